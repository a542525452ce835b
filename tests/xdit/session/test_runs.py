"""Runs, declared and recognised: what is held of one is never seen in another, whoever calls what in which order."""

import copy
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import nn

import xfuser_cocodiff
from tests import ranks
from tests.engine.compression.test_runtime import SHARE, held, hold, runtime
from tests.quick import slow
from tests.xdit.attention.test_overlap import inputs_of, start, use_config
from tests.xdit.session.test_session import config_of
from xfuser_cocodiff.xdit.layers.root_module import RootModule
from xfuser_cocodiff.xdit.session import runs, step_key
from xfuser_cocodiff.xdit.session.runs import MAX_BRANCHES, Runs

TIMES = (1.0, 0.75, 0.5, 0.25)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user is told."""
    said: list[str] = []
    monkeypatch.setattr(runs, "warn_once", lambda message: said.append(message) if message not in said else None)
    return said


class FakeSession:
    """As much of a session as runs need, with transformers of one layer that hold whose call they were in last."""

    def __init__(self) -> None:
        self.runtime = runtime()
        self.roots: list[RootModule] = []
        self.runs = Runs(lambda: self.runtime, self._new_step)

    def _new_step(self) -> None:
        for root in self.roots:
            root.calls = 0

    def transformer(self) -> "Transformer":
        return Transformer(self)

    @property
    def held(self) -> int:
        return self.runtime.reference_bytes // 16


class Transformer(nn.Module):
    """Each call names its request; says whether it found something of that one, and fails where it is another's."""

    def __init__(self, session: FakeSession) -> None:
        super().__init__()
        self.session, self.root = session, None

    def forward(self, request: float, timestep: object, encoder_hidden_states: torch.Tensor) -> bool:
        kwargs = {"timestep": timestep, "encoder_hidden_states": encoder_hidden_states}
        if self.root is None:
            self.root = RootModule(self, lambda: True, self.session.runs.before_call)
            self.root.watch(self, (request,), kwargs)
            self.session.roots.append(self.root)
        root = self.root
        if root.run is None:
            return False
        layer_codecs = self.session.runtime.layer_codecs("a", id(self), root.calls - 1, SHARE, id(root))
        if layer_codecs is None:
            return False
        found = held(layer_codecs)
        assert found in (None, request), f"request {request} met what is held of request {found}"
        hold(layer_codecs, request)
        return found is not None


def prompt() -> torch.Tensor:
    return torch.zeros(1, 4, 8)


def loop(one: Transformer, request: float, text: torch.Tensor, times: tuple = TIMES) -> list[bool]:
    """A run that nobody declares."""
    return [one(request, timestep=torch.full((1,), time), encoder_hidden_states=text) for time in times]


# Recognised.


@pytest.mark.parametrize("times", [TIMES, TIMES[::-1]], ids=["down", "up"])
@pytest.mark.parametrize("same_prompt", [False, True])
def test_a_run_is_recognised_from_its_timesteps(times: tuple, same_prompt: bool) -> None:
    session, text = FakeSession(), prompt()
    one = session.transformer()
    for request in range(3):
        assert loop(one, request, text if same_prompt else prompt(), times) == [False, True, True, True]
    # Names of arguments are not needed.
    assert [one(3, time, text) for time in times] == [False, True, True, True]
    assert session.held == 1


@pytest.mark.parametrize("second", [(0.6, 0.3), (0.5, 0.2), (0.4, 0.1), (0.75, 0.5), (1.0, 0.5)])
def test_another_prompt_is_another_run_wherever_its_times_begin(second: tuple) -> None:
    one = FakeSession().transformer()
    loop(one, 1, prompt(), (1.0, 0.75, 0.5))
    assert not loop(one, 2, prompt(), second)[0]


def test_the_same_prompt_at_the_last_time_is_another_run() -> None:
    one, text = FakeSession().transformer(), prompt()
    loop(one, 1, text, (1.0, 0.5))
    assert loop(one, 2, text, (0.5, 0.25)) == [False, True]


