"""Head groups that are tried without being set, on ranks that communicate as accelerators do."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.engine.topology.test_planner import profile_of
from tests.xdit.attention.test_overlap import depend_on_heads, start, use_config
from tests.xdit.session.test_schedule_tuner import FakeClock
from xfuser_cocodiff.engine.autotune import comm_setup, tuning_cache
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.topology.devices import Capabilities
from xfuser_cocodiff.xdit.attention import eager_attention
from xfuser_cocodiff.xdit.session import schedule_tuner
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap

ACCELERATOR = SimpleNamespace(capabilities=lambda device_type: Capabilities())
LINKS = profile_of([2], [1e3], latency=0.0, launch=0.0)  # slow, so that head groups are worth their launches


class Run:
    """Steps of a session on two ranks, 8 heads, by a clock that depends on the schedules."""

    def __init__(self, rank: int, seconds: dict[int, float], **options: object) -> None:
        self.group, _, self.step = start(rank, depth=3)
        self.expected, self._clock, self._seconds = self.step(), FakeClock(), seconds
        self._options = options

    def session(self, cache: TuningCache | None = None) -> Session:
        """Return a session, and run with it from now on."""
        config = CocoDiffConfig(topology=LINKS.topology, **self._options)
        session = use_config(self.group, config, cache or TuningCache({}, LINKS))
        session.begin_run(50)
        return session

    def steps(self, session: Session, number: int) -> list[list[int]]:
        """Return the numbers of head groups of all signatures in each step; check the output against stock."""
        found = []
        with mock.patch.object(schedule_tuner, "time", self._clock):
            for _ in range(number):
                schedules = [each.candidates.schedule for each in session.layers.signatures if each.candidates]
                found.append([each.groups for each in schedules])
                self._clock.now += self._seconds[max([each.groups for each in schedules], default=1)]
                result = self.step()
                assert session.runtime or torch.equal(result, self.expected)
                session.end_step()
        return found


def tune(rank: int, seconds: dict[int, float]) -> tuple[list, list]:
    """Return the candidates' numbers of head groups, and those chosen in the end, by signature."""
    run = Run(rank, seconds)
    with mock.patch.object(comm_setup, "devices", ACCELERATOR):
        session = run.session()
    run.steps(session, 3 + 16)
    signatures = list(session.layers.signatures)
    return (
        [[each.groups for each in signature.candidates.schedules] for signature in signatures],
        [signature.candidates.chosen.groups for signature in signatures if signature.candidates.chosen],
    )


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [({1: 1.0, 2: 0.9, 4: 0.8}, 4), ({1: 1.0, 2: 1.1, 4: 1.2}, 1)],
)
def test_accelerators_choose_the_number_of_head_groups_by_steps(seconds: dict[int, float], chosen: int) -> None:
    assert ranks.run(tune, 2, seconds) == [([[1, 1, 2, 4]] * 2, [chosen] * 2)] * 2


def tune_with_odd_ranks(rank: int, odd: str) -> list[tuple[set[int], tuple[int, ...]]]:
    """Return the candidates' numbers of head groups, and those that are not bit-identical, where rank 1 is odd."""
    from xfuser.model_executor.layers import usp as stock

    run = Run(rank, {1: 1.0, 2: 0.9, 4: 0.9})
    with mock.patch.object(comm_setup, "devices", ACCELERATOR):
        session = run.session()
    if odd == "links" and rank == 1:
        policy = session.mesh.policy
        object.__setattr__(policy, "splits_heads", lambda *sizes: sizes[2] == 2)
    get = stock._get_attention_function
    with mock.patch.object(stock, "_get_attention_function", depend_on_heads(get) if odd == "attention" else get):
        run.expected = run.step()
        run.steps(session, 4)
    return [
        ({each.groups for each in signature.candidates.schedules}, signature.unequal)
        for signature in session.layers.signatures
    ]


def test_ranks_try_what_pays_on_all_of_them() -> None:
    assert ranks.run(tune_with_odd_ranks, 2, "links") == [[({1, 2}, ())] * 2] * 2


def test_attention_that_is_not_bit_identical_is_not_tried() -> None:
    assert ranks.run(tune_with_odd_ranks, 2, "attention") == [[({1}, (2, 4))] * 2] * 2


