"""Choice of overlap schedules for the layers of a signature: set by the user, bit-identical, and possibly faster."""

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule, ScheduleCandidates
from xfuser_cocodiff.engine.attention.reshard import HEADS
from xfuser_cocodiff.engine.attention.ulysses import Attend
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.session.session import Session


def usable_head_groups(session: Session, *heads: int) -> int:
    """Return the number of head groups set by the user; 1 if the mode is lossy or it does not divide the heads.

    Args:
        session: active session.
        heads: numbers of heads of Q and of K and V on a rank.
    """
    groups = session.overlap.head_groups or 1
    if groups == 1:
        return 1
    if session.runtime:
        warn_once("--cocodiff_head_groups has no effect in lossy modes; leave it out, or choose --cocodiff_mode exact")
        return 1
    if any(number % groups for number in heads):
        warn_once(
            f"--cocodiff_head_groups {groups} has no effect: {' and '.join(map(str, heads))} heads per rank are not "
            "divisible by it; choose a divisor"
        )
        return 1
    return groups


class HeadGroupCheck:
    """Attention that also checks whether it is bit-identical by head groups.

    Args:
        attend: attention of a head group.
        groups: number of head groups.
    """

    def __init__(self, attend: Attend, groups: int) -> None:
        self._attend, self._groups = attend, groups
        self.is_same = True
        """Whether it is bit-identical on this rank."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup
    ) -> torch.Tensor:
        output = self._attend(query, key, value, ALL_HEADS)
        if self._groups > 1:
            head_groups = [HeadGroup(index, self._groups) for index in range(self._groups)]
            outputs = [
                self._attend(group.of(query, HEADS), group.of(key, HEADS), group.of(value, HEADS), group)
                for group in head_groups
            ]
            self.is_same = torch.equal(torch.cat(outputs, HEADS), output)
        return output


def choose_schedules(
    signature: LayerSignature,
    session: Session,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: int = 1,
    is_same: bool = True,
) -> None:
    """Set the candidate schedules of a layer signature. All ranks that share a sequence must call this.

    Args:
        signature: layer signature.
        session: active session.
        query: Q of a call as it is sent; only its size matters.
        key: K, likewise.
        value: V, likewise.
        groups: number of head groups.
        is_same: whether attention by that many head groups is bit-identical on this rank.
    """
    fixed, policy, flat = session.overlap.v_first, session.mesh.policy, session.comm_setup.flat_mesh
    nbytes = query.nbytes + key.nbytes + value.nbytes
    pays_off = fixed is None and signature.ready and policy.sends_early(value.nbytes, nbytes)
    has_mlp = signature.has_parallel_mlp and fixed is not False and not session.comm_setup.synchronous
    sizes = [value.nbytes, query.nbytes + key.nbytes] if pays_off else [nbytes]
    is_flat = flat is None or {policy.choose(size) for size in (*sizes, query.nbytes)} == {Plan.flat(flat.topology)}
    # Links differ between the Ulysses groups of a ring, and hooks of the MLP between ranks.
    answers = session.all_reduce([float(each) for each in (pays_off, has_mlp, is_flat, is_same)], "min")
    pays_off, has_mlp, is_flat, is_same = map(bool, answers)
    if not is_same:
        signature.unequal = (groups,)
        warn_once(
            f"--cocodiff_head_groups {groups} has no effect: attention by head groups is not bit-identical; "
            "leave it out"
        )
        groups = 1
    cached = session.cached_schedule(signature)
    overlapped = OverlapSchedule(signature.ready if fixed else pays_off, groups, has_mlp)
    sequential = OverlapSchedule(groups=groups, flat=session.runtime is None and not is_flat)
    if cached:
        signature.candidates = ScheduleCandidates([cached])
    else:
        signature.candidates = ScheduleCandidates([sequential, overlapped] if fixed is None else [overlapped])