def test_runs_of_one_step_never_meet() -> None:
    session, text = FakeSession(), prompt()
    one = session.transformer()
    for request in range(3 * MAX_BRANCHES):
        assert loop(one, request, text if request % 2 else prompt(), (1.0,)) == [False]
        assert session.held <= MAX_BRANCHES


def test_calls_at_one_time_are_branches() -> None:
    session, texts = FakeSession(), [prompt(), prompt()]
    one = session.transformer()
    for request in (0, 10):
        for number, time in enumerate(TIMES):
            for branch, text in enumerate(texts):
                assert one(request + branch, timestep=time, encoder_hidden_states=text) == (number > 0)
        assert session.held == 2


def test_guidance_that_begins_in_mid_run_costs_steps_but_mixes_nothing() -> None:
    session, texts = FakeSession(), [prompt(), prompt()]
    one = session.transformer()
    found = []
    for number, time in enumerate((1.0, 0.9, 0.8, 0.7, 0.6, 0.5)):
        for branch in range(1 + (number > 1)):
            found.append(one(branch, timestep=time, encoder_hidden_states=texts[branch]))
    assert found[-4:] == [True] * 4


def test_a_prompt_that_is_written_over_is_another_one() -> None:
    one, text = FakeSession().transformer(), prompt()
    loop(one, 1, text, (1.0, 0.75))
    text.fill_(1)
    assert not loop(one, 2, text, (0.5,))[0]


def test_a_second_transformer_may_take_over() -> None:
    session = FakeSession()
    first, second = session.transformer(), session.transformer()
    for request in range(2):
        texts = [prompt(), prompt()]
        for one, times in ((first, (1.0, 0.9, 0.8)), (second, (0.5, 0.4, 0.3))):
            for number, time in enumerate(times):
                for branch, text in enumerate(texts):
                    call = {"timestep": time, "encoder_hidden_states": text}
                    assert one(10 * request + branch, **call) == (number > 0)
            assert session.held == 2  # of one transformer, in two branches


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timesteps lie where the host does not see their values."""
    monkeypatch.setattr(step_key, "_on_host", lambda tensor: False)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.usefixtures("on_a_device")
def test_timesteps_on_a_device_are_known_by_their_place(inference: bool) -> None:
    session, times = FakeSession(), torch.tensor(TIMES)
    one = session.transformer()
    with torch.inference_mode(inference):
        for request in range(3):
            if request == 2:
                times = torch.tensor(TIMES)
            text = prompt()
            found = [one(request, timestep=time.expand(1), encoder_hidden_states=text) for time in times]
            assert found == [False, True, True, True]


@pytest.mark.usefixtures("on_a_device")
def test_timesteps_made_anew_on_a_device_are_not(said: list[str]) -> None:
    one, text = FakeSession().transformer(), prompt()
    for request in range(2):
        assert loop(one, request, text) == [False] * 4
    [message] = said
    assert "compression inactive (mode 'balanced'): no denoising steps detected" in message
    assert "xfuser_cocodiff.run(" in message


@pytest.mark.parametrize("missing", ["timestep", "encoder_hidden_states"])
def test_what_cannot_be_known_is_said_once(missing: str, said: list[str]) -> None:
    session, transformer = FakeSession(), nn.Identity()
    root = RootModule(transformer, lambda: True, session.runs.before_call)
    given = {"timestep": 1.0, "encoder_hidden_states": prompt()}
    del given[missing]
    for _ in range(6):
        session.runs.before_call(root, (), given)
        assert root.run is None
    [message] = said
    assert f"no argument named {missing}" in message and "xfuser_cocodiff.run(" in message


def test_a_loop_after_a_pipeline_says_so_too(said: list[str]) -> None:
    session = FakeSession()
    one, text = session.transformer(), prompt()
    for _ in range(3):
        session.runs.begin(3)
        for _ in range(3):
            one(1, timestep=1.0, encoder_hidden_states=text)
            session.runs.end_step()
    assert said == []
    for _ in range(4):
        one(2, timestep=1.0, encoder_hidden_states=None)
    [message] = said
    assert "no argument named encoder_hidden_states" in message


# Declared.


@pytest.mark.parametrize("total", [4, None])
def test_a_declared_run_goes_by_its_steps_alone(total: int | None) -> None:
    session = FakeSession()
    one, text = session.transformer(), prompt()
    for request in range(2):
        run = session.runs.begin(total)
        for number in range(4):
            assert one(request, timestep=0.5, encoder_hidden_states=text) == (number > 0)
            session.runs.end_step(run)
        session.runs.end(run)
        assert session.held == 0


@pytest.mark.parametrize("changes", [False, True])
def test_a_loop_over_an_iterable_may_make_its_embeddings_anew(said: list[str], changes: bool) -> None:
    """Another prompt is another run's: the loop was left, and nobody said so."""
    session = FakeSession()
    one = session.transformer()
    session.runs.begin(4, owner=object()).may_be_abandoned = True
    found = []
    for number in range(4):
        found.append(one(0, timestep=0.5, encoder_hidden_states=prompt() + (changes and number > 1)))
        session.runs.end_step()
    assert found == ([False, True, False, False] if changes else [False, True, True, True])
    assert any("the prompt has changed" in message for message in said) == changes


