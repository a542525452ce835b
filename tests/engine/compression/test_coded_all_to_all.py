"""The coded all-to-all on real ranks, against a codec for each pair of ranks in one process."""

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.coded_layers import encode, layer_codecs
from xfuser_cocodiff.engine.attention.reshard import start_heads_to_seq, start_seq_to_heads
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.codec.active_tokens import select_tokens
from xfuser_cocodiff.engine.codec.codec import ALIGNMENT, EXACT, Codec
from xfuser_cocodiff.engine.codec.coded_tensor import CodedTensor, decode
from xfuser_cocodiff.engine.codec.link_reference import LinkReference
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout, AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.compression.step_errors import StepErrors
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison.virtual_ranks import VirtualRanks
from xfuser_cocodiff.tools.simulation import coded_bytes

BATCH, HEADS, TOKENS, DIM = 2, 16, 40, 8
STEPS = 5
F32 = torch.float32


def whole(name: str, step: int) -> torch.Tensor:
    """Return a tensor (B, H, S, D) that changes a little at each step, the same on every rank."""
    first, change = (
        torch.randn(BATCH, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))
        for seed in (ord(name), 1000 * ord(name) + step)
    )
    return first + 0.1 * change


class Pairs:
    """Values that each rank receives from each other, with a codec for each pair at different slow coordinates."""

    def __init__(
        self, topology: Topology, slow: tuple[str, ...], keyframe_codec: Codec = EXACT, is_exact: bool = False
    ) -> None:
        self.topology, self.keyframe_codec, self.is_exact = topology, keyframe_codec, is_exact
        self.slow_indices = [index for index, axis in enumerate(topology.axes) if axis.name in slow]
        self.references: dict = {}
        self.selections: dict = {}

    def get(
        self, name: str, values: torch.Tensor, source: int, target: int, codec: Codec, repeated: bool = False
    ) -> torch.Tensor:
        """Return values (B, n, s, D) as the target receives them; `repeated` if they are sent again losslessly."""
        coordinates = (self.topology.coordinates(rank) for rank in (source, target))
        source_index, target_index = ([each[index] for index in self.slow_indices] for each in coordinates)
        if source_index == target_index:
            return values
        ends = self.references.setdefault((name, source, target), [LinkReference(self.is_exact) for _ in range(2)])
        reference, received = ends
        values = values.unsqueeze(0).contiguous()
        if not reference.fits(values.shape, values.dtype):
            codec = dataclasses.replace(self.keyframe_codec, predicts=codec.predicts)
        active = None
        if codec.token_fraction < 1:
            if name in "vo":
                self.selections[name, source, target] = select_tokens(values, reference, codec)
            active = self.selections[name if name == "o" else "v", source, target]
        if repeated:
            codec, active = EXACT, None
        payload = torch.empty(1, codec.payload_bytes(values.shape, values.dtype), dtype=torch.uint8)
        encode(CodedTensor(values, reference, codec, active, payload))
        decoded = torch.empty_like(values)
        decode([CodedTensor(decoded, received, codec, active, payload)])
        return decoded[0]


def is_v_major(*codecs_of: Codec) -> bool:
    """Return whether references are stored as they are."""
    return any(codec.selects_tokens for codec in codecs_of)


def assert_received(found: torch.Tensor, expected: torch.Tensor, is_of_pairs: bool, what: object) -> None:
    """Compare received values bit for bit, or by their error where a link's ranks share a gain."""
    assert torch.equal(found, expected) or (not is_of_pairs and (found - expected).norm() < 0.05 * expected.norm()), (
        what
    )


