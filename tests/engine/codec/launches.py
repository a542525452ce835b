"""Launches of the kernels for a GPU that need not be present; they are neither executed nor their results compared."""

import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression import codec_check, message
from xfuser_cocodiff.engine.compression.loopback import Loopback

KERNELS = "encode_kernel", "decode_kernel"


def set_target(capability: int) -> None:
    """Let Triton compile for a compute capability, such as 90, from now on."""
    target = GPUTarget("cuda", capability, 32)
    current = {"get_current_target": target, "get_current_device": 0, "get_current_stream": 0}
    driver.set_active(SimpleNamespace(**{name: lambda *_, each=each: each for name, each in current.items()}))


@contextlib.contextmanager
def as_on_accelerators() -> Iterator[None]:
    """Launch the kernels that accelerators would launch, within this context."""

    def send(choice: str, layer: Loopback, values: Mapping, codecs: Mapping, step: int) -> None:
        layer.send(values, codecs, step=step)

    with (
        mock.patch.object(kernels, "backend_for", lambda device: kernels.TRITON),
        mock.patch.object(codec_check, "_failure_of_step", send),
        mock.patch.object(message, "_carries_flag", lambda buffer: False),
    ):
        yield


def self_check(mode: str) -> None:
    """Launch what the self-check of a mode launches."""
    failure = codec_check.failure(kernels.AUTO, mode, None, torch.device("cpu"), tokens=64)
    assert failure is None, failure
