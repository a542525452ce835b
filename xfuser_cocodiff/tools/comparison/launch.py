"""Launches a command with stock xDiT and with the plugin, with records of all ranks."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xfuser_cocodiff.tools.launching import command_line
from xfuser_cocodiff.xdit.settings.options import ENABLE_OPTION, OPTIONS, SHARE_FIELD
from xfuser_cocodiff.xdit.settings.variables import RECORD_VARIABLE

STOCK, PLUGIN = "stock", "plugin"
TERMINATION_SECONDS = 40
"""Seconds until a launch that does not terminate is killed; torchrun gives its ranks 30."""
TAIL_LINES = 25
_MODE = "cocodiff_mode"
# The last line of a traceback, with or without the rank's prefix. torchrun's ChildFailedError only repeats it.
_ERROR = re.compile(r"^(?:\[[^\]]+\]:?\s*)*((?!\S*ChildFailedError)[\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)


class LaunchError(RuntimeError):
    """Error: a launch of xDiT failed."""


@dataclass(frozen=True)
class Variant:
    """One variant of a comparison: stock or a mode of the plugin."""

    name: str
    arguments: list[str]
    environment: dict[str, str]


def launch_variants(
    arguments: Sequence[str],
    out: Path,
    repeats: int,
    modes: Sequence[str] = (),
    launcher: Sequence[str] | None = None,
) -> list[Path]:
    """Run a command with stock xDiT and with the plugin, and return the folders with their records, stock's first.

    An example script is launched once per repeat, the xdit command repeats its run itself.

    Args:
        arguments: of the xdit command, or an example script and its arguments.
        out: folder for records, logs and images; created if missing.
        repeats: measured runs of each variant.
        modes: modes of the plugin; without any, the one that the arguments or the environment select.
        launcher: command that starts the ranks instead of torchrun; see :func:`command_line.launch_command`.

    Raises:
        ValueError: the arguments are not valid.
        LaunchError: a launch failed.
    """
    _check(arguments, modes)
    variants = make_variants(arguments, os.environ, out, repeats, modes)
    folders = [out / "records" / variant.name for variant in variants]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    is_script = command_line.is_script(arguments)
    print(f"comparing {', '.join(variant.name for variant in variants)}; repeats of each: {repeats}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops a launch as Ctrl-C does
    for number in range(repeats if is_script else 1):
        # The order alternates, so that no variant always runs first.
        for variant, folder in [*zip(variants, folders, strict=True)][:: 1 if number % 2 == 0 else -1]:
            command = command_line.launch_command(variant.arguments, launcher)
            name = f"{variant.name} {number + 1}" if is_script else variant.name
            folder = folder / str(number + 1) if is_script else folder
            run(name, command, {**variant.environment, RECORD_VARIABLE: str(folder.resolve())}, out)
    return folders


def _check(arguments: Sequence[str], modes: Sequence[str]) -> None:
    if not arguments:
        raise ValueError("xDiT's arguments are missing: put them, or a script and its arguments, after --")
    if command_line.is_script(arguments) and not Path(arguments[0]).is_file():
        raise ValueError(f"script {arguments[0]} does not exist")
    if command_line.option_value(arguments, "ulysses_degree") is None:
        raise ValueError("--ulysses_degree is missing after --: without it nothing differs; try --ulysses_degree 2")
    if modes and (selected := command_line.option_value(arguments, _MODE)):
        raise ValueError(f"--modes {','.join(modes)} and --{_MODE} {selected} are mutually exclusive")


def make_variants(
    arguments: Sequence[str], environment: Mapping[str, str], out: Path, repeats: int, modes: Sequence[str] = ()
) -> list[Variant]:
    """Return stock and one variant per mode: the same command, with different options of the plugin."""
    environment = {name: value for name, value in environment.items() if name != "COCODIFF_DISABLE"}
    own_variables = {option.variable for option in OPTIONS if option.field != SHARE_FIELD}
    stock_environment = {name: value for name, value in environment.items() if name not in own_variables}
    base = command_line.drop_options(arguments, {ENABLE_OPTION: False})
    lines = {mode: [*base, f"--{_MODE}={mode}"] for mode in modes} or {PLUGIN: base}
    variants = [
        Variant(STOCK, command_line.stock_arguments(arguments), stock_environment),
        *(Variant(name, [*line, f"--{ENABLE_OPTION}"], environment) for name, line in lines.items()),
    ]
    if not command_line.is_script(arguments):
        for variant in variants:
            folder = out / "output" / variant.name
            folder.mkdir(parents=True, exist_ok=True)
            defaults = {"num_iterations": repeats, "warmup_calls": 1, "output_directory": folder}
            given = {name for name in defaults if command_line.option_value(arguments, name) is not None}
            variant.arguments.extend(f"--{name}={value}" for name, value in defaults.items() if name not in given)
    return variants


def run(name: str, command: Sequence[str], environment: Mapping[str, str], out: Path) -> None:
    """Run a command to its end.

    Args:
        name: of the launch, for the console and its log.
        command: program and arguments.
        environment: of the command.
        out: folder of the comparison, for the log.

    Raises:
        LaunchError: the command failed; the message has its error and the end of its log.
    """
    log = out / "logs" / f"{name.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{name}: started, output in {log}", flush=True)
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait()
        finally:
            stop(process)
    if status != 0:
        raise LaunchError(_describe_failure(name, status, log))
    print(f"{name}: done in {time.monotonic() - started:.0f} s", flush=True)


def stop(process: subprocess.Popen) -> None:
    """Stop a process group that still runs: SIGTERM first, so that a launcher stops its ranks, then SIGKILL."""
    for number, seconds in ((signal.SIGTERM, TERMINATION_SECONDS), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def _describe_failure(name: str, status: int, log: Path) -> str:
    """Return how a launch failed, with its error and the end of its log."""
    text = log.read_text(errors="replace")
    failure = f"was killed by signal {-status}" if status < 0 else f"failed with exit status {status}"
    error = max(_ERROR.finditer(text), key=re.Match.end, default=None)
    # torchrun's summary after the error lists ranks and exit codes; without it the traceback is in the last lines.
    lines = text[: error.end() if error else None].splitlines()[-TAIL_LINES:]
    cause = f": {error[1]}" if error else ""
    return "\n".join([f"the {name} launch {failure}{cause}", "", f"From {log}:", "", *lines])