def cut(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    return tensor.chunk(count, dim)[index]


def expected_heads(
    pairs: Pairs,
    name: str,
    step: int,
    target: int,
    size: int,
    codec: Codec,
    tensor: torch.Tensor | None = None,
    repeated: bool = False,
) -> torch.Tensor:
    """Return Q, K or V as a rank receives it: its heads, all tokens."""
    values = cut(whole(name, step) if tensor is None else tensor, 1, size, target)
    shards = values.chunk(size, 2)
    return torch.cat([pairs.get(name, shard, i, target, codec, repeated) for i, shard in enumerate(shards)], 2)


def expected_sequence(
    pairs: Pairs, step: int, target: int, size: int, codec: Codec, tensor: torch.Tensor | None = None
) -> torch.Tensor:
    """Return O as a rank receives it: its tokens, all heads."""
    values = cut(whole("o", step) if tensor is None else tensor, 2, size, target)
    parts = [pairs.get("o", cut(values, 1, size, source), source, target, codec) for source in range(size)]
    return torch.cat(parts, 1)


def mesh_and_partition(topology: Topology, slow: tuple[str, ...]) -> tuple[Mesh, AxisPartition | None]:
    """Return a mesh that alternates between two plans, and its partition.

    The last stage of one plan is among the same ranks as all-to-alls along fast axes, so that no operation may overtake
    another.
    """
    plans = [Plan(topology, Plan.hierarchical(topology).stages[::-1]), Plan.flat(topology)]

    def over(group: dist.ProcessGroup, topology: Topology, plans: Sequence[Plan] = ()) -> Mesh:
        plans = [*plans] or [Plan.flat(topology)]
        turns = itertools.cycle(plans)

        class Alternating(PlanPolicy):
            def choose(self, message_bytes: int) -> Plan:
                return next(turns)

        return dataclasses.replace(Mesh.over(group, topology, plans), policy=Alternating.fixed(plans[0]))

    mesh = over(dist.group.WORLD, topology, plans)
    return mesh, AxisPartition.over(dist.group.WORLD, mesh, slow, over)


def run_all_to_alls(
    rank: int,
    text: str,
    slow: tuple[str, ...],
    codec: Codec,
    codec_of_o: Codec,
    v_first: bool,
    keyframe_codec: Codec = EXACT,
) -> None:
    size = dist.get_world_size()
    topology = Topology.parse(text, size)
    mesh, partition = mesh_and_partition(topology, slow)
    is_exact, is_of_pairs = is_v_major(codec, codec_of_o), partition.fast is None or not codec.predicts
    pairs, link_states, stats, errors = Pairs(topology, slow, keyframe_codec, is_exact), {}, CodecStats(), StepErrors()
    for step in range(STEPS):
        codecs_of = {"q": codec, "k": codec, "v": codec, "o": codec_of_o}
        how = {"errors": errors, "has_exact_references": is_exact, "keyframe_codec": keyframe_codec}
        codecs = layer_codecs(partition, codecs_of, link_states, stats, step, **how)
        q, k, v = (cut(whole(name, step), 2, size, rank).clone() for name in "qkv")
        if v_first:
            early = start_seq_to_heads([v], mesh, Label("v"), layer_codecs=codecs)
            late = start_seq_to_heads([q, k], mesh, Label("qk"), layer_codecs=codecs)
            found = {"v": early.wait()[0], **dict(zip("qk", late.wait(), strict=True))}
        else:
            handle = start_seq_to_heads([q, k, v], mesh, Label("qkv"), layer_codecs=codecs)
            found = dict(zip("qkv", handle.wait(), strict=True))
        for name in "vqk":
            expected_values = expected_heads(pairs, name, step, rank, size, codec)
            assert_received(found[name], expected_values, is_of_pairs, (name, step))
        target = torch.empty(BATCH, HEADS, TOKENS // size, DIM)
        attended = cut(whole("o", step), 1, size, rank).contiguous()
        start_heads_to_seq(attended, target, mesh, Label("o"), codecs).wait()
        assert_received(target, expected_sequence(pairs, step, rank, size, codec_of_o), is_of_pairs, step)
    moving = [axis.name for axis in topology.axes if axis.size > 1]
    if len(slow) < len(moving):  # parts of a mesh are named by their axes
        fast_name, slow_name = (
            "+".join(name for name in reversed(moving) if (name in slow) is is_slow) for is_slow in (False, True)
        )
        assert set(mesh.traffic.sent_bytes) == {fast_name, slow_name}
    assert 0 < stats.sent_bytes < stats.exact_bytes or codec.is_exact
    assert stats.repeated == 0
    if codec.bits:
        found_errors = errors.start_readout().read()
        energy, of_values = (
            sum(getattr(each, name) for each in found_errors) for name in ("error_energy", "value_energy")
        )
        assert 0 < energy < 0.1 * of_values


CASES = [
    ("2x2", ("node",), Codec(4), Codec(2)),
    ("2x2", ("node",), Codec(2, predicts=True), EXACT),
    ("2x2", ("node", "gpu"), Codec(2, predicts=True), EXACT),
    ("2x2", ("node", "gpu"), Codec(None, 0.5), Codec(None, 0.5)),
    ("flat", ("flat",), Codec(3.2), Codec(1)),
    ("2x2x2", ("node", "gpu"), Codec(None, 0.4), EXACT),
    ("2x2x2", ("node",), Codec(8), Codec(5.3)),
    ("2x2", ("node",), EXACT, EXACT),
]


@pytest.mark.parametrize(
    ("topology", "slow", "codec", "codec_of_o", "order"),
    [(*case, order) for case, order in zip(CASES, itertools.cycle(["V first", "together"]), strict=False)],
    ids=str,
)
def test_coded_all_to_all_equals_a_codec_per_pair(
    topology: str, slow: tuple[str, ...], codec: Codec, codec_of_o: Codec, order: str
) -> None:
    size = 8 if topology == "2x2x2" else 4
    ranks.run(run_all_to_alls, size, topology, slow, codec, codec_of_o, order == "V first")


def test_quantized_keyframes_carry_the_scales_of_each_head() -> None:
    codec, keyframe_codec = Codec(2), Codec(4, is_keyframe=True)
    ranks.run(run_all_to_alls, 4, "2x2", ("node",), codec, codec, True, keyframe_codec)


def repeat_v(rank: int, bad: set[int], sender: int, codec: Codec) -> tuple[list[int], int]:
    """Send V, with a value that is not finite at some steps, before Q and K, which use its selection of tokens."""
    mesh, partition = mesh_and_partition(Topology.parse("2x2", 4), ("node",))
    pairs, link_states = Pairs(mesh.topology, ("node",), is_exact=is_v_major(codec)), {}
    sent, repeated = [], 0
    for step in range(STEPS):
        stats, wholes = CodecStats(), {name: whole(name, step) for name in "vqk"}
        if step in bad:
            # From rank 0 for rank 3, or from rank 3 for rank 0; rank 1 or 2 sends it to the other node.
            wholes["v"][0, 15 if sender == 0 else 0, 10 * sender + 3, 1] = torch.nan
        how = {"has_exact_references": is_v_major(codec)}
        codecs = layer_codecs(partition, dict.fromkeys("qkvo", codec), link_states, stats, step, **how)
        v, *others = (cut(tensor, 2, 4, rank).clone() for tensor in wholes.values())
        early = start_seq_to_heads([v], mesh, Label("v"), layer_codecs=codecs)
        late = start_seq_to_heads(others, mesh, Label("qk"), layer_codecs=codecs)
        for name, found in zip("vqk", [*early.wait(), *late.wait()], strict=True):
            is_repeated = name == "v" and step in bad and rank % 2 == (sender == 0)
            expected_values = expected_heads(pairs, name, step, rank, 4, codec, wholes[name], is_repeated)
            torch.testing.assert_close(
                found, expected_values, rtol=0, atol=0, equal_nan=True, msg=f"{name} of step {step}"
            )
        sent.append(stats.sent_bytes)
        repeated += stats.repeated
    return sent, repeated


@pytest.mark.parametrize(("bad", "sender"), [({2}, 3), (set(range(STEPS)), 0)], ids=["once", "always"])
@pytest.mark.parametrize("codec", [Codec(2), Codec(None, 0.4)], ids=str)
def test_repeating_v_alone_keeps_its_selection(bad: set[int], sender: int, codec: Codec) -> None:
    """Compare values bit for bit, and the bytes of both messages; values that stay infinite are repeated every step."""
    shapes = [(1, BATCH * 2, HEADS // 4, TOKENS // 4, DIM)] * 3
    once = [
        coded_bytes.link_bytes(dict.fromkeys("vqk", codec if step else EXACT), "vqk", shapes, F32)
        for step in range(STEPS)
    ]
    again = coded_bytes.link_bytes({"v": EXACT}, "v", shapes[:1], F32)
    steps = bad - {0}  # the first step is lossless anyway
    found = ranks.run(repeat_v, 4, bad, sender, codec)
    for rank, result in enumerate(found):
        repeated = steps if rank % 2 == (sender == 0) else set()  # all of a rank's receivers
        expected_values = [size + ALIGNMENT + again * (step in repeated) for step, size in enumerate(once)]
        assert result == (expected_values, len(repeated))


def abandon(rank: int, how: str, codec: Codec) -> None:
    """Wait for no handle of one all-to-all: on one rank, or on all, whose attention fails, or what runs beside it."""
    topology, size, is_exact = Topology.parse("2x2", 4), 4, is_v_major(codec)
    mesh, partition = mesh_and_partition(topology, ("node",))
    pairs, link_states, stats = Pairs(topology, ("node",), is_exact=is_exact), {}, CodecStats()

    def fail(*_: object) -> torch.Tensor:
        raise InterruptedError

    for step in range(STEPS):
        codecs_of = dict.fromkeys("qkvo", codec)
        codecs = layer_codecs(partition, codecs_of, link_states, stats, step, has_exact_references=is_exact)
        q, k, v = (cut(whole(name, step), 2, size, rank).clone() for name in "qkv")
        all_expected = [expected_heads(pairs, name, step, rank, size, codec) for name in "vqk"]
        early = start_seq_to_heads([v], mesh, Label("v"), layer_codecs=codecs)
        if step == 2 and how != "one rank":
            ulysses = UlyssesAttention(mesh, early_value=early, layer_codecs=codecs)
            with pytest.raises(InterruptedError):
                ulysses.run(q, k, v, fail, overlapped=fail if how == "beside" else None)
            continue
        late = start_seq_to_heads([q, k], mesh, Label("qk"), layer_codecs=codecs)
        if step == 2 and rank == 1:
            for handle in (early, late):
                handle.drain()
            continue
        for found, expected in zip([*early.wait(), *late.wait()], all_expected, strict=True):
            assert torch.equal(found, expected), step
        assert step == 0 or stats.sent_bytes < stats.exact_bytes


@pytest.mark.parametrize(
    ("how", "codec"), [("attention", Codec(2)), ("one rank", Codec(None, 0.5)), ("beside", Codec(None, 0.5))], ids=str
)
def test_abandoned_exchanges_keep_references_equal(how: str, codec: Codec) -> None:
    """Continue with equal references after handles that nobody waits for."""
    ranks.run(abandon, 4, how, codec)


def run_in_contexts(rank: int, contexts: list[str]) -> None:
    """Run a coded layer once in each context of autograd."""
    mesh, partition = mesh_and_partition(Topology.parse("2x2", 4), ("node",))
    runtime = CodecRuntime(partition, "fast", None, list)
    for name in contexts:
        with getattr(torch, name)():
            runtime.begin_run(STEPS)
            for step in range(STEPS):
                mine = [cut(whole(each, step), 2, 4, rank).clone() for each in "qkv"]
                if torch.is_grad_enabled():
                    mine = [1 * each.requires_grad_() for each in mine]
                codecs = runtime.layer_codecs(CodedCall("attn", 1, 0, LayerSizes.of(*mine)))
                found = start_seq_to_heads(mine, mesh, Label("qkv"), layer_codecs=codecs).wait()
                assert not any(each.requires_grad for each in found)
                assert all(each.isfinite().all() for each in found)
                runtime.end_step()
            assert all(report.sent_bytes < report.exact_bytes for report in runtime.reports)


def test_runs_may_be_in_any_mode_of_autograd() -> None:
    """A sampler may enable gradients, and a warm-up be in another mode than the runs after it."""
    ranks.run(run_in_contexts, 4, ["inference_mode", "no_grad", "enable_grad", "inference_mode"])


def shorten_prompt(rank: int, mode: str, overrides: str) -> None:
    """Run with constant K and V of a prompt that becomes shorter in the middle of the run."""
    mesh, partition = mesh_and_partition(Topology.parse("2x2", 4), ("node",))
    runtime = CodecRuntime(partition, mode, overrides, list)
    pairs = Pairs(mesh.topology, ("node",), is_exact=mode == "paper")
    runtime.begin_run(STEPS + 4)
    for step in range(STEPS + 4):
        wholes = {"q": whole("q", step), **{name: whole(name, 0)[:, :, : 40 if step < STEPS else 24] for name in "kv"}}
        codecs = runtime.layer_codecs(CodedCall("attn", 1, 0, LayerSizes.of(*wholes.values())))
        mine = [cut(tensor, 2, 4, rank).clone() for tensor in wholes.values()]
        found = start_seq_to_heads(mine, mesh, Label("qkv"), layer_codecs=codecs).wait()
        for (name, tensor), arrived in zip(reversed(wholes.items()), reversed(found), strict=True):  # V selects first
            codec = runtime.schedule.codecs(step, STEPS + 4)[name]
            if name == "q" and step >= STEPS:  # V's selection is of other tokens
                codec = dataclasses.replace(codec, token_fraction=1.0)
            assert torch.equal(arrived, expected_heads(pairs, name, step, rank, 4, codec, tensor)), (name, step)
        runtime.end_step()


@pytest.mark.parametrize(
    ("mode", "overrides"),
    [("balanced", "first=exact,bits=4,predictor=0"), ("paper", "warmup=1,refresh=0,cached=0.5")],
)
def test_a_prompt_that_becomes_shorter_begins_with_a_keyframe(mode: str, overrides: str) -> None:
    ranks.run(shorten_prompt, 4, mode, overrides)


@pytest.mark.parametrize(("sizes", "slow"), [("2x2", ("gpu",)), ("2x2x2", ("node", "tile")), ("1x2x2", ("tile",))])
def test_a_slow_axis_inside_a_fast_one_is_refused(sizes: str, slow: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"slow axes {', '.join(slow)} must be the outermost ones"):
        AxisLayout.of(Topology.parse(sizes), slow)


SEGMENTS = [24, 16]


@pytest.mark.parametrize(("topology", "slow", "codec", "codec_of_o"), CASES, ids=str)
def test_virtual_ranks_equal_a_codec_per_pair(
    topology: str, slow: tuple[str, ...], codec: Codec, codec_of_o: Codec
) -> None:
    size = 8 if topology == "2x2x2" else 4
    virtual, is_exact = VirtualRanks(Topology.parse(topology, size), slow), is_v_major(codec, codec_of_o)
    pairs = Pairs(virtual.topology, slow, is_exact=is_exact)
    link_states, stats, sent = {}, CodecStats(), 0

    def sharded(tensor: torch.Tensor) -> torch.Tensor:
        """Return tokens in the order of real ranks: by rank, then by segment."""
        parts = tensor.split(SEGMENTS, 2)
        return torch.cat([cut(part, 2, size, rank) for rank in range(size) for part in parts], 2)

    for step in range(STEPS):
        codecs_of = {"q": codec, "k": codec, "v": codec, "o": codec_of_o}
        codecs = layer_codecs(None, codecs_of, link_states, stats, step, has_exact_references=is_exact)
        qkv = virtual.transmit("qkv", [whole(name, step) for name in "qkv"], SEGMENTS, codecs)
        [o] = virtual.transmit("o", [whole("o", step)], SEGMENTS, codecs)
        for rank in range(size):
            for name, found in reversed(list(zip("qkv", qkv, strict=True))):  # V selects first
                expected_values = expected_heads(pairs, name, step, rank, size, codec, sharded(whole(name, step)))
                assert_received(cut(sharded(found), 1, size, rank), expected_values, not codec.predicts, (name, step))
            expected_values = expected_sequence(pairs, step, rank, size, codec_of_o, sharded(whole("o", step)))
            assert_received(cut(sharded(o), 2, size, rank), expected_values, not codec_of_o.predicts, (step, rank))
        used = dict.fromkeys("qkv", codec) | {"o": codec_of_o} if step else dict.fromkeys("qkvo", EXACT)
        shapes = [(1, BATCH * size // virtual.layout.num_slow, HEADS // size, TOKENS // size, DIM)] * 3
        sent += coded_bytes.link_bytes(used, "qkv", shapes, F32) + coded_bytes.link_bytes(used, "o", shapes[:1], F32)
    assert stats.sent_bytes == size * (virtual.layout.num_slow - 1) * sent
    assert (
        stats.exact_bytes == 4 * STEPS * whole("q", 0).nbytes * (virtual.layout.num_slow - 1) // virtual.layout.num_slow
    )
