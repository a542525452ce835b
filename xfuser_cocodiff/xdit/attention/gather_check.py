"""The check in a lossless mode that attention with gathered K and V is bit-identical to all-to-alls by heads.

The output of one query does not depend on other queries, so most kernels give the same bits for a part of them; but a
kernel may divide its work by their number.
"""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.attention.reshard import HEADS
from xfuser_cocodiff.engine.attention.ulysses import Attend, UlyssesAttention
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature
from xfuser_cocodiff.xdit.session.session import Session


def groups_to_compare(
    session: Session,
    signature: LayerSignature,
    tensors: Sequence[torch.Tensor],
    gathered_tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
) -> list[int]:
    """Return the numbers of head groups by which lossless layers of a signature may gather K and V if their bits stay
    the same: that of its schedule if it is known, else some where a plan says so or an earlier process has chosen it,
    and where the planner expects to save time.

    All ranks that share a sequence must call this, and get the same answer.

    Args:
        session: active session.
        signature: layer signature.
        tensors: Q, K and V of a call as they are sent by heads, shape (B, H, S/P, D) each.
        gathered_tensors: the same as they are sent where K and V are gathered, perhaps with less zero padding.
        numbers: numbers of head groups that may save time.
    """
    if signature.candidates:
        schedule = signature.candidates.schedule
        return [schedule.groups] if schedule.gathers_kv else []
    is_tried, cached = bool(session.config.plan), session.cached_schedule(signature)
    if not is_tried and cached:
        is_tried = cached.gathers_kv
    elif not is_tried and session.overlap.v_first is None and (pays_off := session.mesh.policy.gathers_kv):
        sizes = [[tensor.nbytes for tensor in each] for each in (tensors, gathered_tensors)]
        is_tried = bool(session.all_reduce([float(pays_off(*sizes))], "min")[0])
    heads = [tensor.shape[HEADS] // session.gather.num_fast for tensor in gathered_tensors[:2]]
    return [number for number in (1, *numbers) if is_tried and not any(each % number for each in heads)]


def compare_gathered(
    session: Session,
    name: str,
    tensors: Sequence[torch.Tensor],
    attend: Attend,
    output: torch.Tensor,
    groups: Sequence[int],
) -> dict[int, bool]:
    """Return whether attention with gathered K and V is bit-identical on this rank, by number of head groups.

    Args:
        session: active session.
        name: name of the layer in traces.
        tensors: Q, K and V as they are sent with gathered K and V, shape (B, H, S/P, D) each.
        attend: attention of a head group.
        output: O of all-to-alls by heads, (B, H, S/P, D), perhaps with zero-padded heads after those of Q.
        groups: numbers of head groups; the same on all ranks.
    """
    query, key, value = tensors
    expected, same = output[:, : query.shape[HEADS]], {}
    for number in groups:
        gathered = UlyssesAttention(session.mesh, number, name, gather=session.gather).run(query, key, value, attend)
        same[number] = torch.equal(gathered[:, : expected.shape[HEADS]], expected)
    return same
