"""Runs: references of one run are never used in another, in any order of calls."""

import copy
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import nn

import xfuser_cocodiff
from tests import ranks
from tests.engine.compression.test_runtime import SIZES, reference_value, runtime, set_reference
from tests.quick import slow
from tests.xdit.attention.test_overlap import inputs_of, start, use_config
from tests.xdit.session.test_session import config_of
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.xdit.layers.root_module import RootModule
from xfuser_cocodiff.xdit.session import batched_branches as batched_branches_module
from xfuser_cocodiff.xdit.session import runs
from xfuser_cocodiff.xdit.session.runs import MAX_BRANCHES
from xfuser_cocodiff.xdit.session.session import Session

TIMES = (1.0, 0.75, 0.5, 0.25)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of warnings, each once."""
    warnings: list[str] = []
    monkeypatch.setattr(runs, "warn_once", lambda text: warnings.append(text) if text not in warnings else None)
    return warnings


class FakeSession(Session):
    """A session with transformers of one layer, whose reference is a request number."""

    def __init__(self, all_agree: Callable[[object], bool] = lambda value: True, **of_runtime: str) -> None:
        self.all_agree = all_agree
        super().__init__(runtime=runtime(**of_runtime))
        self.roots: list[RootModule] = []
        self.layers.end_step = self._end_branches

    def _end_branches(self) -> None:
        for root in self.roots:
            root.calls = 0

    def transformer(self) -> "Transformer":
        return Transformer(self)

    @property
    def num_references(self) -> int:
        return self.runtime.store.nbytes // 16


class Transformer(nn.Module):
    """A transformer whose calls return whether their request has a reference, and fail on that of another request."""

    def __init__(self, session: FakeSession) -> None:
        super().__init__()
        self.session, self.root = session, None

    def forward(self, request: float, timestep: object, encoder_hidden_states: torch.Tensor) -> bool:
        kwargs = {"timestep": timestep, "encoder_hidden_states": encoder_hidden_states}
        if self.root is None:
            self.root = RootModule(self, lambda: True, self.session.runs.before_call)
            self.session.roots.append(self.root)
        root = self.root
        root.count_call((request,), kwargs)
        if root.run is None:
            return False
        layer_codecs = self.session.runtime.layer_codecs(CodedCall("a", id(self), root.calls - 1, SIZES, id(root)))
        if layer_codecs is None:
            return False
        found = reference_value(layer_codecs)
        assert found in (None, request), f"request {request} has a reference of request {found}"
        set_reference(layer_codecs, request)
        return found is not None


def prompt() -> torch.Tensor:
    return torch.zeros(1, 4, 8)


# Calls outside of runs.


def test_undeclared_loops_are_lossless_without_agreement_and_warn_once(warned: list[str]) -> None:
    def agree(value: object) -> bool:
        raise AssertionError(f"ranks compare {value}")

    session = FakeSession(agree)
    model, text = session.transformer(), prompt()
    for request in range(3):
        assert [model(request, timestep=time, encoder_hidden_states=text) for time in TIMES] == [False] * 4
    assert session.num_references == 0
    [message] = warned
    assert message.startswith("compression inactive (mode 'balanced'): no denoising steps detected; wrap the loop in ")
    assert "with xfuser_cocodiff.run(steps=...) as run:" in message


def test_an_undeclared_loop_after_a_pipeline_warns(warned: list[str]) -> None:
    session = FakeSession()
    model, text = session.transformer(), prompt()
    for _ in range(3):
        session.begin_run(3)
        for _ in range(3):
            model(1, timestep=1.0, encoder_hidden_states=text)
            session.end_step()
    assert warned == []
    for _ in range(4):
        assert not model(2, timestep=1.0, encoder_hidden_states=text)
    [message] = warned
    assert "no denoising steps detected" in message


# Runs.


@pytest.mark.parametrize("total", [4, None])
def test_a_declared_run_depends_on_its_steps_only(total: int | None) -> None:
    session = FakeSession()
    model, text = session.transformer(), prompt()
    for request in range(2):
        run = session.begin_run(total)
        for number in range(4):
            assert model(request, timestep=0.5, encoder_hidden_states=text) == (number > 0)
            session.end_step(run)
        session.end_run(run)
        assert session.num_references == 0


@pytest.mark.parametrize("is_left", [False, True])
def test_calls_after_a_loop_that_was_left_early_are_lossless(warned: list[str], is_left: bool) -> None:
    session = FakeSession()
    model, text = session.transformer(), prompt()
    run = session.begin_run(5, owner=object())
    run.is_loop = True
    found = []
    for number in range(4):
        run.is_in_step = run.is_in_step or not (is_left and number > 1)  # as by the next item of the iterable
        found.append(model(0, timestep=0.5, encoder_hidden_states=text))
        session.end_step(run)
    assert found == ([False, True, False, False] if is_left else [False, True, True, True])
    assert (session.runs.newest is None) == is_left
    if is_left:
        assert session.num_references == 0
        session.begin_run(5, owner=object()).is_loop = True
        assert session.begin_run(5, owner=object()) is session.runs.newest
        assert not model(1, timestep=0.5, encoder_hidden_states=text) and session.num_references == 1
    assert warned == []


def test_a_run_of_unknown_length_uses_the_schedule_of_50_steps() -> None:
    session = FakeSession(mode="paper", overrides="warmup=1,refresh=0,cached=0->0.5")
    session.begin_run(None)
    found = []
    for _ in range(70):
        codecs = session.runtime.layer_codecs(CodedCall("a", 1, 0, SIZES)).step.codecs["v"]
        found.append(codecs.token_fraction)
        session.end_step()
    assert found[1] == pytest.approx(1 - 0.5 / 49)
    assert found[49] == found[69] == 0.5


@pytest.mark.parametrize("shared", [False, True])
def test_two_alternating_runs_are_lossless(warned: list[str], shared: bool) -> None:
    session = FakeSession()
    models = [session.transformer(), session.transformer()]
    both, text = [session.begin_run(6, owner=object()) for _ in models], prompt()
    for _ in range(5):
        for request, run in enumerate(both):
            assert not models[request * (not shared)](request, timestep=0.5, encoder_hidden_states=text)
            session.end_step(run)
    assert session.num_references == 0
    [message] = warned
    assert "several runs are open; finish one before the next" in message


def test_a_run_continues_with_a_keyframe_after_another_one_inside_of_it(warned: list[str]) -> None:
    session = FakeSession()
    model, text = session.transformer(), prompt()
    outer = session.begin_run(6, owner=object())
    for step in range(6):
        assert model(1, timestep=0.0, encoder_hidden_states=text) == (step not in (0, 3))
        session.end_step(outer)
        if step == 2:
            inner = session.begin_run(2, owner=object())
            for _ in range(2):
                assert not model(2, timestep=0.0, encoder_hidden_states=text)
                session.end_step(inner)
            assert session.num_references == 0
    assert session.runs.newest is None and session.num_references == 0


def test_the_next_run_of_an_owner_ends_one_that_stopped_without_notice(warned: list[str]) -> None:
    session = FakeSession()
    model, text, owner = session.transformer(), prompt(), object()
    for request in range(2):
        session.begin_run(6, owner)
        for step in range(3):
            assert model(request, timestep=0.0, encoder_hidden_states=text) == (step > 0)
            session.end_step()
    assert warned == []


def test_calls_without_ends_of_steps_do_not_fill_memory(warned: list[str]) -> None:
    session = FakeSession()
    model, text = session.transformer(), prompt()
    session.begin_run(50)
    for number in range(3 * MAX_BRANCHES):
        model(number, timestep=0.0, encoder_hidden_states=text)
        assert session.num_references <= MAX_BRANCHES
    assert session.num_references == 0
    assert any("no step ended in" in message for message in warned)


def test_a_run_without_encoded_layers_warns(warned: list[str]) -> None:
    session = FakeSession()
    session.begin_run(3)
    for _ in range(3):
        session.runtime.inactive_reason = "K is odd"
        session.end_step()
    assert warned == ["compression inactive (mode 'balanced'): K is odd"]
    session.begin_run(3)
    for _ in range(3):
        session.end_step()
    assert "no attention layer called xDiT's USP" in warned[-1] == warned[1]


# Whole loops around xDiT's FLUX, on real ranks.

STEPS = 14


# Branches in one batch.


class Denoiser(nn.Module):
    """A transformer whose call is never made: only its arguments count."""

    def forward(self, hidden_states: torch.Tensor) -> None: ...


def batched_branches(session: FakeSession, steps: Iterable[list[torch.Tensor]]) -> list[int]:
    """Return the number of branches that each call of a run of 8 steps has in its batch.

    Args:
        session: the session.
        steps: latents of the calls of each step.
    """
    model = Denoiser()
    root = RootModule(model, lambda: True, session.runs.before_call)
    session.roots.append(root)
    counts = []
    session.begin_run(8)
    for calls in steps:
        for latents in calls:
            session.runs.before_call(root, (), {"hidden_states": latents})
            session.runtime.layer_codecs(CodedCall("a", 1, root.calls, SIZES, batched_branches=root.batched_branches))
            root.calls += 1
            counts.append(root.batched_branches)
        session.end_step()
    session.end_run()
    return counts


def test_equal_halves_of_a_batch_are_branches() -> None:
    steps = [[torch.full((2, 4), float(step))] for step in range(4)]
    assert batched_branches(FakeSession(), steps) == [2] * 4


def test_two_prompts_with_one_seed_are_no_branches() -> None:
    """Their latents are equal in the first step only, whichever number of calls it has."""
    for calls in (1, 2):
        steps = [[torch.stack([torch.zeros(4), torch.full((4,), float(step))])] * calls for step in range(4)]
        assert batched_branches(FakeSession(), steps) == [2] * calls + [1] * (3 * calls)


def test_branches_are_not_counted_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing latents waits for the device, at which a capture fails; they are compared at the next call."""
    captured = iter((True, False, False))
    monkeypatch.setattr(batched_branches_module, "is_captured", lambda: next(captured))
    assert batched_branches(FakeSession(), [[torch.zeros(2, 4)]] * 3) == [1, 2, 2]


