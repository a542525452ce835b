"""Tokens that never change, such as a prompt's: once all ranks have seen it they are not sent any more, and
nobody can tell but by the bytes."""

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.codec.test_exchange import way_of
from tests.quick import slow_but
from xfuser_cocodiff.attention.reshard import send_to_heads
from xfuser_cocodiff.codec.memory import Share
from xfuser_cocodiff.codec.runtime import Runtime, StepReport
from xfuser_cocodiff.codec.slow_way import SlowWay
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.exchange.traffic import Label
from xfuser_cocodiff.machine.topology import Topology

STEPS, BATCH, HEADS, TEXT, PICTURE, DIM = 8, 2, 8, 8, 12, 16
SHARE = Share(values=64, value=16, head_dim=DIM, value_bytes=4)


def noise(name: str, rank: int, step: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * ord(name) + 100 * rank + step)
    return torch.randn(BATCH, HEADS, tokens, DIM, generator=generator)


def text_of(name: str, rank: int, changed: bool) -> torch.Tensor:
    text = noise(name, rank, -1, TEXT)
    if changed:
        text[1, 6, 2, 3] += 1e-6  # for the last rank
    return text


def picture_of(name: str, rank: int, step: int) -> torch.Tensor:
    return noise(name, rank, 0, PICTURE) + 0.1 * noise(name, rank, 1 + step, PICTURE)


def largest(values: list[float]) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


AS_IT_IS = "first=exact,predictor=0.5"
"""So that what is still arrives as it is, and a text makes no difference to how a picture is extrapolated."""


def run(
    rank: int,
    mesh: Mesh,
    way: SlowWay,
    schedule: str,
    text: bool,
    picture: bool = True,
    change: tuple[int, int] = (9, 9),
    begins: str = AS_IT_IS,
) -> tuple[list[list[torch.Tensor]], list[StepReport]]:
    """What a rank gets of Q, K and V at each step, from tokens of a text, in K and V, of a picture, or both.

    Args:
        rank: of this process.
        mesh: over all ranks.
        way: the slow axes.
        schedule: changes to that of the mode.
        text: whether there is one.
        picture: the same, in K and V.
        change: the step and the rank at which a text changes.
        begins: more such changes.
    """
    runtime, found = Runtime(way, "balanced", f"{begins},{schedule}", None, largest), []
    runtime.begin_run(STEPS)
    for step in range(STEPS):
        layer_codecs = runtime.layer_codecs("attn", 1, 0, SHARE)
        tensors = {"q": picture_of("q", rank, step)}
        for name in "kv":
            parts = [text_of(name, rank, (step, rank) == change)] if text else []
            parts += [picture_of(name, rank, step)] if picture else []
            tensors[name] = torch.cat(parts, 2)
        found.append(send_to_heads(list(tensors.values()), mesh, Label("qkv"), layer_codecs=layer_codecs).wait())
        runtime.end_step()
    return found, runtime.reports


def expected_text(name: str, rank: int, size: int, step: int, change: tuple[int, int]) -> list[torch.Tensor]:
    """Of each source, for the heads of a rank."""
    return [text_of(name, source, (step, source) == change).chunk(size, 1)[rank] for source in range(size)]


def stay_still(rank: int, topology: str, slow: tuple[str, ...], schedule: str, anew: set[int]) -> None:
    """A text beside a picture, which is coded as if there were none.

    Args:
        rank: of this process.
        topology: of all.
        slow: axes.
        schedule: changes to that of the mode.
        anew: steps at which everything travels, and that after which ranks agree.
    """
    size = dist.get_world_size()
    mesh, way = way_of(Topology.parse(topology, size), slow)
    both, reports = run(rank, mesh, way, schedule, text=True)
    alone, others = run(rank, mesh, way, schedule, text=False)
    for step in range(STEPS):
        assert torch.equal(both[step][0], alone[step][0])
        for name, mine, wanted in zip("kv", both[step][1:], alone[step][1:], strict=True):
            parts = mine.unflatten(2, (size, -1)).unbind(2)
            for part, text in zip(parts, expected_text(name, rank, size, step, (9, 9)), strict=True):
                assert torch.equal(part[:, :, :TEXT], text), (step, name)
            assert torch.equal(torch.cat([part[:, :, TEXT:] for part in parts], 2), wanted), (step, name)
        assert (reports[step].sent_bytes == others[step].sent_bytes) is (step not in anew), step
        assert reports[step].sent_bytes >= others[step].sent_bytes
        assert reports[step].repeated == 0


CASES = [
    ("2x2", ("node",), "bits=4", {0, 1}),
    ("2x2", ("node", "gpu"), "bits=2,bits_o=2", {0, 1}),
    ("flat", ("flat",), "bits=2,refresh=3", {0, 1, 3, 4, 6, 7}),
    ("2x2x2", ("node", "tile"), "bits=1", {0, 1}),
]


