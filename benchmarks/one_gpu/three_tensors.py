"""Encodes and decodes messages of three tensors: python3 -m benchmarks.one_gpu.three_tensors TOKENS HEADS"""

import sys

import torch

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.loopback import NUM_SLOTS, Loopback
from xfuser_cocodiff.xdit.platforms.platform import compute_device

HEAD_DIM, BITS = 128, (None, 4, 2)


def main() -> None:
    """Send Q, K and V by Triton's kernels in the first steps of a run of `balanced`: a keyframe and two residuals."""
    tokens, heads = map(int, sys.argv[1:])
    device = compute_device()
    kernels.use(kernels.resolve(kernels.TRITON, device.type))
    layer = Loopback(("qkv",))
    values = torch.randn(3, NUM_SLOTS, 1, heads, tokens, HEAD_DIM, device=device).bfloat16()
    for step, bits in enumerate(BITS):
        sent = dict(zip("qkv", values + 0.05 * step * values.roll(1, -1), strict=True))
        layer.send(sent, modes.BALANCED.codecs(step, len(BITS), bits), step=step)


if __name__ == "__main__":
    main()
