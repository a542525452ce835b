"""Builds full-size transformers in xDiT's wrappers, with a few blocks of each kind and without values."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.lab.full_size.architectures import architecture
from xfuser_cocodiff.lab.full_size.inputs import INPUTS, Inputs, Request
from xfuser_cocodiff.lab.full_size.materialize import materialize
from xfuser_cocodiff.lab.simulation.workloads import Workload
from xfuser_cocodiff.xdit.launching import transformer_wrappers

DTYPE = torch.bfloat16


@dataclass
class FullSizeTransformer:
    """A transformer of full width whose blocks stand for all blocks of their kind."""

    workload: Workload
    """Dimensions, and how the pipeline calls it: `calls` per step, `rows_per_image` of the batch."""
    model: nn.Module
    """The transformer in xDiT's wrapper."""
    blocks: dict[str, list[nn.Module]]
    """Blocks by kind, in the order of the call."""
    counts: dict[str, int]
    """Number of blocks of each kind in the real model."""
    device: torch.device
    """Device of the weights and inputs."""
    _sizes: dict[str, Any]
    _inputs: dict[tuple[int, ...], Inputs] = field(default_factory=dict)

    def call(self, resolution: int, batch: int = 1) -> torch.Tensor:
        """Run one forward on this rank's shard, and return its output.

        Args:
            resolution: pixels per side.
            batch: number of images.

        Raises:
            ValueError: xDiT cannot shard this size.
        """
        if (size := (resolution, batch)) not in self._inputs:
            rows = batch * self.workload.rows_per_image
            request = Request(resolution, resolution, rows, self.workload.text_tokens, self.device, DTYPE)
            self._inputs[size] = INPUTS[self.workload.name](request, self._sizes)
        with torch.no_grad():
            output = self.model(**self._inputs[size], return_dict=False)[0]
        return output[0] if isinstance(output, tuple) else output


def build(name: str, blocks: int, device: torch.device, **flags: Any) -> FullSizeTransformer:
    """Return a full-size transformer, and start a runtime state of xDiT for it.

    The process groups of xDiT must exist; see :func:`xfuser_cocodiff.xdit.launching.bare_runtime.start`.

    Args:
        name: name of the model in :data:`xfuser_cocodiff.lab.full_size.architectures.ARCHITECTURES`.
        blocks: number of blocks of each kind.
        device: device of the weights, which are not initialized.
        flags: further flags of xDiT for the runtime state.

    Raises:
        ValueError: an unknown model, or fewer than one block.
    """
    if blocks < 1:
        raise ValueError(f"{blocks} blocks are not valid; valid are positive numbers")
    workload, parts = architecture(name)
    sizes = parts.sizes(workload, blocks)
    with torch.device("meta"):
        model = transformer_wrappers.construct(name, sizes).eval()
    materialize(model, device, DTYPE)
    model = transformer_wrappers.wrap(name, model, **flags)
    return FullSizeTransformer(
        workload,
        model,
        {key: list(getattr(model, kind.attribute))[kind.first : kind.end] for key, kind in parts.kinds.items()},
        {key: kind.count for key, kind in parts.kinds.items()},
        device,
        sizes,
    )
