"""Fixture of the kernel tests: the Triton backend."""

import numpy as np
import pytest
import torch

from tests.engine.codec.case import HAS_GPU


@pytest.fixture(scope="package")
def triton_kernels():
    """Triton's kernels, run by its interpreter without a GPU (see tests/conftest.py)."""
    if not HAS_GPU:
        from triton.runtime import interpreter

        interpreter._convert_float = _rounding_to_nearest(interpreter._convert_float)
    from xfuser_cocodiff.engine.codec import triton_kernels as module

    return module


def _rounding_to_nearest(convert):
    """Return a conversion that rounds float32 to bfloat16 as GPUs and PyTorch do; the interpreter truncates."""

    def converted(data: np.ndarray, source, target, mode) -> np.ndarray:
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        return torch.tensor(data.view(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    return converted
