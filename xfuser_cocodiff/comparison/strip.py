"""One picture of all that a pipeline returns."""

from typing import Any

import torch

MOST = 8
"""Pictures side by side."""


def strip(output: Any) -> Any:
    """The pictures of a batch, or frames of its first video, side by side; None where there is nothing to show.

    Args:
        output: lists of PIL images, arrays (B, [F,] H, W, C) or tensors (B, [F,] C, H, W) in 0..1.
    """
    shown = _shown(output)
    if len(shown) < 2:
        return next(iter(shown), None)
    from PIL import Image

    width, height = shown[0].size
    joined = Image.new(shown[0].mode, (width * len(shown), height))
    for number, each in enumerate(shown):
        joined.paste(each, (width * number, 0))
    return joined


def _shown(output: Any) -> list[Any]:
    """Pictures, or frames of the first video, as PIL has them."""
    from diffusers.image_processor import VaeImageProcessor

    if isinstance(output, torch.Tensor):
        output = output.detach().movedim(-3, -1).float().cpu().numpy()
    if not len(output):
        return []
    if isinstance(output[0], list) or getattr(output[0], "ndim", 3) == 4:  # they move
        frames = output[0]
        count = min(len(frames), MOST)
        shown = [frames[(2 * number + 1) * len(frames) // (2 * count)] for number in range(count)]
    else:
        shown = list(output[:MOST])
    if not shown or hasattr(shown[0], "save"):
        return shown
    if shown[0].shape[-1] not in (1, 3, 4):
        return []
    return [VaeImageProcessor.numpy_to_pil(each)[0] for each in shown]
