"""What a run says of its layers: their codecs, the memory of their references, and which of them stay lossless."""

import math
from collections.abc import Iterable, Sequence

from xfuser_cocodiff.engine.compression.layer_state import LayerState
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import GIB
from xfuser_cocodiff.engine.compression.step_report import RunErrors


def mode_in_use(mode: str, overrides: str | None, schedule: CodecSchedule, total: int | None) -> str:
    """Return a message that names the schedule of a run and how to measure its error.

    Args:
        mode: the run's mode.
        overrides: changes to its schedule, in its notation.
        schedule: the run's schedule.
        total: number of steps; None if unknown.
    """
    name = f"{mode}@{overrides}" if overrides else mode
    return (
        f"mode {name!r}: {schedule}; measure this model with cocodiff quality "
        f"--model NAME --steps {total or 'N'} --mode {name!r}"
    )


def error_of_run(errors: RunErrors, first_step: int, of_all_ranks: bool, has_yardsticks: bool) -> str | None:
    """Return a message with the mean error of a run's tensors and their bits, or None if all were lossless.

    Args:
        errors: errors of the run.
        first_step: first step that they cover, from 0: later ones of a run that was interrupted.
        of_all_ranks: whether they are those of all ranks that share the sequence, and not of this one.
        has_yardsticks: whether those of the errors were measured in this run, and not in an earlier one.
    """
    if errors.mean_error is None:
        return None
    of_tensors = ", ".join(f"{name.upper()} {error:.2%}" for name, error in sorted(errors.error.items()))
    message = f"error {errors.mean_error:.2%} ({of_tensors}) at {errors.bits:.2f} bits per value"
    message += f" from step {first_step + 1} on" if first_step else ""
    message += "" if of_all_ranks else " on this rank"
    of_others = "".join(f"; {name.upper()} {error:.2%}" for name, error in errors.yardsticks.items())
    tensors = "the same tensors" if has_yardsticks else "those of the first run"
    return f"{message}{of_others} on {tensors}" if of_others else message


def uncoded(lossy: Sequence[LayerState], slow_axes: Iterable[str]) -> str | None:
    """Return a message if the host would take longer to encode some layers than the links save, else None.

    Args:
        lossy: layers that the schedule codes.
        slow_axes: names of all slow axes.
    """
    seconds = [state.coding_seconds for state in lossy if not state.saves_time]
    if not seconds:
        return None
    saved, added = max(seconds)
    return (
        f"{len(seconds)} of {len(lossy)} layers are lossless: coding would save {1e3 * saved:.2g} ms of "
        f"communication and add {1e3 * added:.2g} ms of host time to a layer; --cocodiff_slow_axes "
        f"{','.join(dict.fromkeys(slow_axes))} compresses them anyway"
    )


def reference_memory(
    lossy: Sequence[LayerState], num_layers: int, num_branches: int, predicts: bool, budget: str
) -> str | None:
    """Return a message with the memory of link references and their budget, or None if no layer has any.

    Args:
        lossy: layers that are coded, or would be if memory sufficed, in all branches.
        num_layers: number of all layers.
        num_branches: number of guidance branches.
        predicts: whether references are extrapolated.
        budget: the budget and what it changes, in words.
    """
    if not lossy:
        return None
    predicted, single = (sum(column) for column in zip(*(state.planned_bytes for state in lossy), strict=True))
    in_use = "" if predicts else " (in use)"
    guidance = f" and {num_branches} guidance branches" if num_branches > 1 else ""
    return (
        f"link references of {num_layers} layers{guidance}: {predicted / GIB:.3g} GiB per rank, "
        f"{single / GIB:.3g} GiB without prediction{in_use}; {budget}"
    )


def memory_budget(lossy: Sequence[LayerState], budget: float, is_default: bool) -> str:
    """Return the memory budget of link references in words, and how many layers have none because of it.

    Args:
        lossy: layers that are coded, or would be if memory sufficed.
        budget: bytes that link references may take on each rank.
        is_default: whether free memory sets the budget, and not the user.
    """
    if math.isinf(budget):
        return "--cocodiff_memory_budget sets a limit"
    origin = "by free memory" if is_default else "by --cocodiff_memory_budget"
    without, exact = (
        sum(map(pick, lossy)) for pick in (lambda each: not each.has_references, lambda each: each.is_exact)
    )
    what = "are lossless" if exact else "have none and send 8 bits"
    advice = "free memory, or use more ranks" if is_default else "raise it"
    advice = f"; {advice}, to send fewer" if without else ""
    return f"memory budget {budget / GIB:.3g} GiB {origin}: {without} of {len(lossy)} layers {what}{advice}"
