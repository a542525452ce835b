"""What `cocodiff env` says of a device, and of what is missing."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.codec.rows import MessagePart
from xfuser_cocodiff.lab.reporting import device_facts

CPU = torch.device("cpu")
MATRIX = "\tGPU0\tGPU1\nGPU0\tX\tNV18\nGPU1\tNV18\tX"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the only folder in which commands are found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    device_facts._output.cache_clear()
    return tmp_path


def install(folder: Path, name: str, text: str) -> None:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{text}")
    tool.chmod(0o755)


def make_gpu(monkeypatch: pytest.MonkeyPatch, device_type: str, **properties: object) -> torch.device:
    """Let PyTorch find two devices of a type, which compute nothing."""
    module = SimpleNamespace(
        device_count=lambda: 2,
        get_device_name=lambda index: "H100",
        get_device_capability=lambda index: (9, 0),
        get_device_properties=lambda index: SimpleNamespace(**properties),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return torch.device(device_type)


SMI = f"""
case $1 in
  topo) printf '\\033[4m%s\\033[0m' '{MATRIX}';;
  *) printf '570.1\\n570.1\\n';;
esac
"""


def without_triton(choice: str, device_type: str) -> str:
    if choice == kernels.TRITON:
        raise ValueError("'triton' is not available: it needs a C compiler; valid are 'auto' and 'torch'")
    return kernels.TORCH


def test_cuda(monkeypatch: pytest.MonkeyPatch, tools: Path) -> None:
    install(tools, "nvidia-smi", SMI)
    monkeypatch.setattr(kernels, "resolve", without_triton)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("CC", raising=False)
    facts = device_facts.device_facts(make_gpu(monkeypatch, "cuda"), "nccl")
    assert facts["device"] == "cuda: 2 x H100, sm_90"
    assert (facts["driver"], facts["collectives"]) == ("570.1", "nccl, NCCL 2.28.9")
    assert facts["links"] == MATRIX.strip()
    assert facts["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert facts["C compiler"].startswith("missing: install gcc")
    assert facts["Triton"].endswith("unused: it needs a C compiler")
    assert "failed (" in facts["kernels"], "this PyTorch has no CUDA"


def test_xpu_without_tools(monkeypatch: pytest.MonkeyPatch, tools: Path) -> None:
    monkeypatch.setattr(device_facts, "package_version", {"oneccl": "2021.17.2"}.get)
    facts = device_facts.device_facts(make_gpu(monkeypatch, "xpu", driver_version="1.6.3"), "xccl")
    assert (facts["driver"], facts["collectives"]) == ("1.6.3", "xccl, oneCCL 2021.17.2")
    assert facts["links"] == "unknown: xpu-smi is not installed"


def test_a_tool_that_fails_and_a_build_without_gpus(tools: Path) -> None:
    install(tools, "nvidia-smi", "exit 9")
    assert device_facts._output(("nvidia-smi", "topo", "-m")) == "unknown: nvidia-smi topo -m exited with 9"
    facts = device_facts.device_facts(CPU, "gloo")
    assert facts["device"].endswith("finds no GPU; nvidia-smi is installed: use a build of PyTorch for it")


def test_kernels_that_run_fail_or_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "encode and decode ran" in device_facts._kernels(CPU)
    decode = kernels.decode

    def wrong(parts: Sequence[MessagePart]) -> None:
        decode(parts)
        parts[0].new_reference.codes.add_(1)

    monkeypatch.setattr(kernels, "decode", wrong)
    assert "different references" in device_facts._kernels(CPU)
    monkeypatch.setattr(kernels, "encode", lambda *_: (_ for _ in ()).throw(RuntimeError("no ptxas\nat line 3")))
    assert "failed (RuntimeError: no ptxas); runs use PyTorch's kernels" in device_facts._kernels(CPU)
