"""V-First: how V is built from its projections, when it is sent early, and when a layer runs unchanged."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.xdit.layers import layer, model_projections
from xfuser_cocodiff.xdit.layers.layer import Layer
from xfuser_cocodiff.xdit.layers.layer_signature import MAX_SIGNATURES, LayerSignatures
from xfuser_cocodiff.xdit.layers.layers import Layers
from xfuser_cocodiff.xdit.layers.model_projections import Copied
from xfuser_cocodiff.xdit.layers.schedule_candidates import ScheduleCandidates
from xfuser_cocodiff.xdit.patching import host, symbol_lookup

HEADS, HEAD_DIM, TOKENS = 4, 8, 6
WIDTH = HEADS * HEAD_DIM
UNKNOWN_V = "V does not go first: it is not known how V is built from to_v here"


class SentV:
    """A handle of V's all-to-all."""

    def __init__(self, value: torch.Tensor, layer: str) -> None:
        self.value, self.layer, self.is_used, self.drained_unused = value.clone(), layer, False, False

    def drain(self) -> None:
        self.drained_unused = not self.is_used


class Harness:
    """Calls layers as USP does, and records projections, sends and messages."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sent: list[SentV] = []
        self.logged: list[str] = []
        yes = {"counts_calls": lambda: True, "overlaps": lambda: True}
        session = SimpleNamespace(**yes, before_call=lambda *_: None, start_value=self.send)
        self.layers = Layers(session, may_overlap=True)

    def send(self, value: torch.Tensor, layer: Layer) -> SentV:
        self.events.append("send")
        self.sent.append(SentV(value, layer.name))
        return self.sent[-1]

    def usp(self, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Multiply Q by V in the place of attention."""
        self.events.append("attend")
        with self.layers.in_usp(value) as handle:
            call = self.layers.current.call if self.layers.current else None
            if handle:
                assert torch.equal(handle.value, value), "V that was sent differs from V in USP"
                handle.is_used = True
            elif call and call.signature.candidates is None and call.signature.structure.is_known:
                call.signature.candidates = ScheduleCandidates([OverlapSchedule(v_first=True)])
            return query * value


class Processor:
    """An attention processor, by whose class and source code the table knows how V is copied."""

    def __call__(self) -> None:
        """Do nothing: the modules below have their processor's code in their forward."""


def known_as(**how: Any) -> contextlib.AbstractContextManager:
    """Return a context in which the table has the processor."""
    row = Copied("Processor", symbol_lookup.source_digest(__name__, "Processor.__call__"), **how)
    return mock.patch.object(model_projections, "PROCESSORS", [row])


def heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Attention with a projection each of Q and V, of one stream or two."""

    def __init__(self, harness: Harness, text: bool = False, change_v: Callable = lambda value: value) -> None:
        super().__init__()
        self.harness, self.text, self.change_v, self.processor = harness, text, change_v, Processor()
        for name in ("to_q", "to_v", *(("add_v_proj", "add_q_proj") if text else ())):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
            observe = lambda module, args, name=name: harness.events.append(name)  # noqa: E731
            self._observe(getattr(self, name), observe)

    @staticmethod
    def _observe(part: nn.Linear, observe: Callable) -> None:
        weight, bias = part.weight, part.bias

        def forward(given: torch.Tensor) -> torch.Tensor:
            observe(part, given)
            return nn.functional.linear(given, weight, bias)

        part.forward = forward

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        query, value = self.to_q(hidden_states), self.to_v(hidden_states)
        if self.text:
            query = torch.cat([self.add_q_proj(encoder_hidden_states), query], 1)
            value = torch.cat([self.add_v_proj(encoder_hidden_states), value], 1)
        return self.harness.usp(heads(query), self.change_v(heads(value))).transpose(1, 2).flatten(2)


class FusedProjection(nn.Module):
    """One projection of Q, K, V and an MLP."""

    def __init__(self, harness: Harness) -> None:
        super().__init__()
        self.harness, self.to_qkv_mlp_proj = harness, nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        query, _, value, *_ = self.to_qkv_mlp_proj(hidden_states).chunk(5, -1)
        self.harness.events.append("norm")
        return self.harness.usp(heads(query), heads(value)).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attention, and optionally a parallel MLP."""

    def __init__(self, attention: nn.Module, mlp: bool = False) -> None:
        super().__init__()
        self.attn = attention
        if mlp:
            self.proj_mlp, self.act_mlp = nn.Linear(WIDTH, WIDTH), nn.GELU()

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        given = hidden_states * 2
        if hasattr(self, "proj_mlp"):
            hidden_states = hidden_states + self.act_mlp(self.proj_mlp(given))
        return hidden_states + self.attn(given, **others)[:, -hidden_states.shape[1] :]


