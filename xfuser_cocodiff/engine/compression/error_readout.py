"""Error energies of a step on their way from the device to the host, which waits for them only when it reads them."""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.codec.coded_tensor import QuantError
from xfuser_cocodiff.engine.topology import devices


class ErrorReadout:
    """Copy of error energies to the host; on an accelerator it is queued behind the caller's stream.

    Args:
        errors: errors whose tensors are on one device.
    """

    def __init__(self, errors: Sequence[QuantError]) -> None:
        self._host = torch.stack([energy for error in errors for energy in error]) if errors else torch.empty(0)
        self._copied: torch.Event | None = None
        device = self._host.device
        if errors and devices.capabilities(device.type).is_asynchronous:
            # Into pinned memory: the host would wait for a copy into any other.
            pinned = torch.empty(self._host.shape, dtype=self._host.dtype, pin_memory=True)
            self._host = pinned.copy_(self._host, non_blocking=True)
            self._copied = torch.accelerator.current_stream(device).record_event()

    def read(self) -> list[tuple[float, float]]:
        """Return error and value energies as numbers, in the order of the errors, once they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        flat = self._host.tolist()
        return list(zip(flat[::2], flat[1::2], strict=True))
