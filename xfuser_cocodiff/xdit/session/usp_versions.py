"""Versions of xDiT's USP that `attention.usp` reimplements.

Any other version runs unchanged: over the plugin's all-to-all where it calls functions that are known here, else over
its own.
"""

import hashlib
import inspect

from xfuser_cocodiff.xdit.patching import symbol_lookup

MODULE = "xfuser.model_executor.layers.usp"
DIGESTS = {
    "0.7.0": {
        "USP": "93b7350d966bea62",
        "ring_attn": "d1e1a08bd38e3f86",
        "_ft_c_input_all_to_all": "7b746e2209225837",
        "_ft_c_output_all_to_all": "8c6666b9a4f1e696",
        "_combined_qkv_all_to_all": "e031dbfcbf4f37cf",
        "_combined_gqa_qkv_all_to_all": "1781b0b4722eb9af",
    }
}
"""Digests of the functions that are reimplemented, by version of xfuser."""
HELPERS = {
    "_HEAD_BALANCE_BACKENDS": (),
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
}
"""Parameters of the functions that the reimplementation calls."""
ATTRIBUTES = {
    "xfuser.core.sparge_attention.head_balance": "head_perm",
    "xfuser.core.distributed.fp8_comms": "fp8_comms_owner",
}
"""Attributes by which it knows calls that are left to xDiT, each with the module that sets it."""


def digest() -> str:
    """Return a digest of the installed functions, and of the helpers' parameters."""
    return hashlib.sha256(repr((_digests(), _helpers())).encode()).hexdigest()[:16]


def is_known() -> bool:
    """Return whether the installed USP is a known version; all ranks have the same one."""
    sets_attributes = all(_has_text(module, name) for module, name in ATTRIBUTES.items())
    return sets_attributes and _helpers() == HELPERS and _digests() in DIGESTS.values()


def has(function: str) -> bool:
    """Return whether an installed function is that of a known version."""
    return _digests()[function] in [known[function] for known in DIGESTS.values()]


def _digests() -> dict[str, str | None]:
    return {name: symbol_lookup.source_digest(MODULE, name) for name in DIGESTS["0.7.0"]}


def _helpers() -> dict[str, tuple[str, ...] | None]:
    return {name: symbol_lookup.find_parameters(MODULE, name) for name in HELPERS}


def _has_text(module: str, text: str) -> bool:
    found = symbol_lookup.find_symbol(module, "__name__")
    return found is not None and text in inspect.getsource(found[0])
