"""Measures one fact in this process, which is one of its ranks."""

import importlib
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.one_gpu import runner
from benchmarks.one_gpu.table import COMMANDS


class NotAvailableError(RuntimeError):
    """What a fact needs is missing on this machine."""


@dataclass(frozen=True)
class Setting:
    """Where facts are measured."""

    folder: Path
    """Folder of the results."""
    device: torch.device
    """The GPU, or what stands for it in a dry run."""
    is_dry_run: bool = False
    """Whether sizes are toy sizes."""

    def pick(self, real: Any, toy: Any) -> Any:
        """Return one of two sizes."""
        return toy if self.is_dry_run else real


def measure(command: str, name: str, setting: Setting) -> None:
    """Measure a fact on this rank; rank 0 writes each row as soon as it is known."""
    [fact] = [fact for together in COMMANDS[command] for fact in together if fact.name == name]
    module, _, function = fact.function.partition(".")
    started = time.monotonic()
    for row in getattr(importlib.import_module(f"{__package__}.{module}"), function)(setting, **fact.arguments):
        if os.environ["RANK"] == "0":
            at = round(time.monotonic() - started, 2)
            runner.append(setting.folder, {"command": command, "fact": name, "at": at, **row})


def measure_and_exit(command: str, name: str, setting: Setting) -> None:
    """Measure a fact and end this process, without destructors, which may wait for other ranks."""
    status = 0
    try:
        measure(command, name, setting)
        if os.environ["WORLD_SIZE"] != "1":
            dist.barrier()  # rank 0 hosts the store
    except NotAvailableError as error:
        print(error, file=sys.stderr)
        status = runner.NOT_AVAILABLE_STATUS
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)
