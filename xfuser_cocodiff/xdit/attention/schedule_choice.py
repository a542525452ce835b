"""Schedules that the layers of a kind may run by: what the user has fixed, what changes no bit, what may be faster."""

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
    """Return the number of head groups that the user wants, where whole tensors are sent that it divides, else 1.

    Args:
        session: with the settings.
        heads: of Q, K and V on a rank.
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
    """Attention that also finds out whether cutting its heads into groups changes a bit of it.

    Args:
        attend: the attention.
        groups: their number.
    """

    def __init__(self, attend: Attend, groups: int) -> None:
        self._attend, self._groups = attend, groups
        self.is_same = True
        """Whether no bit changes, on this rank."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup
    ) -> torch.Tensor:
        result = self._attend(query, key, value, ALL_HEADS)
        if self._groups > 1:
            parts = [HeadGroup(index, self._groups) for index in range(self._groups)]
            cut = [
                self._attend(part.of(query, HEADS), part.of(key, HEADS), part.of(value, HEADS), part) for part in parts
            ]
            self.is_same = torch.equal(torch.cat(cut, HEADS), result)
        return result


def choose_schedules(
    signature: LayerSignature,
    session: Session,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: int = 1,
    is_same: bool = True,
) -> None:
    """Settle by which schedules a kind of layer may run. All ranks that share a sequence call this.

    Args:
        kind: of layer, whose V may be able to go first.
        session: whose ranks agree.
        query: Q of a call, as it is sent; its size counts.
        key: K.
        value: V.
        groups: of heads.
        is_same: whether that many groups change no bit on this rank.
    """
    fixed, policy, flat = session.overlap.v_first, session.mesh.policy, session.comm_setup.flat_mesh
    whole = query.nbytes + key.nbytes + value.nbytes
    pays = fixed is None and signature.ready and policy.sends_early(value.nbytes, whole)
    has_mlp = signature.has_parallel_mlp and fixed is not False and not session.comm_setup.synchronous
    sizes = [value.nbytes, query.nbytes + key.nbytes] if pays else [whole]
    is_flat = flat is None or {policy.choose(size) for size in (*sizes, query.nbytes)} == {Plan.flat(flat.topology)}
    # Links differ from one Ulysses group of a ring to another, and the MLP's hooks from rank to rank.
    answers = session.all_reduce([float(each) for each in (pays, has_mlp, is_flat, is_same)], "min")
    pays, has_mlp, is_flat, is_same = map(bool, answers)
    if not is_same:
        signature.unequal = (groups,)
        warn_once(
            f"--cocodiff_head_groups {groups} has no effect: attention in groups of heads is not bit-identical; "
            "leave it out"
        )
        groups = 1
    known = session.cached_schedule(signature)
    ours = OverlapSchedule(signature.ready if fixed else pays, groups, has_mlp)
    stocks = OverlapSchedule(groups=groups, flat=session.runtime is None and not is_flat)
    if known:
        signature.candidates = ScheduleCandidates([known])
    else:
        signature.candidates = ScheduleCandidates([stocks, ours] if fixed is None else [ours])
