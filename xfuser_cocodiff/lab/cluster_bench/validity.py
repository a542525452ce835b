"""Whether a measured time is that of the machine: the checks of each measurement."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_DILATION_ERROR = 0.03
"""Relative difference of step times at D and 2 D."""
MIN_IDLE_SHARE = 0.3
"""Idle share of the busiest core."""
MAX_BYTES_ERROR = 0.02
"""Relative difference of counted bytes and those of the recorded collectives."""
MAX_PREDICTION_ERROR = 0.1
"""Relative difference of predicted and measured step time."""
MAX_LATE_SHARE = 0.01
"""Longest time by which a collective starts late, as a share of the step."""


@dataclass(frozen=True)
class Evidence:
    """What the checks of a variant need."""

    dilation_ratio: float
    """Step time at twice the dilation over that at the dilation; 1 if dilation does not matter."""
    idle_share: float
    """Share of the period in which the busiest core was idle."""
    bytes_ratio: Mapping[str, float] = field(default_factory=dict)
    """Counted bytes over those of the recorded collectives, by axis."""
    prediction_ratio: float = 1.0
    """Predicted over measured step time."""
    late_share: float = 0.0
    """Longest time by which a collective started late, as a share of the recorded step."""

    def objections(self) -> list[str]:
        """Return why the time is not valid; empty if it is."""
        reasons = []
        if abs(self.dilation_ratio - 1) > MAX_DILATION_ERROR:
            reasons.append(f"time at 2 D differs by {self.dilation_ratio - 1:+.1%} from that at D")
        if self.idle_share < MIN_IDLE_SHARE:
            reasons.append(f"a core was idle {self.idle_share:.0%} of the time, less than {MIN_IDLE_SHARE:.0%}")
        for axis, ratio in self.bytes_ratio.items():
            if abs(ratio - 1) > MAX_BYTES_ERROR:
                reasons.append(f"bytes counted on axis {axis} differ by {ratio - 1:+.1%} from the recorded ones")
        if abs(self.prediction_ratio - 1) > MAX_PREDICTION_ERROR:
            reasons.append(f"prediction is off by {self.prediction_ratio - 1:+.1%}")
        if self.late_share > MAX_LATE_SHARE:
            reasons.append(f"a collective started late by {self.late_share:.1%} of the step")
        return reasons
