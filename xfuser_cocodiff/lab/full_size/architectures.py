"""Provides the arguments of full-size transformers that the simulator's workloads lack, and their kinds of blocks.

The figures come from `transformer/config.json` of the weights on Hugging Face.
"""

from dataclasses import dataclass
from typing import Any

from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS


@dataclass(frozen=True)
class Dimensions:
    """Dimensions of a transformer, and how its pipeline calls it."""

    heads: int
    head_dim: int
    text_tokens: int
    """Text tokens of the prompt."""
    calls: int = 1
    """Sequential calls per step: 2 where guidance needs a second call."""
    rows_per_image: int = 1
    """Batch rows per image: 2 where guidance is batched."""


@dataclass(frozen=True)
class BlockKind:
    """Blocks of the same structure."""

    argument: str
    """Argument of the transformer's class that sets their number."""
    attribute: str
    """Attribute of the transformer that holds them."""
    count: int
    """Number in the real model."""
    first: int | None = None
    """Position of the first of them in the attribute, where it holds more than one kind."""
    end: int | None = None
    """Position after the last of them."""


@dataclass(frozen=True)
class Architecture:
    """A transformer's class arguments and kinds of blocks, in addition to its dimensions."""

    arguments: dict[str, Any]
    """Arguments of the class, without heads, head dim and numbers of blocks."""
    kinds: dict[str, BlockKind]
    """Kinds of blocks, in the order of the call."""
    frames: int = 1
    """Default number of frames in xDiT's runner; 1 for an image."""

    def sizes(self, dimensions: Dimensions, blocks: int) -> dict[str, Any]:
        """Return all arguments of the class for a model with `blocks` blocks of each kind, or all that it has."""
        sizes = dict(self.arguments, num_attention_heads=dimensions.heads, attention_head_dim=dimensions.head_dim)
        for kind in self.kinds.values():
            sizes[kind.argument] = sizes.get(kind.argument, 0) + min(blocks, kind.count)
        return sizes


_DOUBLE, _SINGLE = ("num_layers", "transformer_blocks"), ("num_single_layers", "single_transformer_blocks")

ARCHITECTURES = {
    "flux.1-dev": Architecture(
        {
            "in_channels": 64,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
            "axes_dims_rope": (16, 56, 56),
        },
        {"double": BlockKind(*_DOUBLE, 19), "single": BlockKind(*_SINGLE, 38)},
    ),
    "flux.2-dev": Architecture(
        {
            "in_channels": 128,
            "joint_attention_dim": 15360,
            "timestep_guidance_channels": 256,
            "mlp_ratio": 3.0,
            "axes_dims_rope": (32, 32, 32, 32),
            "rope_theta": 2000,
            "guidance_embeds": True,
        },
        {"double": BlockKind(*_DOUBLE, 8), "single": BlockKind(*_SINGLE, 48)},
    ),
    # The last block discards its text: it has no output projection and no MLP for text.
    "sd3.5-large": Architecture(
        {
            "sample_size": 128,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 2432,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        {"joint": BlockKind(*_DOUBLE, 37, end=-1), "last": BlockKind(*_DOUBLE, 1, first=-1)},
    ),
    "qwen-image": Architecture(
        {
            "patch_size": 2,
            "in_channels": 64,
            "out_channels": 16,
            "joint_attention_dim": 3584,
            "guidance_embeds": False,
            "axes_dims_rope": (16, 56, 56),
        },
        {"double": BlockKind(*_DOUBLE, 60)},
    ),
    # In addition to its blocks, a refiner of 2 blocks processes the text before them.
    "hunyuanvideo": Architecture(
        {
            "in_channels": 16,
            "out_channels": 16,
            "num_refiner_layers": 2,
            "mlp_ratio": 4.0,
            "patch_size": 2,
            "patch_size_t": 1,
            "qk_norm": "rms_norm",
            "guidance_embeds": True,
            "text_embed_dim": 4096,
            "pooled_projection_dim": 768,
            "rope_theta": 256.0,
            "rope_axes_dim": (16, 56, 56),
        },
        {"double": BlockKind(*_DOUBLE, 20), "single": BlockKind(*_SINGLE, 40)},
        frames=129,
    ),
    # Text is in cross-attention only, which has no all-to-all.
    "wan2.1-14b": Architecture(
        {
            "patch_size": (1, 2, 2),
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 4096,
            "freq_dim": 256,
            "ffn_dim": 13824,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 1024,
        },
        {"cross": BlockKind("num_layers", "blocks", 40)},
        frames=81,
    ),
}

_VIDEOS = {
    # Guidance is distilled. xDiT drops the padding of the prompt; the longest has 256 tokens.
    "hunyuanvideo": Dimensions(heads=24, head_dim=128, text_tokens=256),
    # The pipeline pads text to 512 tokens. Guidance needs two calls per step.
    "wan2.1-14b": Dimensions(heads=40, head_dim=128, text_tokens=512, calls=2),
}
VIDEO_WIDTHS = {480: 832, 720: 1280}
"""Width in pixels by height of the models' usual videos."""


def architecture(name: str) -> Architecture:
    """Return the architecture of a model.

    Raises:
        ValueError: an unknown name.
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"model {name!r} is not valid; valid are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def dimensions(name: str) -> Dimensions:
    """Return the dimensions of a model with an architecture."""
    if name in _VIDEOS:
        return _VIDEOS[name]
    workload = WORKLOADS[name]
    return Dimensions(workload.heads, workload.head_dim, workload.text_tokens, workload.calls, workload.rows_per_image)