def test_a_run_of_unknown_length_goes_on() -> None:
    session = FakeSession()
    session.runtime = runtime(changes="bits=8->4,cached=0->0.5")
    session.runs.begin(None)
    found = []
    for _ in range(70):
        codecs = session.runtime.layer_codecs("a", 1, 0, SHARE).codecs["v"]
        found.append((codecs.bits, codecs.share))
        session.runs.end_step()
    assert found[1] == (8, pytest.approx(1 - 0.5 / 49))
    assert found[24][0] == 8 and found[25][0] == 4
    assert found[49] == found[69] == (4, 0.5)


def interleaved(session: FakeSession, first: Transformer, second: Transformer, steps: int = 6) -> list[list[bool]]:
    """Two pipelines that take turns."""
    both, texts = [session.runs.begin(steps, owner=object()) for _ in range(2)], [prompt(), prompt()]
    found: list[list[bool]] = [[], []]
    for step in range(steps):
        for request, one in enumerate((first, second)):
            for _ in range(2):
                call = {"timestep": 1 - step / steps, "encoder_hidden_states": texts[request]}
                found[request].append(one(request, **call))
            session.runs.end_step(both[request])
            assert session.held <= 2
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_two_pipelines_that_take_turns_travel_exactly(said: list[str], shared: bool) -> None:
    session = FakeSession()
    one = session.transformer()
    older, newer = interleaved(session, one, one if shared else session.transformer())
    assert older == newer == [False] * 12
    assert session.held == 0 and all("alternates with another run" in message for message in said)


def test_a_run_inside_another_leaves_it_as_it_is(said: list[str]) -> None:
    session = FakeSession()
    outer, inner = session.transformer(), session.transformer()
    for shared in (False, True):
        one = outer if shared else inner
        first, texts = session.runs.begin(6, owner=object()), [prompt(), prompt()]
        for step in range(6):
            # The inner run has taken its place, and it begins anew.
            assert outer(1, timestep=0.0, encoder_hidden_states=texts[0]) == (step not in (0, 3))
            session.runs.end_step(first)
            if step == 2:
                second = session.runs.begin(2, owner=object())
                for number in range(2):
                    found = one(2, timestep=0.0, encoder_hidden_states=texts[1])
                    assert found == (number > 0)
                    session.runs.end_step(second)
                assert session.held == 0


def test_two_pipelines_may_share_a_transformer_in_turns_of_several_steps(said: list[str]) -> None:
    session = FakeSession()
    one = session.transformer()
    both, texts = [session.runs.begin(9, owner=object()) for _ in range(2)], [prompt(), prompt()]
    for request in (1, 1, 1, 0, 0, 1, 0, 1, 1):
        one(request, timestep=0.0, encoder_hidden_states=texts[request])
        session.runs.end_step(both[request])
    assert any("the prompt has changed" in message for message in said)


def test_steps_that_nobody_sees_do_not_fill_the_memory(said: list[str]) -> None:
    session = FakeSession()
    one, text = session.transformer(), prompt()
    session.runs.begin(50)
    for number in range(3 * MAX_BRANCHES):
        one(number, timestep=0.0, encoder_hidden_states=text)
        assert session.held <= MAX_BRANCHES
    assert session.held == 0
    assert any("no step ended in" in message for message in said)