@pytest.mark.parametrize(("topology", "slow", "schedule", "anew"), slow_but([CASES[0]], CASES), ids=str)
def test_a_text_is_sent_until_all_have_seen_that_it_stays(
    topology: str, slow: tuple[str, ...], schedule: str, anew: set[int]
) -> None:
    ranks.run(stay_still, 8 if topology == "2x2x2" else 4, topology, slow, schedule, anew)


def be_all_text(rank: int, schedule: str) -> list[int]:
    mesh, way = way_of(Topology.parse("2x2", 4), ("node",))
    found, reports = run(rank, mesh, way, schedule, text=True, picture=False)
    for step in range(STEPS):
        for name, mine in zip("kv", found[step][1:], strict=True):
            assert torch.equal(mine, torch.cat(expected_text(name, rank, 4, step, (9, 9)), 2))
    return [report.sent_bytes for report in reports]


@pytest.mark.parametrize("schedule", ["bits=4", "bits=4,cached=0.2"])
def test_cross_attention_sends_its_text_twice(schedule: str) -> None:
    for sent in ranks.run(be_all_text, 4, schedule):
        assert len(set(sent[2:])) == 1
        # Q alone, by its bits, scales and the gaps of messages.
        assert sent[2] < sent[1] - 2 * BATCH * 2 * TEXT * DIM // 2


def change_after_all(rank: int, step: int, culprit: int) -> list[int]:
    mesh, way = way_of(Topology.parse("2x2", 4), ("node",))
    found, reports = run(rank, mesh, way, "bits=4", text=True, change=(step, culprit))
    for name in (1, 2):
        parts = found[step][name].unflatten(2, (4, -1)).unbind(2)
        for part, text in zip(parts, expected_text("qkv"[name], rank, 4, step, (step, culprit)), strict=True):
            # Coded while all tokens are, and repeated exactly once they are not.
            torch.testing.assert_close(part[:, :, :TEXT], text, rtol=0, atol=1e-6 if step == 1 else 0)
    for later in range(step + 1, STEPS):
        for name in (1, 2):
            parts = found[later][name].unflatten(2, (4, -1)).unbind(2)
            for part, text in zip(parts, expected_text("qkv"[name], rank, 4, later, (9, 9)), strict=True):
                assert (part[:, :, :TEXT] - text).norm() < 0.01 * text.norm()
    return [report.repeated for report in reports]


def test_a_text_that_changes_after_all_is_sent_as_it_is() -> None:
    """At once on CPUs: who has it on a slow axis tells the others there."""
    found = ranks.run(change_after_all, 4, 4, 0)
    # Heads of rank 3 lie at rank 1 when they come to the slow axis.
    assert found[1] == found[3] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert found[0] == found[2] == [0] * STEPS


def test_a_text_that_changes_at_once_is_never_left_out() -> None:
    """Rank 0's differs at the step in which ranks look."""
    for repeated in ranks.run(change_after_all, 4, 1, 0):
        assert not any(repeated)


def repeat_a_step(rank: int) -> list[int]:
    mesh, way = way_of(Topology.parse("2x2", 4), ("node",))
    runtime = Runtime(way, "balanced", "bits=4", None, largest)
    runtime.begin_run(STEPS)
    for _ in range(STEPS):
        layer_codecs = runtime.layer_codecs("attn", 1, 0, SHARE)
        tensors = [picture_of(name, rank, 0) for name in "qkv"]
        send_to_heads(tensors, mesh, Label("qkv"), layer_codecs=layer_codecs).wait()
        runtime.end_step()
    return [report.sent_bytes for report in runtime.reports]


def test_a_model_that_is_called_on_the_same_input_shows_nothing() -> None:
    """As benchmarks and warm-ups call it: what stays then may change later, and a benchmark sends what runs send."""
    for sent in ranks.run(repeat_a_step, 4):
        assert len(set(sent[1:])) == 1


def begin_in_8_bits(rank: int) -> list[int]:
    mesh, way = way_of(Topology.parse("2x2", 4), ("node",))
    found, reports = run(rank, mesh, way, "bits=4", text=True, picture=False, begins="first=8")
    for name, place in (("k", 1), ("v", 2)):
        text = torch.cat(expected_text(name, rank, 4, 0, (9, 9)), 2)
        assert all(torch.equal(arrived[place], found[2][place]) for arrived in found[3:])
        errors = [((arrived[place] - text).norm() / text.norm()).item() for arrived in found]
        assert errors[1] < 0.2 * errors[0] < 0.002  # what the first step lacks, the second one sends
        assert errors[2] == errors[1]
    return [report.sent_bytes for report in reports]


def test_a_text_that_began_in_8_bits_stays_as_the_second_step_has_left_it() -> None:
    for sent in ranks.run(begin_in_8_bits, 4):
        assert len(set(sent[2:])) == 1 and sent[2] < sent[1] < sent[0]