def switch_backend(rank: int, odd: str, is_argument: bool) -> tuple[list[bool], list[tuple[int, ...]]]:
    """Return whether each step equals stock's, and head groups that are not bit-identical, where an odd backend follows
    another one: the runtime's, as in xDiT's hybrid schedule, or an argument of USP."""
    from xfuser.core.distributed import get_runtime_state
    from xfuser.core.distributed.attention_backend import AttentionBackendType
    from xfuser.model_executor.layers import usp as stock
    from xfuser.model_executor.models.transformers import transformer_flux

    run, state = Run(rank, {}, overlap=Overlap(head_groups=2)), get_runtime_state()
    get = stock._get_attention_function
    usual, results, warned = state.attention_backend, [], []

    def get_by_backend(backend: object = None) -> Callable:
        is_usual = (backend or state.attention_backend) is usual
        return (get if is_usual else depend_on_heads(get))(backend=usual)

    with (
        mock.patch.object(stock, "_get_attention_function", get_by_backend),
        mock.patch.object(eager_attention, "warn_once", warned.append),
    ):
        session, attend = run.session(), transformer_flux.USP
        for backend in (usual, AttentionBackendType[odd], usual):
            if is_argument:
                transformer_flux.USP = functools.partial(attend, backend=backend)
            else:
                state.attention_backend = backend
            expected = stock_step(run)
            results += [torch.equal(run.step(), expected) for _ in range(4)]
    assert any("needs all heads at once" in line for line in warned) == (odd == "FLASH_3_FP8")
    return results, [signature.unequal for signature in session.layers.signatures]


@pytest.mark.parametrize(
    ("odd", "is_argument", "unequal"),
    [
        ("FLASH_3_FP8", False, [()] * 4),  # double and single blocks with each backend
        ("FLASH_3_FP8", True, [(2,)] * 2),
        ("SDPA_MATH", False, [(), (), (2,), (2,)]),
    ],
)
def test_head_groups_are_used_with_backends_that_were_checked(
    odd: str, is_argument: bool, unequal: list[tuple[int, ...]]
) -> None:
    """Backends that quantize scale all heads together: equal bits in one step are no promise for the next."""
    for results, found in ranks.run(switch_backend, 2, odd, is_argument):
        assert all(results)
        assert sorted(found) == unequal


def use_cached(rank: int, folder: str, patch_attention: bool) -> tuple[list[str], list[list[int]]]:
    """Choose two head groups, then use the cache in a second session.

    Returns:
        The cached schedules; the numbers of head groups in the first steps of the second session.
    """
    from xfuser.model_executor.layers import usp as stock

    run = Run(rank, {1: 1.0, 2: 0.8, 4: 0.9})
    with mock.patch.object(comm_setup, "devices", ACCELERATOR):
        first = run.session(TuningCache({}, LINKS, folder=Path(folder) if rank == 0 else None))
        run.steps(first, 3 + 16)
        schedules = first.comm_setup.cache.schedules
        second = run.session(TuningCache({}, LINKS, dict(schedules)))
    get: Callable = stock._get_attention_function
    with mock.patch.object(stock, "_get_attention_function", depend_on_heads(get) if patch_attention else get):
        if patch_attention:
            run.expected = stock_step(run)
        return sorted(str(each.groups) for each in schedules.values()), run.steps(second, 4)


def stock_step(run: Run) -> torch.Tensor:
    """Return the result of a step by stock, and continue with the session in use."""
    from benchmarks import bare_runtime
    from xfuser_cocodiff.xdit.session.session import active

    session = active()
    bare_runtime.use_session(Session())
    result = run.step()
    bare_runtime.use_session(session)
    return result


@pytest.mark.parametrize(("patch_attention", "groups"), [(False, 2), (True, 1)])
def test_cached_head_groups_are_used_if_still_bit_identical(tmp_path: Path, patch_attention: bool, groups: int) -> None:
    for cached, found in ranks.run(use_cached, 2, str(tmp_path), patch_attention):
        assert cached == ["2", "2"]
        assert found[2:] == [[groups] * 2] * 2
    [file] = tmp_path.iterdir()
    assert {each.groups for each in tuning_cache.load(file).schedules.values()} == {2}
