"""Values, references and payloads for tests of the kernel backends."""

from types import ModuleType
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec.quantize import GRIDS
from xfuser_cocodiff.engine.codec.rows import (
    GAIN_STEPS,
    Int8Rows,
    MessagePart,
    PayloadLayout,
    Prediction,
    num_links,
    remote_slots,
    rows_of,
    write_remote_slots,
)

HAS_GPU = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
DEVICE = torch.accelerator.current_accelerator() if HAS_GPU else torch.device("cpu")
FIRST, SECOND, MIDDLE = range(1), range(1, 2), range(1, 3)
"""Slots of this rank, among three or four."""
KEYFRAME, REFERENCE, STARTED, EXTRAPOLATED = KINDS = ("keyframe", "reference", "started", "extrapolated")
"""Predictions: zeros, the reference, the same with a gain that has no last change yet, and the reference with a part of
its last change."""


class Encoded(NamedTuple):
    """A part that has been encoded."""

    part: MessagePart
    """The part, whose payload and new reference are written; its gains are those that were encoded with."""
    energies: torch.Tensor
    """Energies of error and values, float32 (2)."""
    gains: torch.Tensor | None
    """Gains after encoding."""


class Case:
    """Values and references for P slots, some of which may be local."""

    def __init__(
        self, dtype: torch.dtype, local_slots: range | None, slots: int = 3, dim: int = 16, tokens: int = 11
    ) -> None:
        generator = torch.Generator().manual_seed(dim + tokens)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        self.local_slots, links = local_slots, num_links(slots, local_slots)
        self.shape = links, 2, 3, tokens, dim
        self.reference = draw(*self.shape)
        self.previous = self.reference + 0.1 * draw(*self.shape)
        # Tokens outside of heads: the strides of tensors that models pass.
        self.values = draw(slots, 2, tokens, 3, dim).transpose(2, 3)
        in_slots = torch.zeros(self.values.shape, device=DEVICE)
        write_remote_slots(in_slots, self.reference, local_slots)
        self.values = (0.1 * self.values + in_slots).to(dtype)
        self.base = draw(links, 2, tokens, 3, dim).to(dtype).transpose(2, 3)
        """A base whose tokens lie outside of heads, as those of values do."""

    def prediction(self, kind: str, gain: float = 0.5) -> Prediction:
        """Return a prediction, with another gain for each link."""
        if kind in (KEYFRAME, REFERENCE):
            return Prediction(None if kind == KEYFRAME else Int8Rows.of(self.reference))
        gains = (GAIN_STEPS * gain / (1 + torch.arange(self.shape[0], device=DEVICE))).to(torch.uint8)
        previous = Int8Rows.of(self.previous) if kind == EXTRAPOLATED else None
        return Prediction(Int8Rows.of(self.reference), previous, gains)

    def memory(self) -> Int8Rows:
        """Return memory for a reference, which holds something else."""
        memory = Int8Rows.empty(self.shape[0], *rows_of(self.shape), DEVICE)
        for tensor in memory:
            tensor.fill_(0x5A)
        return memory

    def plus_base(self) -> torch.Tensor:
        """Return values whose difference to the base is the case's values, up to rounding; local slots hold NaN."""
        whole = torch.full(self.values.shape, float("nan"), device=DEVICE)
        write_remote_slots(whole, self.remote(self.values).float() + self.base.float(), self.local_slots)
        return torch.empty_like(self.values).copy_(whole)

    def remote(self, values: torch.Tensor) -> torch.Tensor:
        """Return the slots of other ranks."""
        return remote_slots(values, self.local_slots)

    def part(self, prediction: Prediction, bits: float, **more: torch.Tensor) -> MessagePart:
        """Return a part whose payload lies between other bytes."""
        num_bytes = PayloadLayout.of(bits, *rows_of(self.shape), prediction.gains is not None).size
        wide = torch.full((len(self.values), -(-num_bytes // 8) * 8 + 16), 0xA5, dtype=torch.uint8, device=DEVICE)
        how = prediction, bits, wide[:, 8 : 8 + num_bytes], self.memory(), self.local_slots, more.get("base")
        return MessagePart(more.get("values", self.values), *how)

    def encoded(self, kernel: ModuleType, part: MessagePart) -> Encoded:
        """Encode a part, and check that memory around its payload and its energies stays unchanged."""
        wide = torch.as_strided(part.payload, (len(self.values), part.payload.stride(0)), part.payload.stride(), 0)
        gains = None if part.prediction.gains is None else part.prediction.gains.clone()
        energies = torch.full((2, 2), -1.0, device=DEVICE)
        kernel.encode([part._replace(prediction=part.prediction._replace(gains=gains))], energies[:1])
        assert (wide[:, :8] == 0xA5).all() and (wide[:, 8 + part.payload.shape[1] :] == 0xA5).all()
        assert all((wide[slot] == 0xA5).all() for slot in self.local_slots or ())
        assert (energies[1] == -1).all()
        return Encoded(part, energies[0], gains)

    def decoded(self, kernel: ModuleType, part: MessagePart, base: torch.Tensor | None = None) -> torch.Tensor:
        """Decode a part into a new target (P, G, H, T, D), which is returned, and check the new reference."""
        target, memory = torch.zeros_like(self.values), self.memory()
        kernel.decode([part._replace(values=target, base=base, new_reference=memory)])
        assert not any(target[slot].any() for slot in self.local_slots or ())
        assert same_reference(memory, part.new_reference)
        return target


def sections(case: Case, part: MessagePart) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the levels (L, R, N) and scales (L, R) of a part's payload."""
    rows, size = rows_of(case.shape)
    layout = PayloadLayout.of(part.bits, rows, size, part.sends_gain)
    levels, scales, _ = case.remote(part.payload).tensor_split([layout.scales, layout.gain], 1)
    grid = GRIDS[part.bits]
    units = levels.contiguous().view(torch.int16).int().bitwise_and(0xFFFF).unflatten(1, (-1, size))
    digits = [units // grid.levels**digit % grid.levels for digit in range(grid.per_unit)]
    return torch.stack(digits, 2).flatten(1, 2)[:, :rows], scales


def assert_equal_up_to_scales(case: Case, one: Encoded, other: Encoded) -> None:
    """Assert that two encodings are equal, but for one scale in a thousand, and one level, on a rounding boundary."""
    (levels, scales), (other_levels, other_scales) = (sections(case, each.part) for each in (one, other))
    assert (scales.int() - other_scales.int()).abs().max() <= 1
    equal = scales == other_scales
    assert (~equal).sum() <= 1 + equal.numel() // 1000
    apart = (levels - other_levels)[equal].abs()
    assert apart.max() <= 1 and (apart > 0).sum() <= 1 + apart.numel() // 1000


def same_reference(one: Int8Rows, other: Int8Rows) -> bool:
    """Return whether two references have the same bits."""
    return all(map(torch.equal, one, other))
