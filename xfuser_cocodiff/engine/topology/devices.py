"""Capabilities of device types that the plugin depends on: one record per type."""

import functools
from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a device type."""

    is_asynchronous: bool = True
    """Whether the host queues work in streams and does not see when it ends. Then the host cannot time layers, avoids
    reading values, and pins memory for copies. On a synchronous device, work is done when a call returns."""
    functional_only: bool = False
    """Whether only functional collectives are safe; the others corrupt data (intel/torch-xpu-ops#3021)."""
    uses_triton: bool = False
    """Whether Triton kernels are the default."""
    has_stream_priorities: bool = False
    """Whether streams have priorities."""
    supports_graph_capture: bool = False
    """Whether work can be captured in a graph that replays it (CUDA graphs)."""
    collective_host_seconds: float = 0.0
    """Least host time of a collective, whatever its size; 0 where none is known. The planner takes no less."""


_CAPABILITIES = {
    "cpu": Capabilities(is_asynchronous=False),
    "cuda": Capabilities(uses_triton=True, has_stream_priorities=True, supports_graph_capture=True),
    "xpu": Capabilities(
        functional_only=True,
        uses_triton=True,
        has_stream_priorities=True,
        collective_host_seconds=42e-6,  # a barrier, or an all-reduce of 10 KiB, on Arc B70 (vllm-project/vllm#54766)
    ),
}


@functools.cache
def capabilities(device_type: str) -> Capabilities:
    """Return the capabilities of a device type; for an unknown type, those that most accelerators have."""
    return _CAPABILITIES.get(device_type, Capabilities())


def is_captured(device: torch.device) -> bool:
    """Return whether current calls are being captured in a graph, which would replay them."""
    return capabilities(device.type).supports_graph_capture and torch.cuda.is_current_stream_capturing()
