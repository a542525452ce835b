"""Platforms that xDiT lacks. The XPU is a stand-in for torch.xpu: no Intel GPU was there to run this on."""

import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import xfuser  # noqa: F401 (with it comes the plugin, for this machine and before anything stands in for another)

from xfuser_cocodiff.xdit.patching import symbol_lookup
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import platform
from xfuser_cocodiff.xdit.platforms.host_clock import HostEvent


class StandInXPU(types.SimpleNamespace):
    """The surface of torch.xpu that the platform uses, noting what it is called with."""

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


def rows_of(here: platform.Platform) -> dict[str, Patch]:
    """Return rows by name, which fit the source of xDiT: this process may have the plugin in place."""
    rows = {row.name: row for row in platform.patches(here)}
    for row in rows.values():
        if row.module.startswith("xfuser"):
            declared = symbol_lookup.source_parameters(row.module, row.symbol)
            assert declared is not None and row.parameters in (None, declared), row.name
    return rows


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> StandInXPU:
    stand_in = StandInXPU()
    monkeypatch.setattr(torch, "xpu", stand_in)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 12)
    return stand_in


def test_without_an_accelerator_the_cpu_is_added() -> None:
    here = platform.detect()
    assert (here.device_type, here.backend(), here.device(3)) == ("cpu", "gloo", torch.device("cpu"))


@pytest.mark.parametrize("known", ["cuda", "mps", "npu"])
def test_what_xdit_knows_is_left_alone(monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    device = types.SimpleNamespace(type=known)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert platform.detect() is None


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> StandInXPU:
    """A stand-in for a machine with one CUDA device, and ranks enough for two."""
    stand_in = StandInXPU()
    monkeypatch.setattr(torch, "cuda", stand_in)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return stand_in


def test_ranks_that_outnumber_devices_share_them(one_gpu: StandInXPU) -> None:
    here = platform.detect()
    assert (here.device_type, here.backend(), here.device(1)) == ("cuda", "gloo", torch.device("cuda", 0))
    rows = rows_of(here)
    assert "xfuser.envs._is_cuda" not in rows  # which is still true
    assert rows["xfuser.envs.get_torch_distributed_backend"].replace(None)() == "gloo"
    assert rows["xfuser.envs.get_device"].replace(None)(3) == torch.device("cuda", 0)
    rows["xfuser.core.distributed.parallel_state.set_device"].replace(one_gpu.set_device)(1)
    here.cuda["memory_allocated"](1)
    here.cuda["max_memory_allocated"](device="cuda:1")
    assert one_gpu.calls == [
        ("set_device", (torch.device("cuda", 0),), {}),
        ("memory_allocated", (torch.device("cuda", 0),), {}),
        ("max_memory_allocated", (), {"device": torch.device("cuda", 0)}),
    ]


def test_ranks_with_a_device_each_are_left_to_xdit(one_gpu: StandInXPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert platform.detect() is None
    monkeypatch.setattr(sys, "argv", ["script.py", "--cocodiff-share-device"])
    assert platform.detect().device(3) == torch.device("cuda", 1)


def test_every_row_for_xpu_fits_xdit_and_does_its_work(xpu: StandInXPU, monkeypatch: pytest.MonkeyPatch) -> None:
    here = platform.detect()
    rows = rows_of(here)
    assert rows["xfuser.envs.get_device"].replace(None)(2) == torch.device("xpu", 2)
    assert rows["xfuser.envs.get_device_name"].replace(None)() == "xpu"
    assert rows["torch.cuda.Event"].replace(None) is xpu.Event

    done = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: done.append(index))
    monkeypatch.setenv("LOCAL_RANK", "7")
    start = rows["xfuser.core.distributed.parallel_state.init_distributed_environment"]
    start.replace(lambda **options: done.append(options))(rank=19)
    assert done == [7, {"rank": 19}]  # the device is chosen before the groups are made


def test_xpu_names_exist_in_both_torch_modules() -> None:
    """The stand-in is only worth something while torch.xpu really has this surface."""
    import torch.xpu as real

    for name in platform._FACADE:
        assert hasattr(real, name), name
        assert hasattr(torch.cuda, name), name


@pytest.mark.parametrize(
    ("xccl", "torch_ccl", "backend"), [(True, False, "xccl"), (True, True, "xccl"), (False, True, "ccl")]
)
def test_xpu_backend(monkeypatch: pytest.MonkeyPatch, xccl: bool, torch_ccl: bool, backend: str) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: xccl)
    monkeypatch.setattr(platform, "_import_if_installed", lambda name: torch_ccl)
    assert platform._xpu_backend() == backend


def test_xpu_without_collectives_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: False)
    with pytest.raises(RuntimeError, match=r"xccl.*oneccl_bindings_for_pytorch"):
        platform._xpu_backend()


