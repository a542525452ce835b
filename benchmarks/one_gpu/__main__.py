"""Measures one fact on this rank: torchrun -m benchmarks.one_gpu FOLDER FACT; scripts/one_gpu.sh calls it."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.one_gpu.setting import Row, Setting
from xfuser_cocodiff import install

install()  # before the facts import xfuser

from benchmarks.one_gpu import kernel_facts, rank_facts  # noqa: E402

FACTS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "versions": kernel_facts.versions,
    "nccl": rank_facts.nccl,
    "self_check_balanced": partial(kernel_facts.self_check, mode="balanced"),
    "self_check_fast": partial(kernel_facts.self_check, mode="fast"),
    "memcheck": partial(kernel_facts.sanitize, tool="memcheck"),
    "racecheck": partial(kernel_facts.sanitize, tool="racecheck"),
    "kernel_times": kernel_facts.kernel_times,
    "layers": rank_facts.layers,
    "two_ranks": rank_facts.two_ranks,
    "flux": rank_facts.flux,
    "profile": kernel_facts.profile,
    "compiled": rank_facts.compiled,
    "compiled_two_ranks": rank_facts.compiled,
}
"""Functions that yield the rows of each fact."""


def measure(name: str, setting: Setting) -> None:
    """Measure a fact on this rank; rank 0 writes each row as soon as it is known: the machine may end at any time."""
    started = time.monotonic()
    with (setting.folder / "facts.jsonl").open("a") as lines:
        for row in FACTS[name](setting):
            if os.environ["RANK"] == "0":
                lines.write(json.dumps({"fact": name, "at": round(time.monotonic() - started, 2), **row}) + "\n")
                lines.flush()
                os.fsync(lines.fileno())


def measure_and_exit(name: str, setting: Setting) -> None:
    """Measure a fact and end this process, without destructors, which may wait for other ranks."""
    status = 0
    try:
        measure(name, setting)
        if os.environ["WORLD_SIZE"] != "1":
            dist.barrier()  # rank 0 hosts the store
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU of NVIDIA; scripts/one_gpu.sh FOLDER PART --dry-run needs none")
    measure_and_exit(sys.argv[2], Setting(Path(sys.argv[1]), torch.device("cuda", 0)))
