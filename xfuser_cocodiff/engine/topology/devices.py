"""What devices can do, as far as the plugin goes by it: one record for each type, so that a new one is a row."""

import functools
from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Capabilities:
    """What is true of a type of device."""

    is_asynchronous: bool = True
    """Whether the host only queues work, in streams, and does not see when it ends: it cannot time layers, asks for no
    value where it need not, and pins memory that the device is to read. Else work is done when a call returns."""
    supports_direct_sends: bool = False
    """Whether receives can be posted before sends: where these run in the order of a stream, ranks would wait for
    each other."""
    functional_only: bool = False
    """Whether collectives other than the functional ones are known to corrupt data (intel/torch-xpu-ops#3021)."""
    uses_triton: bool = False
    """Whether Triton's kernels are to be used unless something else is asked for."""
    has_stream_priorities: bool = False
    """Whether streams have priorities."""
    supports_graph_capture: bool = False
    """Whether work can become part of a graph that repeats it (CUDA graphs)."""


_KNOWN = {
    "cpu": Capabilities(is_asynchronous=False, supports_direct_sends=True),
    "cuda": Capabilities(uses_triton=True, has_stream_priorities=True, supports_graph_capture=True),
    "xpu": Capabilities(functional_only=True, uses_triton=True, has_stream_priorities=True),
}


@functools.cache
def capabilities(device_type: str) -> Capabilities:
    """What is true of a type of device; of one that is not known, what is true of most accelerators."""
    return _KNOWN.get(device_type, Capabilities())


def is_captured(device: torch.device) -> bool:
    """Whether what is called now becomes part of a graph, which would repeat what is done at this one step."""
    return capabilities(device.type).supports_graph_capture and torch.cuda.is_current_stream_capturing()
