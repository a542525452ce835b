"""Messages: tensors of one exchange, encoded into one buffer for each place that they go to, and decoded from there.

Sizes in shapes: P places, L of them that are not the rank's own; G groups of tokens, H heads, T tokens, D head dim.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.compression import codecs
from xfuser_cocodiff.engine.compression.codecs import EXACT, Codec, QuantError
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs, active_for, codec_for, is_finite
from xfuser_cocodiff.engine.kernels import rows
from xfuser_cocodiff.engine.kernels.rows import ActiveTokens
from xfuser_cocodiff.engine.topology import devices as devices

_FLAG_BYTES, _FINITE, _NOT_FINITE = 1, 0, 1
"""In front of a message between CPUs: whether all values of its sender are finite. Nobody reads it on an accelerator,
where the host would have to wait, and nobody writes it."""


class Message:
    """Tensors of one exchange, from their encoding to the decoding of what has come.

    Args:
        names: a letter for each tensor; V is encoded before Q and K of the same head group.
        values: (P, G, H, T, D) each, by destination.
        layer_codecs: how to encode.
        head_group: of the heads.
        here: the rank's own places, which are left out.
        copies: how often values travel that are the same for all places, of which they have none: P is 1 then.
    """

    def __init__(
        self,
        names: str,
        values: Sequence[torch.Tensor],
        layer_codecs: LayerCodecs,
        head_group: HeadGroup,
        here: range,
        copies: int | None = None,
    ) -> None:
        self.names, self.values = names, values
        self._layer_codecs, self._head_group = layer_codecs, head_group
        self._here, self._copies = here, copies or 1
        self._left_out = None if copies else here
        # V first: it chooses tokens for Q and K.
        self._by_name = dict(sorted(zip(names, values, strict=True), key=lambda pair: pair[0] != "v"))
        self._links = rows.others(len(values[0]), self._left_out)
        self._codecs: dict[str, Codec] = {}

    def encoded(self) -> torch.Tensor:
        """Encode the values, uint8 (P, bytes); nothing but the flag is written for the rank's own places."""
        chosen: dict[str, ActiveTokens | None] = {}
        for name, values in self._by_name.items():
            shape, link_state = (self._links, *values.shape[1:]), self._layer_codecs.link_state(name, self._head_group)
            codec = codec_for(self._layer_codecs, name, self._head_group, shape, values.dtype)
            chosen[name] = active_for(self._layer_codecs, name, self._head_group, values, codec, self._left_out)
            self._codecs[name], link_state.in_flight = codec, True
            self._layer_codecs.stats.exact_bytes += self._copies * math.prod(shape) * values.itemsize
        return self._written(chosen)

    def _written(self, chosen: Mapping[str, ActiveTokens | None]) -> torch.Tensor:
        """The values by their codecs, in a buffer that counts as sent."""
        sizes, stats = self._sizes, self._layer_codecs.stats
        buffer = self.values[0].new_empty(len(self.values[0]), sum(sizes), dtype=torch.uint8)
        stats.sent_bytes += self._copies * self._links * buffer.shape[1]
        losses: list[QuantError] = []
        for name, choice, payload in self._sections(buffer, sizes):
            reference, active = self._layer_codecs.link_state(name, self._head_group).sent, chosen.get(name)
            if choice.nbytes and active:
                codecs.pack_choice(active, choice, self._left_out)
            loss = codecs.encode(self._by_name[name], reference, self._codecs[name], active, payload, self._left_out)
            losses += [loss] if loss else []
        stats.losses += losses
        if not devices.capabilities(buffer.device.type).is_asynchronous:
            buffer[:, :_FLAG_BYTES].fill_(_FINITE if all(map(is_finite, losses)) else _NOT_FINITE)
        return buffer

    def decode(
        self,
        received: torch.Tensor,
        landings: Sequence[torch.Tensor],
        carry: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Write what other places have encoded, but for the rank's own places.

        Args:
            received: their messages, uint8 (P, bytes).
            landings: room for the tensors, (P, G, H, T, D) each.
            carry: exchanges messages once more. Where some values, of some rank on these slow axes, are not finite, all
                of these ranks see that, since each tells all others, and send theirs as they are.
        """
        self._read_choices(received)
        if not devices.capabilities(received.device.type).is_asynchronous and received[:, :_FLAG_BYTES].any():
            self._layer_codecs.stats.repeated += 1
            self._codecs = dict.fromkeys(self._by_name, EXACT)
            received = carry(self._written({}))
        targets = dict(zip(self.names, landings, strict=True))
        for name, _, payload in self._sections(received, self._sizes):
            link_state, codec, active = self._layer_codecs.link_state(name, self._head_group), self._codecs[name], None
            link_state.in_flight = False
            if codec.chooses:
                chooser = name if name in codecs.CHOOSING else "v"
                active = self._layer_codecs.choices[chooser, self._head_group].received
            codecs.decode(payload, link_state.received, codec, active, targets[name], self._here)

    def _read_choices(self, received: torch.Tensor) -> None:
        """Read which tokens others have chosen, of first messages: those that are sent as they are have no choice, and
        Q and K, which may be under way, go by V's."""
        for name, choice, _ in self._sections(received, self._sizes):
            if choice.nbytes:
                _, groups, _, tokens, _ = self._by_name[name].shape
                count = self._codecs[name].active(tokens)
                active = codecs.unpack_choice(choice, groups, tokens, count, self._here)
                self._layer_codecs.choices[name, self._head_group].received = active

    @property
    def _sizes(self) -> list[int]:
        """Bytes of the sections of a message for one place, each with the gap behind it: its flag, and for each tensor
        its choice of tokens, perhaps none, and its values."""
        sizes = [_FLAG_BYTES]
        for name, values in self._by_name.items():
            sizes += codecs.section_bytes(self._codecs[name], name, (self._links, *values.shape[1:]), values.dtype)
        return [each for size in sizes for each in (size, codecs.aligned(size) - size)]

    def _sections(self, buffer: torch.Tensor, sizes: list[int]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """For each tensor its name, and the parts of a message (P, bytes) that have its choice and its values."""
        _, *rooms = buffer.split_with_sizes(sizes, 1)[::2]
        return list(zip(self._by_name, rooms[::2], rooms[1::2], strict=True))
