"""Tests of the costs of operations: FLOPs and bytes are counted by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests import ranks
from tests.benchmarks.accelerator.emulated import CALL, LAUNCH, ROUND, SHORTEST, accelerator

BYTES, FLOPS, ATTENTION = ROUND.bytes_per_second, ROUND.matmul_flops, ROUND.attention_flops


def operations(device: torch.device) -> dict[str, tuple[Callable[[], Any], list[float]]]:
    """Return operations by name, with the durations of their kernels."""
    image, wide, weight, bias = (
        torch.empty(*shape, device=device) for shape in ((2, 1000, 300), (2, 1000, 600), (500, 300), (500,))
    )
    row, twin = torch.empty(2, 1, 300, device=device), torch.empty_like(image)
    numel, row_numel = 2 * 1000 * 300, 2 * 300
    query, key, value = (torch.empty(1, 4, tokens, 128, device=device) for tokens in (50, 2000, 2000))
    narrow = torch.empty(1, 4, 500, 64, device=device)
    table, index = torch.empty(5000, 400, device=device), torch.empty(7, dtype=torch.int64, device=device)
    half = torch.empty(1000, 3000, dtype=torch.bfloat16, device=device)

    def pointwise(values: float) -> list[float]:
        return [4 * values / BYTES]

    product = [2 * 2000 * 500 * 300 / FLOPS]
    attention_bytes = 4 * 4 * 128 * (50 + 2000 + 2000 + 50) / BYTES
    return {
        "linear": (
            lambda: functional.linear(image, weight, bias),
            [_roof(product, 4 * (numel + 300 * 500 + 500 + 1e6))],
        ),
        "matmul": (lambda: image @ weight.T, [_roof(product, 4 * (numel + 300 * 500 + 1e6))]),
        "bmm": (
            lambda: torch.bmm(image.transpose(1, 2), wide),
            [_roof([2 * 2 * 300 * 600 * 1000 / FLOPS], 4 * (3 * numel + 2 * 300 * 600))],
        ),
        "attention": (
            lambda: functional.scaled_dot_product_attention(query, key, value),
            [max(4 * 4 * 50 * 2000 * 128 / ATTENTION, attention_bytes)],
        ),
        "narrow attention": (
            lambda: functional.scaled_dot_product_attention(narrow, narrow, narrow),
            [4 * 4 * 500 * 500 * 64 / ROUND.narrow_attention_flops],
        ),
        "add": (lambda: image + image.flip(0), [*pointwise(2 * numel), *pointwise(3 * numel)]),
        "square": (lambda: image * image, pointwise(2 * numel)),
        "product of equal shapes": (lambda: image * twin, pointwise(3 * numel)),
        "broadcast": (lambda: image * row, pointwise(2 * numel + row_numel)),
        "expanded": (lambda: row.expand(2, 1000, 300).contiguous(), pointwise(row_numel + numel)),
        "view": (lambda: image.transpose(0, 1)[5:, :, None], []),
        "reshape": (lambda: image.reshape(-1), []),
        "copying reshape": (lambda: image.transpose(0, 1).reshape(-1), pointwise(2 * numel)),
        "part": (lambda: image[:, :100] * 2, pointwise(2 * numel / 10)),
        "in place": (lambda: image.add_(row), pointwise(2 * numel + row_numel)),
        "copy": (lambda: image.copy_(wide[..., :300]), pointwise(2 * numel)),
        "fill": (lambda: image.zero_(), pointwise(numel)),
        "zeros": (lambda: image.new_zeros(2, 1000), pointwise(2000)),
        "empty": (lambda: torch.empty_like(image), []),
        "cat": (lambda: torch.cat([image, row, image], 1), pointwise(3 * numel + 2 * row_numel)),
        "cast": (lambda: half.float(), [(2 + 4) * 3e6 / BYTES]),
        "embedding": (lambda: functional.embedding(index, table), [(8 * 7 + 2 * 4 * 7 * 400) / BYTES]),
        "short": (lambda: bias[:3] + 1, [SHORTEST]),
        "chunk": (lambda: wide.chunk(3, -1), []),
        "dropout of inference": (lambda: functional.dropout(image, 0.1, training=False), []),
    }


def _roof(flop_seconds: list[float], moved: float) -> float:
    return max(*flop_seconds, moved / BYTES)


def costs(rank: int) -> dict[str, tuple[list[float], float, list[float]]]:
    """Return the durations of the kernels, the host time, and the durations that are expected."""
    found = {}
    with accelerator() as emulator:
        for name, (operation, expected) in operations(emulator.device).items():
            emulator.begin_step()
            operation()
            found[name] = emulator.program.kernels, emulator.host_time.floor, expected
    return found


def test_operations_cost_their_flops_and_bytes() -> None:
    [measured] = ranks.run(costs, 1)
    for name, (kernels, host, expected) in measured.items():
        assert kernels == pytest.approx(expected, rel=2e-4), name  # attention also returns its logsumexp
        calls = host - len(expected) * LAUNCH
        assert calls == pytest.approx(round(calls / CALL) * CALL, abs=1e-9), name
        assert (calls > 0.5 * CALL) == (name in (*_WITHOUT_KERNELS, *_WITH_VIEWS)), name


_WITHOUT_KERNELS = ("view", "reshape", "empty", "chunk", "dropout of inference")
_WITH_VIEWS = ("matmul", "bmm", "expanded", "copying reshape", "part", "copy", "short")
"""Operations with views before them."""
