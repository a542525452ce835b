"""What references take, foreseen and held, and what a budget does to them."""

from types import SimpleNamespace

import pytest
import torch

from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression import codecs
from xfuser_cocodiff.engine.compression.layer_codecs import LinkState
from xfuser_cocodiff.engine.compression.modes import CodecSchedule, preset
from xfuser_cocodiff.engine.compression.reference_memory import GIB, LayerSizes, ReferenceBytes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.settings.options import MODES

PLACES, HEAD_DIM = 3, 8
SHAPE = (PLACES - 1, 2, 2, 6, HEAD_DIM)
"""Of one tensor: links, groups, heads, tokens, head dim."""


def share(dtype: torch.dtype) -> LayerSizes:
    """What a rank has if it sends tensors of that shape to other places, and keeps as much for its own."""
    value = torch.Size(SHAPE).numel() * PLACES // (PLACES - 1)
    return LayerSizes(4 * value, value, HEAD_DIM, dtype.itemsize)


def hold(link_states: dict, schedule: CodecSchedule, dtype: torch.dtype, compact: bool, steps: int) -> None:
    """Go through some steps as an exchange would."""
    generator = torch.Generator().manual_seed(0)
    for name in "vqko":
        link_state = link_states.setdefault(
            (name, ALL_HEADS), LinkState(codecs.LinkReference(compact), codecs.LinkReference(compact))
        )
        for step in range(steps):
            codec = schedule.codecs(step, 9)[name]
            values = torch.randn(SHAPE, generator=generator).to(dtype)
            chosen = codecs.choose(values, link_state.sent, codec, 0) if codec.share < 1 else None
            payload = torch.empty(len(values), codec.payload_bytes(SHAPE, dtype), dtype=torch.uint8)
            codecs.encode(values, link_state.sent, codec, chosen, payload)
            codecs.decode(payload, link_state.received, codec, chosen, torch.empty_like(values))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES[1:])
def test_what_is_foreseen_is_what_is_held(mode: str, dtype: torch.dtype, compact: bool) -> None:
    schedule = preset(mode, 50)
    link_states: dict = {}
    hold(link_states, schedule, dtype, compact, steps=4)
    held = sum(link_state.sent.nbytes + link_state.received.nbytes for link_state in link_states.values())
    if mode == "paper":  # here Q and K make a choice of their own; in an exchange they take V's
        held -= sum(link_states[name, ALL_HEADS].sent.seen.nbytes for name in "qk")
    assert held == ReferenceBytes.of(share(dtype), schedule, PLACES)[compact]


class Run:
    """Steps of a run with a budget, in which every layer holds what it may."""

    def __init__(self, budget: float | None, layers: int, branches: int = 1) -> None:
        self.said: list[str] = []
        slow = SimpleNamespace(comm_stream=SimpleNamespace(device=torch.device("cpu")))
        partition = SimpleNamespace(
            num_slow=PLACES,
            slow=slow,
            fast=None,
            is_single_stage=lambda message_bytes: False,
        )
        self.runtime = CodecRuntime(
            partition, "balanced", None, None, list, budget=budget, say=self.said.append, warn=self.said.append
        )
        self.layers, self.branches = layers, branches

    def begin(self) -> None:
        self.runtime.begin_run(9)

    def step(self) -> list[bool]:
        """Which layers are encoded."""
        found = []
        for branch in range(self.branches):
            for layer in range(self.layers):
                layer_codecs = self.runtime.layer_codecs(str(layer), layer, branch, share(torch.bfloat16))
                found.append(layer_codecs is not None)
                if layer_codecs:
                    hold(layer_codecs.link_states, self.runtime.schedule, torch.bfloat16, layer_codecs.compact, steps=3)
        self.runtime.end_step()
        return found


FULL, COMPACT = ReferenceBytes.of(share(torch.bfloat16), preset("balanced", 50), PLACES)


@pytest.mark.parametrize(
    ("budget", "held", "encoded"),
    [
        (None, 4 * FULL, 4),
        (4 * FULL, 4 * FULL, 4),
        (4 * FULL - 1, 4 * COMPACT, 4),
        (4 * COMPACT, 4 * COMPACT, 4),
        (4 * COMPACT - 1, 3 * COMPACT, 3),
        (COMPACT - 1, 0, 0),
    ],
)
def test_a_budget_is_kept(budget: int | None, held: int, encoded: int) -> None:
    run = Run(budget, layers=4)
    for _ in range(2):
        run.begin()
        for _ in range(3):
            assert run.step() == [True] * encoded + [False] * (4 - encoded)
            assert run.runtime.planned_reference_bytes == run.runtime.reference_bytes == held
            assert run.runtime.reports[-1].exact_layers == 4 - encoded
    assert sum(f"references of 4 layers: {4 * FULL / GIB:.3g} GiB per rank" in line for line in run.said) == 1
    # In every run, of which a later one may be in another's log.
    exact = [line for line in run.said if f"{4 - encoded} of 4 layers are lossless" in line]
    assert len(exact) == (2 if encoded < 4 else 0)


def test_branches_of_guidance_find_room_at_once() -> None:
    run = Run(8 * COMPACT, layers=4, branches=2)  # room for four in full
    for _ in range(2):
        run.begin()
        for _ in range(3):
            assert run.step() == [True] * 8
            assert run.runtime.planned_reference_bytes == run.runtime.reference_bytes == 8 * COMPACT
        assert [report.exact_layers for report in run.runtime.reports] == [0, 0, 0]
    assert any("references of 4 layers and 2 guidance branches" in line for line in run.said)
