"""`cocodiff demo`: compares stock xDiT and the plugin on CPU ranks, on equal links and between emulated nodes."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli import compare
from xfuser_cocodiff.cli.output import fail

ARGUMENTS = (
    *("--model", "FLUX.1-dev", "--height", "128", "--width", "128", "--num_inference_steps", "16"),
    *("--prompt", "a photo of a cat", "a photo of an astronaut", "a photo of a cup of coffee", "cell bodies"),
    *("--batch_size", "4", "--max_sequence_length", "32", "--seed", "1", "--warmup_calls", "0"),
    *("--ulysses_degree", "4", "--cocodiff_topology", "2x2"),
)
MODES = ("exact", "balanced", "fast")
NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "opencl:cpu"}
"""Environment of ranks on the CPU, which runs any number of them."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "demo",
        help="what does it look like? A small model on this machine's CPU",
        description="Compares stock xDiT and the plugin with a small FLUX.1-dev on 4 CPU ranks: on equal links, then "
        "with slow links between two emulated nodes. Run it in a clone, which has the small models.",
        usage="%(prog)s [--out DIR] [-- <xdit arguments instead of the demo's>]",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("cocodiff-report"), metavar="DIR", help="folder of the report (%(default)s)"
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from xfuser_cocodiff.tools.launching import command_line

    arguments = options.xdit_arguments or [*ARGUMENTS]
    if not (repository := _repository()):
        return fail("the demo's small models are not in the wheel; clone the repository, and run the demo in it")
    hub = Path(".models").resolve()
    model = command_line.option_value(arguments, "model")
    if (ranks := command_line.num_ranks(arguments)) % 2:
        return fail(f"the demo divides the ranks over two nodes: {ranks} ranks are not valid; valid are even numbers")
    if subprocess.run(
        [sys.executable, "-m", "small_models", "--out", hub, *([model] if model else [])], cwd=repository
    ).returncode:
        return fail(f"no small model {model}; `python -m small_models --help` lists them")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        os.environ.pop(name, None)
    # Cached profiles and schedules of earlier runs are not used, so that every demo measures a first run.
    os.environ |= {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "COCODIFF_CACHE": "off", **NO_DEVICES}
    page, equal_links = options.out / "report.html", options.out / "equal-links"
    page.unlink(missing_ok=True)

    print("Part 1 of 2: equal links, stock xDiT and the plugin; about one minute on two cores", flush=True)
    # The launcher of part 2 is used here too: the xdit command would import all of xDiT once more.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node={ranks}"]
    if (status := _compare(options, equal_links, (), [*torchrun, "--no-python", "--"], arguments)) > 1:
        return status
    emulated = [sys.executable, str(repository / "emulation"), "--preset", "ethernet", "--scale", "10"]  # 25 Mbit/s
    emulated += ["--topology", _topology(arguments), "--"]
    if problem := subprocess.run([*emulated, "true"], stderr=subprocess.PIPE, text=True).stderr:
        print(f"Part 2 is skipped: this machine cannot emulate slow links between nodes. {problem.strip()}")
    else:
        print("Part 2 of 2: slow links between two nodes, stock xDiT and three modes; about three minutes", flush=True)
        modes = () if command_line.option_value(arguments, "cocodiff_mode") else MODES
        status = max(status, _compare(options, options.out, modes, emulated, arguments))
    if not page.exists():
        shutil.copy(equal_links / "report.html", page)
    print("The demo's model is small: its dB do not carry over to real ones; errors and bits are its own.")
    print(f"Report: {page.resolve()}")
    return status


def _repository() -> Path | None:
    """Return the folder of the repository; None where there are no small models."""
    places = Path(__file__).parents[2], Path.cwd()
    return next((place for place in places if (place / "small_models/hub.py").is_file()), None)


def _compare(
    options: argparse.Namespace, out: Path, modes: Sequence[str], launcher: Sequence[str], line: Sequence[str]
) -> int:
    given = {"records": [], "repeats": 3, "json": None, "command": options.command, "xdit_arguments": line}
    return compare.run(argparse.Namespace(out=out, modes=modes, launcher=launcher, **given))


def _topology(arguments: Sequence[str]) -> str:
    """Return the topology of all ranks: that of the arguments if it has as many, else two nodes."""
    from xfuser_cocodiff.engine.topology.topology import Topology
    from xfuser_cocodiff.tools.launching import command_line

    ranks, given = command_line.num_ranks(arguments), command_line.option_value(arguments, "cocodiff_topology")
    return given if given and Topology.parse(given).size == ranks else f"node=2,gpu={ranks // 2}"
