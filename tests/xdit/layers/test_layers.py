"""V ahead of time: how a layer's V is found, when it is sent, and when it is left alone."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule, ScheduleCandidates
from xfuser_cocodiff.xdit.layers.forward_wrapper import ForwardWrapper
from xfuser_cocodiff.xdit.layers.layer import Layer
from xfuser_cocodiff.xdit.layers.layers import Layers
from xfuser_cocodiff.xdit.layers.root_module import RootModule
from xfuser_cocodiff.xdit.layers.v_source import find_recipes

HEADS, HEAD_DIM, TOKENS = 4, 8, 6
WIDTH = HEADS * HEAD_DIM
WRONG = "V does not go first: V differs from the output of its projections"


class Sent:
    """Stands for an exchange."""

    def __init__(self, value: torch.Tensor, layer: str) -> None:
        self.value, self.layer, self.awaited, self.abandoned = value.clone(), layer, False, False

    def drain(self) -> None:
        self.abandoned = not self.awaited


class World:
    """Follows layers as xDiT's USP does, and keeps what happened."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sent: list[Sent] = []
        self.agreed = True
        self.said: list[str] = []
        self.layers = Layers(lambda: True, self.send, lambda value: self.agreed, self.said.append)

    def send(self, value: torch.Tensor, layer: Layer) -> Sent:
        self.events.append("send")
        self.sent.append(Sent(value, layer.name))
        return self.sent[-1]

    def usp(self, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Not attention, but something that depends on Q and V."""
        self.events.append("attend")
        layer = self.layers.current
        if layer is None:
            self.layers.discover()
        elif under_way := layer.claim_v_handle(value):
            assert torch.equal(under_way.value, value), "another V was sent"
            under_way.awaited = True
        elif layer.call.signature.candidates is None and (layer.call.signature.ready or layer.call.signature.refusal):
            layer.call.signature.candidates = ScheduleCandidates([OverlapSchedule(v_first=True)])
        return query * value


def heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Separate projections of one or two streams."""

    def __init__(self, world: World, text: bool = False, twist: Callable = lambda value: value) -> None:
        super().__init__()
        self.world, self.text, self.twist = world, text, twist
        for name in ("to_q", "to_v", *(("add_v_proj", "add_q_proj") if text else ())):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
            note = lambda module, args, name=name: world.events.append(name)  # noqa: E731
            self._tell(getattr(self, name), note)

    @staticmethod
    def _tell(part: nn.Linear, note: Callable) -> None:
        weight, bias = part.weight, part.bias

        def forward(given: torch.Tensor) -> torch.Tensor:
            note(part, given)
            return nn.functional.linear(given, weight, bias)

        part.forward = forward

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        query, value = self.to_q(hidden_states), self.to_v(hidden_states)
        if self.text:
            query = torch.cat([self.add_q_proj(encoder_hidden_states), query], 1)
            value = torch.cat([self.add_v_proj(encoder_hidden_states), value], 1)
        return self.world.usp(heads(query), self.twist(heads(value))).transpose(1, 2).flatten(2)


class Fused(nn.Module):
    """Q, K, V and an MLP from one projection."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.to_qkv_mlp_proj = world, nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        query, _, value, *_ = self.to_qkv_mlp_proj(hidden_states).chunk(5, -1)
        self.world.events.append("norm")
        return self.world.usp(heads(query), heads(value)).transpose(1, 2).flatten(2)


class Grouped(nn.Module):
    """Two heads of K and V, each of which serves two of Q, and is repeated for them."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.to_q, self.to_v = world, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        query = heads(self.to_q(hidden_states))
        self.world.events.append("norm")
        value = self.to_v(hidden_states).unflatten(-1, (HEADS // 2, -1)).transpose(1, 2).repeat_interleave(2, dim=1)
        return self.world.usp(query, value).transpose(1, 2).flatten(2)


class Joining(Attention):
    """One stream made of two inside the module, of which USP gets the first part."""

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
        both = torch.cat([hidden_states, encoder_hidden_states], 1)
        query, value = heads(self.to_q(both)), heads(self.to_v(both))
        return self.world.usp(query[:, :, :TOKENS], value[:, :, :TOKENS]).transpose(1, 2).flatten(2)


class Crossing(Attention):
    """Q of one stream attends to the other one, which is half as long."""

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
        query, value = heads(self.to_q(hidden_states)), heads(self.to_v(encoder_hidden_states))
        return self.world.usp(query[:, :, :3], value).transpose(1, 2).flatten(2).repeat(1, 2, 1)


class Block(nn.Module):
    """Attention, and an MLP beside it."""

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
def world() -> Iterator[World]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield World()


def step(transformer: Transformer, text: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    given = {"hidden_states": torch.randn(2, TOKENS, WIDTH, generator=generator)}
    if text:
        given["encoder_hidden_states"] = torch.randn(2, 3, WIDTH, generator=generator)
    return transformer(**given)


def steps(world: World, transformer: Transformer, count: int = 4, text: bool = False) -> list[str]:
    """Run steps, all of which must give what the first did, and return the events of the last one."""
    first = step(transformer, text)
    for _ in range(count - 1):
        world.events.clear()
        assert torch.equal(step(transformer, text), first)
    return world.events


def statuses(world: World) -> set[str]:
    return {signature.status for signature in world.layers.signatures}


USUAL = ["to_v", "send", "to_q", "attend"]


@pytest.mark.parametrize(
    ("block", "text", "events", "sources"),
    [
        (lambda world: Block(Attention(world)), False, USUAL, "to_v"),
        (Attention, False, USUAL, "to_v"),  # the list that it stands in is never called, and ends no call
        (lambda world: Block(Fused(world)), False, ["send", "norm", "attend"], "to_qkv_mlp_proj"),
        (lambda world: Block(Grouped(world)), False, ["send", "norm", "attend"], "to_v"),
        (lambda world: Block(Joining(world)), True, USUAL, "to_v"),
        (lambda world: Block(Crossing(world)), True, USUAL, "to_v"),
        (
            lambda world: Block(Attention(world, text=True)),
            True,
            ["add_v_proj", "to_v", "send", "to_q", "add_q_proj", "attend"],
            "add_v_proj and to_v",
        ),
    ],
    ids=["usual", "in a list", "fused", "grouped heads", "joined inside", "crossing", "two streams"],
)
def test_v_is_sent_as_soon_as_it_can_be(
    world: World, block: Callable, text: bool, events: list[str], sources: str
) -> None:
    transformer = Transformer([block(world) for _ in range(3)])
    assert steps(world, transformer, text=text) == 3 * events
    assert statuses(world) == {f"V can go first, from {sources}"}
    assert len({sent.layer for sent in world.sent}) == 3 and not world.sent[-1].abandoned
    assert all(layer.call is None for layer in world.layers._layers.values())


def test_v_of_weights_that_can_be_trained_is_sent_too(world: World) -> None:
    """As those of every model that was made outside of inference mode."""
    with torch.inference_mode(False):
        transformer = Transformer([Block(Fused(world)) for _ in range(2)])
    assert steps(world, transformer).count("send") == 2


def test_attention_right_under_what_compiles_it_is_left_alone(world: World) -> None:
    """There is no module to follow."""

    class Compiled(nn.Module):  # as torch.compile makes one of a function
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Identity()

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return world.usp(heads(hidden_states), heads(hidden_states))

    Compiled()(torch.randn(2, TOKENS, WIDTH))
    assert not world.layers._layers and not world.layers._roots


def test_v_among_the_columns_of_each_head_goes_first(world: World) -> None:
    """StepVideo projects Q, K and V of one head, then of the next one."""
    given = torch.randn(2, TOKENS, WIDTH)
    all_heads = nn.Linear(WIDTH, 3 * WIDTH)(given)
    value = all_heads.unflatten(-1, (HEADS, 3 * HEAD_DIM))[..., -HEAD_DIM:].transpose(1, 2)
    [recipe] = find_recipes(value, "after Q and K of each head", {"wqkv": all_heads})
    assert torch.equal(recipe.build({"wqkv": all_heads}), value)


def test_v_of_one_sample_goes_first(world: World) -> None:
    """Cosmos3 has no dim for samples, and V of text beside that of Q's tokens."""
    image, text = torch.randn(5, WIDTH), torch.randn(3, WIDTH)
    value = torch.cat([heads(text[None]), heads(image[None])], 2)
    returned = {"to_v": image, "add_v_proj": text}
    [recipe] = find_recipes(value, "all", returned)
    assert recipe.paths == ("add_v_proj", "to_v")
    assert torch.equal(recipe.build(returned), value)
    assert find_recipes(value + 1, "all", returned) == []


def test_v_that_is_not_what_its_projection_makes_is_left_alone(world: World) -> None:
    class Changing(Attention):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            query = self.to_q(hidden_states)
            hidden_states += 1
            return self.world.usp(heads(query), heads(self.to_v(hidden_states))).transpose(1, 2).flatten(2)

    for attention in (Changing(world), Attention(world, twist=lambda value: value * 1.5)):
        transformer = Transformer([Block(attention)])
        assert steps(world, transformer) == ["to_q", "to_v", "attend"]
    assert statuses(world) == {WRONG} and world.said == [f"Changing: {WRONG}", f"Attention: {WRONG}"]


def test_projections_that_others_watch_are_left_alone(world: World) -> None:
    transformer, seen = Transformer([Block(Attention(world)) for _ in range(2)]), []
    for block in transformer.blocks:
        block.attn.to_v.register_forward_hook(lambda *_: seen.append(1))
    assert steps(world, transformer, count=5) == 2 * ["to_q", "to_v", "attend"]
    assert statuses(world) == {"V does not go first: to_v has hooks"}
    assert len(seen) == 10


@pytest.mark.parametrize("elsewhere", [False, True])
def test_projections_that_others_watch_since_a_run_began_are_left_alone_in_the_next(
    world: World, elsewhere: bool
) -> None:
    """On this rank or on another one."""
    transformer = Transformer([Block(Attention(world)) for _ in range(2)])
    assert steps(world, transformer) == 2 * USUAL
    if elsewhere:
        world.agreed = False
    else:
        transformer.blocks[1].attn.to_v.register_forward_pre_hook(lambda _, args: (args[0].clone(),))
    world.layers.begin_run()
    world.agreed = True
    assert steps(world, transformer) == (2 * USUAL if elsewhere else 2 * ["to_q", "to_v", "attend"])
    world.layers.begin_run()


def test_what_does_not_go_through_usp_is_projected_ahead_once(world: World) -> None:
    """As of many attention modules of diffusers' one class."""
    transformer = Transformer([Block(Attention(world)), Block(Attention(world, text=True))])
    own = transformer.blocks[1].attn
    own.forward = lambda hidden_states: own.to_q(hidden_states) * own.to_v(hidden_states)
    assert steps(world, transformer) == [*USUAL, "to_q", "to_v"]
    assert world.layers.signatures.report() == {"Attention": ["V can go first, from to_v"]}


def test_ranks_that_find_different_things_leave_v_alone(world: World) -> None:
    world.agreed = False
    transformer = Transformer([Block(Attention(world)) for _ in range(2)])
    assert steps(world, transformer) == 2 * ["to_q", "to_v", "attend"]
    assert statuses(world) == {"V does not go first: the ranks do not agree on where V comes from"}


def test_v_that_comes_about_otherwise_is_not_used(world: World) -> None:
    attention = Attention(world)
    transformer = Transformer([Block(attention), Block(Attention(world))])
    steps(world, transformer)
    attention.twist = lambda value: value[:, :, :-1]
    with pytest.raises(RuntimeError, match="size"):  # Q and this V do not fit, which is not our business
        step(transformer)
    assert world.sent[-1].abandoned
    assert "V does not go first: V has another shape than before" in statuses(world)


@pytest.mark.parametrize(
    "change",
    [lambda value: value * 2, lambda value: value.mul_(2), torch.clone, lambda value: torch.flip(value, (0,))],
    ids=["scaled", "written", "copied", "exchanged"],
)
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("block", [Attention, Fused])
def test_v_that_a_processor_changes_from_a_step_on_is_not_used(
    world: World, change: Callable, inference: bool, block: Callable
) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        attention = block(world)
        attention.twist = lambda value: value
        transformer = Transformer([Block(attention)])
        steps(world, transformer)
        usp, world.usp = world.usp, lambda query, value: usp(query, change(value))
        with pytest.raises(RuntimeError, match="V does not come from"):
            step(transformer)
    assert world.sent[-1].abandoned


@pytest.mark.parametrize("text", [False, True])
def test_v_that_one_layer_changes_goes_first_in_none(world: World, text: bool) -> None:
    """Of layers of one kind, which rehearse one by one."""
    attentions = [Attention(world, text, twist) for twist in (lambda value: value * 1.5, torch.clone)]
    assert steps(world, Transformer(list(map(Block, attentions))), text=text).count("send") == 0
    assert statuses(world) == {WRONG}


def test_v_that_may_have_come_in_several_ways_is_looked_at_again(world: World) -> None:
    """Zeros lie in any order."""
    transformer = Transformer([Block(Attention(world, text=True)) for _ in range(2)])
    for block in transformer.blocks:
        for name in ("to_v", "add_v_proj"):
            getattr(block.attn, name).weight.zero_()
            getattr(block.attn, name).bias.zero_()
    assert "send" not in steps(world, transformer, text=True)
    for block in transformer.blocks:
        block.attn.to_v.bias.fill_(1)
    assert steps(world, transformer, text=True).count("send") == 2
    assert {signature.recipe.paths for signature in world.layers.signatures} == {("add_v_proj", "to_v")}


def test_a_module_that_is_called_again_after_an_error_has_forgotten_what_it_was_asked(world: World) -> None:
    class Twice(Block):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            once = self.attn(hidden_states * 2)
            return once + self.attn(hidden_states * 3)

    transformer = Transformer([Twice(Attention(world)), Twice(Attention(world))])
    assert steps(world, transformer).count("send") == 4


def test_a_layer_with_one_projection_of_q_k_and_v_may_be_given_text(world: World) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
            both = torch.cat([hidden_states, encoder_hidden_states], 1)
            query, _, value = self.to_qkv(both).chunk(3, -1)
            return world.usp(heads(query), heads(value)).transpose(1, 2).flatten(2)[:, :TOKENS]

    assert "send" not in steps(world, Transformer([Block(Packed()) for _ in range(2)]), text=True)


def test_a_module_at_the_address_of_one_that_has_gone_is_another_one(world: World) -> None:
    old, new = (Transformer([Block(Attention(world))]) for _ in range(2))
    steps(world, old)
    [layer] = held = [*world.layers._layers.values()]
    root, module = layer.root, new.blocks[0].attn
    del old
    world.layers._layers[id(module)], world.layers._roots[id(new)] = layer, root
    assert steps(world, new) == USUAL
    assert held and {each.root.transformer for each in world.layers._layers.values()} >= {new}


def test_a_copy_of_a_followed_module_computes_by_itself() -> None:
    """Whatever the one that follows holds, which may not be copied."""
    module, lock = nn.Linear(2, 2), threading.Lock()
    ForwardWrapper(module, lambda forward, given: lock and forward(given))
    ForwardWrapper(module, lambda forward, given: lock and forward(given))
    RootModule(module, lambda: bool(lock), lambda *_: None).watch(module, (), {})
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        given = torch.ones(1, 2)
        assert torch.equal(copied(given), module(given))
        nn.init.zeros_(copied.weight)
        nn.init.zeros_(copied.bias)
        assert copied(given).count_nonzero() == 0 != module(given).count_nonzero()


def test_an_error_between_v_and_attention_abandons_v(world: World) -> None:
    """Such as one in USP, which has taken the exchange by then."""
    transformer = Transformer([Block(Attention(world))])
    steps(world, transformer)
    taken = Layer.value_under_way

    def fail(layer: Layer, value: torch.Tensor) -> None:
        assert taken(layer, value)
        raise ArithmeticError

    with mock.patch.object(Layer, "value_under_way", fail), pytest.raises(ArithmeticError):
        step(transformer)
    assert world.sent[-1].abandoned


def test_clear_leaves_modules_as_they_were(world: World) -> None:
    transformer = Transformer([Block(Attention(world), mlp=True) for _ in range(2)])
    before = [dict(vars(module)) for module in transformer.modules()]
    steps(world, transformer)
    world.layers.clear()
    for module, state in zip(transformer.modules(), before, strict=True):
        assert vars(module).get("forward") is state.get("forward")
        assert not module._forward_hooks and not module._forward_pre_hooks
    world.events.clear()
    step(transformer)
    assert "send" not in world.events


@pytest.mark.parametrize("cleared", [False, True])
def test_weights_go_with_their_transformer(world: World, cleared: bool) -> None:
    """By counting references alone: it may take long until garbage is collected."""
    transformer = Transformer([Block(Grouped(world), mlp=True) for _ in range(2)])
    for _ in range(4):
        step(transformer)
    assert all(signature.ready for signature in world.layers.signatures)
    if cleared:
        world.layers.clear()
    gone = [weakref.ref(parameter) for parameter in transformer.parameters()]
    gc.disable()
    try:
        del transformer
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_forwards_may_be_left_in_any_order() -> None:
    module, seen = nn.Linear(2, 2), []
    arounds = [ForwardWrapper(module, lambda forward, given, n=n: seen.append(n) or forward(given)) for n in range(3)]
    for index, left in ((1, [2, 0]), (2, [0]), (0, [])):
        arounds[index].remove()
        seen.clear()
        assert module(torch.ones(2)).shape == (2,) and seen == left
    assert "forward" not in vars(module)
