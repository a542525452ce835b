"""Combines the images or video frames that a pipeline returns into one image."""

from typing import Any

import numpy as np
import torch

MAX_IMAGES = 8
"""Largest number of images in a grid."""


def image_grid(output: Any) -> Any:
    """Return the images of a batch, or frames of its first video, side by side; None if there are none.

    Args:
        output: lists of PIL images, arrays (B, [F,] H, W, C) or tensors (B, [F,] C, H, W) with values in [0, 1].
    """
    from diffusers.image_processor import VaeImageProcessor
    from diffusers.utils import make_image_grid

    if isinstance(output, torch.Tensor):
        output = output.detach().movedim(-3, -1).float().cpu().numpy()
    images = list(output[:MAX_IMAGES])
    if images and (isinstance(images[0], list) or getattr(images[0], "ndim", 3) == 4):
        frames, count = images[0], min(len(images[0]), MAX_IMAGES)  # evenly spaced over the video
        images = [frames[(2 * number + 1) * len(frames) // (2 * count)] for number in range(count)]
    if images and not hasattr(images[0], "save"):
        has_colors = images[0].shape[-1] in (1, 3, 4)  # latents have other numbers of channels
        images = VaeImageProcessor.numpy_to_pil(np.stack(images)) if has_colors else []
    return make_image_grid(images, 1, len(images)) if images else None
