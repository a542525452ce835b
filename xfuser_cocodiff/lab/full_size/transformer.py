"""Builds full-size transformers in xDiT's wrappers, with a few blocks of each kind and without values."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.lab.full_size.architectures import VIDEO_WIDTHS, Dimensions, architecture, dimensions
from xfuser_cocodiff.lab.full_size.full_mask import FullMask
from xfuser_cocodiff.lab.full_size.inputs import INPUTS, Inputs, Request
from xfuser_cocodiff.lab.full_size.materialize import materialize
from xfuser_cocodiff.xdit.launching import transformer_wrappers

DTYPE = torch.bfloat16
FRAMES_PER_LATENT = 4
"""Frames per latent frame after the first, in both video models."""


@dataclass
class FullSizeTransformer:
    """A transformer of full width whose blocks stand for all blocks of their kind."""

    name: str
    """Name of the model."""
    dimensions: Dimensions
    """Dimensions, and how the pipeline calls it: `calls` per step, `rows_per_image` of the batch."""
    model: nn.Module
    """The transformer in xDiT's wrapper."""
    blocks: dict[str, list[nn.Module]]
    """Blocks by kind, in the order of the call."""
    counts: dict[str, int]
    """Number of blocks of each kind in the real model."""
    frames: int
    """Default number of frames; 1 for an image."""
    device: torch.device
    """Device of the weights and inputs."""
    _sizes: dict[str, Any]
    _inputs: dict[tuple[int, ...], Inputs] = field(default_factory=dict)

    def call(self, resolution: int, batch: int = 1, frames: int | None = None) -> torch.Tensor:
        """Run one forward on this rank's shard, and return its output.

        A step has `dimensions.calls` such calls. Inputs are created in the first call of each size.

        Args:
            resolution: pixels per side of a square image, or height of a video in
                :data:`xfuser_cocodiff.lab.full_size.architectures.VIDEO_WIDTHS`.
            batch: number of images or videos.
            frames: number of frames of a video; :attr:`frames` when not given.

        Raises:
            ValueError: an unknown size of a video, or xDiT cannot shard this size.
        """
        size = resolution, batch, frames or self.frames
        if size not in self._inputs:
            self._inputs[size] = INPUTS[self.name](self._request(*size), self._sizes)
        with torch.no_grad(), FullMask() if "encoder_attention_mask" in self._inputs[size] else nullcontext():
            output = self.model(**self._inputs[size], return_dict=False)[0]
        return output[0] if isinstance(output, tuple) else output

    def _request(self, resolution: int, batch: int, frames: int) -> Request:
        width = resolution
        if self.frames > 1:
            if resolution not in VIDEO_WIDTHS:
                raise ValueError(
                    f"video height {resolution} is not valid; valid are {', '.join(map(str, VIDEO_WIDTHS))}"
                )
            width = VIDEO_WIDTHS[resolution]
        latent_frames = (frames - 1) // FRAMES_PER_LATENT + 1
        rows = batch * self.dimensions.rows_per_image
        text = self.dimensions.text_tokens
        return Request(resolution, width, latent_frames, rows, text, self.device, DTYPE)


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
    parts, dims = architecture(name), dimensions(name)
    sizes = parts.sizes(dims, blocks)
    with torch.device("meta"):
        model = transformer_wrappers.construct(name, sizes).eval()
    materialize(model, device, DTYPE)
    model = transformer_wrappers.wrap(name, model, **flags)
    return FullSizeTransformer(
        name,
        dims,
        model,
        {key: list(getattr(model, kind.attribute))[kind.first : kind.end] for key, kind in parts.kinds.items()},
        {key: kind.count for key, kind in parts.kinds.items()},
        parts.frames,
        device,
        sizes,
    )
