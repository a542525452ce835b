"""Choice of the numbers of head groups that layers may use: set or tried, divisible, and bit-identical."""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.attention.reshard import HEADS
from xfuser_cocodiff.engine.attention.ulysses import Attend
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.topology import head_groups
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import Overlap


def head_groups_to_check(
    signature: LayerSignature,
    session: Session,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gathers_kv: bool,
) -> list[int]:
    """Return the numbers of head groups that the layers of a signature may use if attention by them is bit-identical.

    That is the number of its schedule if it is known, the number that is set or cached, else those that the planner
    expects to save time. In lossy modes there are some only where K and V are gathered. All ranks that share a sequence
    must call this, and get the same numbers.

    Args:
        signature: layer signature.
        session: active session.
        query: Q of a call as it is sent, shape (B, H, S/P, D).
        key: K, likewise.
        value: V, likewise.
        gathers_kv: whether K and V of this call are gathered, encoded.
    """
    if signature.candidates:
        schedule = signature.candidates.schedule
        return [] if schedule.groups == 1 or schedule.gathers_kv else [schedule.groups]
    heads = [tensor.shape[HEADS] // session.head_degree(gathers_kv) for tensor in (query, key)]
    by_coded_heads = session.runtime is not None and not gathers_kv
    if session.overlap.head_groups:
        return _set_head_groups(session.overlap.head_groups, heads, by_coded_heads)
    if by_coded_heads or session.overlap != Overlap():
        return []
    cached = session.cached_schedule(signature)
    if cached:
        return [cached.groups] if cached.groups > 1 and not any(number % cached.groups for number in heads) else []
    numbers, policy = head_groups.divisors_to_try(*heads), session.mesh.policy
    if policy.splits_heads is None or not numbers:
        return []
    input_bytes = query.nbytes + key.nbytes + value.nbytes
    pays = [
        policy.splits_heads(input_bytes, query.nbytes, groups, fewer)
        for fewer, groups in zip([1, *numbers], numbers, strict=False)
    ]
    # Links differ between the Ulysses groups of a ring, and each check of a number runs the ring's collectives.
    answers = session.all_reduce([float(each) for each in pays], "min")
    return [number for number, answer in zip(numbers, answers, strict=True) if answer]


def _set_head_groups(groups: int, heads: Sequence[int], by_coded_heads: bool) -> list[int]:
    """Return the number of head groups that is set; nothing where it is 1, or has no effect."""
    if groups == 1:
        return []
    if by_coded_heads:
        warn_once(
            "--cocodiff_head_groups has no effect in lossy modes where K and V are not gathered; leave it out, or "
            "choose --cocodiff_mode exact"
        )
        return []
    if any(number % groups for number in heads):
        warn_once(
            f"--cocodiff_head_groups {groups} has no effect: {' and '.join(map(str, heads))} heads per rank are not "
            "divisible by it; choose a divisor"
        )
        return []
    return [groups]


class HeadGroupCheck:
    """Attention that also checks whether it is bit-identical by head groups.

    Args:
        attend: attention of a head group.
        numbers: numbers of head groups.
    """

    def __init__(self, attend: Attend, numbers: Sequence[int]) -> None:
        self._attend = attend
        self.is_same = dict.fromkeys(numbers, True)
        """Whether it is bit-identical on this rank, by number of head groups."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup
    ) -> torch.Tensor:
        output = self._attend(query, key, value, ALL_HEADS)
        for number in self.is_same:
            head_groups = [HeadGroup(index, number) for index in range(number)]
            outputs = [
                self._attend(group.of(query, HEADS), group.of(key, HEADS), group.of(value, HEADS), group)
                for group in head_groups
            ]
            self.is_same[number] = torch.equal(torch.cat(outputs, HEADS), output)
        return output
