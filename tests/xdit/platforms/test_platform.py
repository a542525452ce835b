"""Platforms that xDiT does not support. torch.xpu is a mock: these tests have not run on an Intel GPU."""

import types
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import xfuser  # noqa: F401 (loads the plugin for this machine, before a device is mocked)

from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching import symbol_lookup
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import platform


class MockXPU(types.SimpleNamespace):
    """A mock of the functions of torch.xpu that the platform uses, which records its calls."""

    def __init__(self) -> None:
        super().__init__(calls=[])
        self.Event, self.Stream = (type(name, (), {}) for name in ("Event", "Stream"))
        for name in platform._FACADE:
            if not hasattr(self, name):
                setattr(self, name, self._note(name))

    def _note(self, name: str) -> object:
        def call(*args: object, **kwargs: object) -> str:
            self.calls.append((name, args, kwargs))
            return name

        return call


def patches_by_name(added: platform.Platform) -> dict[str, Patch]:
    """Return the patches by name, checked against the source of xDiT: in this process it may be patched already."""
    patches = {patch.name: patch for patch in platform.patches(added)}
    for patch in patches.values():
        if patch.module.startswith("xfuser"):
            declared = symbol_lookup.find_parameters(patch.module, patch.symbol)
            assert declared is not None, patch.name
    return patches


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> MockXPU:
    mock = MockXPU()
    monkeypatch.setattr(torch, "xpu", mock)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 12)
    return mock


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> MockXPU:
    """Return a mock of one CUDA device for two ranks."""
    mock = MockXPU()
    monkeypatch.setattr(torch, "cuda", mock)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return mock


def test_more_ranks_than_devices_share_them(one_gpu: MockXPU) -> None:
    added = platform.detect()
    assert (added.device_type, added.backend(), added.device(1)) == ("cuda", "gloo", torch.device("cuda", 0))
    patches = patches_by_name(added)
    assert "xfuser.envs._is_cuda" not in patches  # still true
    assert patches["xfuser.envs.get_torch_distributed_backend"].replace(None)() == "gloo"
    assert patches["xfuser.envs.get_device"].replace(None)(3) == torch.device("cuda", 0)
    patches["xfuser.core.distributed.parallel_state.set_device"].replace(one_gpu.set_device)(1)
    added.cuda["memory_allocated"](1)
    added.cuda["max_memory_allocated"](device="cuda:1")
    assert one_gpu.calls == [
        ("set_device", (torch.device("cuda", 0),), {}),
        ("memory_allocated", (torch.device("cuda", 0),), {}),
        ("max_memory_allocated", (), {"device": torch.device("cuda", 0)}),
    ]


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_nothing_of_torch_is_patched_where_each_rank_sees_its_own_device(
    one_gpu: MockXPU, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    def replaced_in_torch() -> list[str]:
        return [row.name for row in activation.patch_table() if row.replace and row.module.partition(".")[0] == "torch"]

    assert {"torch.Generator", "torch.cuda.Event"} <= {*replaced_in_torch()}  # the ranks share it
    monkeypatch.setenv(variable, "1")
    assert platform.detect() is None
    assert replaced_in_torch() == []


def test_patches_for_xpu_match_xdit_and_work(xpu: MockXPU, monkeypatch: pytest.MonkeyPatch) -> None:
    added = platform.detect()
    patches = patches_by_name(added)
    assert patches["xfuser.envs.get_device"].replace(None)(2) == torch.device("xpu", 2)
    assert patches["xfuser.envs.get_device_name"].replace(None)() == "xpu"
    assert patches["torch.cuda.Event"].replace(None) is xpu.Event

    done = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: done.append(index))
    monkeypatch.setenv("LOCAL_RANK", "7")
    start = patches["xfuser.core.distributed.parallel_state.init_distributed_environment"]
    start.replace(lambda **options: done.append(options))(rank=19)
    assert done == [7, {"rank": 19}]  # the device is set before groups are created


def test_xpu_backend_is_pytorchs(xpu: MockXPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "xccl")
    assert platform.detect().backend() == "xccl"
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: False)
    with pytest.raises(RuntimeError, match="no collectives for XPU: this PyTorch was built without 'xccl'"):
        platform.detect().backend()


def test_on_xpu_only_the_functional_all_to_all_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain one corrupts data on XPU: intel/torch-xpu-ops#3021."""
    from xfuser_cocodiff.engine.comm import stages

    called = []

    def record(module: Any, name: str, label: str) -> None:
        def collective(*args: Any, **_: Any) -> torch.Tensor:
            called.append((label, args))
            return torch.zeros(2, 3)

        monkeypatch.setattr(module, name, collective)

    record(stages.functional, "all_to_all_single", "functional")
    record(stages, "_functional_all_gather", "functional")
    record(stages.dist, "all_to_all_single", "plain")
    record(stages, "_all_gather", "plain")
    plan, group = Plan.flat(Topology.named(node=2)), mock.Mock(size=lambda: 2)
    one = stages.Stages({plan.stages[0]: group}, timeout=timedelta(seconds=9))
    tensor = OnXPU(torch.zeros(2, 3))
    one.start(tensor, plan, 0)
    one.start_gather(tensor, plan, 0)
    assert [label for label, _ in called] == ["functional"] * 2
    assert called[0][1][1:] == (None, None, group)  # equal splits: others are emulated, intel/torch-xpu-ops#5057


class OnXPU(torch.Tensor):
    """A tensor whose device is a mock XPU."""

    device = torch.device("xpu", 0)
