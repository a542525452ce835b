"""Ulysses attention over exchanges that hide behind computation.

V may be under way before Q and K exist (V-First). The heads of a rank may be cut into groups: while one attends, the
next ones come in and those before it go back. Then V of the first group alone goes first: attention begins when the
first group is there, and nothing that is needed later should be before it on the links.

Sizes in shapes: P ranks, B batch, S sequence, H heads, D head dim.
"""

from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.attention.reshard import HEADS, SEQUENCE, reshard, send_to_heads, send_to_sequence
from xfuser_cocodiff.codec.layer_codecs import LayerCodecs
from xfuser_cocodiff.exchange.head_group import HeadGroup
from xfuser_cocodiff.exchange.lane import Handle
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.exchange.traffic import Label

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, HeadGroup], torch.Tensor]
"""Attention of one head group: Q, K, V (B, h, S, D) to O (B, h, S, D)."""


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: Attend,
    mesh: Mesh,
    groups: int = 1,
    layer: str = "",
    early: Handle[list[torch.Tensor]] | None = None,
    layer_codecs: LayerCodecs | None = None,
    beside: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Bring Q, K and V to the heads of this rank, attend, and bring O back.

    Args:
        query: shape (B, H, S/P, D).
        key: the same, perhaps with fewer heads; each count must be a multiple of P * `groups`.
        value: as `key`.
        attend: what attention is.
        mesh: ranks and their topology.
        groups: number of head groups; every element is that of one group, where attention treats heads alike.
        layer: its name in traces.
        early: the exchange of V, or of its first head group, already under way.
        layer_codecs: what travels on slow axes; everything, as it is, when not given.
        beside: computes something else, while Q, K and V travel.

    Returns:
        O, shape (B, H, S/P, D).
    """
    if groups == 1 and layer_codecs is None and beside is None:
        return _at_once(query, key, value, attend, mesh, layer, early)
    head_groups = [HeadGroup(index, groups) for index in range(groups)]
    coming: list[Handle[list[torch.Tensor]]] = []
    going: list[Handle[None]] = []
    result = None
    try:
        for head_group in head_groups:  # all of them now, so that the links never run dry
            with_value = early is None or head_group.index > 0
            tensors, what = ([query, key, value], "qkv") if with_value else ([query, key], "qk")
            is_awaited = groups == 1 and with_value and beside is None
            coming.append(send_to_heads(tensors, mesh, Label(what, layer), head_group, layer_codecs, is_awaited))
        if beside:
            beside()
        first_value = early.wait() if early else []  # Q and K follow the choice of tokens that came with it
        for head_group, handle in zip(head_groups, coming, strict=True):
            received = handle.wait()
            its_query, its_key, its_value = received if len(received) == 3 else (*received, *first_value)
            attended = attend(its_query, its_key, its_value, head_group)
            if result is None:
                result = attended.new_empty(*query.shape[:-1], attended.shape[-1])
            label = Label("o", layer)
            going.append(send_to_sequence(attended, result, mesh, label, head_group, layer_codecs, groups == 1))
        for sending in going:
            sending.wait()
        return result
    finally:  # after an error, peers still have to get what they were promised
        under_way: list[Handle[Any]] = [*coming, *going, *([early] if early else [])]
        for one in under_way:
            one.abandon()


def _at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: Attend,
    mesh: Mesh,
    layer: str,
    early: Handle[list[torch.Tensor]] | None,
) -> torch.Tensor:
    if early:
        try:
            query, key = reshard([query, key], HEADS, SEQUENCE, mesh, Label("qk", layer))
        except BaseException:
            early.abandon()
            raise
        [value] = early.wait()
    else:
        query, key, value = reshard([query, key, value], HEADS, SEQUENCE, mesh, Label("qkv", layer))
    return reshard([attend(query, key, value, HeadGroup())], SEQUENCE, HEADS, mesh, Label("o", layer))[0]