def test_with_one_visible_tile_it_is_the_device_however_it_is_named(
    xpu: StandInXPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "5")
    monkeypatch.setenv("PALS_LOCAL_RANKID", "5")
    chosen = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    here = platform.detect()
    rows = {row.symbol: row for row in platform.patches(here)}
    rows["init_distributed_environment"].replace(lambda: None)()
    here.cuda["set_device"](5)
    here.cuda["synchronize"]("cuda:5")
    only = torch.device("xpu", 0)
    assert (chosen, here.device(5), here.device(None)) == ([0], only, torch.device("xpu"))
    assert xpu.calls == [("set_device", (only,), {}), ("synchronize", (only,), {})]


@pytest.mark.parametrize("error", [None, ImportError("undefined symbol"), OSError("libsycl.so.7: cannot open")])
def test_legacy_packages_are_imported_when_the_platform_is_found(
    xpu: StandInXPU, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    imported, notes = [], []

    def import_module(name: str) -> None:
        imported.append(name)
        if error:
            raise error

    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(platform.importlib, "import_module", import_module)
    monkeypatch.setattr(platform, "warn_once", notes.append)
    assert platform.detect().device_type == "xpu"
    assert imported == ["intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"]
    assert len(notes) == (2 if error else 0)
    assert all("is ignored" in said and str(error) in said for said in notes)


@pytest.mark.parametrize("form", ["functional", "plain"])
def test_on_xpu_only_the_functional_all_to_all_is_called(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The other one corrupts data there: intel/torch-xpu-ops#3021."""
    from xfuser_cocodiff.engine.comm import stages

    called = []
    monkeypatch.setattr(stages.functional, "all_to_all_single", lambda *args: called.append(("functional", args)))
    monkeypatch.setattr(stages.dist, "all_to_all_single", lambda *args, **_: called.append(("plain", args)))
    tensor = torch.zeros(4, 3) if form == "plain" else OnXPU(torch.zeros(4, 3))
    stages._run_collective(tensor, torch.empty_like(tensor), "group", False)
    [(name, args)] = called
    assert name == form
    if form == "functional":
        assert args[1:] == (None, None, "group")  # equal splits: others are emulated, intel/torch-xpu-ops#5057
    called.clear()
    monkeypatch.setattr(stages.functional, "all_gather_tensor", lambda *args: called.append(("functional", args)))
    monkeypatch.setattr(stages, "_all_gather", lambda *args, **_: called.append(("plain", args)))
    stages._run_collective(tensor, torch.empty(2, *tensor.shape), "group", True)
    assert [name for name, _ in called] == [form]


class OnXPU(torch.Tensor):
    """A tensor that says it is on an XPU, since none can be here."""

    device = torch.device("xpu", 0)


def test_no_other_collective_is_called_where_an_xpu_may_be() -> None:
    """Data goes by functional collectives, and between two ranks; a barrier carries none. What lies on the host goes by
    xDiT's own group for that, which is gloo's; an all-gather that can be given up is no functional one."""
    package = Path(platform.__file__).parent.parent.parent
    plain = re.compile(r"\bdist\.(all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*)\(")
    found = {
        (file.relative_to(package).as_posix(), call)
        for file in package.rglob("*.py")
        for call in plain.findall(file.read_text())
    }
    assert found == {
        ("engine/comm/stages.py", "all_to_all_single"),
        ("xdit/session/session.py", "all_reduce"),
        ("engine/autotune/tuning_cache.py", "all_gather_object"),
        ("lab/probing/pairwise_links.py", "all_gather"),
    }


def test_devices_are_translated_wherever_they_stand() -> None:
    here = platform.Platform("xpu", lambda: "xccl", {})
    seen = []
    here.translating(lambda *args, **kwargs: seen.append((args, kwargs)))("cuda", "cudnn", 1, device="cuda:2")
    assert seen == [((torch.device("xpu"), "cudnn", 1), {"device": torch.device("xpu", 2)})]


def test_generators_on_cuda_become_this_machines() -> None:
    real = torch.Generator if isinstance(torch.Generator, type(torch._C.Generator)) else torch._C.Generator
    generator_class = platform.detect().generator(real)
    made = generator_class(device="cuda").manual_seed(3)
    expected = torch._C.Generator().manual_seed(3)
    assert torch.equal(torch.rand(4, generator=made), torch.rand(4, generator=expected))
    assert isinstance(expected, generator_class)


def test_a_host_event_measures_milliseconds() -> None:
    start, end = HostEvent(enable_timing=True), HostEvent(enable_timing=True)
    start.record()
    time.sleep(0.05)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 50


def test_peak_memory_follows_an_allocation() -> None:
    """In a process of its own: kernels need not allow that a peak is forgotten, and other tests have had theirs."""
    code = (
        "from xfuser_cocodiff.xdit.platforms import host_clock as clock\n"
        "clock.reset_peak_memory()\n"
        "before = clock.peak_memory()\n"
        "block = bytearray(64 << 20)\n"
        "block[::4096] = b'x' * len(block[::4096])\n"
        "print(clock.peak_memory() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 60 << 20
