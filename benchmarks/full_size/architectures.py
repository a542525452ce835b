"""Provides the arguments of full-size transformers that the simulator's workloads lack, and where their blocks are.

The figures come from `transformer/config.json` of the weights on Hugging Face.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class BlockList:
    """Where a transformer keeps the blocks of one kind."""

    argument: str
    """Argument of its class that sets their number."""
    attribute: str
    """Attribute that holds them."""


@dataclass(frozen=True)
class Architecture:
    """A transformer's class arguments and blocks, in addition to its workload."""

    arguments: dict[str, Any]
    """Arguments of the class, without heads, head dim and numbers of blocks."""
    lists: dict[str, BlockList]
    """Lists of blocks by the names of the workload's kinds, in the order of the call."""
    last_differs: bool = False
    """Whether the last block is of a kind of its own, :data:`LAST`."""

    def counts(self, workload: Workload) -> dict[str, int]:
        """Return the number of blocks of each kind in the real model."""
        counts = {kind.name: kind.count for kind in workload.kinds}
        if self.last_differs:
            counts[workload.kinds[-1].name] -= 1
            counts[LAST] = 1
        return counts

    def sizes(self, workload: Workload, blocks: int) -> dict[str, Any]:
        """Return all arguments of the class for a model with `blocks` blocks of each kind, or all that it has."""
        sizes = dict(self.arguments, num_attention_heads=workload.heads, attention_head_dim=workload.head_dim)
        counts = self.counts(workload)
        for kind, blocks_of_kind in self.lists.items():
            sizes[blocks_of_kind.argument] = min(blocks, counts[kind])
        if self.last_differs:
            sizes[list(self.lists.values())[-1].argument] += 1
        return sizes

    def blocks(self, model: nn.Module) -> dict[str, list[nn.Module]]:
        """Return the blocks of a model by kind, in the order of the call."""
        blocks = {kind: list(getattr(model, each.attribute)) for kind, each in self.lists.items()}
        if self.last_differs:
            blocks[LAST] = [list(blocks.values())[-1].pop()]
        return blocks


LAST = "last"
"""Name of the kind of a last block that differs from all others."""
_DOUBLE = {"double": BlockList("num_layers", "transformer_blocks")}
_DOUBLE_AND_SINGLE = _DOUBLE | {"single": BlockList("num_single_layers", "single_transformer_blocks")}

ARCHITECTURES = {
    "flux.1-dev": Architecture(
        {
            "in_channels": 64,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
            "axes_dims_rope": (16, 56, 56),
        },
        _DOUBLE_AND_SINGLE,
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
        _DOUBLE_AND_SINGLE,
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
        _DOUBLE,
        last_differs=True,
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
        _DOUBLE,
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
        _DOUBLE_AND_SINGLE,
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
        {"block": BlockList("num_layers", "blocks")},
    ),
}


def architecture(name: str) -> tuple[Workload, Architecture]:
    """Return the workload and the architecture of a model.

    Raises:
        ValueError: an unknown name.
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"model {name!r} is not valid; valid are {', '.join(ARCHITECTURES)}")
    return WORKLOADS[name], ARCHITECTURES[name]
