"""The stages by name, each with its facts, and the setting in which they run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.lab.one_gpu import fact_process, rank_launch, stage_a, stage_b, stage_c
from xfuser_cocodiff.lab.one_gpu.fact import Fact, Result, Setting

STAGES: Mapping[str, Sequence[Fact]] = {"A": stage_a.FACTS, "B": stage_b.FACTS, "C": stage_c.FACTS}
_RANK_SECONDS = 280.0
"""Time limit of ranks; the time limit of their fact may be shorter."""


def setting_of(folder: Path, is_dry_run: bool) -> Setting:
    """Return the setting of this machine, in which ranks are processes."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = CPU if is_dry_run or accelerator is None else accelerator

    def launch_ranks(case: str, count: int, **arguments: object) -> Result:
        transport = rank_launch.dry_transport() if is_dry_run else rank_launch.select(folder)
        return rank_launch.launch(case, count, arguments, transport, _RANK_SECONDS, is_dry_run)

    return Setting(folder, device, is_dry_run, launch_ranks, fact_process.run_command)
