"""Runs, steps and branches, and the references that belong to them.

References live from the first step of a run to its last, for one layer in one branch (of classifier-free guidance).
Nothing of one run is ever read in another: a new run begins with none, however the one before it ended.
"""

import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch

from xfuser_cocodiff import modes
from xfuser_cocodiff.codec import Loss
from xfuser_cocodiff.coding import Account, Coding, Wire
from xfuser_cocodiff.memory import GIB, Budget, Need, Share
from xfuser_cocodiff.modes import CodecSchedule
from xfuser_cocodiff.slow_way import SlowWay
from xfuser_cocodiff.virtual import VirtualRanks


@dataclass
class _State:
    """Of one layer in one branch."""

    layer: str
    need: Need
    is_exact: bool
    """Whether it always travels exactly, and holds no references: the schedule or the budget wants it so."""
    wires: dict = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    """Of the step."""


def _numbers(losses: list[Loss]) -> list[tuple[float, float]]:
    """What lacks, and of what: the host waits for a device once."""
    together = torch.stack([each for loss in losses for each in loss]).tolist() if losses else []
    return list(zip(together[::2], together[1::2], strict=True))


@dataclass
class StepReport:
    """What codecs did at one step."""

    step: int
    errors: dict[str, float]
    """Relative, of what receivers hold, for each layer."""
    sent_bytes: int
    """To other places on slow axes, by this rank as the first."""
    exact_bytes: int
    """What that would have been without codecs."""
    repeated: int
    """Exchanges that went exactly, since there were values that are not finite, or that were not and are followed by an
    exact step, as on accelerators."""
    unsound: int
    """Those of them that were not."""
    was_refresh: bool
    reference_bytes: int
    """What references take."""
    exact_layers: int
    """Layers, for each branch, that always travel exactly."""

    @property
    def error(self) -> float:
        """The largest."""
        return max(self.errors.values(), default=0.0)


