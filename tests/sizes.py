"""Sizes of small models, and a function that builds a model with them."""

import inspect
from typing import Any

from torch import nn

SIZES = {
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_kv_heads"), 8),
    **dict.fromkeys(("attention_head_dim", "head_dim"), 16),
    **dict.fromkeys(("num_layers", "num_single_layers", "n_layers", "num_hidden_layers"), 2),
    **dict.fromkeys(("num_refiner_layers", "n_refiner_layers"), 1),
    **dict.fromkeys(("in_channels", "out_channels"), 4),
    **dict.fromkeys(("joint_attention_dim", "cap_feat_dim", "text_dim", "text_embed_dim", "text_embed_2_dim"), 16),
    **dict.fromkeys(("timestep_embed_dim", "caption_channels"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 64),
    **dict.fromkeys(("axes_dims_rope", "rope_axes_dim"), (4, 6, 6)),
    "axes_lens": (64, 32, 32),
    "cross_attention_dim": 128,
    "guidance_embeds": True,
    "mlp_ratio": 2.0,
    "pooled_projection_dim": 8,
    "sample_size": 16,
}
"""Default arguments of model classes; each class gets those that its constructor has."""


def build(model_class: type[nn.Module], **sizes: Any) -> nn.Module:
    """Return a model with :data:`SIZES`, overridden by `sizes`."""
    accepted = {name for base in model_class.__mro__ for name in inspect.signature(base.__init__).parameters}
    return model_class(**{**{name: size for name, size in SIZES.items() if name in accepted}, **sizes})
