"""Reports of steps: reconstruction errors and bytes, whose errors arrive from the device later."""

import itertools
import math
from dataclasses import dataclass

from xfuser_cocodiff.engine.compression.error_readout import ErrorReadout


@dataclass
class StepReport:
    """Reconstruction errors and bytes of one step."""

    step: int
    """Number of the step, from 0."""
    errors: dict[str, float]
    """Relative reconstruction error of each layer."""
    sent_bytes: int
    """Bytes that this rank sent as the source to other coordinates on slow axes."""
    exact_bytes: int
    """Bytes that the same values take without codecs."""
    repeated: int
    """Lossy tensors with values that are not finite: on CPUs, messages that were repeated losslessly; on accelerators,
    tensors after which the next step is lossless."""
    not_finite: int
    """Number of them that were not repeated."""
    was_keyframe: bool
    """Whether the step used no references of earlier steps."""
    reference_bytes: int
    """Memory of all link references."""
    exact_layers: int
    """Layers, counted per branch, that are lossless at all steps."""
    gathered_layers: tuple[str, ...]
    """Names of coded layers that gather K and V along the slow axes of the Ulysses group, in call order."""

    @property
    def error(self) -> float:
        """Maximum relative reconstruction error over layers."""
        return max(self.errors.values(), default=0.0)


@dataclass
class StartedReport:
    """A step's report, and its errors on their way from the device."""

    report: StepReport
    """The report, without errors until they are read."""
    num_errors: list[tuple[str, int]]
    """Name of each layer, and number of its errors."""
    counts_repeats: bool
    """Whether tensors that are not finite were repeated already."""
    readout: ErrorReadout | None
    """Errors of all layers; None once they are read."""

    def read(self) -> StepReport:
        """Return the report with the relative error of each layer, once these have arrived."""
        readout, self.readout = self.readout, None
        if readout is None:
            return self.report
        energies, not_finite = iter(readout.read()), 0
        for layer, count in self.num_errors:
            pairs = list(itertools.islice(energies, count))
            finite = [pair for pair in pairs if math.isfinite(pair[0])]
            not_finite += len(pairs) - len(finite)
            error_energy, value_energy = (sum(column) for column in zip(*finite, strict=True)) if finite else (0.0, 0.0)
            error = math.sqrt(error_energy / value_energy) if value_energy else 0.0
            self.report.errors[layer] = max(error, self.report.errors.get(layer, 0.0))
        if not self.counts_repeats:
            self.report.not_finite = not_finite
            self.report.repeated += not_finite
        return self.report