class Runtime:
    """What codecs know of the run under way. All ranks must call its methods alike.

    Args:
        way: the slow axes; None where ranks are virtual.
        mode: one of options.MODES that approximates.
        changes: to its schedule, in its notation.
        max_error: relative error of a layer above which the next step is a refresh; None never asks for one.
        agreed: given numbers, the largest of all ranks for each.
        virtual: the ranks that this one stands for, in the place of slow axes.
        budget: bytes that references may take on each rank.
        say: tells the user.
    """

    def __init__(
        self,
        way: SlowWay | None,
        mode: str,
        changes: str | None,
        max_error: float | None,
        agreed: Callable[[list[float]], list[float]],
        virtual: VirtualRanks | None = None,
        budget: int | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.virtual = virtual
        self._budget, self._say = Budget(budget), say
        self._met = 0
        """Layers of the run before, for each branch."""
        self._settled = 0
        """Layers of this run that are known to have room, or to have none."""
        self._way, self._mode, self._changes = way, mode, changes
        self._max_error, self._agreed = max_error, agreed
        self._states: dict[Hashable, _State] = {}
        self._running = False
        self._refreshing = self._mends = False
        self.schedule = self._schedule(None)
        self.step, self.total = 0, 1
        self.reports: list[StepReport] = []
        """Of the run's steps so far."""

    def _schedule(self, total: int | None) -> CodecSchedule:
        usual = modes.usual(self._mode, total) or CodecSchedule()
        return CodecSchedule.parse(self._changes, usual) if self._changes else usual

    def begin_run(self, total: int | None) -> None:
        """A run begins, of so many steps if that is known."""
        self.end_run()
        self._running, self._settled = True, 0
        self._refreshing = self._mends = False
        self.schedule = self._schedule(total)
        self.step, self.total = 0, total or 1
        self.reports = []

    def end_run(self) -> None:
        """The run is over, or broken off: its references go."""
        self._running = False
        self._met = max(self._met, len(self._states))
        self._states.clear()

    def end_step(self) -> None:
        """A step is over."""
        if not self._running:
            return
        report = self._report()
        self.reports.append(report)
        if len(self._states) > self._settled:
            self._settle()
        if self._max_error is not None or self._defers:
            largest, unsound = self._agreed([report.error, float(report.unsound)])
            self._mends = unsound > 0
            self._refreshing = self._mends or (self._max_error is not None and largest > self._max_error)
        self.step += 1
        if self.step == self.total:
            self.end_run()

    def _report(self) -> StepReport:
        errors: dict[str, float] = {}
        accounts = [state.account for state in self._states.values()]
        figures, broken = iter(_numbers([loss for account in accounts for loss in account.losses])), 0
        for state, account in zip(self._states.values(), accounts, strict=True):
            losses = list(itertools.islice(figures, len(account.losses)))
            finite = [loss for loss in losses if math.isfinite(loss[0])]
            broken += len(losses) - len(finite)
            lacking, wanted = (sum(column) for column in zip(*finite, strict=True)) if finite else (0.0, 0.0)
            error = math.sqrt(lacking / wanted) if wanted else 0.0
            errors[state.layer] = max(error, errors.get(state.layer, 0.0))
            state.account = Account()
        unsound = broken if self._defers else 0  # elsewhere they were repeated
        return StepReport(
            self.step,
            errors,
            sum(account.sent_bytes for account in accounts),
            sum(account.exact_bytes for account in accounts),
            sum(account.repeated for account in accounts) + unsound,
            unsound,
            self._refreshing or self.schedule.is_refresh(self.step),
            self.reference_bytes,
            sum(state.is_exact for state in self._states.values()),
        )

    def coding(self, layer: str, key: Hashable, branch: int, share: Share, layers: int) -> Coding | None:
        """How a layer's exchanges travel in a call of its transformer; None where they travel without codecs.

        Args:
            layer: its name.
            key: tells it from the layers of other transformers.
            branch: which call of the transformer within the step this is.
            share: what this rank has of the layer.
            layers: how many there are in the transformer.
        """
        if not self._running:
            return None
        if (key, branch) not in self._states:
            self._states[key, branch] = self._state(layer, share, layers)
        state = self._states[key, branch]
        if state.is_exact:
            crossing = share.crossing(self._places)
            state.account.sent_bytes = state.account.exact_bytes = crossing.values * crossing.value_bytes
            return None
        codecs = self.schedule.codecs(self.step, self.total)
        if self._refreshing:
            # Where a reference is not finite, its change is not either: what is held now is all that is kept.
            codecs = {
                name: replace(modes.EXACT, predictor=0.0 if self._mends else codec.predictor)
                for name, codec in codecs.items()
            }
        return Coding(self._way, codecs, state.wires, state.account, self.step, self._budget.compact)

    @property
    def _defers(self) -> bool:
        """Whether what is not finite is only seen when a step has ended."""
        return self._way is not None and self._way.slow.lane.device.type != "cpu"

    @property
    def _places(self) -> int:
        """On slow axes."""
        return (self.virtual or self._way).places

    def _state(self, layer: str, share: Share, layers: int) -> _State:
        """Of a layer that is met in a branch for the first time in this run."""
        need = Need.of(share, self.schedule, self._places)
        if not self._states:
            self._foresee(need, layers)
        return _State(layer, need, self.schedule.leaves_out(layer) or not self._budget.admits(need))

    def _foresee(self, need: Need, layers: int) -> None:
        """Say what references will take, before there are any, and decide how they are kept."""
        count = self._met or layers
        expected = Need(*(each * count for each in need))
        self._budget.begin_run(expected)
        each = "" if self._met else ", for each branch of guidance,"
        kept = ", as they are kept" if self._budget.compact else ""
        bound = "; --cocodiff_memory_budget sets a bound" if self._budget.limit is None else ""
        self._say(
            f"references of {count} layers{each} take {expected.full / GIB:.3g} GiB per rank, "
            f"{expected.compact / GIB:.3g} in 8 bits{kept}{bound}"
        )

    def _settle(self) -> None:
        """All layers of a step have been met. If some found no room, let those in that do in 8 bits."""
        self._settled = len(self._states)
        wanting = [state for state in self._states.values() if not self.schedule.leaves_out(state.layer)]
        if not self._budget.compact and any(state.is_exact for state in wanting):
            self._budget.squeeze()
            for state in wanting:
                for wire in state.wires.values():
                    wire.squeeze(self._way)
                state.is_exact = not self._budget.admits(state.need)
        if exact := sum(state.is_exact for state in wanting):
            self._say(
                f"{exact} of {len(wanting)} layers travel exactly: in {self._budget.limit / GIB:.3g} GiB there is no "
                "room for their references"
            )

    @property
    def reference_bytes(self) -> int:
        """What references take now."""
        wires: list[Wire] = [wire for state in self._states.values() for wire in state.wires.values()]
        return sum(wire.sent.nbytes + wire.received.nbytes for wire in wires)