def test_a_freed_transformer_tells_nothing_of_the_next_one() -> None:
    """The next one may have its id on some ranks, which would then take no part in the collective."""
    asked: list[object] = []
    session = FakeSession(lambda value: asked.append(value) or True)
    session.begin_run(8)
    for _ in range(3):
        model = Denoiser()
        root = RootModule(model, lambda: True, session.runs.before_call)
        session.runs.before_call(root, (), {"hidden_states": torch.zeros(2, 4)})
        del root
    assert asked == [2, 2, 2]


class Loops:
    """One Euler loop, as a plain loop, as a declared run and in progress bars of diffusers."""

    def __init__(self, rank: int, config: object) -> None:
        group, self.transformer, step = start(rank, depth=3)
        self.given = inputs_of(self.transformer, step)
        self.session = use_config(group, config)
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.pipeline = SimpleNamespace(scheduler=self.scheduler, _progress_bar_config={"disable": True})

    def inputs(self, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return latents, and the prompts of two branches."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [self.given["hidden_states"].shape, *[self.given["encoder_hidden_states"].shape] * 2]
        latents, *prompts = (torch.randn(shape, generator=generator) for shape in shapes)
        return latents, prompts

    def velocity(self, latents: torch.Tensor, time: torch.Tensor, prompts: list[torch.Tensor]) -> torch.Tensor:
        def branch(prompt: torch.Tensor) -> torch.Tensor:
            changed = {"hidden_states": latents, "timestep": time.expand(1) / 1000, "encoder_hidden_states": prompt}
            return self.transformer(**{**self.given, **changed})[0]

        first, *others = map(branch, prompts)
        return first + sum(0.5 * (first - other) for other in others)

    @torch.no_grad()
    def run(self, seed: int, form: str, branches: int = 1) -> torch.Tensor:
        latents, prompts = self.inputs(seed)
        self.scheduler.set_timesteps(STEPS)
        return getattr(self, form)(latents, prompts[:branches])

    def by_hand(
        self, latents: torch.Tensor, prompts: list[torch.Tensor], step: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        sigmas = self.scheduler.sigmas
        for time, now, then in zip(self.scheduler.timesteps, sigmas[:-1], sigmas[1:], strict=True):
            latents = latents + (then - now) * self.velocity(latents, time, prompts)
            step()
        return latents

    def declared(self, latents: torch.Tensor, prompts: list[torch.Tensor], steps: int | None = STEPS) -> torch.Tensor:
        with xfuser_cocodiff.run(steps) as run:
            latents = self.by_hand(latents, prompts, run.step)
        assert self.session.runtime.store.nbytes == 0
        return latents

    def of_unknown_length(self, latents: torch.Tensor, prompts: list[torch.Tensor]) -> torch.Tensor:
        return self.declared(latents, prompts, None)

    def by_diffusers(self, latents: torch.Tensor, prompts: list[torch.Tensor]) -> torch.Tensor:
        with DiffusionPipeline.progress_bar(self.pipeline, total=STEPS):
            return self.through(self.scheduler.timesteps, latents, prompts)

    def over_an_iterable(self, latents: torch.Tensor, prompts: list[torch.Tensor]) -> torch.Tensor:
        return self.through(DiffusionPipeline.progress_bar(self.pipeline, self.scheduler.timesteps), latents, prompts)

    def through(self, times: Iterable, latents: torch.Tensor, prompts: list[torch.Tensor]) -> torch.Tensor:
        for time in times:
            velocity = self.velocity(latents, time, prompts)
            latents = self.scheduler.step(velocity, time, latents)[0]
        return latents

    @property
    def encoded(self) -> list[float]:
        """Compression ratio of each step of the last run, in sent bytes over lossless ones."""
        return [report.sent_bytes / report.exact_bytes for report in self.session.runtime.reports]


FORMS = ("declared", "of_unknown_length", "by_diffusers", "over_an_iterable")


def all_loops(rank: int, mode: str, runs: list[tuple]) -> list[tuple[torch.Tensor, list[float]]]:
    """Return the latents of several runs, and the compression ratios of their steps."""
    loops = Loops(rank, config_of(mode))
    return [(loops.run(*run), loops.encoded if loops.session.runtime else []) for run in runs]


@pytest.mark.parametrize(("branches", "forms"), [slow(2, FORMS), (1, ("declared", "by_diffusers"))])
def test_every_form_of_a_loop_is_encoded(branches: int, forms: tuple[str, ...]) -> None:
    exact = ranks.run(all_loops, 2, "exact", [(1, "by_hand", branches), (1, "by_diffusers", branches)])
    fresh = ranks.run(all_loops, 2, "balanced", [(2, "declared", branches)])
    # One prompt after the other, with nothing in between.
    in_a_row = [(seed, form, branches) for form in forms for seed in (1, 2)]
    for rank, found in enumerate(ranks.run(all_loops, 2, "balanced", in_a_row)):
        (wanted, _), (scheduled, _) = exact[rank]
        torch.testing.assert_close(scheduled, wanted)
        latents, _ = found[0]
        error = (latents - wanted).norm() / wanted.norm()
        assert 0 < error < 0.1
        for (latents, encoded), (seed, form, _) in zip(found, in_a_row, strict=True):
            torch.testing.assert_close(latents, found[seed - 1][0], rtol=1e-5, atol=1e-5)
            assert len(encoded) == STEPS and max(encoded[1:]) < 0.2, form
        assert torch.equal(found[1][0], fresh[rank][0][0])
        assert torch.equal(found[3][0], fresh[rank][0][0])


def test_an_undeclared_loop_is_lossless() -> None:
    exact = ranks.run(all_loops, 2, "exact", [(1, "by_hand", 1)])
    coded = ranks.run(all_loops, 2, "balanced", [(1, "by_hand", 1)])
    for [(expected, _)], [(found, encoded)] in zip(exact, coded, strict=True):
        assert torch.equal(found, expected) and encoded == []


def two_experts(rank: int) -> list[float]:
    """Return the compression ratio of each step of a run that continues with a second transformer, as in Wan 2.2."""
    loops = Loops(rank, config_of("balanced", schedule="first=8"))
    first, second, calls = loops.transformer, copy.deepcopy(loops.transformer), []

    def expert(**given: object) -> tuple:
        calls.append(1)
        return (first if len(calls) <= STEPS // 2 else second)(**given)

    loops.transformer = expert
    loops.run(1, "by_diffusers")
    return loops.encoded


def test_a_second_transformer_has_its_own_references() -> None:
    for encoded in ranks.run(two_experts, 2):
        change = STEPS // 2
        assert encoded[0] > 0.2 and encoded[change] > 0.2  # keyframes
        assert max(encoded[1:change] + encoded[change + 1 :]) < 0.2
