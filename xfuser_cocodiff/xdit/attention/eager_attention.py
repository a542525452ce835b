"""Ulysses attention of the running layer in eager mode, by its overlap schedule.

Sizes in shapes: P ranks of a Ulysses group, B batch, H heads, S sequence, D head dim.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import BY_HEADS, Division, OverlapSchedule
from xfuser_cocodiff.engine.attention.reshard import HEADS
from xfuser_cocodiff.engine.attention.ulysses import Attend, UlyssesAttention
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.xdit.attention.schedule_choice import (
    agree_on_bits,
    choose_schedules,
    find_worthwhile,
    share_schedules,
)
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature
from xfuser_cocodiff.xdit.patching.log import info_once, warn_once
from xfuser_cocodiff.xdit.session.session import Session


@dataclass(frozen=True)
class AttentionInputs:
    """What attention needs of a call, for one way to divide its heads over ranks."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Q, K and V as they are sent, shape (B, H, S/P, D) each; Q with joint tokens, K and V possibly with fewer heads or
    another number of tokens."""
    attend_with: Callable[[LayerCodecs | None, str], Attend]
    """Returns the attention, given the codecs of a ring and the name of the layer."""


class AttentionCall(ABC):
    """A call of attention in xDiT. What it returns, but the values of tensors, is the same on every rank."""

    @abstractmethod
    def inputs(self, gather: AxisPartition | None) -> AttentionInputs:
        """Return the inputs, given the axes along which K and V are gathered, or None."""

    @property
    def stock(self) -> Callable[[], torch.Tensor] | None:
        """Computes it as stock xDiT; None where stock does not support it."""
        return None

    @property
    def can_split_heads(self) -> bool:
        """Whether attention may be computed for some of the heads at a time, if it is bit-identical."""
        return False

    @property
    def can_gather(self) -> bool:
        """Whether attention may have fewer queries than keys, if it is bit-identical in a lossless mode."""
        return False

    @property
    def gathers_coded(self) -> bool:
        """Whether K and V are gathered if this call is encoded."""
        return False

    def allows(self, division: Division) -> bool:
        """Return whether attention may be divided so."""
        groups, gathers_kv = division
        return (groups == 1 or self.can_split_heads) and (self.can_gather or not gathers_kv)


def attend(call: AttentionCall, in_flight: Handle | None, session: Session) -> torch.Tensor:
    """Compute attention by the schedule of the running layer, with its codecs, and return O, (B, H, S/P, D).

    The first call of a size decides on the schedules that its layers may use. In a lossless mode, the first call of
    each signature also checks their bits.

    Args:
        call: the call.
        in_flight: handle of V if its all-to-all is in flight already.
        session: active session.
    """
    if session.mesh.topology.size == 1:
        return _attend_in_ring(call, session)
    return (_attend_lossy if session.runtime else _attend_lossless)(call, in_flight, session)


def _attend_in_ring(call: AttentionCall, session: Session) -> torch.Tensor:
    """Compute attention of a sequence that only a ring shares."""
    layer, inputs = session.layers.current, call.inputs(None)
    codecs = session.codecs.of_ring(layer, LayerSizes.of(*inputs.tensors)) if session.ring else None
    return inputs.attend_with(codecs, layer.name if layer else "")(*inputs.tensors, ALL_HEADS)


def _attend_lossless(call: AttentionCall, in_flight: Handle | None, session: Session) -> torch.Tensor:
    layer = session.layers.current
    signature, schedule = (layer.call.signature, layer.call.schedule) if layer else (None, OverlapSchedule())
    if schedule.stock and call.stock:
        return call.stock()
    if not call.allows(schedule.division):
        _warn_of_ignored(call, signature, session)
        signature.is_same[schedule.division], schedule = False, schedule.divided(BY_HEADS)
        if in_flight:
            in_flight.drain()
            in_flight = None
    if signature and signature.candidates is None:
        share_schedules(signature, session)
    run = functools.partial(_run, call, session)
    if signature and not signature.is_checked and signature.structure.is_known:
        _warn_of_ignored(call, signature, session)
        return _check(call, signature, session, in_flight, run)
    return run(schedule.division, in_flight)


def _check(
    call: AttentionCall,
    signature: LayerSignature,
    session: Session,
    in_flight: Handle | None,
    run: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Compute attention by heads. Compare it with the divisions that may save time, or with the one that layers of this
    size use already.

    The output of a query or a head does not depend on others, so most kernels give the same bits for a part of them;
    but a kernel may divide its work by their number.
    """
    worthwhile = None
    if signature.candidates:
        divisions = [each for each in [signature.candidates.schedule.division] if call.allows(each)]
        signature.is_same[signature.candidates.schedule.division] = False  # if the call does not allow it
    else:
        gathered = call.inputs(session.gather).tensors if call.can_gather and session.gather else None
        by_heads = call.inputs(None).tensors
        worthwhile = find_worthwhile(signature, session, by_heads, gathered, call.can_split_heads)
        divisions = list(worthwhile.divisions)
    output = run(BY_HEADS, in_flight)
    checked = {each: equal_outputs(run(each, counts_traffic=False), output) for each in divisions}
    agree_on_bits(signature, session, checked)
    if worthwhile:
        choose_schedules(signature, session, worthwhile, call.stock is not None)
    return output


