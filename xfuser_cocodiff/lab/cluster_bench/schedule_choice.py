"""Chooses the overlap schedule of each step as autotuning would."""

from collections.abc import Iterable, Mapping

from xfuser_cocodiff.xdit.session.schedule_tuner import MIN_SAVING


def choose_programs(
    names: Iterable[str], alternatives: Mapping[str, str], seconds: Mapping[str, float]
) -> dict[str, str]:
    """Return, for each program of a run, itself or its alternative where that saves enough.

    Args:
        names: programs of a run.
        alternatives: the program of the other overlap schedule, by the program that it could replace.
        seconds: step time of each program.
    """
    chosen = {name: name for name in names}
    for name, other in alternatives.items():
        if name in chosen and 1 - seconds[other] / seconds[name] > MIN_SAVING:
            chosen[name] = other
    return chosen
