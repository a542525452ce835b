"""One picture of all that a pipeline returns."""

from typing import Any

import numpy as np
import torch

MOST = 8
"""Pictures side by side."""


def strip(output: Any) -> Any:
    """The pictures of a batch, or frames of its first video, side by side; None where there is nothing to show.

    Args:
        output: lists of PIL images, arrays (B, [F,] H, W, C) or tensors (B, [F,] C, H, W) in 0..1.
    """
    from diffusers.image_processor import VaeImageProcessor
    from diffusers.utils import make_image_grid

    if isinstance(output, torch.Tensor):
        output = output.detach().movedim(-3, -1).float().cpu().numpy()
    shown = list(output[:MOST])
    if shown and (isinstance(shown[0], list) or getattr(shown[0], "ndim", 3) == 4):  # they move
        frames = shown[0]
        count = min(len(frames), MOST)
        shown = [frames[(2 * number + 1) * len(frames) // (2 * count)] for number in range(count)]
    if shown and not hasattr(shown[0], "save"):
        shown = VaeImageProcessor.numpy_to_pil(np.stack(shown)) if shown[0].shape[-1] in (1, 3, 4) else []
    return make_image_grid(shown, 1, len(shown)) if shown else None
