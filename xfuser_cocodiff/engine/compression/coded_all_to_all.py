"""The coded all-to-all: values are sent unchanged along fast axes and encoded along slow ones, in one of two forms.

Staged: values first go along the fast axes, unchanged. Those for other coordinates on the slow axes are then encoded
once, and decoded only at their destination, also where they cross several slow axes. Few messages cross slow axes,
and all values cross the fast ones.

Single-stage: values for other coordinates on the slow axes are encoded at their source and go to their rank along all
axes. At the same time, values for the own coordinate go along the fast axes, unchanged. Little data crosses the fast
axes and no stage waits for another, but there are as many messages as ranks.

In both forms link references are at the two ends of a link: one for each other coordinate on the slow axes if staged,
or one for each rank there if single-stage.

Sizes in shapes: S coordinates on slow axes, F on fast axes; n heads, s tokens and D head dim of one rank's values for
another; B batch. P slots and G groups of tokens of a message: S and F * B if staged, S * F and B if single-stage.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.packing import pack, unpack
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.message import Message
from xfuser_cocodiff.engine.topology.plans import Plan

T = TypeVar("T")


class _CodedAllToAll(NamedTuple):
    """Arguments of an all-to-all that both of its ends need."""

    targets: Sequence[torch.Tensor]
    """Tensors to write received values to, (*partition.shape, B, n, s, D) each."""
    mesh: Mesh
    """Mesh of all axes."""
    layer_codecs: LayerCodecs
    """Codecs of the layer."""
    label: Label
    """Letters of the tensors, the layer's name, and the head group."""
    is_blocking: bool
    """Whether the caller waits for the all-to-all at once."""

    @property
    def partition(self) -> AxisPartition:
        """Slow and fast axes."""
        return self.layer_codecs.partition

    def message(self, values: list[torch.Tensor], local_slots: range) -> Message:
        """Return a message of values (P, G, n, s, D)."""
        samples = self.targets[0].shape[-4]
        return Message(self.label, values, self.layer_codecs, local_slots, samples)

    def receive(
        self,
        message: Message,
        received: torch.Tensor,
        local_values: Sequence[torch.Tensor],
        local_slots: range,
        resend: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Write received and local values to the targets.

        Args:
            message: message that this rank sent.
            received: messages of other ranks, uint8 (P, bytes).
            local_values: values of the local slots, which were not encoded.
            local_slots: slots of this rank.
            resend: sends messages (P, bytes) once more, see :meth:`Message.decode`.
        """
        views = [self.partition.slot_view(target, len(received)) for target in self.targets]
        for (view, _), values in zip(views, local_values, strict=True):
            view[local_slots.start : local_slots.stop].copy_(values)
        run = self.mesh.comm_stream.run
        message.decode(received, [view for view, _ in views], lambda sent: run(lambda: resend(sent)))
        for (view, is_target), target in zip(views, self.targets, strict=True):
            if not is_target:
                target.copy_(self.partition.join(view.view(self.partition.num_slow, -1, *target.shape[-4:])))


def start(
    pieces: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    mesh: Mesh,
    layer_codecs: LayerCodecs,
    label: Label,
    result: T,
    is_blocking: bool = False,
) -> Handle[T]:
    """Start a coded all-to-all.

    Args:
        pieces: values by destination, (*partition.shape, B, n, s, D) each, all of one dtype.
        targets: tensors for values by source, of the same shapes; written when the handle is waited for.
        mesh: mesh of all axes.
        layer_codecs: codecs of the layer. Of one head group, V must be sent before or together with Q and K.
        label: letters of the tensors, q, k, v or o, the layer's name, and the head group.
        result: result of the handle.
        is_blocking: whether the caller waits for the handle at once.
    """
    partition = layer_codecs.partition
    operation = _CodedAllToAll(targets, mesh, layer_codecs, label, is_blocking)
    split = [partition.split(piece) for piece in pieces]
    if partition.fast is None or layer_codecs.single_stage:
        return _start_single_stage(split, operation, result)
    return _start_staged(split, operation, result)


def _start_single_stage(split: list[torch.Tensor], operation: _CodedAllToAll, result: T) -> Handle[T]:
    """Send values (S, F, B, n, s, D) to all ranks in one stage; those for other slow coordinates are encoded."""
    partition, mesh, label = operation.partition, operation.mesh, operation.label
    local_slots = range(partition.slow_index * partition.num_fast, (partition.slow_index + 1) * partition.num_fast)
    message = operation.message([piece.flatten(0, 1) for piece in split], local_slots)
    coded = _to_ranks(message.encode(), partition, mesh)
    local_values = [piece[partition.slow_index] for piece in split]

    def resend(sent: torch.Tensor) -> torch.Tensor:
        return _to_slots(mesh.all_to_all(*_to_ranks(sent, partition, mesh)), partition)

    def receive(received: torch.Tensor, received_local: list[torch.Tensor]) -> T:
        operation.receive(message, _to_slots(received, partition), received_local, local_slots, resend)
        return result

    if partition.fast is None:
        return mesh.start_all_to_all(
            *coded, label, lambda received: receive(received, local_values), operation.is_blocking
        )
    fast, uncoded = partition.fast, _by_plan(pack(local_values, 1), partition.fast)

    def communicate() -> tuple[torch.Tensor, list[torch.Tensor]]:
        return mesh.all_to_all(*coded), unpack(fast.all_to_all(*uncoded), local_values, 1)

    # On the comm stream, even if both have one stage: it keeps the order of other operations among the same ranks.
    return mesh.start(label, communicate, lambda arrived: receive(*arrived), operation.is_blocking)


def _to_ranks(message: torch.Tensor, partition: AxisPartition, mesh: Mesh) -> tuple[torch.Tensor, Plan]:
    """Return a message (S * F, bytes) in the order of ranks and the shape of a plan, and that plan."""
    plan = mesh.policy.choose(message.nbytes)
    by_rank = partition.join(message.unflatten(0, (partition.num_slow, partition.num_fast)))
    return by_rank.reshape(*plan.shape, -1), plan


def _to_slots(received: torch.Tensor, partition: AxisPartition) -> torch.Tensor:
    """Return received messages as (S * F, bytes); the inverse of :func:`_to_ranks`."""
    return partition.split(received.reshape(*partition.shape, -1)).flatten(0, 1)


def _start_staged(split: list[torch.Tensor], operation: _CodedAllToAll, result: T) -> Handle[T]:
    """Send values (S, F, B, n, s, D) along the fast axes, and then encoded along the slow axes."""
    partition, mesh, fast = operation.partition, operation.mesh, operation.partition.fast
    local_slots = range(partition.slow_index, partition.slow_index + 1)

    def along_slow_axes(sent: torch.Tensor) -> torch.Tensor:
        return partition.slow.all_to_all(*_by_plan(sent, partition.slow)).reshape(partition.num_slow, -1)

    def communicate() -> tuple[Message, Sequence[torch.Tensor], torch.Tensor]:
        """Return the values too, so that the comm stream records their use by the caller's stream."""
        by_fast_index = [piece.transpose(0, 1) for piece in split]
        received = unpack(fast.all_to_all(*_by_plan(pack(by_fast_index, 1), fast)), by_fast_index, 1)
        message = operation.message([piece.transpose(0, 1).flatten(1, 2) for piece in received], local_slots)
        return message, message.values, along_slow_axes(message.encode())

    def receive(arrived: tuple[Message, Sequence[torch.Tensor], torch.Tensor]) -> T:
        message, values, received = arrived
        local_values = [each[partition.slow_index, None] for each in values]
        operation.receive(message, received, local_values, local_slots, along_slow_axes)
        return result

    return mesh.start(operation.label, communicate, receive, operation.is_blocking)


def _by_plan(message: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, Plan]:
    """Return a message (ranks, n) in the shape of a plan for the mesh, and that plan."""
    plan = mesh.policy.choose(message.nbytes)
    return message.view(*plan.shape, -1), plan
