"""Private names of xDiT, PyTorch and other packages that the plugin calls without replacing them.

They are patches that replace nothing. Since they are checked with the others, a name that has moved is found when the
plugin is installed, rather than in the middle of a run. Those with a feature cost only that.
"""

from xfuser_cocodiff.xdit.patching.patch import Patch

_HOOKS = "whether a module has hooks of others"
_PATCHES = (
    Patch("xfuser.core.distributed.runtime_state", "_RUNTIME", "the current runtime state", None),
    Patch("xfuser.core.distributed.parallel_state", "_SP", "the group of ranks that share a sequence", None),
    Patch(
        "xfuser.core.sparge_attention.head_balance",
        "apply_head_balance",
        "whether heads move between ranks",
        None,
        used_names=("head_perm",),
    ),
    Patch(
        "xfuser.core.distributed.fp8_comms",
        "Fp8CommsState.get_model_state",
        "whether xDiT has the scales of its FP8 communication",
        None,
        used_names=("fp8_comms_owner",),
    ),
    Patch(
        "xfuser.model_executor.layers.attention_processor",
        "xFuserAttentionProcessorRegister._XFUSER_ATTENTION_PROCESSOR_MAPPING",
        "xDiT's attention processors, for virtual ranks",
        None,
        feature="--cocodiff_virtual",
    ),
    Patch("yunchang.globals", "PROCESS_GROUP", "Ulysses groups and rings", None),
    Patch(
        "torch.distributed.distributed_c10d", "_get_default_store", "agreement of ranks, and failure detection", None
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        "_set_pg_timeout",
        "groups of benchmarks with another timeout",
        None,
        feature="the timeout of benchmarks",
    ),
    *(
        Patch("torch.distributed._functional_collectives", name, "collectives in compiled graphs", None)
        for name in ("AsyncCollectiveTensor", "all_gather_tensor", "all_to_all_single")
    ),
    Patch("torch", "Tensor._base", "whether tensors are views of the same tensor", None),
    Patch("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu", "ring attention on CPUs", None),
    Patch("torch", "_C._dispatch_has_kernel_for_dispatch_key", "whether XPUs have flash attention", None),
    Patch(
        "torch._dynamo.decorators",
        "disable",
        "which functions are kept out of graphs",
        None,
        used_names=("_torchdynamo_disable",),
    ),
    Patch("torch._ops", "OpOverload", "the order of collectives in graphs", None, used_names=("_name",)),
    Patch("torch.nn.modules.module", "Module._wrapped_call_impl", "which modules are running", None),
    Patch("torch.nn.modules.module", "Module", _HOOKS, None, used_names=("_forward_hooks", "_forward_pre_hooks")),
    Patch("diffusers.hooks.hooks", "HookRegistry", _HOOKS, None, used_names=("_diffusers_hook",)),
    Patch("torch._dynamo.eval_frame", "OptimizedModule", "which module is compiled", None, used_names=("_orig_mod",)),
    Patch("torch._dynamo.symbolic_convert", "InstructionTranslator", "the layer whose call is traced", None),
    Patch("torch._higher_order_ops.effects", "_EffectType", "the order of collectives in graphs", None),
    Patch("torch._higher_order_ops.effects", "_register_effectful_op", "the order of collectives in graphs", None),
    Patch("torch._inductor.config", "reorder_for_compute_comm_overlap", "the order of collectives in graphs", None),
    Patch("torch.utils._pytree", "tree_map", "tensors inside the arguments of a module", None),
    Patch("torch.autograd.profiler", "_is_profiler_enabled", "names of collectives in a trace", None),
)
UNCHECKED = (
    *("_hf_hook", "_version", "_modules"),
    *("_C", "_attention", "_call_impl"),
    *("_templated_ring_attention", "_enable_compute_comm_overlap", "_get_runtime_state_pipeline"),
    *("_chunk_text_for_sp", "_init_sync_pipeline"),
    "_get_backend",
    *("_distributed_c10d", "_detect_dma_connectivity", "_autograd"),
)
"""Private names that no patch checks: those of accelerate, which may be absent; of tensors and modules, which no class
declares; of benchmark commands, on which no run depends; of a group's backend, without which the default timeout of
collectives holds; and of the detection of NVLink, without which it is taken to be there."""


def patches() -> list[Patch]:
    """Return a patch without replacement for each required name."""
    return list(_PATCHES)
