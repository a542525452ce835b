"""Guidance branches coded together, against their definition, and the ends of each link against each other."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.engine.attention.reshard import start_heads_to_seq, start_seq_to_heads
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.codec.quantize import dequantize, quantize
from xfuser_cocodiff.engine.codec.rows import GAIN_STEPS, Int8Rows
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.topology.topology import Topology

BATCH, HEADS, TOKENS, DIM, STEPS = 2, 4, 16, 64, 7
SCHEDULE = "first=8,bits=2"
"""Codes references that are extrapolated, at a gain of the link's."""
OF_RANKS = f"{SCHEDULE},predictor=0"
"""Codes references as they are: where a link has values of several ranks, these have one gain."""


def whole(name: str, branch: int, step: int) -> torch.Tensor:
    """Return a tensor (B, H, S, D) of a branch, the same on every rank.

    Changes from step to step correlate between branches, and a part of them goes on, so that gains are above 0.
    """
    seeds = ord(name), 1000 + 100 * ord(name) + step, 50 + ord(name) + branch, 9000 * (branch + 1) + 77 * step, 3
    first, change, own, own_change, drift = (
        torch.randn(BATCH, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(seed)) for seed in seeds
    )
    return first + 0.1 * change + (0.3 + 0.1 * step) * own + 0.02 * own_change + 0.2 * step * drift


def coded(values: torch.Tensor, bits: float) -> torch.Tensor:
    """Return values as they are after quantization by rows."""
    packed, scales, _ = quantize(values, bits)
    return dequantize(packed, scales, bits, values.shape[-1])


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Return values as a reference of 8 bits has them."""
    return Int8Rows.of(values[None]).values.view(values.shape)


class Definition:
    """Values that a receiver decodes of one tensor of one sender, branch by branch and step by step.

    Args:
        predicts: whether references are extrapolated.
    """

    def __init__(self, predicts: bool) -> None:
        self.predicts = predicts
        self.references: dict[int, list[torch.Tensor]] = {}
        """References of each branch, the last one and the one before; of others than branch 0, those of differences."""
        self.gains: dict[int, float] = {}
        """Gain of each branch; a half before the first estimate."""
        self.is_kept = False
        """Whether the sender has the values of branch 0 of this step."""

    def decode(
        self, branch: int, values: torch.Tensor, leading: torch.Tensor, is_repeated: bool = False, lost: str = ""
    ) -> torch.Tensor:
        """Return the decoded values.

        Args:
            branch: branch, called in order.
            values: its values (B, n, s, D).
            leading: the values of branch 0.
            is_repeated: whether the values are not finite and sent losslessly.
            lost: "leader" if the collective of branch 0 has not ended in this step, "last" if it did not in the last.
        """
        base = leader = torch.zeros_like(values)
        if branch:
            base, leader = leading, self.references[0][0]
        known = self.references.get(branch, [])
        is_first = branch == 0 and not known
        if is_repeated:
            decoded = values.nan_to_num(0.0)
            self._restart(branch, rounded(decoded) - leader if branch else decoded)
            if branch == 0 and len(known) > 1:
                self.gains[0] = 0.0  # estimated of values that are not finite
        elif lost == "leader" or (lost == "last" and branch == 0):
            decoded = coded(values, 8)
            self._restart(branch, decoded)
        elif lost == "last":  # the reference is one of the values themselves
            self._restart(branch, known[0] - leader)
            decoded = leader + self._sent(branch, values - base)
        elif branch and not self.is_kept:
            predicted = rounded(known[0] + leader) if known else None
            decoded = coded(values, 8) if predicted is None else coded(values - predicted, 2) + predicted
            self._restart(branch, rounded(decoded) - leader)
        elif not known:
            difference = coded(values - base, 8)
            decoded = leader + difference
            self.references[branch] = [rounded(difference)]
        else:
            decoded = leader + self._sent(branch, values - base)
        if branch == 0:
            # Without extrapolation there is no memory for them in the first step.
            self.is_kept = not is_repeated and (self.predicts or not is_first)
        return values if is_repeated else decoded

    def _restart(self, branch: int, values: torch.Tensor) -> None:
        """Replace the references of a branch by one of values; another one of differences has another gain."""
        self.references[branch] = [rounded(values)]
        if branch:
            self.gains.pop(branch, None)

    def _sent(self, branch: int, values: torch.Tensor) -> torch.Tensor:
        """Return what is decoded of a residual to the prediction, plus the prediction."""
        known, gain = self.references[branch], self.gains.get(branch, 0.5)
        predicted = known[0]
        if self.predicts and len(known) > 1:
            change = known[0] - known[1]
            predicted = change * gain + known[0]
            best = ((values - known[0]) * change).sum() / change.square().sum()
            self.gains[branch] = (best * GAIN_STEPS + 0.5).floor().clamp(0, GAIN_STEPS).item() / GAIN_STEPS
        decoded = coded(values - predicted, 2) + predicted
        self.references[branch] = [rounded(decoded), known[0]]
        return decoded


class Expected:
    """Definitions of all tensors between two ranks."""

    def __init__(self, predicts: bool) -> None:
        self.definitions: dict = {}
        self.predicts = predicts

    def received(
        self,
        name: str,
        source: int,
        target: int,
        branch: int,
        values: torch.Tensor,
        leading: torch.Tensor,
        bad: bool,
        lost: str = "",
    ) -> torch.Tensor:
        """Return values as the target decodes them, or as they are on one rank."""
        if source == target:
            return values
        definition = self.definitions.setdefault((name, source, target), Definition(self.predicts))
        return definition.decode(branch, values, leading, bad, lost)


def piece(tensor: torch.Tensor, name: str, source: int, target: int, size: int) -> torch.Tensor:
    """Return the part of a whole tensor that a rank sends to another."""
    tokens, heads = (source, target) if name != "o" else (target, source)
    return tensor.chunk(size, 2)[tokens].chunk(size, 1)[heads]


def over(sizes: str) -> tuple[Mesh, AxisPartition]:
    mesh = Mesh.over(dist.group.WORLD, Topology.parse(sizes))
    return mesh, AxisPartition.over(dist.group.WORLD, mesh, ("node",), Mesh.over)


def contents(branch: int, step: int, how: str, size: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a call; the second branch may lack the first two tokens of each rank."""
    wholes = {name: whole(name, branch, step) for name in "qkvo"}
    if branch and how == "shorter":
        return {name: torch.cat([part[:, :, 2:] for part in each.chunk(size, 2)], 2) for name, each in wholes.items()}
    return wholes


