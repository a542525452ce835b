"""python3 -m benchmarks.one_gpu FOLDER COMMAND; scripts/one_gpu.sh calls it."""

import argparse
import importlib.metadata
import importlib.util
import signal
import sys
from pathlib import Path

from benchmarks.one_gpu import runner
from benchmarks.one_gpu.table import COMMANDS

MODULES = (
    *("torch", "triton", "transformers", "xfuser", "diffusers", "yunchang", "distvae", "rich", "bs4", "ftfy"),
    *("numpy", "PIL", "requests", "einops"),
)
"""What the facts import."""


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="scripts/one_gpu.sh")
    parser.add_argument("folder", type=Path, help="folder of the results")
    parser.add_argument("command", choices=COMMANDS, help="which facts to measure")
    parser.add_argument("--fact", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(folder: Path, command: str, program: str, patience: float = 1.0) -> int:
    """Run a command and return its exit status: 1 if a fact has failed, 2 if packages are missing.

    Args:
        folder: folder of the results.
        command: key of COMMANDS.
        program: module that measures a fact in a process of its own.
        patience: factor on all time limits.
    """
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if not importlib.metadata.entry_points(group="torch.backends", name="cocodiff"):
        missing.append("xfuser-cocodiff")
    if missing:
        print(
            f"one_gpu: missing: {', '.join(missing)}. Nothing is downloaded here: bring wheels and set PYTHONPATH=SITE "
            "after `python3 -m pip install --no-index --no-deps --no-build-isolation --target SITE *.whl .`",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the facts' processes end too
    folder.mkdir(parents=True, exist_ok=True)
    failed = runner.run(command, folder, [sys.executable, "-m", program, str(folder), command], patience)
    if failed:
        print(f"one_gpu: failed: {', '.join(failed)}; see {folder}/{runner.FACTS_FILE}", file=sys.stderr)
    return 1 if failed else 0


def _measure(folder: Path, command: str, name: str) -> None:
    """Measure a fact on the GPU and end this process."""
    import torch

    from xfuser_cocodiff import install

    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU of NVIDIA; scripts/one_gpu.sh FOLDER COMMAND --dry-run needs none")
    install()  # before xfuser is imported
    from benchmarks.one_gpu import measuring

    measuring.measure_and_exit(command, name, measuring.Setting(folder, torch.device("cuda", 0)))


if __name__ == "__main__":
    given = options()
    if given.fact:
        _measure(given.folder, given.command, given.fact)
    sys.exit(run(given.folder, given.command, "benchmarks.one_gpu"))
