"""Calls of the codecs' kernels, a copy of as many bytes, and the all-to-alls of a layer without communication."""

from collections.abc import Callable

import torch

from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.rows import GAIN_STEPS, Int8Rows, MessagePart, Prediction
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.stages import PendingStage, Stages
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.compression.step_codecs import StepCodecs
from xfuser_cocodiff.engine.compression.step_errors import StepErrors
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.simulation.workloads import Workload

Call = Callable[[], object]
NODES = 2
"""Size of the slow axis."""
BITS = 2
"""Bits per value."""
STEPS = 50
"""Number of steps of the run whose later layers are timed."""


def kernel_calls(
    workload: Workload, resolution: int, degree: int, device: torch.device, bits: float = BITS
) -> tuple[int, dict[str, Call]]:
    """Return the kernel calls by name, for the part of one of Q, K, V and O that a rank sends along the slow axis.

    Before them, return their minimum memory traffic in bytes: each tensor read or written once.
    """
    torch.manual_seed(0)
    groups, heads = degree // NODES, workload.heads // degree
    tokens, dim = tokens_per_rank(workload, resolution, degree), workload.head_dim
    # Strides as after the all-to-all along fast axes: tokens outside of heads.
    values = torch.randn(NODES, groups, tokens, heads, dim, device=device).bfloat16().transpose(2, 3)
    shape = (NODES - 1, groups, heads, tokens, dim)
    reference = torch.randn(shape, device=device)
    gains = torch.full((len(reference),), GAIN_STEPS // 2, dtype=torch.uint8, device=device)
    previous = Int8Rows.of(reference + 0.1 * torch.randn_like(reference))
    prediction = Prediction(Int8Rows.of(reference), previous, gains)
    size = Codec(bits, predicts=True).payload_bytes(shape, values.dtype)
    payload = torch.zeros(NODES, size, dtype=torch.uint8, device=device)
    memory = Int8Rows(*map(torch.empty_like, previous))
    part = MessagePart(values, prediction, bits, payload, memory, range(1))
    energies = torch.empty(1, 2, device=device)
    target = part._replace(values=torch.empty_like(values))
    # Values, both references and the new one.
    of_values, of_reference = values[:-1].nbytes, sum(tensor.nbytes for tensor in previous)
    moved = of_values + 3 * of_reference + (NODES - 1) * payload.shape[1]
    return moved, {"encode": lambda: kernels.encode([part], energies), "decode": lambda: kernels.decode([target])}


def tokens_per_rank(workload: Workload, resolution: int, degree: int) -> int:
    """Return the tokens per rank."""
    return -(-workload.tokens(resolution) // degree)


def copy_of(nbytes: int, device: torch.device) -> Call:
    """Return a copy that reads and writes `nbytes` together."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


class _NoCommunication(Stages):
    """Stages that return what was sent, so that only device and host work is timed."""

    def start(self, buffer: torch.Tensor, plan: Plan, number: int) -> PendingStage:
        dim = plan.dims[number]
        sent = (buffer.movedim(dim, 0) if dim else buffer).contiguous()
        return lambda: sent.movedim(0, dim)

    def start_gather(self, block: torch.Tensor, plan: Plan, number: int) -> PendingStage:
        ranks = plan.shape[plan.dims[number]]
        return lambda: block.expand(ranks, *block.shape)


def _local_mesh(comm_stream: CommStream, **axes: int) -> Mesh:
    """Return a mesh over some axes that does not communicate."""
    topology = Topology.named(**axes)
    plan = Plan.hierarchical(topology)
    return Mesh(
        topology,
        _NoCommunication(dict.fromkeys(plan.stages), comm_stream.device),
        PlanPolicy.fixed(plan),
        comm_stream,
    )


def layer_call(workload: Workload, tokens: int, degree: int, device: torch.device, mode: str) -> Call:
    """Return a call of a layer's all-to-alls for so many tokens on a rank, as in the later steps of a run in a mode.

    Nothing is communicated. Coded layers gather K and V between the nodes, as a run on two nodes does.
    """
    comm_stream, near = CommStream.on(device), {"gpu": degree // NODES} if degree > NODES else {}
    mesh, fast = _local_mesh(comm_stream, node=NODES, **near), _local_mesh(comm_stream, **near) if near else None
    partition = AxisPartition(NODES, mesh.topology.size // NODES, 0, _local_mesh(comm_stream, node=NODES), fast)
    query, key, value = (
        torch.randn(1, workload.heads, tokens, workload.head_dim, device=device).bfloat16() for _ in range(3)
    )
    link_states: dict = {}
    errors, schedule = StepErrors(), modes.PRESETS.get(mode)
    codecs = schedule.codecs(STEPS - 1, STEPS, BITS if schedule.error else None) if schedule else None

    def call() -> None:
        layer_codecs, gather = None, partition if codecs else None
        if codecs:
            errors.start_readout()
            step = StepCodecs(codecs=codecs)
            layer_codecs = LayerCodecs(partition, step, link_states, CodecStats(), errors, gathers_kv=True)
        UlyssesAttention(mesh, layer_codecs=layer_codecs, gather=gather).run(query, key, value, _attend)

    call()  # the keyframe that creates the references
    return call


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup) -> torch.Tensor:
    """Return O of an attention that takes no time."""
    return query
