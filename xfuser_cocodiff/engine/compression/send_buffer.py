"""Memory of the coded message that is being sent, used again for each message."""

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
        """Return the buffer as uint8 (P, bytes), whose contents are undefined; it grows if it is too small."""
        slots, nbytes = shape
        if self._memory is None or self._memory.numel() < slots * nbytes or self._memory.device != device:
            self._memory = lasting((slots * nbytes,), torch.uint8, device)
        return self._memory.as_strided(shape, (nbytes, 1))
