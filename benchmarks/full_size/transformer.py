"""Builds full-size transformers in xDiT's wrappers, with a few blocks of each kind and without values."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.full_size.architectures import architecture
from benchmarks.full_size.full_mask import FullMask
from benchmarks.full_size.inputs import INPUTS, Inputs, Request
from benchmarks.full_size.materialize import materialize
from xfuser_cocodiff.lab.launching import transformer_wrappers
from xfuser_cocodiff.lab.simulation.workloads import Workload, num_latent_frames

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

    def call(self, resolution: int, batch: int = 1, frames: int | None = None) -> torch.Tensor:
        """Run one forward on this rank's shard, and return its output.

        A step has `workload.calls` such calls. Inputs are created in the first call of each size.

        Args:
            resolution: pixels per side of a square image, or rows of a video of 16:9.
            batch: number of images or videos.
            frames: number of frames of a video; the workload's when not given.

        Raises:
            ValueError: xDiT cannot shard this size.
        """
        latent_frames = num_latent_frames(frames) if frames else self.workload.latent_frames or 1
        size = resolution, batch, latent_frames
        if size not in self._inputs:
            self._inputs[size] = INPUTS[self.workload.name](self._request(*size), self._sizes)
        with torch.no_grad(), FullMask() if "encoder_attention_mask" in self._inputs[size] else nullcontext():
            output = self.model(**self._inputs[size], return_dict=False)[0]
        return output[0] if isinstance(output, tuple) else output

    def _request(self, resolution: int, batch: int, latent_frames: int) -> Request:
        width, height = self.workload.size(resolution)
        text_tokens = self.workload.text_tokens + self.workload.cross_text_tokens
        rows = batch * self.workload.rows_per_image
        return Request(height, width, latent_frames, rows, text_tokens, self.device, DTYPE)


def build(name: str, blocks: int, device: torch.device, **flags: Any) -> FullSizeTransformer:
    """Return a full-size transformer, and start a runtime state of xDiT for it.

    The process groups of xDiT must exist; see :func:`xfuser_cocodiff.lab.launching.bare_runtime.start`.

    Args:
        name: name of the model in :data:`benchmarks.full_size.architectures.ARCHITECTURES`.
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
    return FullSizeTransformer(workload, model, parts.blocks(model), parts.counts(workload), device, sizes)
