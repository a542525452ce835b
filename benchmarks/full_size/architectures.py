"""Provides the arguments of full-size transformers that the simulator's workloads lack, and where their blocks are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from xfuser_cocodiff.tools.simulation.workloads import Workload

LAST = "last"
"""Name of the kind of a last block that differs from all others."""


@dataclass(frozen=True)
class Architecture:
    """A transformer's blocks, and where its arguments differ from the defaults of its class in diffusers."""

    lists: Mapping[str, tuple[str, str]]
    """Argument with the number of blocks, and attribute that holds them, by the workload's kinds in the order of the
    call."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments without heads, head dim and numbers of blocks, from `transformer/config.json` of the weights."""
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
        """Return the arguments of the class for a model with `blocks` blocks of each kind, or all that it has."""
        sizes = dict(self.arguments, num_attention_heads=workload.heads, attention_head_dim=workload.head_dim)
        counts = self.counts(workload)
        for kind, (argument, _) in self.lists.items():
            sizes[argument] = min(blocks, counts[kind]) + self.last_differs
        return sizes

    def blocks(self, model: nn.Module) -> dict[str, list[nn.Module]]:
        """Return the blocks of a model by kind, in the order of the call."""
        blocks = {kind: list(getattr(model, attribute)) for kind, (_, attribute) in self.lists.items()}
        if self.last_differs:
            blocks[LAST] = [list(blocks.values())[-1].pop()]
        return blocks


_DOUBLE = {"double": ("num_layers", "transformer_blocks")}
_DOUBLE_AND_SINGLE = _DOUBLE | {"single": ("num_single_layers", "single_transformer_blocks")}
ARCHITECTURES = {
    "flux.1-dev": Architecture(_DOUBLE_AND_SINGLE, {"guidance_embeds": True}),
    "flux.2-dev": Architecture(_DOUBLE_AND_SINGLE),
    # The class has the defaults of SD3. The last block discards its text: it has no output projection and no MLP for
    # text.
    "sd3.5-large": Architecture(
        _DOUBLE,
        {"caption_projection_dim": 2432, "pos_embed_max_size": 192, "qk_norm": "rms_norm"},
        last_differs=True,
    ),
    "qwen-image": Architecture(_DOUBLE),
    # In addition to its blocks, a refiner of 2 blocks processes the text before them.
    "hunyuanvideo": Architecture(_DOUBLE_AND_SINGLE),
    # Text is in cross-attention only, which has no all-to-all.
    "wan2.1-14b": Architecture({"block": ("num_layers", "blocks")}),
}
