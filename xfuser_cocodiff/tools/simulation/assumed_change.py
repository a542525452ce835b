"""Change per step that predictions assume, and the bits that rate control would choose for it."""

import math
from collections.abc import Sequence
from pathlib import Path

from xfuser_cocodiff.engine.codec.quantize import GRIDS
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.rate_control import RateControl
from xfuser_cocodiff.tools.reporting import record_file
from xfuser_cocodiff.xdit.settings.variables import RECORD_VARIABLE

# fmt: off
PUBLISHED = (
    0.46, 0.35, 0.29, 0.25, 0.20, 0.17, 0.18, 0.16, 0.17, 0.22, 0.26, 0.15, 0.15, 0.14,
    0.15, 0.14, 0.14, 0.15, 0.16, 0.16, 0.16, 0.17, 0.19, 0.20, 0.21, 0.24, 0.31,
)
# fmt: on
"""Norm of the change of K and V between two steps over that of K and V: FLUX.1-dev, mean of 57 blocks, 1024 px, 28
steps (data files of github.com/Cobalt-27/CompactFusion, `compact_plot/sim_norm_dump`)."""
STEPS = len(PUBLISHED) + 1
"""Number of steps of the published run; predictions assume it by default."""
DESCRIPTION = "the published change per step of FLUX.1-dev"


def of_record(folder: Path) -> list[float]:
    """Return the changes per step of the last run in a folder that RECORD_VARIABLE named, as :data:`PUBLISHED`.

    That of a step is its mean error over the distortion of its bits. Keyframes have none.

    Raises:
        ValueError: the folder has no record, or one of a run without quantized residuals.
    """
    valid = f"valid is the folder of {RECORD_VARIABLE} in a run in mode balanced or fast"
    try:
        [*_, run] = record_file.read(folder / "rank0.json")["runs"]
        steps = [step for step in run["codecs"] or () if step["bits"] and step["error"] > 0]
        changes = [step["error"] / GRIDS[step["bits"]].distortion for step in steps]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--record {folder} is not valid: {type(error).__name__} {error}; {valid}") from None
    if not changes:
        raise ValueError(f"--record {folder} is not valid: its last run sent no quantized residuals; {valid}")
    return changes


def stretch(changes: Sequence[float], steps: int) -> list[float]:
    """Return the changes between the steps of a run with another number of steps.

    Fewer steps change more, in proportion, but no more than the values themselves.

    Args:
        changes: norm of the change over that of the values, between adjacent steps.
        steps: number of steps, at least 1.
    """
    count, last = steps - 1, len(changes) - 1
    positions = (last * index / max(1, count - 1) for index in range(count))
    pairs = ((changes[math.floor(at)], changes[math.ceil(at)], at % 1) for at in positions)
    return [min(1.0, (low + (high - low) * part) * (last + 1) / count) for low, high, part in pairs]


def bits_of(schedule: CodecSchedule, steps: int, changes: Sequence[float] = PUBLISHED) -> list[float] | None:
    """Return the bits per value of each step of a run; None for a schedule that has no target of the error.

    Residuals also carry the error of the step before. No prediction is assumed.

    Args:
        schedule: of a mode.
        steps: number of steps.
        changes: see :data:`PUBLISHED`; of a run of any number of steps.
    """
    if schedule.error is None:
        return None
    rate, error = RateControl(schedule.error), GRIDS[schedule.first].distortion if schedule.first else 0.0
    rate.note(0, error, 1)
    bits = [schedule.first or 0.0]
    for step, change in enumerate(stretch(changes, steps), 1):
        bits.append(rate.bits(step))
        error = GRIDS[bits[-1]].distortion * math.hypot(change, error)
        rate.note(step, error, 1)
    return bits
