"""Ulysses attention over exchanges that hide behind computation.

V may be under way before Q and K exist (V-First). The heads of a rank may be cut into groups: while one attends, the
next one's Q and K come in and the one before it goes back.

Sizes in shapes: P ranks, B batch, S sequence, H heads, D head dim.
"""

from collections.abc import Callable

import torch

from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.exchange import HEADS, SEQUENCE, Part, reshard, send_to_heads, send_to_sequence
from xfuser_cocodiff.lane import Handle
from xfuser_cocodiff.traffic import Label

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Part], torch.Tensor]
"""Attention of one part of a rank's heads: Q, K, V (B, h, S, D) to O (B, h, S, D)."""


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | Handle[list[torch.Tensor]],
    attend: Attend,
    mesh: Mesh,
    groups: int = 1,
    layer: str = "",
) -> torch.Tensor:
    """Bring Q, K and V to the heads of this rank, attend, and bring O back.

    Args:
        query: shape (B, H, S/P, D).
        key: the same, perhaps with fewer heads; each count must be a multiple of P * `groups`.
        value: as `key`; or its exchange, already under way.
        attend: what attention is.
        mesh: ranks and their topology.
        groups: parts of the heads; every element is that of one group, where attention treats heads alike.
        layer: its name in traces.

    Returns:
        O, shape (B, H, S/P, D).
    """
    if groups == 1:
        return _at_once(query, key, value, attend, mesh, layer)
    early = value if isinstance(value, Handle) else None
    parts = [Part(index, groups) for index in range(groups)]
    result = None
    under_way: list[Handle] = [early] if early else []
    going: list[Handle[None]] = []

    def send(part: Part) -> Handle[list[torch.Tensor]]:
        tensors, what = ([query, key], "qk") if early else ([query, key, value], "qkv")
        under_way.append(send_to_heads(tensors, mesh, Label(what, layer), part))
        return under_way[-1]

    try:
        coming = send(parts[0])
        whole_value = early.wait()[0] if early else None
        for part in parts:
            received = coming.wait()
            if part is not parts[-1]:
                coming = send(parts[part.index + 1])
            own_value = part.of(whole_value, HEADS) if early else received[2]
            attended = attend(received[0], received[1], own_value, part)
            if result is None:
                result = attended.new_empty(*query.shape[:-1], attended.shape[-1])
            going.append(send_to_sequence(attended, result, mesh, Label("o", layer), part))
        for handle in going:
            handle.wait()
        return result
    finally:  # after an error, peers still have to get what they were promised
        for handle in (*under_way, *going):
            handle.abandon()


def _at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | Handle[list[torch.Tensor]],
    attend: Attend,
    mesh: Mesh,
    layer: str,
) -> torch.Tensor:
    if isinstance(value, Handle):
        try:
            query, key = reshard([query, key], HEADS, SEQUENCE, mesh, Label("qk", layer))
        except BaseException:
            value.abandon()
            raise
        [value] = value.wait()
    else:
        query, key, value = reshard([query, key, value], HEADS, SEQUENCE, mesh, Label("qkv", layer))
    return reshard([attend(query, key, value, Part())], SEQUENCE, HEADS, mesh, Label("o", layer))[0]