def test_a_run_in_which_nothing_is_understood_says_so(said: list[str]) -> None:
    session = FakeSession()
    session.runs.begin(3)
    for _ in range(3):
        session.runtime.disable("K is odd")
        session.runs.end_step()
    assert said == ["compression inactive (mode 'balanced'): K is odd"]
    session.runs.begin(3)
    for _ in range(3):
        session.runs.end_step()
    assert "no attention layer called xDiT's USP" in said[-1] == said[1]


# Whole loops around xDiT's FLUX, on real ranks.

STEPS = 14


class Loops:
    """The same Euler loop, shown in several ways."""

    def __init__(self, rank: int, config: object) -> None:
        group, self.transformer, step = start(rank, depth=3)
        self.given = inputs_of(self.transformer, step)
        self.session = use_config(group, config)
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.pipeline = SimpleNamespace(scheduler=self.scheduler, _progress_bar_config={"disable": True})

    def inputs(self, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Latents, and the prompts of two branches."""
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
    def run(self, seed: int, shown: str, branches: int = 1) -> torch.Tensor:
        latents, prompts = self.inputs(seed)
        self.scheduler.set_timesteps(STEPS)
        return getattr(self, shown)(latents, prompts[:branches])

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
        assert self.session.runtime.reference_bytes == 0
        return latents

    def of_unknown_length(self, latents: torch.Tensor, prompts: list[torch.Tensor]) -> torch.Tensor:
        return self.declared(latents, prompts, None)

    def by_diffusers(self, latents: torch.Tensor, prompts: list[torch.Tensor]) -> torch.Tensor:
        with DiffusionPipeline.progress_bar(self.pipeline, total=STEPS):
            return self.through(self.scheduler.timesteps, latents, prompts)

    def over_an_iterable(self, latents: torch.Tensor, prompts: list[torch.Tensor]) -> torch.Tensor:
        times = iter(DiffusionPipeline.progress_bar(self.pipeline, self.scheduler.timesteps))
        return self.through(times, latents, prompts)  # which hold the iterator as long as an error is held

    def through(self, times: Iterable, latents: torch.Tensor, prompts: list[torch.Tensor]) -> torch.Tensor:
        for time in times:
            velocity = self.velocity(latents, time, prompts)
            latents = self.scheduler.step(velocity, time, latents)[0]
        return latents

    @property
    def encoded(self) -> list[float]:
        """Share of its bytes that each step of the last run has sent."""
        return [report.sent_bytes / report.exact_bytes for report in self.session.runtime.reports]


WAYS = ("by_hand", "declared", "of_unknown_length", "by_diffusers", "over_an_iterable")


def all_loops(rank: int, mode: str, runs: list[tuple]) -> list[tuple[torch.Tensor, list[float]]]:
    """Latents of runs in a row, and what their steps sent. The first of a run that is only recognised is exact; here
    that of others is too, so that runs can be compared."""
    loops = Loops(rank, config_of(mode, schedule=None if mode == "exact" else "first=exact"))
    return [(loops.run(*run), loops.encoded if loops.session.runtime else []) for run in runs]


@pytest.mark.parametrize(("branches", "ways"), [slow(1, WAYS), (2, ("by_hand", "declared"))])
def test_a_loop_is_coded_however_it_is_shown(branches: int, ways: tuple[str, ...]) -> None:
    exact = ranks.run(all_loops, 2, "exact", [(1, "by_hand", branches), (1, "by_diffusers", branches)])
    fresh = ranks.run(all_loops, 2, "balanced", [(2, "declared", branches)])
    # Prompt after prompt, without anything between them.
    in_a_row = [(seed, shown, branches) for shown in ways for seed in (1, 2)]
    for rank, found in enumerate(ranks.run(all_loops, 2, "balanced", in_a_row)):
        (wanted, _), (scheduled, _) = exact[rank]
        torch.testing.assert_close(scheduled, wanted)
        latents, encoded = found[0]
        # The last step of a loop that nobody declares has not ended yet.
        assert encoded[0] >= 1 and len(encoded) == STEPS - 1 and max(encoded[1:]) < 0.2
        error = (latents - wanted).norm() / wanted.norm()
        assert 0 < error < 0.1
        for (latents, encoded), (seed, shown, _) in zip(found, in_a_row, strict=True):
            torch.testing.assert_close(latents, found[seed - 1][0], rtol=1e-5, atol=1e-5)
            assert shown == "by_hand" or (len(encoded) == STEPS and max(encoded[1:]) < 0.2)
        assert torch.equal(found[1][0], fresh[rank][0][0])
        assert torch.equal(found[3][0], fresh[rank][0][0])


def two_experts(rank: int) -> list[float]:
    """What each step sends of a run that goes on with a second transformer, as Wan 2.2 has one."""
    loops = Loops(rank, config_of("balanced", schedule="first=8"))
    first, second, calls = loops.transformer, copy.deepcopy(loops.transformer), []

    def expert(**given: object) -> tuple:
        calls.append(1)
        return (first if len(calls) <= STEPS // 2 else second)(**given)

    loops.transformer = expert
    loops.run(1, "by_diffusers")
    return loops.encoded


def test_a_second_transformer_is_coded_by_reference() -> None:
    for encoded in ranks.run(two_experts, 2):
        change = STEPS // 2
        assert encoded[0] > 0.2 and encoded[change] > 0.2  # where references begin
        assert max(encoded[1:change] + encoded[change + 1 :]) < 0.2


def anew_on_one_rank(rank: int) -> torch.Tensor:
    """A loop whose prompt another rank is given anew at each step, as by a broadcast."""
    loops = Loops(rank, config_of("balanced"))
    velocity = loops.velocity
    loops.velocity = lambda latents, time, prompts: velocity(
        latents, time, [prompt.clone() for prompt in prompts] if rank == 1 else prompts
    )
    latents = loops.run(1, "by_hand")
    assert "others make new ones" in loops.session.runs.reason
    return latents


def test_ranks_that_see_different_things_of_a_loop_go_on_exactly() -> None:
    exact = ranks.run(all_loops, 2, "exact", [(1, "by_hand", 1)])
    for found, [(wanted, _)] in zip(ranks.run(anew_on_one_rank, 2), exact, strict=True):
        assert torch.equal(found, wanted)


def left_early(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two loops after one over an iterable that an error has ended, which one rank holds on to."""
    loops = Loops(rank, config_of("balanced", timeout=20))
    velocity, calls = loops.velocity, []

    def fail(*given: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError
        return velocity(*given)

    loops.velocity, held = fail, []
    try:
        loops.run(1, "over_an_iterable")
    except MemoryError as error:
        if rank == 0:
            held.append(error)
    loops.velocity = velocity
    by_hand = loops.run(2, "by_hand")
    again = loops.run(2, "over_an_iterable")
    assert len(loops.encoded) == STEPS and max(loops.encoded[1:]) < 0.2
    return by_hand, again


def test_a_loop_that_was_left_early_is_the_same_run_on_all_ranks() -> None:
    """Whatever a rank holds on to of the error."""
    exact = ranks.run(all_loops, 2, "exact", [(2, "by_hand", 1)])
    fresh = ranks.run(all_loops, 2, "balanced", [(2, "over_an_iterable", 1)])
    for found, [(wanted, _)], [(coded, _)] in zip(ranks.run(left_early, 2), exact, fresh, strict=True):
        torch.testing.assert_close(found[0], wanted)
        torch.testing.assert_close(found[1], coded, rtol=0.1, atol=0.1)


def first_steps(rank: int) -> list[float]:
    """What the first step of a loop sends, by how it is shown."""
    loops = Loops(rank, config_of("balanced"))
    found = []
    for shown in ("by_hand", "declared", "by_diffusers"):
        loops.run(1, shown, 1)
        found.append(loops.encoded[0])
    return found


def test_a_run_that_is_only_recognised_begins_exactly() -> None:
    """It may be none, and then nothing of it is to be approximated."""
    for by_hand, declared, by_diffusers in ranks.run(first_steps, 2):
        assert by_hand >= 1
        assert declared == by_diffusers < 0.3
