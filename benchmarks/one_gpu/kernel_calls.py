"""Calls of the codecs' kernels, and a copy of as many bytes."""

from collections.abc import Callable

import torch

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.rows import GAIN_STEPS, Int8Rows, MessagePart, Prediction
from xfuser_cocodiff.tools.simulation.workloads import Workload

Call = Callable[[], object]
NODES = 2
"""Size of the slow axis."""
BITS = 2
"""Bits per value."""


def kernel_calls(
    workload: Workload, resolution: int, degree: int, device: torch.device, bits: float = BITS
) -> tuple[int, dict[str, Call]]:
    """Return the kernel calls by name, for the part of one of Q, K, V and O that a rank sends along the slow axis.

    Before them, return their minimum memory traffic in bytes: each tensor read or written once.
    """
    torch.manual_seed(0)
    groups, heads = degree // NODES, workload.heads // degree
    tokens, dim = tokens_per_rank(workload, resolution, degree), workload.head_dim
    # Strides as after the all-to-all along fast axes: tokens outside of heads.
    values = torch.randn(NODES, groups, tokens, heads, dim, device=device).bfloat16().transpose(2, 3)
    shape = (NODES - 1, groups, heads, tokens, dim)
    reference = torch.randn(shape, device=device)
    gains = torch.full((len(reference),), GAIN_STEPS // 2, dtype=torch.uint8, device=device)
    previous = Int8Rows.of(reference + 0.1 * torch.randn_like(reference))
    prediction = Prediction(Int8Rows.of(reference), previous, gains)
    size = Codec(bits, predicts=True).payload_bytes(shape, values.dtype)
    payload = torch.zeros(NODES, size, dtype=torch.uint8, device=device)
    memory = Int8Rows(*map(torch.empty_like, previous))
    part = MessagePart(values, prediction, bits, payload, memory, range(1))
    energies = torch.empty(1, 2, device=device)
    target = part._replace(values=torch.empty_like(values))
    # Values, both references and the new one.
    of_values, of_reference = values[:-1].nbytes, sum(tensor.nbytes for tensor in previous)
    moved = of_values + 3 * of_reference + (NODES - 1) * payload.shape[1]
    return moved, {"encode": lambda: kernels.encode([part], energies), "decode": lambda: kernels.decode([target])}


def tokens_per_rank(workload: Workload, resolution: int, degree: int) -> int:
    """Return the tokens per rank."""
    return -(-workload.tokens(resolution) // degree)


def copy_of(nbytes: int, device: torch.device) -> Call:
    """Return a copy that reads and writes `nbytes` together."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
