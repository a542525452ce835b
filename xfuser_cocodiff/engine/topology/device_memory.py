"""Memory of a rank's device: what the rank can still allocate, and how much there is."""

from typing import NamedTuple


class DeviceMemory(NamedTuple):
    """Memory of a device, or the part of one rank where several share the device."""

    free: float
    """Bytes that the rank can still allocate: free on the device, or cached by PyTorch's allocator."""
    total: float
    """Bytes of the device."""
