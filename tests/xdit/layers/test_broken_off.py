"""Calls that are broken off in the midst of attention, on real ranks: the next run is as if they had never been."""

import contextlib
import copy
import gc
import weakref
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.xdit.attention.test_overlap import in_force, inputs_of, start
from tests.xdit.session.test_session import config_of
from xfuser_cocodiff.xdit.session import session as session_module

STEPS = 4


class Runs:
    """Runs of a FLUX.1 with the plugin in use, and which layers sent V first."""

    def __init__(self, rank: int, mode: str) -> None:
        group, self.transformer, step = start(rank, depth=3)
        self.other = copy.deepcopy(self.transformer)
        self.given = inputs_of(self.transformer, step)
        self.session = in_force(group, config_of(mode))
        self.sent: list[str] = []

    @torch.no_grad()
    def run(self, declared: bool, transformer: torch.nn.Module | None = None) -> list[torch.Tensor]:
        send, results = session_module.start_seq_to_heads, []
        self.sent.clear()
        if declared:
            self.session.runs.begin(STEPS)
        noting = lambda tensors, mesh, label, *args: (  # noqa: E731
            self.sent.append(label.layer) or send(tensors, mesh, label, *args)
        )
        with mock.patch.object(session_module, "start_seq_to_heads", noting):
            for step in range(STEPS):
                given = self.given | {"hidden_states": self.given["hidden_states"] * (1 + 0.2 * step)}
                results.append((transformer or self.transformer)(**given)[0])
                if declared:
                    self.session.runs.end_step()
        return results

    def breaking_off(self, error: BaseException, after: int) -> contextlib.AbstractContextManager:
        """A context in which a call of a layer fails, while V is under way."""
        calls: list[int] = []

        def fail(*_: object) -> None:
            calls.append(1)
            if len(calls) == after:
                raise error

        hook = self.transformer.single_transformer_blocks[0].attn.norm_q.register_forward_pre_hook(fail)
        stack = contextlib.ExitStack()
        stack.callback(hook.remove)
        return stack


def interrupted(rank: int, mode: str, declared: bool) -> None:
    runs = Runs(rank, mode)
    runs.run(declared)  # in which layers become known
    fresh, sent = runs.run(declared), list(runs.sent)
    layers = ["transformer_blocks.0", "single_transformer_blocks.0", "single_transformer_blocks.1"]
    assert sent == STEPS * [f"{layer}.attn" for layer in layers]
    for transformer in (runs.other, runs.transformer):
        with runs.breaking_off(KeyboardInterrupt(), 3), pytest.raises(KeyboardInterrupt):
            runs.run(declared)
        for count in range(2):
            found = runs.run(declared, transformer)
            # The first call of a layer is not followed, where its transformer is another one.
            assert count == 0 or runs.sent == sent
            assert all(torch.equal(*pair) for pair in zip(found, fresh, strict=True))
        assert runs.session.layers.current is None


@pytest.mark.parametrize(("mode", "declared"), [("balanced", True), ("exact", False)])
def test_an_interrupt_in_attention_leaves_nothing_behind(mode: str, declared: bool) -> None:
    ranks.run(interrupted, 2, mode, declared)


@torch.no_grad()
def tried_again(rank: int) -> list[tuple[int, bool]]:
    """What is noted of a call, which one rank makes where it handles an error, as after one of memory."""
    runs = Runs(rank, "exact")
    runs.run(declared=True)
    runs.session.runs.begin(STEPS)
    try:
        if rank == 0:
            raise MemoryError
        runs.transformer(**runs.given)
    except MemoryError:
        runs.transformer(**runs.given)
    return [
        (signature.candidates.calls, signature.candidates.is_representative)
        for signature in runs.session.layers.signatures
    ]


def test_a_call_where_an_error_is_handled_is_as_any_other() -> None:
    first, second = ranks.run(tried_again, 2)
    assert first == second == [(2, True), (1, True)]


@torch.no_grad()
def another_v_on_one_rank(rank: int) -> None:
    """V comes about otherwise than before on one rank, while others count on the V that it has sent."""
    runs = Runs(rank, "exact")
    runs.run(declared=False)
    if rank == 0:
        processor = type(runs.transformer.single_transformer_blocks[0].attn.processor)
        original = processor.__call__
        # Values are the same, but that is not known.
        processor.__call__ = lambda self, attn, hidden_states, *args, **kwargs: original(
            self, attn, hidden_states.clone(), *args, **kwargs
        )
    runs.transformer(**runs.given)


def test_a_rank_whose_v_comes_about_otherwise_ends_with_the_way_out() -> None:
    first, second = ranks.outcomes(another_v_on_one_rank, 2)
    assert "V does not come from" in str(first) and "--cocodiff_v_first off" in str(first)
    assert isinstance(second, Exception)


def weights_left(rank: int, closed: bool) -> int:
    """Weights of a transformer that are still there when nobody needs it, before garbage is collected."""
    runs = Runs(rank, "balanced")
    gc.collect()
    gc.disable()
    runs.run(True, runs.other)
    if closed:
        runs.session.close()
    weights = [weakref.ref(weight) for weight in runs.other.parameters()]
    del runs.other
    return sum(weight() is not None for weight in weights)


def test_weights_go_with_a_transformer_that_is_not_needed() -> None:
    for closed in (False, True):
        assert ranks.run(weights_left, 2, closed) == [0, 0]
