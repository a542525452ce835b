"""Provides the arguments of full-size transformers that the simulator's workloads lack, and their kinds of blocks.

The figures come from `transformer/config.json` of the weights on Hugging Face.
"""

from dataclasses import dataclass
from typing import Any

from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS, Workload


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
    """A transformer's class arguments and kinds of blocks, in addition to its workload."""

    arguments: dict[str, Any]
    """Arguments of the class, without heads, head dim and numbers of blocks."""
    kinds: dict[str, BlockKind]
    """Kinds of blocks, in the order of the call."""

    def sizes(self, workload: Workload, blocks: int) -> dict[str, Any]:
        """Return all arguments of the class for a model with `blocks` blocks of each kind, or all that it has."""
        sizes = dict(self.arguments, num_attention_heads=workload.heads, attention_head_dim=workload.head_dim)
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
}


def architecture(name: str) -> tuple[Workload, Architecture]:
    """Return the workload and the architecture of a model.

    Raises:
        ValueError: an unknown name.
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"model {name!r} is not valid; valid are {', '.join(ARCHITECTURES)}")
    return WORKLOADS[name], ARCHITECTURES[name]
