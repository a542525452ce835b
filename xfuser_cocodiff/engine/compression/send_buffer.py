"""Memory of the coded message that is being sent, used again for each message."""

import math
from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.codec.memory import lasting


class SendBuffer:
    """A buffer for one message at a time.

    A comm stream encodes and sends one message after the other, so that none needs a buffer of its own.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def view(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the buffer as bytes of a shape, uint8, whose contents are undefined; it grows if it is too small."""
        size = math.prod(shape)
        if self._memory is None or len(self._memory) < size or self._memory.device != device:
            self._memory = lasting((size,), torch.uint8, device)
        return self._memory[:size].view(shape)