def run_branches(rank: int, sizes: str, how: str, schedule: str) -> tuple:
    """Run all-to-alls of two branches and compare what arrives; return the references of both ends."""
    kernels.use("torch")
    size = dist.get_world_size()
    mesh, partition = over(sizes)
    runtime = CodecRuntime(partition, "balanced", schedule, list)
    expected = Expected(bool(runtime.schedule.predictor))
    runtime.begin_run(STEPS)
    for step in range(STEPS):
        for branch in range(3 if how == "three branches" else 2):
            bad = step == 3 and how == f"not finite in {branch}"
            wholes, leading = (contents(each, step, how, size) for each in (branch, 0))
            if bad:
                for tensor in wholes.values():
                    tensor[:, :, :, 0] = torch.nan
            mine = [wholes[name].chunk(size, 2)[rank].contiguous() for name in "qkv"]
            layer_codecs = runtime.layer_codecs(CodedCall("attn", 1, branch, LayerSizes.of(*mine)))
            handle = start_seq_to_heads(mine, mesh, Label("qkv"), layer_codecs=layer_codecs)
            found = dict(zip("qkv", handle.wait(), strict=True))
            found["o"] = torch.empty_like(mine[0])
            attended = wholes["o"].chunk(size, 1)[rank].contiguous()
            start_heads_to_seq(attended, found["o"], mesh, Label("o"), layer_codecs).wait()
            if how == "interrupted" and (step, branch) == (3, 0):
                lose(runtime, rank)
            for name, source in itertools.product("qkvo", range(size)):
                values, of_leader = (piece(each[name], name, source, rank, size) for each in (wholes, leading))
                if source // (size // 2) == rank // (size // 2):
                    wanted = values
                else:
                    lost = {3: "leader" * branch, 4: "last"}.get(step, "") if how == "interrupted" else ""
                    who = (f"{name}{branch}", 0) if how == "shorter" else (name, branch)  # then each is coded by itself
                    wanted = expected.received(who[0], source, rank, who[1], values, of_leader, bad, lost)
                arrived = found[name].chunk(size, 2 if name != "o" else 1)[source]
                what = f"{name} of branch {branch} in step {step}: "
                torch.testing.assert_close(arrived, wanted, rtol=0, atol=1e-5, equal_nan=True, msg=what.__add__)
        if step == 2:  # all previous references are there
            assert runtime.store.planned_bytes == runtime.store.nbytes
        if step < STEPS - 1:
            runtime.end_step()
    return ends(runtime)


