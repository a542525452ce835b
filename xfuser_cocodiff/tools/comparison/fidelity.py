"""Measures how close two results are: PSNR, SSIM and LPIPS of final latents and images."""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np


def psnr_db(reference: np.ndarray, other: np.ndarray, peak: float) -> float | None:
    """Return the peak signal-to-noise ratio in decibels; None if it is infinite or not a number.

    Args:
        reference: the baseline.
        other: array of the same shape.
        peak: largest difference that two values can have.
    """
    error = float(np.mean((reference.astype(np.float64) - other.astype(np.float64)) ** 2))
    return 10 * math.log10(peak**2 / error) if error > 0 and peak > 0 and math.isfinite(error) else None


def ssim(reference: np.ndarray, other: np.ndarray, peak: float, channel_axis: int | None = None) -> float:
    """Return the structural similarity of two images (height, width[, channels]); for the peak see :func:`psnr_db`."""
    from skimage.metrics import structural_similarity

    window = min(7, *(side - (side + 1) % 2 for side in reference.shape[:2]))
    how = {"channel_axis": channel_axis, "data_range": peak, "win_size": window}
    return float(structural_similarity(reference, other, **how))


def lpips(references: np.ndarray, others: np.ndarray) -> float | None:
    """Return the mean LPIPS (perceptual distance, AlexNet) over images or frames; None if it is not installed.

    Args:
        references: gray values from 0 to 1, (N, [frames,] height, width).
        others: of the same shape.
    """
    network = _perceptual_network()
    if network is None:
        return None
    import torch

    def to_rgb(values: np.ndarray) -> torch.Tensor:
        flat = torch.as_tensor(values, dtype=torch.float32).reshape(-1, 1, *values.shape[-2:])
        return (2 * flat - 1).expand(-1, 3, -1, -1)

    with torch.inference_mode():
        return float(network(to_rgb(references), to_rgb(others)).mean())


@functools.cache
def _perceptual_network() -> Any:
    try:
        from lpips import LPIPS

        return LPIPS(net="alex", verbose=False)
    except (ImportError, OSError):  # not installed, or its weights cannot be downloaded
        return None


def compare_latents(reference: Path, other: Path) -> dict[str, Any]:
    """Return the largest difference and the PSNR of the tensor ``latents`` in two safetensors files.

    The peak of the PSNR is the range of the reference's values. Both are None if a file is missing, shapes differ or
    values are not finite.
    """
    from safetensors.torch import load_file

    unknown = {"max_abs": None, "psnr_db": None}
    if not (reference.exists() and other.exists()):
        return unknown
    # Through torch: numpy has no bfloat16.
    expected, actual = (load_file(file)["latents"].double().numpy() for file in (reference, other))
    if expected.shape != actual.shape or not (np.isfinite(expected).all() and np.isfinite(actual).all()):
        return unknown
    return {
        "max_abs": float(np.abs(expected - actual).max()),
        "psnr_db": psnr_db(expected, actual, float(np.ptp(expected))),
    }


def compare_images(reference: Path | None, other: Path | None) -> dict[str, Any]:
    """Return PSNR and SSIM of two images; both are None if an image is missing or sizes differ.

    For equal images PSNR is None and SSIM is 1.
    """
    images = [read_image(file) for file in (reference, other) if file]
    if len(images) < 2 or images[0].shape != images[1].shape:
        return {"psnr_db": None, "ssim": None}
    expected, actual = images
    return {"psnr_db": psnr_db(expected, actual, 255), "ssim": ssim(expected, actual, 255, channel_axis=2)}


def read_image(file: Path) -> np.ndarray:
    """Read an image as uint8 array (height, width, 3)."""
    from PIL import Image

    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))
