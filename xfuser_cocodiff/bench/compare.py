"""Runs a command of the user with stock xDiT and with the plugin, and compares what both recorded."""

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from xfuser_cocodiff.bench import child, host, trace
from xfuser_cocodiff.bench.figures import Outcome, figures
from xfuser_cocodiff.options import EXACT, OPTIONS, TRACE_VARIABLE
from xfuser_cocodiff.xdit import command

STOCK = "stock"
_VARIABLES = {option.field: option.variable for option in OPTIONS}


class UsageError(ValueError):
    """The command line makes no comparison."""


@dataclass
class Contender:
    """One side of the comparison."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    launcher: str | None = None
    """What starts the ranks; torchrun when not given."""
    folders: list[Path] = field(default_factory=list)
    """Of the records, one per launch so far."""
    launched: list[str] = field(default_factory=list)
    """The command of its last launch."""

    trace: Path | None = None
    """Of all ranks."""

    def launch(self, out: Path, console: Console) -> None:
        """Run once more, recording into a fresh folder of `out`."""
        label = self.name if not command.is_script(self.arguments) else f"{self.name} {len(self.folders) + 1}"
        self.launched = command.launch(self.arguments, self.launcher)
        self.folders.append(self._run(label, self.launched, self.environment, out, console))

    def launch_traced(self, out: Path, console: Console) -> None:
        """Run once more for a trace; a launch of its own, since tracing takes time."""
        arguments = self.arguments if command.is_script(self.arguments) else [*self.arguments, "--num_iterations=1"]
        environment = {**self.environment, TRACE_VARIABLE: "1"}
        folder = self._run(f"{self.name} traced", command.launch(arguments, self.launcher), environment, out, console)
        self.trace = out / f"trace-{self.name}.json.gz"
        trace.merge(sorted(folder.glob("trace*.json.gz"), key=_rank), self.trace)

    def take(self, earlier: Path, out: Path, repeats: int) -> None:
        """Stand for this side by what an earlier comparison recorded of it.

        Raises:
            UsageError: there is none, or it ran something else.
        """
        try:
            found = json.loads((earlier / "report.json").read_text())
            ran, recorded = shlex.split(found["runs"][0]["command"]), found["repeats"]
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise UsageError(f"--stock {earlier} is no folder of a comparison: {error}") from None
        self.launched = command.launch(self.arguments, self.launcher)
        wanted = command.bearing_on_stock(self.launched)
        if (command.bearing_on_stock(ran), recorded) != (wanted, repeats):
            raise UsageError(
                f"--stock {earlier} ran {shlex.join(ran)!r}, repeats: {recorded}; valid here is a comparison of "
                f"{shlex.join(wanted)!r}, repeats: {repeats}"
            )
        self.launched = ran
        for folder in sorted((earlier / "records").glob(f"{STOCK}*")):
            if not folder.name.endswith("traced"):
                self.folders.append(out / "records" / folder.name)
                shutil.copytree(folder, self.folders[-1], dirs_exist_ok=True)

    @staticmethod
    def _run(label: str, launched: list[str], environment: dict[str, str], out: Path, console: Console) -> Path:
        folder = out / "records" / label.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        child.run(label, launched, environment, folder, out / "logs" / f"{folder.name}.log", console)
        return folder


def _rank(file: Path) -> int:
    return int("".join(filter(str.isdigit, file.name)))


def compare(
    arguments: Sequence[str],
    out: Path,
    repeats: int,
    console: Console,
    traced: bool = False,
    launcher: str | None = None,
    earlier: Path | None = None,
) -> dict[str, Any]:
    """Run a command stock and with the plugin.

    Args:
        arguments: of the xdit command, or an example script and its arguments.
        out: folder for records, logs and pictures; created if missing.
        repeats: runs to measure on each side, unless the arguments say ``--num_iterations``.
        console: where progress is shown.
        traced: whether to launch each side once more for a trace of its last steps.
        launcher: what starts the ranks, see :func:`command.launch`; torchrun when not given.
        earlier: folder of a comparison with the same stock side, which then is not run again.

    Returns:
        The record; paths in it are relative to `out`.

    Raises:
        UsageError: nothing can be compared with these arguments.
        LaunchError: xDiT failed.
        RecordError: xDiT ran, but not as expected.
    """
    degree, script = check(arguments), command.is_script(arguments)
    repeats = repeats if script else _number(arguments, "num_iterations", repeats)
    if repeats < 1:
        raise UsageError(f"{repeats} repeats leave nothing to compare")
    if degree == 1:
        console.print("--ulysses_degree is 1: there is nothing to move, so both sides run the same code")
    _check_launcher(arguments, launcher)
    contenders = contend(arguments, os.environ, out, repeats, launcher)
    if earlier:
        contenders[0].take(earlier, out, repeats)
    to_run = contenders[1 if earlier else 0 :]
    console.print(f"{' and '.join(contender.name for contender in contenders)}, repeats of each: {repeats}")
    for turn in range(repeats if script else 1):
        # Turns change, so that neither side always runs first.
        for contender in to_run[:: 1 if turn % 2 == 0 else -1]:
            contender.launch(out, console)
    for contender in to_run if traced else ():
        contender.launch_traced(out, console)
    outcomes = [Outcome.read(contender.folders, 1 if script else repeats) for contender in contenders]
    runs = [
        {
            "name": contender.name,
            "model": command.option(arguments, "model"),
            "degree": degree,
            "command": shlex.join(contender.launched),
            "trace": contender.trace.relative_to(out).as_posix() if contender.trace else None,
            "overlap": trace.overlaps(contender.trace) if contender.trace else {},
            **figures(outcome, outcomes[0], out),
        }
        for contender, outcome in zip(contenders, outcomes, strict=True)
    ]
    return {**host.header(), "repeats": repeats, "launches": "one per repeat" if script else "one", "runs": runs}


def check(arguments: Sequence[str]) -> int:
    """The Ulysses degree of a command.

    Raises:
        UsageError: there is no command, or nothing in it that the plugin could change.
    """
    if not arguments:
        raise UsageError("xDiT's arguments are missing: put them, or a script and its arguments, after --")
    if command.is_script(arguments) and not Path(arguments[0]).is_file():
        raise UsageError(f"there is no script {arguments[0]}")
    if command.option(arguments, "ulysses_degree") is None:
        raise UsageError(
            "--ulysses_degree is missing after --: the plugin works on Ulysses attention, so there is nothing to "
            "compare without it; try --ulysses_degree 2"
        )
    return _number(arguments, "ulysses_degree", 1)


def _number(arguments: Sequence[str], name: str, default: int) -> int:
    value = command.option(arguments, name)
    try:
        return default if value is None else int(value)
    except ValueError:
        raise UsageError(f"--{name}: {value!r} is not a whole number") from None


def _check_launcher(arguments: Sequence[str], launcher: str | None) -> None:
    try:
        command.launch(arguments, launcher)
    except ValueError as error:
        raise UsageError(f"--launcher {launcher!r} is not valid: {error}; valid is a command line") from None


def contend(
    arguments: Sequence[str], environment: Mapping[str, str], out: Path, repeats: int, launcher: str | None = None
) -> list[Contender]:
    """Stock, and the plugin in the mode asked for: the same command, but for one flag."""
    shared = {name: value for name, value in environment.items() if name != "COCODIFF_DISABLE"}
    off = {name: value for name, value in shared.items() if name != _VARIABLES["use_cocodiff"]}
    plain = command.without(arguments, "use_cocodiff")
    mode = command.option(arguments, "cocodiff_mode") or environment.get(_VARIABLES["cocodiff_mode"]) or EXACT
    sides = [
        Contender(STOCK, plain, off, launcher),
        Contender(mode, [*plain, "--use_cocodiff"], shared, launcher),
    ]
    if not command.is_script(arguments):
        for side in sides:
            side.arguments += _missing(arguments, side.name, out, repeats)
    return sides


def _missing(arguments: Sequence[str], name: str, out: Path, repeats: int) -> list[str]:
    """What xDiT needs to be told besides; what the user said stands."""
    folder = out / "output" / name
    wanted = {"num_iterations": repeats, "warmup_calls": 1, "output_directory": folder}
    folder.mkdir(parents=True, exist_ok=True)
    return [f"--{key}={value}" for key, value in wanted.items() if command.option(arguments, key) is None]