def equal_outputs(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether outputs are bit-identical, perhaps but for different numbers of zero-padded heads behind."""
    heads = min(output.shape[HEADS], expected.shape[HEADS])
    return torch.equal(output[:, :heads], expected[:, :heads])


def _attend_lossy(call: AttentionCall, in_flight: Handle | None, session: Session) -> torch.Tensor:
    layer = session.layers.current
    signature, schedule = (layer.call.signature, layer.call.schedule) if layer else (None, OverlapSchedule())
    tensors = call.inputs(session.gather if call.gathers_coded else None).tensors
    sizes = LayerSizes.of(*tensors)
    if signature:
        signature.sizes, signature.gathers_kv = sizes, call.gathers_coded
    codecs = session.codecs.of_layer(layer, sizes, call.gathers_coded)
    if codecs and codecs.gathers_kv and not call.can_gather:
        codecs = session.codecs.by_heads(layer, sizes)
        if in_flight:
            in_flight.drain()
            in_flight = None
    gathers_kv = codecs is not None and codecs.gathers_kv
    if signature and signature.candidates is None:
        share_schedules(signature, session)
    if signature and signature.candidates is None and signature.structure.is_known:
        _warn_of_ignored(call, signature, session)
        worthwhile = find_worthwhile(signature, session, tensors, tensors if gathers_kv else None, call.can_split_heads)
        signature.is_same |= dict.fromkeys(worthwhile.divisions, True)  # results are lossy anyway
        choose_schedules(signature, session, worthwhile)
    groups = schedule.groups if gathers_kv and call.can_split_heads else 1
    return _run(call, session, (groups, gathers_kv), in_flight, codecs, sizes)


def _run(
    call: AttentionCall,
    session: Session,
    division: Division,
    in_flight: Handle | None = None,
    codecs: LayerCodecs | None = None,
    sizes: LayerSizes | None = None,
    counts_traffic: bool = True,
) -> torch.Tensor:
    """Compute attention, divided in some way, over the plugin's all-to-alls."""
    layer, (groups, gathers_kv) = session.layers.current, division
    gather, name = session.gather if gathers_kv else None, layer.name if layer else ""
    inputs = call.inputs(gather)
    ring_codecs = session.codecs.of_ring(layer, sizes) if session.ring and sizes else None
    deferred = layer.take_deferred() if layer else []
    beside = (lambda: [each.materialize() for each in deferred]) if deferred else None
    mesh = session.mesh if counts_traffic else session.mesh.with_separate_traffic()
    ulysses = UlyssesAttention(mesh, groups, name, in_flight, codecs, gather)
    return ulysses.run(*inputs.tensors, inputs.attend_with(ring_codecs, name), beside)


def _warn_of_ignored(call: AttentionCall, signature: LayerSignature, session: Session) -> None:
    """Log options that have no effect in calls like this one."""
    if not call.can_split_heads and (session.overlap.head_groups or 1) > 1:
        warn_once(
            f"{signature.name}: --cocodiff_head_groups {session.overlap.head_groups} has no effect, since "
            "attention needs all heads at once (quantizing backend, PipeFusion, or xDiT's long-context attention)"
        )
    if session.config.plan and session.config.plan.gathers_kv and not call.can_gather:
        info_once(
            f"{signature.name}: K and V are not gathered, since attention needs all queries (causal, a "
            "per-query mask, sparse, or xDiT's long-context attention); all-to-alls by heads run instead"
        )
