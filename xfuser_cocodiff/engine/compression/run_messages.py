"""What a run says of its layers: their codecs, the memory of their references, and which of them stay lossless."""

import difflib
import math
from collections.abc import Iterable, Sequence

from xfuser_cocodiff.engine.compression.layer_state import LayerState
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import GIB


def mode_in_use(mode: str, overrides: str | None, schedule: CodecSchedule, total: int | None, expected: str) -> str:
    """Return a message that names the schedule of a run and how to measure its error.

    Args:
        mode: the run's mode.
        overrides: changes to its schedule, in its notation.
        schedule: the run's schedule.
        total: number of steps; None if unknown.
        expected: PSNR that such runs have with small models, in words; empty if unknown.
    """
    expectation = f"{expected}; " if expected else ""
    name = f"{mode}@{overrides}" if overrides else mode
    return (
        f"mode {name!r}: {schedule}; {expectation}measure this model with cocodiff quality "
        f"--model NAME --steps {total or 'N'} --mode {name!r}"
    )


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
    lossy: Sequence[LayerState], num_layers: int, num_branches: int, in_int8: bool, budget: str
) -> str | None:
    """Return a message with the memory of link references and their budget, or None if no layer has any.

    Args:
        lossy: layers that are coded, or would be if memory sufficed, in all branches.
        num_layers: number of all layers.
        num_branches: number of guidance branches.
        in_int8: whether references are stored in 8 bits.
        budget: the budget and what it changes, in words.
    """
    if not lossy:
        return None
    full, int8 = (sum(state.planned_bytes[is_int8] for state in lossy) for is_int8 in (False, True))
    in_use = " (in use)" if in_int8 else ""
    guidance = f" and {num_branches} guidance branches" if num_branches > 1 else ""
    return (
        f"link references of {num_layers} layers{guidance}: {full / GIB:.3g} GiB per rank, "
        f"{int8 / GIB:.3g} GiB in 8 bits{in_use}; {budget}"
    )


def memory_budget(lossy: Sequence[LayerState], budget: float, is_default: bool) -> str:
    """Return the memory budget of link references in words, and how many layers are lossless because of it.

    Args:
        lossy: layers that are coded, or would be if memory sufficed.
        budget: bytes that link references may take on each rank.
        is_default: whether free memory sets the budget, and not the user.
    """
    if math.isinf(budget):
        return "--cocodiff_memory_budget sets a limit"
    origin = "by free memory" if is_default else "by --cocodiff_memory_budget"
    exact = sum(state.is_exact for state in lossy)
    advice = "free memory, or use more ranks" if is_default else "raise it"
    advice = f"; {advice}, to code them" if exact else ""
    return f"memory budget {budget / GIB:.3g} GiB {origin}: {exact} of {len(lossy)} layers are lossless{advice}"


def unmatched_layers(schedule: CodecSchedule, layers: Iterable[str]) -> list[str]:
    """Return a warning for each name in the schedule's `exact` that matches none of the layers."""
    layers = sorted(set(layers))
    prefixes = sorted({".".join(layer.split(".")[:count]) for layer in layers for count in (1, 2, 3, 4)})
    nearest = {name: difflib.get_close_matches(name, prefixes, 3, 0.0) for name in schedule.unmatched_layers(layers)}
    return [f"exact={name} matches no layer; the nearest are {', '.join(names)}" for name, names in nearest.items()]
