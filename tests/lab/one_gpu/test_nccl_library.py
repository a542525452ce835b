"""NCCL's library for several ranks on one GPU, and the environment of these ranks."""

import dataclasses
import json
import os
import tarfile
from pathlib import Path

import pytest
import torch

from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.lab.one_gpu import nccl_library, rank_launch, stage_a
from xfuser_cocodiff.lab.one_gpu.fact import NotAvailableError
from xfuser_cocodiff.lab.one_gpu.nccl_library import NcclLibrary

MAKE = """#!/usr/bin/env bash
echo "$@"
until [ -e "$GO" ]; do sleep 0.05; done
[ -z "$FAILS" ] || exit 1
mkdir -p "$2/build/lib"
touch "$2/build/lib/libnccl.so.2"
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose PyTorch has NCCL 2.28."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(nccl_library.ctypes.util, "find_library", lambda _: None)
    monkeypatch.setenv("PYTHONPATH", "")
    for name in (nccl_library.SOURCE_VARIABLE, "FAILS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_gpu_there_is_no_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotAvailableError, match="needs a GPU"):
        nccl_library.find(tmp_path)
    transport = rank_launch.select(tmp_path)
    assert (transport.backend, transport.reason) == ("gloo", "NCCL needs a GPU")
    assert launcher.shares_device(transport.environment, [], 1)
    monkeypatch.setattr(rank_launch, "_select", None)
    assert rank_launch.select(tmp_path) == transport, "kept for the next fact"


@pytest.mark.parametrize(
    ("own", "given", "found"),
    [
        ((2, 30, 1), None, NcclLibrary((2, 30, 1), None)),
        ((2, 28, 9), (2, 30, 7), "given"),
        ((2, 28, 9), (2, 29, 0), "is 2.29.0"),
        ((2, 28, 9), None, "PyTorch has 2.28.9"),
    ],
)
def test_the_library_is_2_30_or_later(
    gpu: None, own: tuple, given: tuple | None, found: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: own)
    monkeypatch.setattr(nccl_library, "version_of", lambda path: given)
    if given:
        monkeypatch.setenv(nccl_library.SOURCE_VARIABLE, str(tmp_path / "libnccl.so.2"))
    if found == "given":
        assert nccl_library.find(tmp_path) == NcclLibrary(given, tmp_path / "libnccl.so.2")
    elif isinstance(found, NcclLibrary):
        assert nccl_library.find(tmp_path) == found
    else:
        with pytest.raises(NotAvailableError, match=f"need NCCL 2.30.0.*{found}"):
            nccl_library.find(tmp_path)


def test_no_library_has_no_version(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").write_text("no library")
    assert nccl_library.version_of(tmp_path / "libnccl.so.2") is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_source_archive_is_built_for_this_gpu(
    gpu: None, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "cuda/bin"
    programs.mkdir(parents=True)
    for name, text in (("make", MAKE), ("nvcc", "")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "nccl-2.30.7").mkdir()
    archive = tmp_path / "nccl.tar.gz"
    with tarfile.open(archive, "w:gz") as source:
        source.add(tmp_path / "nccl-2.30.7", "nccl-2.30.7")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv(nccl_library.SOURCE_VARIABLE, str(archive))
    monkeypatch.setenv("FAILS", "1" if fails else "")
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    monkeypatch.setattr(nccl_library, "version_of", lambda path: (2, 30, 7))
    nccl_library.start_build(tmp_path)
    first = (tmp_path / "nccl-build/process.json").read_text()
    nccl_library.start_build(tmp_path)  # of the next stage, while the build of the first one runs
    assert (tmp_path / "nccl-build/process.json").read_text() == first
    (tmp_path / "go").touch()
    if fails:
        with pytest.raises(RuntimeError, match=r"the build failed: .*-C"):
            nccl_library.wait_for_build(tmp_path, 30)
        return
    nccl_library.wait_for_build(tmp_path, 30)
    library = nccl_library.find(tmp_path)
    assert library == NcclLibrary((2, 30, 7), tmp_path / "nccl-build/nccl-2.30.7/build/lib/libnccl.so.2")
    said = (tmp_path / "nccl-build.log").read_text()
    assert "arch=compute_90,code=sm_90" in said
    assert f"CUDA_HOME={tmp_path / 'cuda'}" in said
    environment = rank_launch.nccl_transport(library, False).environment
    assert environment == {
        "LD_PRELOAD": str(library.path),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
        "CUDA_VISIBLE_DEVICES": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    assert not launcher.shares_device(environment, [], 1), "the plugin must use NCCL"


def test_another_process_with_the_number_of_a_build_is_not_waited_for_or_killed(tmp_path: Path) -> None:
    target = tmp_path / "nccl-build"
    (target / "nccl/build/lib").mkdir(parents=True)
    (target / "nccl/build/lib/libnccl.so.2").touch()
    (target / "process.json").write_text(json.dumps([os.getpid(), 1]))  # of this process, which started later
    nccl_library.wait_for_build(tmp_path, 0)


def test_nccl_is_tried_again_after_a_fallback(tmp_path: Path) -> None:
    file = tmp_path / "transport.json"
    for transport in (rank_launch.dry_transport(), rank_launch.nccl_transport(NcclLibrary((2, 30, 7), None), False)):
        file.write_text(json.dumps(dataclasses.asdict(transport)))
        rank_launch.forget_fallback(tmp_path)
        assert file.exists() == (transport.backend == "nccl")


def test_nccl_that_refuses_is_replaced_by_gloo(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first transport that works is kept: with MPS, without it, or gloo."""
    tried = []

    def launch(case: str, count: int, arguments: dict, transport: rank_launch.Transport, seconds: float) -> None:
        tried.append(transport.uses_mps)
        raise RuntimeError("Duplicate GPU detected")

    monkeypatch.setattr(nccl_library, "find", lambda folder: NcclLibrary((2, 30, 7), None))
    monkeypatch.setattr(rank_launch.shutil, "which", lambda _: "/usr/bin/program")
    monkeypatch.setattr(rank_launch, "launch", launch)
    transport = rank_launch.select(tmp_path)
    assert tried == [True, False]
    assert (transport.backend, transport.reason.count("Duplicate GPU detected")) == ("gloo", 2)


NCU = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","encode_kernel","launch__registers_per_thread","register/thread","99"
"2","1","encode_kernel","launch__registers_per_thread","register/thread","40"
"2","1","encode_kernel","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","81.5"
"2","1","encode_kernel","l1tex__t_requests_pipe_lsu_mem_local_op_ld.sum","","1,024"
"3","1","decode_kernel","launch__registers_per_thread","register/thread","n/a"
"""


def test_the_output_of_ncu_is_parsed() -> None:
    encode, decode = stage_a.parse_profile(NCU)
    assert (encode["kernel"], encode["registers"], encode["memory_bandwidth"]) == ("encode", 40, 81.5)
    assert encode["local_loads"] == 1024
    assert decode == {"kernel": "decode", **dict.fromkeys(stage_a._METRICS)}
