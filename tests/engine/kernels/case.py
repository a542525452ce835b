"""Values, references and payloads for tests of the kernel backends."""

import torch

from xfuser_cocodiff.engine.compression.codec import Codec
from xfuser_cocodiff.engine.kernels.quantize import tokens_per_row
from xfuser_cocodiff.engine.kernels.rows import (
    GAIN_BYTES,
    GAIN_STEPS,
    ActiveTokens,
    Base,
    EncodeResult,
    Prediction,
    remote_slots,
    write_remote_slots,
)

HAS_GPU = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
DEVICE = torch.accelerator.current_accelerator() if HAS_GPU else torch.device("cpu")
FIRST, SECOND, MIDDLE = range(1), range(1, 2), range(1, 3)
"""Slots of this rank, among three or four."""
Encoded = tuple[torch.Tensor, EncodeResult]
"""A payload, and the result of encoding it."""


class Case:
    """Values and references for P slots, some of which may be local."""

    def __init__(
        self, dtype: torch.dtype, local_slots: range | None, slots: int = 3, dim: int = 16, tokens: int = 11
    ) -> None:
        generator = torch.Generator().manual_seed(dim + tokens)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

        self.local_slots, links = local_slots, slots - len(local_slots or ())
        # Tokens outside of heads: the strides of tensors that models pass.
        self.values = draw(slots, 2, tokens, 3, dim).transpose(2, 3)
        self.reference = draw(links, 2, 3, tokens, dim)
        self.previous = self.reference + (0.1 * draw(*self.reference.shape)).to(dtype)
        self.values.copy_(self.values.float() * 0.1 + self._in_slots(self.reference))
        self.target = torch.zeros(slots, 2, tokens, 3, dim, dtype=dtype, device=DEVICE).transpose(2, 3)

    def _in_slots(self, reference: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(self.values.shape, dtype=reference.dtype, device=DEVICE)
        write_remote_slots(whole, reference, self.local_slots)
        return whole.float()

    def prediction(self, gain: float = 0.0) -> Prediction:
        """Return a prediction with another gain for each link; with gain 0 it is the reference."""
        gains = (GAIN_STEPS * gain / (1 + torch.arange(len(self.reference), device=DEVICE))).to(torch.uint8)
        return Prediction(self.reference, self.previous if gain else None, gains)

    def rows(self, bits: float | None, active: int | None = None) -> int:
        """Return the number of scales of a link."""
        _, groups, heads, tokens, dim = self.reference.shape
        row_tokens = tokens_per_row(bits, dim, tokens, active is None) if bits else 1
        return groups * heads * (tokens if active is None else active) // row_tokens

    def active(self, count: int | None) -> ActiveTokens | None:
        """Return `count` random active tokens per group, or None for all."""
        if count is None:
            return None
        links, groups, _, tokens, _ = self.reference.shape
        scores = torch.rand(links, groups, tokens, generator=torch.Generator().manual_seed(1))
        mask = torch.zeros(scores.shape, dtype=torch.uint8).scatter_(-1, scores.topk(count, -1).indices, 1)
        return ActiveTokens(mask.to(DEVICE), tokens, count)

    def base(self, weight: float) -> Base:
        """Return a base whose tokens lie outside of heads, as those of values do."""
        links, groups, heads, tokens, dim = self.reference.shape
        generator = torch.Generator().manual_seed(7)
        values = torch.randn(links, groups, tokens, heads, dim, generator=generator)
        return Base(values.to(self.reference.dtype).to(DEVICE).transpose(2, 3), weight)

    def plus(self, base: Base) -> torch.Tensor:
        """Return values whose difference to a base is the case's values, up to rounding; local slots hold NaN."""
        whole = torch.full(self.values.shape, float("nan"), device=DEVICE)
        difference = remote_slots(self.values, self.local_slots).float()
        write_remote_slots(whole, difference + base.weight * base.values.float(), self.local_slots)
        return torch.empty_like(self.values).copy_(whole)

    def encoded(
        self,
        kernel,
        *how: object,
        values: torch.Tensor | None = None,
        sends_gain: bool = False,
        base: Base | None = None,
    ) -> Encoded:
        """Encode into a payload between other bytes, check that these stay unchanged, and return both results.

        Args:
            kernel: module of a backend.
            how: prediction, bits and active tokens.
            values: other values than the case's.
            sends_gain: whether the payload carries the gain.
            base: base that is subtracted from the values.
        """
        values, (_, bits, active) = self.values if values is None else values, how
        codec = Codec(bits, 1.0 if active is None else active.count / active.tokens)
        size = codec.payload_bytes(self.reference.shape, values.dtype) + (GAIN_BYTES if sends_gain else 0)
        wide = torch.full((len(values), -(-size // 8) * 8 + 16), 0xA5, dtype=torch.uint8, device=DEVICE)
        result = kernel.encode(values, *how, wide[:, 8 : 8 + size], self.local_slots, sends_gain, base)
        assert (wide[:, :8] == 0xA5).all() and (wide[:, 8 + size :] == 0xA5).all()
        assert all((wide[slot] == 0xA5).all() for slot in self.local_slots or ())
        return wide[:, 8 : 8 + size], result


def levels_of_rows(packed: torch.Tensor, rows: int, bits: float) -> torch.Tensor:
    """Return packed levels (L, n) by row, (L, rows, ...), as numbers or as bytes.

    With 1.6 and 2.7 bits, byte j of five or three adjacent rows holds their levels in column j, the first row's lowest.
    """
    if bits not in (1.6, 2.7):
        return packed.unflatten(1, (rows, -1))
    base, of_byte = (3, 5) if bits == 1.6 else (6, 3)
    groups = packed.int().unflatten(1, (-(-rows // of_byte), -1))
    return torch.stack([groups // base**digit % base for digit in range(of_byte)], 2).flatten(1, 2)[:, :rows]


def assert_equal_up_to_scales(case: Case, one: Encoded, other: Encoded, rows: int, bits: float | None) -> None:
    """Assert that two encodings are equal bit for bit, but for one scale in a thousand on a rounding boundary."""
    payloads = [remote_slots(payload, case.local_slots) for payload, _ in (one, other)]
    if bits is None:
        assert torch.equal(*payloads) and torch.equal(one[1].reference, other[1].reference)
        return
    scales = [payload[:, payload.shape[1] - rows :].int() for payload in payloads]
    assert (scales[0] - scales[1]).abs().max() <= 1
    assert (scales[0] != scales[1]).sum() <= 1 + scales[0].numel() // 1000
    equal = scales[0] == scales[1]
    levels = [levels_of_rows(payload[:, : payload.shape[1] - rows], rows, bits) for payload in payloads]
    assert torch.equal(levels[0][equal], levels[1][equal])
    if equal.all():
        torch.testing.assert_close(one[1].reference, other[1].reference, rtol=0, atol=0, equal_nan=True)
