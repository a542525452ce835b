"""Errors and interrupts inside attention, on real ranks: they leave no state to the next run."""

import contextlib
import copy
import gc
import weakref
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.xdit.attention.test_overlap import inputs_of, start, use_config
from tests.xdit.session.test_session import GATHERED, config_of
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.comm import failure_detection

STEPS = 4


class Runs:
    """Runs of a FLUX.1 transformer with the plugin, and the layers whose V went first.

    Args:
        rank: number of the rank.
        mode: mode of the plugin.
        options: other options of the config.
    """

    def __init__(self, rank: int, mode: str, **options: object) -> None:
        group, self.transformer, step = start(rank, depth=3)
        self.other = copy.deepcopy(self.transformer)
        self.given = inputs_of(self.transformer, step)
        self.session = use_config(group, config_of(mode, **options))
        self.sent: list[str] = []
        self.gathered: list[bool] = []
        """Whether each V that went first was gathered."""

    @torch.no_grad()
    def run(self, declared: bool, transformer: torch.nn.Module | None = None) -> list[torch.Tensor]:
        start_value, results = UlyssesAttention.start_value, []
        self.sent.clear()
        self.gathered.clear()
        if declared:
            self.session.begin_run(STEPS)

        def noting(call: UlyssesAttention, value: torch.Tensor) -> object:
            self.sent.append(call._layer)
            self.gathered.append(call.gather is not None)
            return start_value(call, value)

        with mock.patch.object(UlyssesAttention, "start_value", noting):
            for step in range(STEPS):
                given = self.given | {"hidden_states": self.given["hidden_states"] * (1 + 0.2 * step)}
                results.append((transformer or self.transformer)(**given)[0])
                if declared:
                    self.session.end_step()
        return results

    def failing(self, error: BaseException, after: int) -> contextlib.AbstractContextManager:
        """Return a context in which a call of a layer raises while V is in flight."""
        calls: list[int] = []

        def fail(*_: object) -> None:
            calls.append(1)
            if len(calls) == after:
                raise error

        hook = self.transformer.single_transformer_blocks[0].attn.norm_q.register_forward_pre_hook(fail)
        stack = contextlib.ExitStack()
        stack.callback(hook.remove)
        return stack


def interrupted(rank: int, mode: str, declared: bool, gathers_kv: bool) -> None:
    runs = Runs(rank, mode, **({"plan": GATHERED} if gathers_kv else {}))
    runs.run(declared)  # in which layers are discovered and verified
    fresh, sent = runs.run(declared), list(runs.sent)
    layers = ["transformer_blocks.0", "single_transformer_blocks.0", "single_transformer_blocks.1"]
    assert sent == STEPS * [f"{layer}.attn" for layer in layers]
    for transformer in (runs.other, runs.transformer):
        with runs.failing(KeyboardInterrupt(), 3), pytest.raises(KeyboardInterrupt):
            runs.run(declared)
        for count in range(2):
            found = runs.run(declared, transformer)
            # The first call of another transformer is not wrapped yet.
            assert count == 0 or runs.sent == sent
            assert set(runs.gathered) == {gathers_kv}
            assert all(torch.equal(*pair) for pair in zip(found, fresh, strict=True))
        assert runs.session.layers.current is None


@pytest.mark.parametrize(("mode", "declared", "gathers_kv"), [("balanced", True, True), ("exact", False, False)])
def test_an_interrupt_in_attention_leaves_no_state(mode: str, declared: bool, gathers_kv: bool) -> None:
    ranks.run(interrupted, 2, mode, declared, gathers_kv)


@torch.no_grad()
def change_v_on_one_rank(rank: int) -> None:
    """Change the source of V on one rank, while the others wait for the V that it has sent."""
    failure_detection.RESPONSE_SECONDS = 2.0
    runs = Runs(rank, "exact")
    runs.run(declared=False)
    if rank == 0:
        processor = type(runs.transformer.single_transformer_blocks[0].attn.processor)
        original = processor.__call__
        # Equal values, but not the verified tensor.
        processor.__call__ = lambda self, attn, hidden_states, *args, **kwargs: original(
            self, attn, hidden_states.clone(), *args, **kwargs
        )
    runs.transformer(**runs.given)


def test_a_rank_whose_v_changes_its_source_names_the_option_to_set() -> None:
    first, second = ranks.outcomes(change_v_on_one_rank, 2)
    assert "V does not come from" in str(first) and "--cocodiff_v_first off" in str(first)
    assert isinstance(second, Exception)


def weights_left(rank: int, closed: bool) -> int:
    """Return the number of weights left after the last reference to a transformer, without the garbage collector."""
    runs = Runs(rank, "balanced")
    gc.collect()
    gc.disable()
    runs.run(True, runs.other)
    if closed:
        runs.session.close()
    weights = [weakref.ref(weight) for weight in runs.other.parameters()]
    del runs.other
    return sum(weight() is not None for weight in weights)


def test_weights_are_freed_with_the_last_reference_to_a_transformer() -> None:
    for closed in (False, True):
        assert ranks.run(weights_left, 2, closed) == [0, 0]
