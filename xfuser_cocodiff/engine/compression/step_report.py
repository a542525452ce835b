"""Reports of steps: reconstruction errors and bytes, whose errors arrive from the device later."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from xfuser_cocodiff.engine.codec.codec import LETTERS
from xfuser_cocodiff.engine.codec.yardsticks import YARDSTICKS
from xfuser_cocodiff.engine.compression.step_errors import ErrorReadout


@dataclass
class StepReport:
    """Reconstruction errors and bytes of one step."""

    step: int
    """Number of the step, from 0."""
    errors: dict[str, float] = field(default_factory=dict)
    """Largest error of a tensor of each layer: norm of decoded minus sent values over that of the sent ones."""
    tensor_errors: dict[str, list[float]] = field(default_factory=dict)
    """Error of each tensor that was sent, by its letter, over layers and branches."""
    yardstick_errors: dict[str, list[float]] = field(default_factory=dict)
    """Errors that FP8 and FP4 have on the same tensors, by name; empty unless they were measured at this step."""
    bits: float | None = None
    """Bits per value of residuals; None in a keyframe, and where values are sent unquantized."""
    sent_bytes: int = 0
    """Bytes that this rank sent as the source to other coordinates on slow axes."""
    exact_bytes: int = 0
    """Bytes that the same values take without codecs."""
    repeated: int = 0
    """Lossy tensors with values that are not finite: on CPUs, messages that were repeated losslessly; on accelerators,
    tensors after which the next step is lossless."""
    not_finite: int = 0
    """Number of them that were not repeated."""
    was_keyframe: bool = False
    """Whether the step used no references of earlier steps."""
    reference_bytes: int = 0
    """Memory of all link references."""
    exact_layers: int = 0
    """Layers, counted per branch, that are lossless at all steps."""
    gathered_layers: tuple[str, ...] = ()
    """Names of coded layers that gather K and V along the slow axes of the Ulysses group, in call order."""
    error_sums: tuple[float, int] = (0.0, 0)
    """Sum of the errors of tensors whose bits rate control chooses, and their number."""

    @property
    def error(self) -> float:
        """Mean error over tensors, layers and branches; 0 if all were lossless."""
        errors = [error for of_letter in self.tensor_errors.values() for error in of_letter]
        return fmean(errors) if errors else 0.0


class RunErrors(NamedTuple):
    """Errors and bits of a run, named as in records. The log has those of all ranks of a sequence, records of one."""

    mean_error: float | None
    """Mean error over lossy tensors, layers, branches and steps; None if all were lossless. It counts keyframes and
    layers without references, unlike rate control."""
    error: dict[str, float]
    """Mean error of each tensor, by its letter."""
    bits: float | None
    """Mean bits per value, with scales and keyframes; None if nothing was coded."""
    yardsticks: Mapping[str, float]
    """Mean errors of FP8 and FP4 on the same tensors, by name."""

    @classmethod
    def of(
        cls,
        reports: Sequence[StepReport],
        yardsticks: Mapping[str, float],
        value_bytes: int,
        sum_over_ranks: Callable[[list[float]], list[float]] = list,
    ) -> "RunErrors":
        """Return the errors and bits of a run.

        Args:
            reports: reports of its steps.
            yardsticks: mean errors of other codes on the same tensors, by name.
            value_bytes: bytes of a value without codecs.
            sum_over_ranks: returns the sum over all ranks for each of some numbers; of this rank alone if not given.
        """
        found = {name: [error for each in reports for error in each.tensor_errors.get(name, ())] for name in LETTERS}
        found |= {name: [yardsticks[name]] if name in yardsticks else [] for name in YARDSTICKS}
        sent, exact = (sum(getattr(report, name) for report in reports) for name in ("sent_bytes", "exact_bytes"))
        sums = [float(number) for errors in found.values() for number in (sum(errors), len(errors))]
        flat = sum_over_ranks([*sums, 8.0 * sent, exact / value_bytes if value_bytes else 0.0])
        *pairs, (sent_bits, num_values) = zip(flat[::2], flat[1::2], strict=True)
        means = {name: total / count for name, (total, count) in zip(found, pairs, strict=True) if count}
        total, count = (sum(column) for column in zip(*pairs[: len(LETTERS)], strict=True))
        return cls(
            total / count if count else None,
            {name: mean for name, mean in means.items() if name in LETTERS},
            sent_bits / num_values if num_values else None,
            {name: mean for name, mean in means.items() if name in YARDSTICKS},
        )

    def text(self, coverage: str = "", tensors: str = "the same tensors") -> str:
        """Return errors and bits in words; a run without errors has none.

        Args:
            coverage: which steps and ranks they cover, if not all, after a space.
            tensors: what the errors of FP8 and FP4 were measured on.
        """
        by_letter = ", ".join(f"{name.upper()} {error:.2%}" for name, error in sorted(self.error.items()))
        text = f"error {self.mean_error:.2%} ({by_letter}) at {self.bits:.2f} bits per value{coverage}"
        others = "".join(f"; {name.upper()} {error:.2%}" for name, error in self.yardsticks.items())
        return f"{text}{others} on {tensors}" if others else text


@dataclass
class StartedReport:
    """A step's report, and its errors on their way from the device."""

    report: StepReport
    """The report, without errors until they are read."""
    counts_repeats: bool
    """Whether tensors that are not finite were repeated already."""
    readout: ErrorReadout | None
    """Errors of all layers; None once they are read."""

    def read(self) -> StepReport:
        """Return the report with the errors, once these have arrived."""
        readout, self.readout = self.readout, None
        if readout is None:
            return self.report
        not_finite = 0
        for each in readout.read():
            if not math.isfinite(each.error_energy):
                not_finite += each.name not in YARDSTICKS
                continue
            error = math.sqrt(each.error_energy / each.value_energy) if each.value_energy else 0.0
            if each.name in YARDSTICKS:
                self.report.yardstick_errors.setdefault(each.name, []).append(error)
                continue
            self.report.tensor_errors.setdefault(each.name, []).append(error)
            self.report.errors[each.layer] = max(error, self.report.errors.get(each.layer, 0.0))
            if each.is_counted:
                self.report.error_sums = self.report.error_sums[0] + error, self.report.error_sums[1] + 1
        if not self.counts_repeats:
            self.report.not_finite = not_finite
            self.report.repeated += not_finite
        return self.report
