"""What the plugin calls of its hosts as it is, though they promise it to nobody: private names, and their parameters.

Rows that replace nothing. They are checked with the others, so that a name that has moved keeps the plugin out when it
is installed, rather than ending a run half way.
"""

from xfuser_cocodiff.xdit.patching.patch import Patch

_USP = {
    "_concat_joint_tensor": ("tensor", "joint_tensor", "joint_strategy", "dim"),
    "_get_attention_function": ("backend",),
    "_has_kv_cache": ("attn_layer",),
    "_preprocess_joint_tensors": ("joint_key", "joint_value"),
    "_repeat_kv_heads": ("key", "value", "repeats"),
    "_trim_trailing_kv_padding": ("key", "value", "attention_kwargs"),
    "_ulysses_extra_inputs": ("attention_kwargs", "query"),
    "_update_and_get_kv_cache": ("key", "value", "attn_layer"),
    "_validate_gqa_params": ("query", "key", "value", "kv_head_repeat", "joint_strategy"),
    "concat_joint_tensors_decorator": ("func",),
    "ring_attn": (
        *("attention_function", "query", "key", "value", "dropout_p", "is_causal"),
        *("joint_attn_kwargs", "attention_kwargs"),
    ),
}
_OTHERS = (
    ("xfuser.core.distributed.runtime_state", "_RUNTIME", "the state in force"),
    ("xfuser.model_executor.layers.usp", "_HEAD_BALANCE_BACKENDS", "whose heads change places between steps"),
    (
        "xfuser.core.distributed.fp8_comms",
        "Fp8CommsState.get_model_state",
        "whether xDiT has seen the scales of what it sends in FP8",
    ),
    (
        "xfuser.model_executor.layers.attention_processor",
        "xFuserAttentionProcessorRegister._XFUSER_ATTENTION_PROCESSOR_MAPPING",
        "xDiT's processors, for one rank that stands for many",
    ),
    (
        "xfuser.model_executor.models.runner_models.base_model",
        "xFuserModel._get_runtime_state_pipeline",
        "a runtime state for `cocodiff quality`",
    ),
    ("yunchang.globals", "PROCESS_GROUP", "Ulysses groups and rings"),
    ("torch.distributed.distributed_c10d", "_get_default_store", "where ranks agree, and call the roll"),
    ("torch.distributed.distributed_c10d", "_set_pg_timeout", "--cocodiff_timeout"),
    *(
        ("torch.distributed._functional_collectives", name, "collectives that can be traced")
        for name in ("AsyncCollectiveTensor", "all_gather_tensor", "all_reduce", "all_to_all_single", "wait_tensor")
    ),
)


def patches() -> list[Patch]:
    """Rows for what has to be there."""
    usp = "xfuser.model_executor.layers.usp"
    return [
        *(Patch(usp, name, "a part of USP", None, parameters) for name, parameters in _USP.items()),
        *(Patch(module, symbol, why, None) for module, symbol, why in _OTHERS),
    ]
