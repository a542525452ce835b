"""Runs: references of one run are never used in another, in any order of calls."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.engine.compression.test_runtime import SIZES, reference_value, runtime, set_reference
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.xdit.layers.root_module import RootModule
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

    def __init__(self, **of_runtime: str) -> None:
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
        before_call = lambda root, *_: self.session.runs.before_call(root)  # noqa: E731
        if self.root is None:
            self.root = RootModule(self, SimpleNamespace(counts_calls=lambda: True, before_call=before_call))
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


def test_undeclared_loops_are_lossless_and_warn_once(warned: list[str]) -> None:
    session = FakeSession()
    model, text = session.transformer(), prompt()
    for request in range(3):
        assert [model(request, timestep=time, encoder_hidden_states=text) for time in TIMES] == [False] * 4
    assert session.num_references == 0
    [message] = warned
    assert message.startswith("compression inactive (mode 'balanced'): no denoising steps detected; wrap the loop in ")
    assert "with xfuser_cocodiff.run(steps=...) as run:" in message


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


def test_calls_after_a_loop_that_was_left_early_are_lossless(warned: list[str]) -> None:
    session = FakeSession()
    model, text = session.transformer(), prompt()
    run = session.begin_run(5, owner=object())
    run.is_loop = True
    found = []
    for number in range(4):
        run.is_in_step = run.is_in_step or number < 2  # as by the next item of the iterable
        found.append(model(0, timestep=0.5, encoder_hidden_states=text))
        session.end_step(run)
    assert found == [False, True, False, False]
    assert session.runs.newest is None and session.num_references == 0
    session.begin_run(5, owner=object()).is_loop = True
    assert session.begin_run(5, owner=object()) is session.runs.newest
    assert not model(1, timestep=0.5, encoder_hidden_states=text) and session.num_references == 1
    assert warned == []


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
