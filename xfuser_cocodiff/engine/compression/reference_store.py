"""The reference store: link references of a run's layers, and the memory budget that they must meet.

References live from the first step of a run to its last, for one layer in one branch of classifier-free guidance. No
run reads those of another: a run begins without any, however the one before it ended. If a run continues with another
transformer, the references of the one before it are dropped.
"""

import math
from collections.abc import Callable, Hashable

from xfuser_cocodiff.engine.compression import reference_memory
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LinkState
from xfuser_cocodiff.engine.compression.layer_state import CodedCall, LayerState
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import GIB, LayerSizes, ReferenceBytes
from xfuser_cocodiff.engine.compression.run_clock import RunClock
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory

_TENSORS, _GATHERED_TENSORS = 4, 2
"""Number of tensors of a layer that are coded: Q, K, V and O, or K and V where these are gathered."""
_DRIFT = GIB // 2
"""Free memory that a run may lack against an earlier one like it, and code the same layers: its images stay the same
although kernels and communicators have been loaded since."""
_ONE_RANK = AxisLayout(1, 1)


class ReferenceStore:
    """Layer states of the run in progress. All ranks must call its methods in the same order.

    Args:
        schedule: codec schedule of all runs.
        clock: clock of the runs.
        layout: slow and fast axes of the Ulysses group; None if it has no slow axis.
        ring_layout: slow and fast axes of the ring; None if it has no slow axis.
        memory_budget: bytes that link references may take on each rank; None for the default.
        device_memory: reads the memory of this rank's device, for the default budget; None for no limit by default,
            the same on all ranks.
        min_over_ranks: returns the minimum over all ranks for each of some numbers.
    """

    def __init__(
        self,
        schedule: CodecSchedule,
        clock: RunClock,
        layout: AxisLayout | None,
        ring_layout: AxisLayout | None,
        memory_budget: int | None,
        device_memory: Callable[[], DeviceMemory | None] | None,
        min_over_ranks: Callable[[list[float]], list[float]],
    ) -> None:
        self._schedule, self._clock = schedule, clock
        self._layout, self._ring_layout = layout or _ONE_RANK, ring_layout or _ONE_RANK
        self._given_budget, self._device_memory, self._min_over_ranks = memory_budget, device_memory, min_over_ranks
        self._default_budgets: dict[Hashable, float] = {}
        """Default budgets of this rank, by the runs that have had them."""
        self.budget = math.inf
        """Bytes that link references of this run may take, the same on all ranks."""
        self.predicts = False
        """Whether references are extrapolated in this run, by the schedule and as far as memory suffices."""
        self._transformers: set[Hashable] = set()
        """Transformers that this run has called."""
        self.states: dict[tuple[Hashable, int], LayerState] = {}
        """Layer states by layer and branch, in the order of their first calls."""
        self._num_branches = 1
        """Number of branches in which any layer has been called."""
        self.dropped_stats: list[CodecStats] = []
        """Statistics of this step of layers whose references were dropped in it."""

    @property
    def has_default_budget(self) -> bool:
        """Whether free memory sets the budget, and not the user."""
        return self._given_budget is None

    def begin_run(self) -> None:
        """Begin a run, without references."""
        self.states.clear()
        self.dropped_stats.clear()
        self._transformers.clear()
        self.predicts = bool(self._schedule.predictor)

    def is_new(self, transformer: Hashable) -> bool:
        """Return whether this run has not called a transformer yet."""
        return transformer not in self._transformers

    def state_of(self, call: CodedCall) -> LayerState:
        """Return the state of a layer that is called, created at its first call."""
        key = call.key, call.branch
        if key not in self.states:
            self.states[key] = self._new_state(call)
            self._num_branches = max(self._num_branches, call.branch + 1)
        state = self.states[key]
        state.call(self._clock.step)
        return state

    def drop(self, key: Hashable, branch: int) -> None:
        """Drop the references of a layer in a branch, whose next call begins with a keyframe."""
        if dropped := self.states.pop((key, branch), None):
            self.dropped_stats.append(dropped.stats)

    def leader_of(self, state: LayerState, key: Hashable, branch: int) -> LayerState | None:
        """Return a layer's state in the branch that leads another one; None where each is coded by itself.

        So are branches whose texts have different lengths.
        """
        leader = self._leading(key, branch)
        return leader if leader and leader.is_like(state) else None

    def _leading(self, key: Hashable, branch: int) -> LayerState | None:
        """Return a layer's state in the first branch, for another one that may follow it."""
        return self.states.get((key, 0)) if branch and self._schedule.joint else None

    def is_followed(self, key: Hashable, branch: int) -> bool:
        """Return whether a layer's values are kept for other branches.

        Whether there are others is not known in the first step. If previous references are planned, there is memory
        then for values of up to two bytes: no reference has a previous one yet. In later steps, memory is planned with
        the first branch that follows in the same way. Branches use it unless they were left out when the leading one
        was called last.
        """
        if branch or not self._schedule.joint:
            return False
        if self._clock.is_first_step:
            has_memory = math.isinf(self.budget) or self.states[key, branch].sizes.value_bytes <= 2
            return self.predicts and has_memory
        previous_step = self.states[key, 0].previous_step
        return any(each.last_step >= previous_step and self.leader_of(each, key, 1) for each in self._followers(key))

    def _followers(self, key: Hashable) -> list[LayerState]:
        """Return a layer's states in other branches than the first; a cache may have skipped it in some."""
        states = (self.states.get((key, branch)) for branch in range(1, self._num_branches))
        return [state for state in states if state]

    def _new_state(self, call: CodedCall) -> LayerState:
        """Return the state of a layer that a branch calls for the first time in this run."""
        if self.is_new(call.transformer):
            self._drop_finished_transformers()
            self._transformers.add(call.transformer)
        if not self.states:
            self.budget = self._agree_on_budget(call.transformer, call.sizes)
            self.predicts = bool(self._schedule.predictor)
        coordinates = self.coordinates(call.gathers_kv)
        planned = ReferenceBytes.of(call.sizes, self._schedule, *coordinates, self._keeps_more_values(call))
        saved, added = coding_seconds = self._coding_seconds(call)
        is_exact = saved < added
        has_references = not is_exact and self._reserve(planned)
        # V-Major has no keyframes in few bits.
        is_exact = is_exact or (not has_references and self._schedule.keyframe_codec.is_exact)
        return LayerState(call, planned, is_exact, has_references, coding_seconds, self._clock.step)

    def _keeps_more_values(self, call: CodedCall) -> bool:
        """Return whether the leading branch keeps values because of a new one: the first that follows counts them."""
        leader = self._leading(call.key, call.branch)
        leads, *is_counted = (
            each is not None and (each.sizes, each.gathers_kv) == (call.sizes, call.gathers_kv)
            for each in (leader, *self._followers(call.key))
        )
        return leads and not any(is_counted)

    def _reserve(self, planned: ReferenceBytes) -> bool:
        """Return whether the references of another layer fit the budget, if need be without extrapolation."""
        if self.planned_bytes + self._bytes(planned) <= self.budget:
            return True
        self.predicts = False
        for link_state in self.link_states:  # they took the memory of previous references
            link_state.drop_kept()
        return self.planned_bytes + self._bytes(planned) <= self.budget

    def coordinates(self, gathers_kv: bool) -> tuple[int, int]:
        """Return the coordinates on slow axes of a layer's all-to-alls, and on those along which it gathers K and V."""
        num_slow = self._layout.num_slow
        return (1, num_slow) if gathers_kv else (num_slow, self._ring_layout.num_slow)

    def _coding_seconds(self, call: CodedCall) -> tuple[float, float]:
        """Return the link time that coding a layer saves and the host time that it adds, over Ulysses group and ring.

        Both are 0 where the slow axes were not measured. A lossless layer would send by heads, also if it gathers K and
        V here.
        """
        parts = [
            (self._layout.coding_cost, (self._layout.num_slow, 1), _GATHERED_TENSORS if call.gathers_kv else _TENSORS),
            (self._ring_layout.coding_cost, (1, self._ring_layout.num_slow), _GATHERED_TENSORS),
        ]
        costs = [
            (cost.saved_link_seconds(call.sizes.slow_axis_bytes(*coordinates)), cost.added_host_seconds(num_tensors))
            for cost, coordinates, num_tensors in parts
            if cost
        ]
        return sum(saved for saved, _ in costs), sum(added for _, added in costs)

    def _agree_on_budget(self, transformer: Hashable, sizes: LayerSizes) -> float:
        """Return the memory budget of a run whose first layer asks, the smallest one of all ranks.

        All ranks that share a device have allocated their inputs when the last of them reads its memory.
        """
        if self._given_budget is not None or self._device_memory is None:
            return math.inf if self._given_budget is None else self._given_budget
        memory, total = self._device_memory(), self._clock.total
        budget = reference_memory.default_budget(memory, sizes, total is not None) if memory else math.inf
        key = transformer, sizes, total
        kept = self._default_budgets.setdefault(key, budget)
        if budget < kept - _DRIFT:
            self._default_budgets[key] = kept = budget
        return max(0.0, *self._min_over_ranks([kept]))

    def _drop_finished_transformers(self) -> None:
        """Drop references of transformers without a call at this step, when another transformer is first called.

        They have done their part of the run; one that is called again begins with a keyframe. All ranks make the same
        calls.
        """
        current = {
            state.first_call.transformer for state in self.states.values() if state.last_step == self._clock.step
        }
        for key, state in list(self.states.items()):
            if state.first_call.transformer not in current:
                del self.states[key]

    @property
    def planned_bytes(self) -> int:
        """Memory that references take once all previous references are there too, in bytes."""
        return sum(self._bytes(state.planned_bytes) for state in self.states.values() if state.has_references)

    def _bytes(self, planned: ReferenceBytes) -> int:
        """Return the memory of a layer's references in this run."""
        return planned.predicted if self.predicts else planned.single

    @property
    def nbytes(self) -> int:
        """Memory that references take now, in bytes."""
        return sum(link_state.nbytes for link_state in self.link_states)

    @property
    def link_states(self) -> list[LinkState]:
        """All link states, in the same order on every rank."""
        return [
            link_state
            for state in self.states.values()
            for link_states in (state.link_states, state.ring_link_states)
            for link_state in link_states.values()
        ]
