"""Self-check of link references: after a coded step, both ends of each link must hold the same bytes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.rank_results import gather_results
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs, LinkState


class ReferenceCheckError(RuntimeError):
    """Sender and receiver of a link hold different references; the same error on every rank."""


class _CodedLayer(NamedTuple):
    """A layer's links in a Ulysses group or ring."""

    layer: str
    partition: AxisPartition
    peers: list[int]
    """Rank at the other end of each link, in the order of the references."""
    link_states: Mapping[tuple[str, HeadGroup], LinkState]


class ReferenceCheck:
    """Checksums of the references of one step's layers.

    Args:
        host_group: all ranks of the run, in a group for host memory.
    """

    def __init__(self, host_group: dist.ProcessGroup) -> None:
        self._host_group = host_group
        self._layers: dict[int, _CodedLayer] = {}

    def note(self, layer: str, codecs: LayerCodecs | None, ranks: Sequence[int]) -> None:
        """Note a layer that is encoded, unless this step is a keyframe.

        Args:
            layer: name of the layer.
            codecs: its codecs in this step; None if it is lossless.
            ranks: global ranks of the Ulysses group or ring.
        """
        if codecs is None or codecs.is_keyframe or codecs.partition is None:
            return
        partition = codecs.partition
        peers = [ranks[partition.ranks_at(index)[partition.fast_index]] for index in partition.remote_indices]
        self._layers[id(codecs.link_states)] = _CodedLayer(layer, partition, peers, codecs.link_states)

    @property
    def is_due(self) -> bool:
        """Whether a step has encoded layers."""
        return bool(self._layers)

    def check(self) -> None:
        """Compare the references of all links at both ends. Every rank must call this after the same step.

        Raises:
            ReferenceCheckError: those of a link differ; names axes, layers and ranks, on every rank.
        """
        layers = list(self._layers.values())
        self._layers.clear()
        own = dist.get_rank()
        results = gather_results(
            lambda: (own, [_checksums(each) for each in layers]), self._host_group, "self-check of references"
        )
        sums = dict(results)  # by global rank
        differing = {
            (sender, receiver): layers[number]
            for receiver, by_layer in sums.items()
            for number, each in enumerate(by_layer)
            for sender, found in each["received"].items()
            if sums[sender][number]["sent"].get(receiver) != found
        }
        if differing:
            layer, links = next(iter(differing.values())), ", ".join(f"{a} to {b}" for a, b in sorted(differing))
            raise ReferenceCheckError(
                f"self-check: link references of sender and receiver differ along "
                f"{', '.join(layer.partition.slow_axis_names)}, first in layer {layer.layer}, between ranks {links}; "
                "--cocodiff_mode exact avoids it. Please report this with the output of `cocodiff env`"
            )


def _checksums(coded: _CodedLayer) -> dict[str, dict[int, list[int]]]:
    """Return the sums of all references to and from each rank, by tensor and head group."""
    sums: dict[str, dict[int, list[int]]] = {"sent": {}, "received": {}}

    def read() -> None:  # on the comm stream, behind the codecs that write references there
        for state in coded.link_states.values():
            for end, reference in (("sent", state.sent), ("received", state.received)):
                found = reference.checksums()
                # A gather sends all ranks the same values, by one reference.
                by_peer = zip(coded.peers, found * (len(coded.peers) // max(len(found), 1)), strict=bool(found))
                for peer, checksum in by_peer:
                    sums[end].setdefault(peer, []).append(checksum)

    coded.partition.slow.comm_stream.run(read)
    return sums
