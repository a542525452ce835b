"""What the plugin calls of its hosts as it is, though they promise it to nobody: private names, and their parameters.

Rows that replace nothing. They are checked with the others, so that a name that has moved keeps the plugin out when it
is installed, rather than ending a run half way.
"""

from xfuser_cocodiff.xdit.patching.patch import Patch

_TEXT = "the text is split among ranks where it divides"
_HOOKS = "whether others listen to a module"
_MODELS = "xfuser.model_executor.models.transformers"
_ROWS = (
    Patch("xfuser.core.distributed.runtime_state", "_RUNTIME", "the state in force", None),
    Patch("xfuser.core.distributed.parallel_state", "_SP", "the ranks of a sequence", None),
    Patch(
        "xfuser.core.sparge_attention.head_balance",
        "apply_head_balance",
        "whether heads change places",
        None,
        used_names=("head_perm",),
    ),
    Patch(
        "xfuser.core.distributed.fp8_comms",
        "Fp8CommsState.get_model_state",
        "whether xDiT has seen the scales of what it sends in FP8",
        None,
        used_names=("fp8_comms_owner",),
    ),
    Patch(
        "xfuser.model_executor.pipelines.pipeline_flux",
        "xFuserFluxPipeline",
        "whether a text is split among ranks",
        None,
        used_names=("split_text_embed_in_sp",),
    ),
    *(
        Patch(f"{_MODELS}.{module}", name, _TEXT, None)
        for module, name in (
            ("transformer_flux", "xFuserFlux1Transformer2DWrapper"),
            ("transformer_flux", "xFuserFluxTransformer2DWrapper"),
            ("transformer_sd3", "xFuserSD3Transformer2DWrapper"),
            ("cogvideox_transformer_3d", "xFuserCogVideoXTransformer3DWrapper"),
            ("transformer_hunyuan_video", "xFuserHunyuanVideoTransformer3DWrapper"),
        )
    ),
    Patch(
        "xfuser.model_executor.layers.attention_processor",
        "xFuserAttentionProcessorRegister._XFUSER_ATTENTION_PROCESSOR_MAPPING",
        "xDiT's processors, for virtual ranks",
        None,
    ),
    Patch("yunchang.globals", "PROCESS_GROUP", "Ulysses groups and rings", None),
    Patch("torch.distributed.distributed_c10d", "_get_default_store", "where ranks agree, and call the roll", None),
    Patch("torch.distributed.distributed_c10d", "_set_pg_timeout", "--cocodiff_timeout", None),
    *(
        Patch("torch.distributed._functional_collectives", name, "collectives that can be traced", None)
        for name in ("AsyncCollectiveTensor", "all_gather_tensor", "all_to_all_single")
    ),
    Patch("torch", "Tensor._base", "whether tensors are views of one", None),
    Patch("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu", "a ring's attention on CPUs", None),
    Patch("torch", "_C._dispatch_has_kernel_for_dispatch_key", "whether XPUs have flash attention", None),
    Patch(
        "torch._dynamo.decorators", "disable", "what is kept out of graphs", None, used_names=("_torchdynamo_disable",)
    ),
    Patch("torch._ops", "OpOverload", "the order of exchanges in graphs", None, used_names=("_name",)),
    Patch("torch.nn.modules.module", "Module._wrapped_call_impl", "which modules are running", None),
    Patch("torch.nn.modules.module", "Module", _HOOKS, None, used_names=("_forward_hooks", "_forward_pre_hooks")),
    Patch("diffusers.hooks.hooks", "HookRegistry", _HOOKS, None, used_names=("_diffusers_hook",)),
    Patch("torch._dynamo.eval_frame", "OptimizedModule", "what is compiled", None, used_names=("_orig_mod",)),
    Patch("torch._dynamo.symbolic_convert", "InstructionTranslator", "a layer whose call is traced", None),
    Patch("torch._higher_order_ops.effects", "_EffectType", "exchanges keep their order in graphs", None),
    Patch("torch._higher_order_ops.effects", "_register_effectful_op", "exchanges keep their order in graphs", None),
    Patch("torch._inductor.config", "reorder_for_compute_comm_overlap", "the order of exchanges in graphs", None),
    Patch("torch.utils._pytree", "tree_map", "values inside of what a module is given", None),
    Patch("torch.autograd.profiler", "_is_profiler_enabled", "names of exchanges in a trace", None),
)
UNCHECKED = (
    *("_hf_hook", "_version", "_modules"),
    *("_encode_vae_image", "_pack_latents", "_C", "_profiler", "_ExperimentalConfig", "_attention"),
    *("_templated_ring_attention", "_enable_compute_comm_overlap", "_get_runtime_state_pipeline"),
)
"""Of accelerate, which need not be installed; of tensors and modules, which no class declares; of commands that
measure, on which no run depends."""


def patches() -> list[Patch]:
    """Rows for what has to be there."""
    return list(_ROWS)
