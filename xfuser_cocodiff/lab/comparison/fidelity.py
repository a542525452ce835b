"""How far one result is from another: final latents and pictures."""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np


def psnr_db(reference: np.ndarray, other: np.ndarray, peak: float) -> float | None:
    """Peak signal-to-noise ratio; None where it is infinite or not a number.

    Args:
        reference: what `other` should be.
        other: array of the same shape.
        peak: largest difference that two values can have.
    """
    error = float(np.mean((reference.astype(np.float64) - other.astype(np.float64)) ** 2))
    return 10 * math.log10(peak**2 / error) if error > 0 and peak > 0 and math.isfinite(error) else None


def lpips(references: np.ndarray, others: np.ndarray) -> float | None:
    """Perceptual distance, a mean over pictures or frames; None where the package, or its network, is not there.

    Args:
        references: grey values from 0 to 1, (N, [frames,] height, width).
        others: of the same shape.
    """
    network = _perceptual_network()
    if network is None:
        return None
    import torch

    def pictures(values: np.ndarray) -> torch.Tensor:
        flat = torch.as_tensor(values, dtype=torch.float32).reshape(-1, 1, *values.shape[-2:])
        return (2 * flat - 1).expand(-1, 3, -1, -1)

    with torch.inference_mode():
        return float(network(pictures(references), pictures(others)).mean())


@functools.cache
def _perceptual_network() -> Any:
    try:
        from lpips import LPIPS

        return LPIPS(net="alex", verbose=False)
    except (ImportError, OSError):  # not installed; or weights that it would have to download
        return None


def compare_latents(reference: Path, other: Path) -> dict[str, Any]:
    """Largest difference and PSNR of the tensor ``latents`` in two safetensors files.

    The peak of the PSNR is the range of the reference's values. Figures are None where a file is missing, shapes differ
    or values are not finite.
    """
    nothing = {"max_abs": None, "psnr_db": None}
    if not (reference.exists() and other.exists()):
        return nothing
    ours, theirs = _load(reference), _load(other)
    if ours.shape != theirs.shape or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return nothing
    return {"max_abs": float(np.abs(ours - theirs).max()), "psnr_db": psnr_db(ours, theirs, float(np.ptp(ours)))}


def _load(file: Path) -> np.ndarray:
    # Through torch: numpy has no bfloat16.
    from safetensors.torch import load_file

    return load_file(file)["latents"].double().numpy()


def compare_pictures(reference: Path | None, other: Path | None) -> dict[str, Any]:
    """PSNR and SSIM of two pictures; None where one is missing or their sizes differ. SSIM is 1 for equal pictures."""
    nothing = {"psnr_db": None, "ssim": None}
    if reference is None or other is None:
        return nothing
    ours, theirs = read_picture(reference), read_picture(other)
    if ours.shape != theirs.shape:
        return nothing
    from skimage.metrics import structural_similarity

    window = min(7, *(side - (side + 1) % 2 for side in ours.shape[:2]))
    ssim = structural_similarity(ours, theirs, channel_axis=2, data_range=255, win_size=window)
    return {"psnr_db": psnr_db(ours, theirs, 255), "ssim": float(ssim)}


def read_picture(file: Path) -> np.ndarray:
    """A picture as (height, width, 3) bytes."""
    from PIL import Image

    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))
