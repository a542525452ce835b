"""Runs and steps of diffusers' progress bars, schedulers and loops, without ranks."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks

import xfuser_cocodiff
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching.patch import PatchSet
from xfuser_cocodiff.xdit.run_tracking import run_tracker
from xfuser_cocodiff.xdit.run_tracking.run_tracker import RunTracker
from xfuser_cocodiff.xdit.session.session import Session


class RecordingListener:
    """A listener that records runs and latents."""

    def __init__(self) -> None:
        self.runs: list[list[Any]] = []

    def begin_run(self, total: int | None) -> None:
        self.runs.append([total])

    def end_step(self, latents: torch.Tensor | None) -> None:
        self.runs[-1].append(None if latents is None else latents.tolist())


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return the active session, without xDiT."""
    session = Session()
    monkeypatch.setattr(run_tracker, "active", lambda: session)
    return session


@pytest.fixture
def listener(uninstalled: None, session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingListener]:
    """Return the listener of a tracker that replaces the plugin's."""
    listener = RecordingListener()
    tracker = RunTracker([listener])
    patches = PatchSet(tracker.patches(), "xfuser")
    patches.install()
    monkeypatch.setattr(activation, "_installed", SimpleNamespace(is_removed=False))
    monkeypatch.setattr(activation, "_tracker", tracker)
    monkeypatch.setattr(activation, "PACKAGE", "diffusers")  # xDiT itself is not needed
    yield listener
    tracker.close()
    patches.uninstall()
    monkeypatch.undo()


class Derived(FlowMatchEulerDiscreteScheduler):
    """A scheduler whose `step` calls that of its base."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


def pipeline(scheduler: Any) -> Any:
    return SimpleNamespace(scheduler=scheduler, _progress_bar_config={"disable": True})


def denoise(scheduler: Any) -> None:
    latents = torch.zeros(1)
    for time in scheduler.timesteps:
        latents = scheduler.step(torch.ones(1), time, latents).prev_sample


def run(pipe: Any, *args: Any, steps: int = 3, **kwargs: Any) -> None:
    pipe.scheduler.set_timesteps(steps)
    with DiffusionPipeline.progress_bar(pipe, *args, **kwargs):
        denoise(pipe.scheduler)


def counts(listener: RecordingListener) -> list[tuple[int | None, int]]:
    """Return the total and the number of steps of each run."""
    return [(total, len(steps)) for total, *steps in listener.runs]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("disable", [True, False])
def test_a_bar_over_an_iterable_is_a_run(
    listener: RecordingListener, session: Session, known: bool, disable: bool
) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    pipe, latents = pipeline(scheduler), torch.zeros(1)
    pipe._progress_bar_config["disable"] = disable
    for time in DiffusionPipeline.progress_bar(pipe, scheduler.timesteps if known else iter(scheduler.timesteps)):
        run = session.runs.newest
        assert run.is_in_step
        latents = scheduler.step(torch.ones(1), time, latents).prev_sample
        assert not run.is_in_step
    assert counts(listener) == [(3 if known else None, 3)]
    assert session.runs.newest is None


def test_an_abandoned_run_ends_when_another_one_begins(listener: RecordingListener, session: Session) -> None:
    """Not when the iterator is freed, which happens at different times on different ranks."""
    for other in (False, True):
        pipe = pipeline(FlowMatchEulerDiscreteScheduler())
        for _ in DiffusionPipeline.progress_bar(pipe, [1, 2, 3]):
            left = session.runs.newest
            break
        assert session.runs.newest is left
        run(pipeline(FlowMatchEulerDiscreteScheduler()) if other else pipe, total=3)
        assert session.runs.newest is None


def test_a_step_of_a_derived_scheduler_counts_once(listener: RecordingListener, session: Session) -> None:
    run(pipeline(FlowMatchEulerDiscreteScheduler()), total=9)  # which patches the base class too
    run(pipeline(Derived()), total=9)
    run(pipeline(Derived()), total=9)
    assert counts(listener) == [(9, 3)] * 3


def test_another_scheduler_may_step_twice_per_timestep(listener: RecordingListener, session: Session) -> None:
    pipe = pipeline(FlowMatchEulerDiscreteScheduler())
    run(pipe, total=3)
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    run(pipe, total=3)
    assert counts(listener) == [(3, 3), (6, 5)]
    assert session.runs.newest is None


@pytest.mark.usefixtures("session", "uninstalled")
def test_uninstall_restores_diffusers() -> None:
    schedulers = FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, Derived

    def patched() -> list[Any]:
        loop = vars(LoopSequentialPipelineBlocks)
        return [
            vars(DiffusionPipeline)["progress_bar"],
            *(loop[name] for name in ("progress_bar", "loop_step")),
            *(vars(scheduler)["step"] for scheduler in schedulers),
        ]

    before = patched()
    for _ in range(2):
        assert xfuser_cocodiff.install()  # with the patches by which xDiT can be imported here
        activation.activate()
        for scheduler in schedulers:
            run(pipeline(scheduler()), total=3)
        assert not any(now is then for now, then in zip(patched(), before, strict=True))
        assert not hasattr(vars(FlowMatchEulerDiscreteScheduler)["step"].__wrapped__, "__wrapped__")
        activation.uninstall()
        assert all(now is then for now, then in zip(patched(), before, strict=True))


class Loop(LoopSequentialPipelineBlocks):
    """A loop of a modular pipeline as in MiniMax-H3, whose schedulers are components."""

    def __init__(self) -> None:
        self.sub_blocks = {}
        self._progress_bar_config = {"disable": True}

    def __call__(self, components: Any, state: Any) -> Any:
        with self.progress_bar(total=3) as bar:
            for index in range(3):
                state.latents = torch.full((1,), float(index))
                components, state = self.loop_step(components, state, i=index)
                bar.update()
        return components, state


def test_modular_pipelines_have_runs(listener: RecordingListener, session: Session) -> None:
    for _ in range(2):
        Loop()(SimpleNamespace(), SimpleNamespace())
    assert listener.runs == [[3, [0.0], [1.0], [2.0]]] * 2
    assert session.runs.newest is None


def test_a_sampler_declares_its_runs(listener: RecordingListener, session: Session) -> None:
    for steps in (2, None):
        with xfuser_cocodiff.run(steps=steps) as one:
            assert session.runs.newest
            one.step()
            one.step(torch.ones(1))
            assert (session.runs.newest is None) == (steps == 2)
        assert session.runs.newest is None
    with pytest.raises(InterruptedError), xfuser_cocodiff.run(3):
        raise InterruptedError
    assert session.runs.newest is None
    assert listener.runs == [[2, None, [1.0]], [None, None, [1.0]], [3]]


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "3"])
def test_an_invalid_number_of_steps_raises(steps: Any) -> None:
    with pytest.raises(ValueError, match=r"steps=.*: valid are integers from 1, or None"):
        xfuser_cocodiff.run(steps)


def test_a_step_outside_of_its_run_raises() -> None:
    one = xfuser_cocodiff.run(3)
    with pytest.raises(RuntimeError, match="inside of its block"):
        one.step()
    with one, pytest.raises(RuntimeError, match="open already"), one:
        pass
    with pytest.raises(RuntimeError, match="inside of its block"):
        one.step()


def test_without_the_plugin_runs_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_installed", None)
    monkeypatch.setattr(run_tracker, "active", lambda: pytest.fail("asked for a session"))
    with xfuser_cocodiff.run(3) as one:
        one.step()
