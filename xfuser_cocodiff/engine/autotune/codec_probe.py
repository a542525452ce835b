"""The codec probe: measures the throughput and the host time of the codec, with the kernels in use.

It launches kernels of the codec, which lossless runs never do.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.autotune.timing import time_calls
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.coded_tensor import CodedTensor, decode, encode
from xfuser_cocodiff.engine.codec.link_reference import LinkReference
from xfuser_cocodiff.engine.compression.loopback import NUM_SLOTS, Loopback
from xfuser_cocodiff.engine.topology import devices

_ROUNDS = 3
_CODEC = Codec(bits=2)
_TOKENS, _CALLS = {False: 2**11, True: 2**18}, {False: 1, True: 8}
"""Size by which the codec is timed, and calls in a row, by whether the device is asynchronous; a token has 128 values.
On such a device, smaller sizes would show the launch overhead, which is hidden while the host is ahead."""
_HOST_CODEC, _HOST_TOKENS, _HOST_CALLS = Codec(bits=2, predicts=True), 2, 8
"""Codec whose host time is measured, tokens, so few that the host is the slower one, and calls in a row."""


class CodecSpeed(NamedTuple):
    """Speed of a codec on one rank, or on the slowest of several."""

    bytes_per_second: float
    """Original values that are encoded while as many are decoded, in bytes per second."""
    host_seconds: float
    """Host time that encoding and decoding a tensor takes; 0 where the host itself computes."""


def measure(device: torch.device, seconds: Callable[[Callable[[], object], int], float] | None = None) -> CodecSpeed:
    """Measure the codec with the kernels in use.

    Args:
        device: device of the values.
        seconds: returns the seconds per call of a function, given the calls in a row; of this rank alone, without any
            collective, when not given.
    """
    fastest = seconds or (lambda work, calls: min(time_calls(work, calls, _ROUNDS, None, device)))
    encode_and_decode, nbytes = _device_work(device)
    throughput = nbytes / fastest(encode_and_decode, _CALLS[devices.capabilities(device.type).is_asynchronous])
    if not devices.capabilities(device.type).is_asynchronous:
        return CodecSpeed(throughput, 0.0)
    code_layer, num_tensors = _host_work(device)
    return CodecSpeed(throughput, fastest(code_layer, _HOST_CALLS) / num_tensors)


def _device_work(device: torch.device) -> tuple[Callable[[], None], int]:
    """Return a function that encodes and decodes a tensor, and the bytes of the tensor."""
    is_asynchronous = devices.capabilities(device.type).is_asynchronous
    values = torch.randn(1, 1, 1, _TOKENS[is_asynchronous], 2**7, device=device)
    values = values.to(torch.bfloat16) if is_asynchronous else values
    target = torch.empty_like(values)
    payload = values.new_empty(1, _CODEC.payload_bytes(values.shape, values.dtype), dtype=torch.uint8)
    sent, received = LinkReference(), LinkReference()
    energies = torch.empty(1, 2, device=device)
    for reference in (sent, received):
        reference.advance(torch.zeros_like(values))

    def encode_and_decode() -> None:
        encode([CodedTensor(values, sent, _CODEC, None, payload)], energies)
        decode([CodedTensor(target, received, _CODEC, None, payload)])

    return encode_and_decode, values.nbytes


def _host_work(device: torch.device) -> tuple[Callable[[], None], int]:
    """Return a function that encodes and decodes the tensors of a layer, and their number."""
    values = torch.randn(NUM_SLOTS, 1, 1, _HOST_TOKENS, 2**7, device=device).to(torch.bfloat16)
    layer, values_of, codecs = Loopback(), dict.fromkeys("qkvo", values), dict.fromkeys("qkvo", _HOST_CODEC)

    def code_layer() -> None:
        layer.send(values_of, codecs)

    code_layer()  # the keyframe that creates the references
    return code_layer, len(values_of)
