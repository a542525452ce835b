"""Requests whose text has another length each time, as in a service of Qwen-Image: what they cost, on real ranks."""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch.nn import functional

from benchmarks import bare_runtime
from tests import ranks
from tests.xdit.attention.test_overlap import inputs_of, start, use_config
from xfuser_cocodiff.engine.attention import ulysses
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.attention import schedule_choice
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap

LENGTHS = (60, 58, 46, 34)
"""Text tokens of each request: with the image's, all between two powers of two."""
STEPS = 20


@dataclass
class Cost:
    """What a request did."""

    collectives: int
    """Agreements of all ranks, over host memory."""
    projections: int
    """Calls of `linear` beyond those of stock."""
    is_equal: bool
    """Whether all outputs are stock's."""
    groups: Counter[int] = field(default_factory=Counter)
    """Numbers of calls of attention by number of head groups."""


class Service:
    """A FLUX.1 on one rank that serves requests, in the exact mode or in a lossy one.

    Args:
        rank: number of the rank.
        overlap: overlap options.
        mode: of the config.
    """

    def __init__(self, rank: int, overlap: Overlap, mode: str = "exact") -> None:
        group, self._transformer, step = start(rank, depth=3)
        self._given = inputs_of(self._transformer, step)
        slow_axes = () if mode == "exact" else ("flat",)
        config = CocoDiffConfig(topology=Topology.flat(2), mode=mode, slow_axes=slow_axes, overlap=overlap)
        self.session = use_config(group, config)

    def serve(self, length: int) -> Cost:
        """Run a request with so many tokens of text."""
        bare_runtime.use_session(Session())
        linear, projections = functional.linear, []
        counting = mock.patch.object(functional, "linear", lambda *args: projections.append(1) or linear(*args))
        with counting:
            expected = self._step(length)
        of_stock = len(projections) * STEPS
        projections.clear()
        bare_runtime.use_session(self.session)
        all_reduce, collectives, groups = schedule_choice.all_reduce, [], Counter()
        counted_reduce = lambda *args: collectives.append(1) or all_reduce(*args)  # noqa: E731
        run = ulysses.UlyssesAttention.run

        def counted(call: ulysses.UlyssesAttention, *args: object) -> torch.Tensor:
            groups[call._groups] += 1
            return run(call, *args)

        results = []
        reducing = mock.patch.object(schedule_choice, "all_reduce", counted_reduce)
        with counting, reducing, mock.patch.object(ulysses.UlyssesAttention, "run", counted):
            self.session.begin_run(STEPS)
            for _ in range(STEPS):
                results.append(self._step(length))
                self.session.end_step()
        is_equal = all(torch.equal(result, expected) for result in results)
        return Cost(len(collectives), len(projections) - of_stock, is_equal, groups)

    @torch.no_grad()
    def _step(self, length: int) -> torch.Tensor:
        text = {name: self._given[name][..., :length, :] for name in ("encoder_hidden_states", "txt_ids")}
        return self._transformer(**{**self._given, **text})[0]


def serve(rank: int, mode: str) -> tuple[list[Cost], int]:
    """Return the costs of requests of several lengths, and the number of schedules that were tuned."""
    service = Service(rank, Overlap(), mode)
    costs = [service.serve(length) for length in LENGTHS]
    return costs, len({id(each.candidates) for each in service.session.layers.signatures})


@pytest.mark.parametrize("mode", ["exact", "balanced"])
def test_another_text_length_costs_what_the_same_one_costs(mode: str) -> None:
    for costs, schedules in ranks.run(serve, 2, mode):
        assert {each.projections for each in costs} == {0}
        assert {each.collectives for each in costs[2:]} == {costs[-1].collectives} and costs[-1].collectives < 8
        assert schedules == 2  # of double and single blocks
        assert all(each.is_equal for each in costs) or mode != "exact"


def depend_on_length(get: Callable) -> Callable:
    """Return a getter of attention functions whose bits depend on the number of heads unless 4 divides that of keys."""

    def get_dependent(backend: object = None) -> Callable:
        function = get(backend=backend)

        def dependent(query: torch.Tensor, key: torch.Tensor, *args: object, **kwargs: object) -> tuple:
            result, *rest = function(query, key, *args, **kwargs)
            return result * (1 + (key.shape[2] % 4 > 0) * query.shape[1] * 2**-10), *rest

        return dependent

    return get_dependent


def serve_with_groups(rank: int) -> list[Cost]:
    """Return the costs of requests with two head groups, whose bits are stock's at every other length only."""
    from xfuser.model_executor.layers import usp as stock

    with contextlib.ExitStack() as stack:
        service = Service(rank, Overlap(v_first=True, head_groups=2))
        odd = depend_on_length(stock._get_attention_function)
        stack.enter_context(mock.patch.object(stock, "_get_attention_function", odd))
        return [service.serve(length) for length in (60, 58, 52, 46)]


def test_head_groups_are_checked_at_each_length() -> None:
    """A kernel may divide its work by the number of tokens."""
    for costs in ranks.run(serve_with_groups, 2):
        assert all(each.is_equal for each in costs)
        checks = 2  # of double and of single blocks
        assert [each.groups[2] > checks for each in costs] == [True, False, True, False]
