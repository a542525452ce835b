"""Sessions in one process, one after the other and side by side: they share no state."""

from types import SimpleNamespace

import torch

from benchmarks import bare_runtime
from tests import ranks
from tests.xdit.attention.test_overlap import start, use_config
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import reductions
from xfuser_cocodiff.xdit.session import startup as starting
from xfuser_cocodiff.xdit.session.session import active
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap

STEPS = 4
GATHERED = Plan.parse("hierarchical:node=kv", Topology.parse("node=2", 2))
"""Plan that gathers K and V."""


def config_of(mode: str, **options: object) -> CocoDiffConfig:
    topology = Topology.parse("node=2", 2)
    fixed = {"plan": Plan.flat(topology), "slow_axes": ("node",), "overlap": Overlap(True, 1)}
    return CocoDiffConfig(topology=topology, mode=mode, **{**fixed, **options})


def run_side_by_side(rank: int) -> None:
    """Compare alternating steps of sessions with the same runs alone."""
    group, transformer, step = start(rank, depth=3)
    index = [0]  # index of the step, by which the inputs change
    transformer.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"hidden_states": kwargs["hidden_states"] * (1 + 0.2 * index[0])}),
        with_kwargs=True,
    )
    configs = [config_of("balanced"), config_of("exact", kernels="torch"), config_of("balanced", schedule="bits=8")]
    configs += [config_of(mode, plan=GATHERED) for mode in ("balanced", "exact")]

    def run(sessions: list) -> list[list[torch.Tensor]]:
        found = [[] for _ in sessions]
        for index[0] in range(STEPS):
            for session, results in zip(sessions, found, strict=True):
                bare_runtime.use_session(session)
                if index[0] == 0:
                    session.begin_run(STEPS)
                results.append(step())
                session.end_step()
        return found

    alone = []
    for config in configs:
        session = starting.create_session(group, config)
        [results] = run([session])
        alone.append((results, dict(session.traffic.sent_bytes)))
        session.close()
    sessions = [starting.create_session(group, config) for config in configs]
    for session, together, (single, sent) in zip(sessions, run(sessions), alone, strict=True):
        assert all(torch.equal(*pair) for pair in zip(together, single, strict=True))
        assert dict(session.traffic.sent_bytes) == sent
        assert session.layers.signatures and all(signature.ready for signature in session.layers.signatures)
    encoded, exact, finer, gathered, exact_gathered = (results for results, _ in alone)
    assert all(map(torch.equal, exact, exact_gathered))
    assert not torch.equal(encoded[-1], gathered[-1])
    assert torch.equal(encoded[0], finer[0])  # both begin with the same keyframe
    assert not any(torch.equal(encoded[-1], other[-1]) for other in (exact, finer))


def test_sessions_side_by_side_share_no_state() -> None:
    ranks.run(run_side_by_side, 2)


def start_another_engine(rank: int) -> None:
    """Check that a new runtime state of xDiT ends the session of the last one."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import initialize_runtime_state

    group, transformer, step = start(rank, depth=3)
    use_config(group, config_of("balanced"))
    active().begin_run(STEPS)
    for _ in range(3):
        step()
        active().end_step()
    before = active()
    assert before.runtime.store.nbytes > 0 and before.layers.signatures and before.traffic.calls
    config, _ = xFuserArgs(model="tiny", ulysses_degree=2).create_config()
    initialize_runtime_state(SimpleNamespace(transformer=transformer), config)
    assert active() is not before
    assert not (active().mesh or active().runtime or active().layers.signatures or active().traffic.calls)
    assert before.runtime.store.nbytes == 0 and not before.layers.signatures
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in transformer.modules())


def test_a_session_ends_with_its_runtime_state() -> None:
    ranks.run(start_another_engine, 2)


def reduce_on_ranks(rank: int) -> tuple[list[float], list[float], list[bool]]:
    """Return the mean of a time and the sum of errors that differ between ranks, and whether they agree on values."""
    group, *_ = start(rank, depth=3)
    session = use_config(group, config_of("balanced"))
    agreed = [reductions.all_agree(value) for value in (rank, -rank, "the same")]
    return reductions.mean([float(rank)]), session.runtime._sum_over_ranks([float(rank), -float(rank)]), agreed


def test_ranks_agree_on_the_mean_time_and_the_sum_of_errors() -> None:
    assert ranks.run(reduce_on_ranks, 2) == [([0.5], [1.0, -1.0], [False, False, True])] * 2
