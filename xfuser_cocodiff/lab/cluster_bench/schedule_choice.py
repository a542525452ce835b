"""Chooses the overlap schedule of each step as autotuning would."""

from collections.abc import Iterable, Mapping, Sequence

from xfuser_cocodiff.xdit.session.schedule_tuner import choose_by_saving


def choose_programs(
    names: Iterable[str], alternatives: Mapping[str, Sequence[str]], seconds: Mapping[str, float]
) -> dict[str, str]:
    """Return, for each program of a run, itself or the alternative that saves the most where that is enough.

    Args:
        names: programs of a run.
        alternatives: programs of the other overlap schedules, by the program that they could replace.
        seconds: step time of each program.
    """
    savings = {name: {each: 1 - seconds[each] / seconds[name] for each in alternatives.get(name, ())} for name in names}
    return {name: choose_by_saving(savings[name], name) for name in savings}
