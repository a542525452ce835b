"""Communication on a mock device: values do not depend on the speed of streams, and the host never waits."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests import coded_layers, ranks
from tests.mock_device import HAS_BACKENDS, Event, MockDevice
from tests.mock_meshes import (
    GATHERED,
    TOPOLOGY,
    device,
    make_tables,
    mesh_of,
    partition_of,
    use_capabilities_of,
)
from xfuser_cocodiff.engine.attention.reshard import start_seq_to_heads
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.codec.codec import EXACT, Codec
from xfuser_cocodiff.engine.comm import comm_stream, failure_detection
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.deadline import Deadline
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.stages import Stages
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.plans import Plan

pytestmark = pytest.mark.skipif(not HAS_BACKENDS, reason="needs a PyTorch that supports devices written in Python")

LAYERS = STEPS = 4
PLANS = ("flat", "hierarchical")
CODECS = {
    "extrapolated": Codec(bits=2, predicts=True),
    "reference": Codec(bits=3.2),
    "change": Codec(token_fraction=0.5),
}
BOTH = (False, True)
THREADS = ((False, False), (True, False), (True, True))
"""Whether messages are staged through host memory, and whether the thread that does so is late."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup) -> torch.Tensor:
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


def run(
    mesh: Mesh,
    groups: int,
    v_first: bool,
    codecs_of_layers: Iterator[LayerCodecs | None],
    gather: AxisPartition | None = None,
) -> None:
    """Run the layers of a transformer: each computes the input of the next one and frees the rest."""
    hidden = torch.randn(2, 8, 8, 16, device=device())
    for layer_codecs in codecs_of_layers:
        value = hidden * 3
        ulysses = UlyssesAttention(mesh, groups, layer_codecs=layer_codecs, gather=gather)
        if v_first:
            ulysses.start_value(value)
        query, key = hidden + 1, hidden - 1
        hidden = ulysses.run(query, key, value, attend)


def lossless(rank: int, plan: str) -> None:
    for groups, v_first, (staged, late) in itertools.product((1, 2), BOTH, THREADS):
        with MockDevice(late):
            run(mesh_of(plan, staged), groups, v_first, iter([None] * LAYERS))


def test_lossless_communication_is_ordered() -> None:
    ranks.run(lossless, 1, "hierarchical")


def gathered(rank: int, slow: str) -> None:
    for groups, v_first, (staged, late) in itertools.product((1, 2), BOTH, THREADS):
        with MockDevice(late):
            mesh, partition = partition_of(slow, staged)
            run(mesh, groups, v_first, iter([None] * LAYERS), partition)


def test_gathered_k_and_v_are_ordered() -> None:
    ranks.run(gathered, 1, "all")


def mixed_plans(rank: int) -> None:
    """Send a large message in two stages, then a small one in a single stage."""
    flat, hierarchical = (Plan.parse(plan, TOPOLOGY) for plan in PLANS)
    groups = {
        stage: SimpleNamespace(size=lambda: TOPOLOGY.size, rank=lambda: 0)
        for stage in (*flat.stages, *hierarchical.stages)
    }
    small, large = (torch.Size((1, 4, tokens, 16)) for tokens in (2, 8))
    policy = PlanPolicy(((large.numel() * 4, flat), (0, hierarchical)))
    with MockDevice() as mock_device:
        mesh = Mesh(TOPOLOGY, Stages(groups, device()), policy, CommStream.on(device()))
        handles = [
            start_seq_to_heads([torch.randn(size, device=device())], mesh, Label("v")) for size in (large, small)
        ]
        networks = list(mock_device._networks.values())
        for handle in handles:
            handle.wait()
    *stages, single = networks
    assert len(stages) == 2
    assert all(single.clock[stage.name] for stage in stages), "the small message may overtake the large one"


def test_a_single_stage_waits_for_earlier_messages_in_stages() -> None:
    ranks.run(mixed_plans, 1)


def coded(rank: int, slow: str, codec: Codec, uses_triton: bool, v_first_once: bool) -> None:
    for (staged, late), v_first in zip(THREADS, (v_first_once, not v_first_once, v_first_once), strict=True):
        with MockDevice(late) as mock_device, mock_device.by_triton() if uses_triton else nullcontext():
            make_tables()
            mesh, partition = partition_of(slow, staged)
            layers = codecs_by_step(partition, codec)
            run(mesh, 1, v_first, layers, partition if slow == GATHERED else None)


def codecs_by_step(partition: AxisPartition, codec: Codec) -> Iterator[LayerCodecs]:
    """Yield the codecs of one layer, step by step."""
    link_states: dict = {}
    for step in range(STEPS):
        codecs_of = dict.fromkeys("qkvo", codec if step else EXACT)
        how = {"step": step, "has_exact_references": codec.selects_tokens}
        yield coded_layers.layer_codecs(partition, codecs_of, link_states, **how)


@pytest.mark.parametrize(
    ("slow", "codec", "uses_triton", "v_first_once"),
    [("node", "extrapolated", True, True), (GATHERED, "change", False, True), ("all", "reference", True, True)],
)
def test_coded_communication_is_ordered(slow: str, codec: str, uses_triton: bool, v_first_once: bool) -> None:
    """With V first on one kind of thread or on the two others."""
    ranks.run(coded, 1, slow, CODECS[codec], uses_triton, v_first_once)


def on_xpu(rank: int) -> None:
    use_capabilities_of("xpu")
    for plan in PLANS:
        lossless(rank, plan)
    gathered(rank, "node")
    for slow in ("all", GATHERED):
        coded(rank, slow, CODECS["extrapolated"], uses_triton=True, v_first_once=True)


def test_functional_collectives_of_xpus_are_ordered() -> None:
    ranks.run(on_xpu, 1)


def deadlines(rank: int, staged: bool) -> list[tuple[str, bool]]:
    """Return the deadlines of a run: the name of the operation, and whether it has the event behind it."""
    found = []

    def recorded(*known: Any) -> Deadline:
        found.append(Deadline(*known))
        return found[-1]

    recording = mock.patch.object(comm_stream, "Deadline", recorded)
    heartbeat = mock.patch.object(failure_detection, "is_heartbeat_running", lambda: True)
    with MockDevice(), recording, heartbeat, mock.patch.object(Event, "query", lambda self: True, create=True):
        mesh = mesh_of("hierarchical", staged, comm_stream=CommStream.on(device(), staged, range(4), 600.0))
        run(mesh, 2, True, iter([None] * LAYERS))
    assert all((each.ranks, each.seconds) == (range(4), 580) for each in found)
    return [(str(each.name), isinstance(each.end, Event)) for each in found]


def test_operations_that_the_host_does_not_wait_for_have_one_deadline_each() -> None:
    """Without one the backend ends the process and does not name the unresponsive rank."""
    of_layer = [(f"communication of {tensors}", True) for tensors in ("v", "qk", "qkv", "o", "o")]
    assert ranks.run(deadlines, 1, False) == [of_layer * LAYERS]
    assert ranks.run(deadlines, 1, True) == [[]]  # the comm stream's thread waits, and names it


def captured_deadlines(rank: int) -> list:
    with mock.patch.object(devices, "is_captured", lambda device: True):
        return deadlines(rank, False)


def test_captured_operations_have_no_deadline() -> None:
    """The events of a captured graph have no state, and a query would invalidate the capture."""
    assert ranks.run(captured_deadlines, 1) == [[]]
