"""Memory of a rank's device."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory
from xfuser_cocodiff.xdit.platforms import device_memory


def read(monkeypatch: pytest.MonkeyPatch, devices: int = 8, **calls: Any) -> DeviceMemory | None:
    """Read the memory of a device of 80 bytes, of which 50 are free and 5 are cached."""
    usual = {"mem_get_info": lambda: (50, 80), "memory_reserved": lambda: 25, "memory_allocated": lambda: 20}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with (
        mock.patch.object(torch, "get_device_module", lambda _: SimpleNamespace(**usual | calls)),
        mock.patch.object(torch.accelerator, "device_count", lambda: devices),
    ):
        return device_memory.reader("cuda")()


def test_cached_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch) == (55, 80)


def test_ranks_that_share_a_device_divide_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch caches is a rank's own."""
    assert read(monkeypatch, devices=2) == (50 / 4 + 5, 80 / 4)


def not_supported() -> tuple[int, int]:
    raise RuntimeError("The device does not support querying the available free memory")


def test_unknown_where_the_driver_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, mem_get_info=not_supported) is None
