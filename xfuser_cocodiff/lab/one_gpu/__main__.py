"""python -m xfuser_cocodiff.lab.one_gpu FOLDER STAGE; scripts/one_gpu.sh calls it."""

import argparse
import functools
import json
import sys
from pathlib import Path

import torch

from xfuser_cocodiff import install

install()  # before xfuser is imported, also where the package is not installed and has no entry point

from xfuser_cocodiff.lab.one_gpu import fact_process, nccl_library, rank_launch  # noqa: E402
from xfuser_cocodiff.lab.one_gpu.runner import run_stage  # noqa: E402
from xfuser_cocodiff.lab.one_gpu.stages import STAGES, setting_of  # noqa: E402

NO_DEVICE_STATUS = 2


def main() -> int:
    """Run a stage, or one of its facts in this process, and return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/one_gpu.sh")
    parser.add_argument("folder", type=Path, help="folder of the results")
    parser.add_argument("stage", choices=STAGES, help="stage to run")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--fact", choices=[fact.name for facts in STAGES.values() for fact in facts], help="one fact")
    options = parser.parse_args()
    facts = STAGES[options.stage]
    if options.fact:
        [fact] = [each for each in facts if each.name == options.fact]
        outcome = fact_process.outcome_of(fact, setting_of(options.folder, options.dry_run))
        (options.folder / f"{fact.name}.outcome").write_text(json.dumps(outcome))
        return 0
    if not (options.dry_run or torch.accelerator.is_available()):
        print("one_gpu: PyTorch finds no GPU; --dry-run needs none", file=sys.stderr)
        return NO_DEVICE_STATUS
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.dry_run:
        rank_launch.forget_fallback(options.folder)
        nccl_library.start_build(options.folder)
    measure = functools.partial(
        fact_process.measure, folder=options.folder, stage=options.stage, is_dry_run=options.dry_run
    )
    failed = run_stage(options.stage, facts, options.folder, measure)
    if failed:
        print(f"one_gpu: stage {options.stage}: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