def lose(runtime: CodecRuntime, rank: int) -> None:
    """Leave the links of branch 0 as if their collective had never ended, with different references at both ends."""
    for state in runtime.store.link_states[:4]:
        state.in_flight = True
        state.received.advance(torch.full_like(state.received.values, rank))


def ends(runtime: CodecRuntime) -> list[tuple]:
    """Return the references of all links of this rank: what it has sent and received, and whether of differences."""
    found = []
    for state in runtime.store.link_states:
        assert state.sent.is_difference == state.received.is_difference
        found.append((state.sent.values, state.received.values, state.sent.is_difference))
    return found


def assert_equal_ends(found: list[list[tuple]], is_joint: bool = True) -> None:
    """Compare both ends of the links between two slow coordinates."""
    assert any(is_difference for _, _, is_difference in found[0]) == is_joint
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        for near, far in zip(one, other, strict=True):
            assert torch.equal(near[0], far[1]) and torch.equal(near[1], far[0])


def run_gathered(rank: int) -> list[tuple]:
    """Gather K and V of two branches and compare what arrives; return the references of both ends."""
    kernels.use("torch")
    mesh, partition = over("node=2")
    size, fast = dist.get_world_size(), partition.num_fast
    runtime = CodecRuntime(partition, "balanced", SCHEDULE, list)
    expected = Expected(bool(runtime.schedule.predictor))
    runtime.begin_run(STEPS)
    for step in range(STEPS):
        for branch in range(2):
            wholes, leading = (contents(each, step, "plain", size) for each in (branch, 0))
            mine = [wholes[name].chunk(size, 2)[rank].contiguous() for name in "qkv"]
            layer_codecs = runtime.layer_codecs(CodedCall("attn", 1, branch, LayerSizes.of(*mine), gathers_kv=True))
            ulysses = UlyssesAttention(mesh, layer_codecs=layer_codecs, gather=partition)
            ulysses.start_inputs(*mine)
            found = ulysses.wait_inputs(0)
            for (name, arrived), source in itertools.product(zip("kv", found[1:], strict=True), range(size)):
                values, of_leader = (
                    each[name].chunk(size, 2)[source].chunk(fast, 1)[rank % fast] for each in (wholes, leading)
                )
                wanted = values
                if source // fast != rank // fast:
                    wanted = expected.received(name, source, rank, branch, values, of_leader, False)
                what = f"{name} of branch {branch} in step {step}: "
                torch.testing.assert_close(arrived.chunk(size, 2)[source], wanted, rtol=0, atol=1e-5, msg=what.__add__)
        assert step < 2 or runtime.store.planned_bytes == runtime.store.nbytes
        if step < STEPS - 1:
            runtime.end_step()
    return ends(runtime)


def test_gathered_k_and_v_are_what_the_definition_says() -> None:
    assert_equal_ends(ranks.run(run_gathered, 2))


HOW = ["plain", "interrupted", "not finite in 0", "not finite in 1", "three branches", "shorter"]


@pytest.mark.parametrize(
    ("sizes", "how", "schedule"), [*(("node=2", how, SCHEDULE) for how in HOW), ("2x2", "plain", OF_RANKS)]
)
def test_all_to_alls_decode_what_the_definition_says(sizes: str, how: str, schedule: str) -> None:
    found = ranks.run(run_branches, Topology.parse(sizes).size, sizes, how, schedule)
    assert_equal_ends(found, is_joint=how != "shorter")