class Transformer(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states, **others)
        return hidden_states


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    torch.manual_seed(0)
    harness = Harness()
    monkeypatch.setattr(host, "backend_name", str)
    monkeypatch.setattr(layer, "info_once", harness.logged.append)
    with torch.inference_mode():
        yield harness


def step(transformer: Transformer, text: bool = False, tokens: int = TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    given = {"hidden_states": torch.randn(2, tokens, WIDTH, generator=generator)}
    if text:
        given["encoder_hidden_states"] = torch.randn(2, 3, WIDTH, generator=generator)
    return transformer(**given)


def steps(harness: Harness, transformer: Transformer, count: int = 4, text: bool = False) -> list[str]:
    """Run steps, check that all give the result of the first, and return the events of the last."""
    first = step(transformer, text)
    for _ in range(count - 1):
        harness.events.clear()
        assert torch.equal(step(transformer, text), first)
    return harness.events


def statuses(harness: Harness) -> set[str]:
    return {signature.status for signature in harness.layers.signatures}


V_FIRST = ["to_v", "send", "to_q", "attend"]


@pytest.mark.parametrize(
    ("block", "text", "events", "sources"),
    [
        (lambda harness: Block(Attention(harness)), False, V_FIRST, "to_v"),
        (Attention, False, V_FIRST, "to_v"),  # the ModuleList that holds it is never called
        (lambda harness: Block(FusedProjection(harness)), False, ["send", "norm", "attend"], "to_qkv_mlp_proj"),
        (
            lambda harness: Block(Attention(harness, text=True)),
            True,
            ["add_v_proj", "to_v", "send", "to_q", "add_q_proj", "attend"],
            "add_v_proj and to_v",
        ),
    ],
    ids=["self-attention", "in a list", "fused", "two streams"],
)
def test_v_is_sent_as_soon_as_its_inputs_are_known(
    harness: Harness, block: Callable, text: bool, events: list[str], sources: str
) -> None:
    transformer = Transformer([block(harness) for _ in range(3)])
    with known_as(text="in front"):
        assert steps(harness, transformer, text=text) == 3 * events
    assert statuses(harness) == {f"V can go first, from {sources}"}
    assert len({sent.layer for sent in harness.sent}) == 3 and not harness.sent[-1].drained_unused


@pytest.mark.parametrize("how", ["another version", "not in the table", "of a script"])
def test_v_that_an_unknown_processor_copies_does_not_go_first(harness: Harness, how: str) -> None:
    """Where streams are joined, V is no view: memory does not tell what it was built from."""
    transformer = Transformer([Block(Attention(harness, text=True)) for _ in range(2)])
    known = contextlib.nullcontext() if how == "not in the table" else known_as(text="in front")
    change = {
        "another version": mock.patch.object(symbol_lookup, "source_digest", lambda *_: "another"),
        "of a script": mock.patch.object(Processor, "__module__", "__main__"),
    }
    with known, change.get(how, contextlib.nullcontext()):
        assert "send" not in steps(harness, transformer, text=True)
    assert statuses(harness) == {UNKNOWN_V} and harness.logged == [f"Attention: {UNKNOWN_V}"]


def test_signatures_of_old_lengths_are_dropped(harness: Harness) -> None:
    signatures, module = LayerSignatures(), Attention(harness)
    for tokens in range(1, 3 * MAX_SIGNATURES):
        signatures.of_call(module, {"hidden_states": torch.zeros(1, tokens, WIDTH)}, "SDPA")
    assert len(signatures) == MAX_SIGNATURES
    assert len({signature.key for signature in signatures}) == 1  # from 256 to 383 tokens


def test_v_that_is_no_view_of_its_projection_does_not_go_first(harness: Harness) -> None:
    class Changing(Attention):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            query = self.to_q(hidden_states)
            value = self.to_v(hidden_states + 1)
            return self.harness.usp(heads(query), heads(value)).transpose(1, 2).flatten(2)

    for change in (torch.clone, lambda value: value * 1.5, lambda value: value.mul_(1.5), lambda value: value.flip(0)):
        harness.layers.clear()
        assert steps(harness, Transformer([Block(Attention(harness, change_v=change))])) == ["to_q", "to_v", "attend"]
        assert statuses(harness) == {UNKNOWN_V} and harness.logged.pop() == f"Attention: {UNKNOWN_V}"
    assert steps(harness, Transformer([Block(Changing(harness))])) == ["to_q", "to_v", "attend"]
    assert harness.logged == [f"Changing: {UNKNOWN_V}"]


@pytest.mark.parametrize("added", ["at the start", "in a run"])
def test_hooks_of_a_projection_run_once_in_each_call(harness: Harness, added: str) -> None:
    """They may change what it computes, and another rank need not have them."""
    transformer, seen = Transformer([Block(Attention(harness)) for _ in range(2)]), []

    def add_hooks() -> None:
        for block in transformer.blocks:
            block.attn.to_v.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
            block.attn.to_v.register_forward_hook(lambda *called: seen.append(1) or called[-1] * 2)

    if added == "in a run":
        assert steps(harness, transformer) == 2 * V_FIRST
    add_hooks()
    assert steps(harness, transformer, count=5) == 2 * V_FIRST
    assert len(seen) == 10
    assert not torch.equal(step(transformer), step(Transformer([Block(Attention(harness)) for _ in range(2)])))


def test_weights_that_diffusers_prefetches_are_used_in_the_order_of_the_first_call(harness: Harness) -> None:
    transformer = Transformer([Block(Attention(harness)) for _ in range(2)])
    transformer.blocks[1].attn.to_v._diffusers_hook = object()
    assert steps(harness, transformer) == [*V_FIRST, "to_q", "to_v", "attend"]


class Adapted(nn.Module):
    """A projection with a LoRA."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.change = base, nn.Linear(WIDTH, WIDTH)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.base(given) + self.change(given)


def test_a_lora_may_be_loaded_after_a_run(harness: Harness) -> None:
    attention = Attention(harness, text=True)
    transformer = Transformer([Block(attention)])
    with known_as(text="in front"):
        before = step(transformer, text=True)
        assert "send" in steps(harness, transformer, text=True)
        attention.to_v = Adapted(attention.to_v)
        assert "send" not in steps(harness, transformer, text=True)
        assert not torch.equal(step(transformer, text=True), before)
        attention.to_v = attention.to_v.base
        assert "send" in steps(harness, transformer, text=True) and torch.equal(step(transformer, text=True), before)


def test_v_of_another_shape_is_not_sent_early(harness: Harness) -> None:
    attention = Attention(harness)
    transformer = Transformer([Block(attention), Block(Attention(harness))])
    steps(harness, transformer)
    attention.change_v = lambda value: value[:, :, :-1]
    with pytest.raises(RuntimeError, match="size"):  # Q does not fit this V: the test's error
        step(transformer)
    assert harness.sent[-1].drained_unused
    attention.change_v = lambda value: value
    harness.events.clear()
    assert [step(transformer) is not None and harness.events.count("send") for _ in range(2)] == [1, 3]


@pytest.mark.parametrize(
    "change",
    [lambda value: value * 2, lambda value: value.mul_(2), torch.clone, lambda value: torch.flip(value, (0,))],
    ids=["scaled", "written", "copied", "permuted"],
)
@pytest.mark.parametrize("block", [Attention, FusedProjection])
def test_v_that_a_processor_changes_later_raises(harness: Harness, change: Callable, block: Callable) -> None:
    transformer = Transformer([Block(block(harness))])
    steps(harness, transformer)
    usp, harness.usp = harness.usp, lambda query, value: usp(query, change(value))
    with pytest.raises(RuntimeError, match="V does not come from"):
        step(transformer)
    assert harness.sent[-1].drained_unused
