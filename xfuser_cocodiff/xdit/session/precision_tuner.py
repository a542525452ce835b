"""Choice of the precision of each kind of layer in mode `auto`: the highest one whose communication stays hidden.

The step time at the lowest precision is measured first. A higher one is then rejected if the links alone take longer,
accepted if its extra communication is negligible even where nothing hides it, and otherwise timed, alternating with
the lowest one. All kinds are raised together as long as possible, then one after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import PLUGIN, Candidates
from xfuser_cocodiff.engine.compression.precisions import (
    SCHEDULED,
    KindLoad,
    LayerKind,
    PrecisionChoice,
    StepLoad,
    describe,
    sent_fraction,
)
from xfuser_cocodiff.engine.topology.planner import MARGIN
from xfuser_cocodiff.xdit.session.step_tuner import StepTuner

MAX_COST = 0.03
"""Fraction of the step time at the lowest precision that a higher one may add."""
_TRIED = 0
"""Index of the candidate that is compared with the lowest precision, whose index is PLUGIN."""


class KindCandidates(Candidates[float]):
    """Precisions of one kind of layer: the one that was accepted so far, and two that are compared."""

    def __init__(self, kind: LayerKind, choice: PrecisionChoice | None) -> None:
        self.kind = kind
        self.level = 0
        """Index of the highest accepted precision."""
        self.is_blocked = False
        """Whether the next precision was rejected."""
        self.load = KindLoad()
        """What the layers sent in the last step at the lowest precision."""
        self.added_seconds: float | None = None
        """Seconds of a step that the final precision adds to the lowest one; None if an earlier process chose it."""
        self.comm_seconds: tuple[float, ...] = ()
        """Predicted seconds on slow axes in a step, by precision, as the mean over ranks; negative if unknown."""
        super().__init__([SCHEDULED])
        self.restart(choice)

    def restart(self, choice: PrecisionChoice | None = None) -> None:
        """Start over, at a cached choice if it is one of the kind's."""
        known = choice is not None and choice.precision in self.kind.precisions
        self.level, self.is_blocked = self.kind.precisions.index(choice.precision) if known else 0, False
        self.comm_seconds, self.added_seconds = (), None
        self.compare(0)
        self.chosen = choice.precision if known and choice.is_final else None

    @property
    def is_open(self) -> bool:
        """Whether a higher precision is left to try."""
        return not self.is_blocked and self.level + 1 < len(self.kind.precisions)

    @property
    def accepted(self) -> float:
        """The highest accepted precision."""
        return self.kind.precisions[self.level]

    def compare(self, level: int) -> None:
        """Time steps at a precision, given its index, alternating with the lowest one."""
        self.schedules = (self.kind.precisions[level], SCHEDULED)
        self.candidate = PLUGIN


class PrecisionTuner(StepTuner):
    """Chooses the precision of each kind of layer. All ranks must call its methods in the same order.

    Args:
        comm_seconds: returns the predicted seconds that bytes of a layer of a kind take on slow axes; None if unknown.
        mean: returns the mean over all ranks of each number; a collective.
        all_agree: returns whether all ranks pass the same value; a collective.
        device: device of the layers.
        cached: returns the cached choice of a kind, the same on all ranks.
        on_choice: called with a message when precisions were chosen for all layers of a step, else with None.
    """

    def __init__(
        self,
        comm_seconds: Callable[[LayerKind, float], float | None],
        mean: Callable[[list[float]], list[float]],
        all_agree: Callable[[object], bool],
        device: torch.device,
        cached: Callable[[LayerKind], PrecisionChoice | None] = lambda kind: None,
        on_choice: Callable[[str | None], None] = lambda message: None,
    ) -> None:
        self._kinds: dict[LayerKind, KindCandidates] = {}
        super().__init__(lambda: list(self._kinds.values()), mean, all_agree, device)
        self._predict, self._cached, self._on_choice = comm_seconds, cached, on_choice
        self._group: Sequence[KindCandidates] = ()
        """Kinds of the layers in a usual step, which are chosen together."""
        self._together = True
        """Whether all kinds of the group are raised at once."""
        self._raised: Sequence[KindCandidates] = ()
        """Kinds whose next precision is timed."""
        self._cost, self._is_cost_predicted = 0.0, False
        """Fraction of the step time that the accepted precisions add, and whether it is predicted, an upper bound."""
        self._spent = 0.0
        """Seconds that the final precisions of other layers add to the step, also in rounds at the lowest one."""

    def precision_of(self, kind: LayerKind) -> float:
        """Return the precision of a kind of layer at this step, the same on all ranks."""
        return (self._kinds.get(kind) or KindCandidates(kind, self._cached(kind))).schedule

    @property
    def choices(self) -> dict[LayerKind, PrecisionChoice]:
        """Accepted precisions of all kinds so far, except for those that are the lowest and not final."""
        choices = {kind: PrecisionChoice(each.accepted, each.chosen is not None) for kind, each in self._kinds.items()}
        return {kind: each for kind, each in choices.items() if each != (SCHEDULED, False)}

    @property
    def described(self) -> dict[str, str]:
        """Accepted precisions so far in words, by name of the kind of layers, with sizes and schedule where several
        have it."""
        names = [kind.name for kind in self._kinds]
        return {
            kind.name if names.count(kind.name) == 1 else _full_name(kind): describe(each.accepted)
            for kind, each in self._kinds.items()
        }

    def end_tuned_step(self, load: StepLoad | None, is_usual: bool) -> None:
        """End a step.

        Args:
            load: what was sent; None if nothing was encoded.
            is_usual: whether the step ran as all later steps will, with overlap schedules that are chosen.
        """
        for kind, of_kind in load.kinds.items() if load else ():
            each = self._kinds.setdefault(kind, KindCandidates(kind, self._cached(kind)))
            each.calls, each.is_representative = of_kind.calls, is_usual and load.is_representative
            if each.is_representative and each.schedule == SCHEDULED:
                each.load = of_kind
        if not is_usual:  # the schedules of these layers change: their steps before are not like later ones
            for workload in [each for each in self._seconds if any(kind.calls for kind, _ in each)]:
                del self._seconds[workload]
        self.end_step()

    def _choose(self, layers: Sequence[KindCandidates], passes: Sequence[Mapping[int, float]]) -> None:
        if [*layers] != [*self._group]:
            self._group, self._together, self._raised, self._cost = [*layers], True, (), 0.0
        seconds = median(each[PLUGIN] for each in passes)
        self._spent = self._final_seconds(seconds)
        if self._raised:
            cost = median(each[_TRIED] / each[PLUGIN] for each in passes) - 1
            self._settle(self._raised, cost, seconds, is_predicted=False)
            self._raised = ()
        self._predict_seconds()
        self._set_next(seconds)

    def _final_seconds(self, seconds: float) -> float:
        """Return the seconds that final precisions of this step add; the most allowed where that is not known."""
        added = [each.added_seconds for each in self._kinds.values() if each.calls and each.chosen and each.level]
        if None in added:
            return seconds - seconds / (1 + MAX_COST)
        return sum(max(0.0, each) for each in added if each is not None)

    def _budget(self, seconds: float) -> float:
        """Return the fraction of the step time that precisions which are not final may add."""
        return max(0.0, (1 + MAX_COST) * (seconds - self._spent) / seconds - 1)

    def _predict_seconds(self) -> None:
        """Predict the seconds of all precisions, once for each group."""
        unknown = [each for each in self._group if not each.comm_seconds]
        predicted = [self._comm_seconds(each, precision) for each in unknown for precision in each.kind.precisions]
        means = iter(self._mean(predicted) if predicted else ())
        for each in unknown:
            each.comm_seconds = tuple(next(means) for _ in each.kind.precisions)

    def _comm_seconds(self, each: KindCandidates, precision: float) -> float:
        load = each.load
        size = (
            load.sent_bytes if precision == SCHEDULED else load.exact_bytes * sent_fraction(precision, each.kind.sizes)
        )
        seconds = self._predict(each.kind, size / load.calls)
        return -1.0 if seconds is None else load.calls * seconds

    def _set_next(self, seconds: float) -> None:
        """Raise precisions until one has to be timed, or none is left.

        Args:
            seconds: step time at the lowest precisions.
        """
        while raised := self._next_raised():
            levels = [each.level + (each in raised) for each in self._group]
            cost = self._predicted_cost(levels, seconds)
            if cost is None:
                for each, level in zip(self._group, levels, strict=True):
                    each.compare(level)
                self._raised = raised
                self._on_choice(None)
                return
            self._settle(raised, cost, seconds, is_predicted=True)
        for each in self._group:
            each.added_seconds = self._cost * seconds / len(self._group)
            each.chosen = each.accepted
        self._on_choice(self._message(seconds))

    def _next_raised(self) -> list[KindCandidates]:
        """Return the kinds to raise next: all that are open, else the lowest, of several the one that sends most."""
        open_kinds = [each for each in self._group if each.is_open]
        if self._together or not open_kinds:
            return open_kinds
        return [min(open_kinds, key=lambda each: (each.accepted, -each.comm_seconds[-1]))]

    def _settle(self, raised: Sequence[KindCandidates], cost: float, seconds: float, is_predicted: bool) -> None:
        """Accept or reject the next precision of some kinds, by the fraction of the step time that it adds."""
        if cost <= self._budget(seconds):
            self._cost, self._is_cost_predicted = cost, is_predicted
            for each in raised:
                each.level += 1
        elif len(raised) > 1:
            self._together = False
        else:
            raised[0].is_blocked = True

    def _predicted_cost(self, levels: Sequence[int], seconds: float) -> float | None:
        """Return the fraction of the step time that precisions add if a prediction can tell whether it is too much;
        None if they have to be timed. Predictions are allowed an error of MARGIN.

        Args:
            levels: index of each kind's precision.
            seconds: step time at the lowest precisions.
        """
        pairs = list(zip(self._group, levels, strict=True))
        if any(min(each.comm_seconds) < 0 for each in self._group):
            return None
        if any(min(each.comm_seconds) < each.comm_seconds[0] for each in self._group):  # more bits never take less time
            return None
        lowest = sum(each.comm_seconds[0] for each in self._group)
        total = sum(each.comm_seconds[level] for each, level in pairs)
        budget = self._budget(seconds)
        if (1 - MARGIN) * total > (1 + budget) * seconds:
            return (1 - MARGIN) * total / seconds - 1
        exposed = (1 + MARGIN) * max(0.0, total - lowest) / seconds
        return exposed if exposed <= budget else None

    def _message(self, seconds: float) -> str:
        """Return what was chosen, for the log."""
        kinds = ", ".join(f"{each.kind.name} {describe(each.accepted)}" for each in self._group)
        cost = 100 * ((1 + self._cost) * seconds / (seconds - self._spent) - 1)
        bound = "at most " if self._is_cost_predicted else ""
        if not any(each.level for each in self._group):
            return f"mode 'auto': {kinds}; step {seconds:.3g} s"
        return f"mode 'auto': {kinds}; step {bound}{(1 + self._cost) * seconds:.3g} s, {cost:.1f} % above 'balanced'"

    def _state(self) -> object:
        kinds = [
            (each.level, each.is_blocked, each.chosen, each.schedules, bool(each.comm_seconds))
            for each in self._kinds.values()
        ]
        return kinds, self._together, len(self._raised)

    def _start_over(self) -> None:
        super()._start_over()
        self._group, self._raised, self._together = (), (), True
        # Ranks may know others, and may have cached different choices since.
        self._kinds = {kind: self._kinds[kind] for kind in sorted(self._kinds) if self._kinds[kind].calls}
        self._cached = lambda kind: None


def _full_name(kind: LayerKind) -> str:
    sizes = f"{kind.sizes.num_values} values of which V has {kind.sizes.num_v_values}, head dim {kind.sizes.head_dim}"
    return f"{kind.name} ({sizes}; {'gathered; ' * kind.gathers_kv}{kind.schedule})"
