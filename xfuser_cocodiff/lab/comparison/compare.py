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

from xfuser_cocodiff.engine.settings.options import (
    ENABLE_OPTION,
    EXACT,
    MODES,
    MULTI_NODE_MODE,
    OPTIONS,
    TRACE_VARIABLE,
)
from xfuser_cocodiff.engine.topology.launcher import SHARE_FIELD
from xfuser_cocodiff.lab.comparison import emulate, launch, trace
from xfuser_cocodiff.lab.comparison.figures import Outcome, figures
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.xdit.launching import command_line

STOCK = "stock"
_MODE = "cocodiff_mode"
_VARIABLES = {option.field: option.variable for option in OPTIONS}
_BEARING = ("xfuser", "torch", "diffusers")
"""Packages whose versions stock's results depend on."""


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
    traces: list[Path] = field(default_factory=list)
    """By rank; none where it was not traced."""

    def launch(self, out: Path, console: Console) -> None:
        """Run once more, recording into a fresh folder."""
        label = self.name if not command_line.is_script(self.arguments) else f"{self.name} {len(self.folders) + 1}"
        self.launched = command_line.launch_command(self.arguments, self.launcher)
        self.folders.append(launch.run(label, self.launched, self.environment, out, console))

    def launch_traced(self, out: Path, console: Console) -> None:
        """Run once more for a trace; a launch of its own, since tracing takes time."""
        arguments = (
            self.arguments if command_line.is_script(self.arguments) else [*self.arguments, "--num_iterations=1"]
        )
        launched = command_line.launch_command(arguments, self.launcher)
        environment = {**self.environment, TRACE_VARIABLE: "1"}
        self.traces = trace.files(launch.run(f"{self.name} traced", launched, environment, out, console))

    def finish(self, out: Path, repeats: int) -> None:
        """Note in `out` that all launches of this side are there, so that another comparison can go on with them."""
        manifest = {
            **host.header(),
            "command": shlex.join(self.launched),
            "repeats": repeats,
            "records": [folder.name for folder in self.folders],
        }
        _manifest(out, self.name).write_text(json.dumps(manifest, indent=2) + "\n")

    def take(self, earlier: Path, out: Path, repeats: int) -> None:
        """Stand for this side by what an earlier comparison recorded of it, whether or not that came to its end.

        Raises:
            UsageError: there is none, or it ran something else, or with other versions.
        """
        try:
            found = json.loads(_manifest(earlier, self.name).read_text())
            ran, recorded, versions = shlex.split(found["command"]), found["repeats"], found["host"]
            names = [str(name) for name in found["records"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--stock {earlier} is no folder of a comparison whose {self.name} side is finished: {error}"
            ) from None
        wanted = command_line.arguments_for_stock(command_line.launch_command(self.arguments, self.launcher))
        if (command_line.arguments_for_stock(ran), recorded) != (wanted, repeats):
            raise UsageError(
                f"--stock {earlier} ran {shlex.join(ran)!r}, repeats: {recorded}; valid here is a comparison of "
                f"{shlex.join(wanted)!r}, repeats: {repeats}"
            )
        here = host.header()["host"]
        if other := [f"{name} {versions.get(name)}" for name in _BEARING if versions.get(name) != here[name]]:
            now = ", ".join(f"{name} {here[name]}" for name in _BEARING)
            raise UsageError(f"--stock {earlier} ran with {', '.join(other)}; valid here is {now}")
        self.launched, folder = ran, out / "records"
        self.folders = [folder / name for name in names]
        if out.resolve() != earlier.resolve():  # else it goes on in its own folder
            for name in names:
                shutil.copytree(earlier / "records" / name, folder / name, dirs_exist_ok=True)
            shutil.copyfile(_manifest(earlier, self.name), _manifest(out, self.name))


def _manifest(out: Path, side: str) -> Path:
    return out / "records" / f"{side}.json"


@dataclass(frozen=True)
class How:
    """How a comparison is made."""

    repeats: int = 3
    """Runs to measure on each side, unless the arguments say ``--num_iterations``."""
    modes: tuple[str, ...] = ()
    """Of the plugin, each a side of its own; when there are none, the one that arguments or environment ask for."""
    traced: bool = False
    """Whether to launch each side once more for a trace of its last steps."""
    launcher: str | None = None
    """What starts the ranks, see :func:`command_line.launch_command`; torchrun when not given."""
    emulated: emulate.Wish | None = None
    """The emulated cluster that they run on, if they do."""
    earlier: Path | None = None
    """Folder of a comparison with the same stock side, which then is not run again."""


def compare(arguments: Sequence[str], out: Path, console: Console, how: How) -> dict[str, Any]:
    """Run a command stock and with the plugin.

    Args:
        arguments: of the xdit command, or an example script and its arguments.
        out: folder for records, logs and pictures; created if missing.
        console: where progress is shown.
        how: to do it.

    Returns:
        The record; paths in it are relative to `out`.

    Raises:
        UsageError: nothing can be compared with these arguments.
        LaunchError: xDiT failed.
        RecordError: xDiT ran, but not as expected.
    """
    degree, script = check(arguments), command_line.is_script(arguments)
    repeats = how.repeats if script else _number(arguments, "num_iterations", how.repeats)
    if repeats < 1:
        raise UsageError(f"{repeats} repeats leave nothing to compare")
    _check_modes(how.modes, arguments)
    arguments, launcher, environment, cluster = _where(arguments, how)
    if degree == 1:
        console.print("--ulysses_degree is 1: there is no all-to-all, so both sides run the same code")
    usual = MULTI_NODE_MODE if cluster and cluster["nodes"] > 1 else EXACT
    contenders = contend(arguments, environment, out, repeats, launcher, how.modes, usual)
    with launch.exit_on_sigterm():
        (out / "records").mkdir(parents=True, exist_ok=True)
        if how.earlier:
            contenders[0].take(how.earlier, out, repeats)
        console.print(f"{' and '.join(contender.name for contender in contenders)}, repeats of each: {repeats}")
        to_run = contenders[1 if how.earlier else 0 :]
        try:
            _launch(to_run, out, repeats, how.traced, console)
            runs = _runs(contenders, arguments, out, repeats)
        except BaseException:
            if _manifest(out, STOCK).exists():
                console.print(f"{STOCK}'s side is finished and kept: add --stock {out} to go on with it")
            raise
    known = {"repeats": repeats, "launches": "one per repeat" if script else "one"}
    return {**host.header(), **known, "cluster": cluster, "runs": runs}


def _check_modes(modes: Sequence[str], arguments: Sequence[str]) -> None:
    for mode in modes:
        if mode not in MODES or list(modes).count(mode) > 1:
            valid = f"some of {', '.join(MODES)}, each once"
            raise UsageError(f"--modes {','.join(modes)!r} is not valid; valid are {valid}")
    if modes and (asked := command_line.option_value(arguments, _MODE)):
        raise UsageError(f"--modes {','.join(modes)} and --{_MODE} {asked} both say what to compare; give one")


def _where(
    arguments: Sequence[str], how: How
) -> tuple[Sequence[str], str | None, Mapping[str, str], dict[str, Any] | None]:
    """Arguments, launcher and environment of the ranks, and what the record says of the cluster that they run on."""
    if how.emulated is None:
        _check_launcher(arguments, how.launcher)
        return arguments, how.launcher, os.environ, None
    if how.launcher is not None:
        raise UsageError(f"--launcher and {emulate.OPTION} both start the ranks; give one")
    try:
        built = emulate.cluster_for(how.emulated, arguments)
        emulate.check(built)
    except ValueError as error:
        raise UsageError(str(error)) from None
    environment = {**os.environ, **emulate.NO_DEVICES}
    return emulate.on_cluster(arguments, built), emulate.launcher(built), environment, emulate.record(built)


def _launch(to_run: Sequence[Contender], out: Path, repeats: int, traced: bool, console: Console) -> None:
    """Run each side as often as it takes; one whose records are complete is finished."""
    for contender in to_run:
        _manifest(out, contender.name).unlink(missing_ok=True)
    turns = repeats if command_line.is_script(to_run[0].arguments) else 1
    for turn in range(turns):
        # Turns change, so that neither side always runs first.
        for contender in to_run[:: 1 if turn % 2 == 0 else -1]:
            contender.launch(out, console)
            if turn == turns - 1:
                Outcome.read(contender.folders, repeats // turns)
                contender.finish(out, repeats)
    for contender in to_run if traced else ():
        contender.launch_traced(out, console)


def _runs(contenders: Sequence[Contender], arguments: Sequence[str], out: Path, repeats: int) -> list[dict[str, Any]]:
    """What the record says of each side."""
    per_launch = 1 if command_line.is_script(arguments) else repeats
    outcomes = [Outcome.read(contender.folders, per_launch) for contender in contenders]
    return [
        {
            "name": contender.name,
            "model": command_line.option_value(arguments, "model"),
            "degree": check(arguments),
            "command": shlex.join(contender.launched),
            "trace": contender.traces[0].relative_to(out).as_posix() if contender.traces else None,
            "overlap": trace.overlaps(contender.traces),
            **figures(outcome, outcomes[0], out),
        }
        for contender, outcome in zip(contenders, outcomes, strict=True)
    ]


def check(arguments: Sequence[str]) -> int:
    """The Ulysses degree of a command.

    Raises:
        UsageError: there is no command, or nothing in it that the plugin could change.
    """
    if not arguments:
        raise UsageError("xDiT's arguments are missing: put them, or a script and its arguments, after --")
    if command_line.is_script(arguments) and not Path(arguments[0]).is_file():
        raise UsageError(f"there is no script {arguments[0]}")
    if command_line.option_value(arguments, "ulysses_degree") is None:
        raise UsageError(
            "--ulysses_degree is missing after --: the plugin works on Ulysses attention, so there is nothing to "
            "compare without it; try --ulysses_degree 2"
        )
    return _number(arguments, "ulysses_degree", 1)


def _number(arguments: Sequence[str], name: str, default: int) -> int:
    value = command_line.option_value(arguments, name)
    try:
        return default if value is None else int(value)
    except ValueError:
        raise UsageError(f"--{name}: {value!r} is not a whole number") from None


def _check_launcher(arguments: Sequence[str], launcher: str | None) -> None:
    try:
        command_line.launch_command(arguments, launcher)
    except ValueError as error:
        raise UsageError(f"--launcher {launcher!r} is not valid: {error}; valid is a command line") from None


def contend(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    out: Path,
    repeats: int,
    launcher: str | None = None,
    modes: Sequence[str] = (),
    usual: str = EXACT,
) -> list[Contender]:
    """Stock, and the plugin in each mode: the same command, but for the plugin's options.

    Without modes, it is the one that arguments or environment ask for, or the one that is usual where these ranks run.
    """
    shared = {name: value for name, value in environment.items() if name != "COCODIFF_DISABLE"}
    ours = {variable for field, variable in _VARIABLES.items() if field != SHARE_FIELD}
    off = {name: value for name, value in shared.items() if name not in ours}
    plain = command_line.without_flag(arguments, ENABLE_OPTION)
    asked = {mode: [*plain, f"--{_MODE}={mode}"] for mode in modes}
    if not asked:
        asked[command_line.option_value(arguments, _MODE) or environment.get(_VARIABLES[_MODE]) or usual] = plain
    sides = [
        Contender(STOCK, command_line.stock_arguments(arguments), off, launcher),
        *(Contender(mode, [*line, f"--{ENABLE_OPTION}"], shared, launcher) for mode, line in asked.items()),
    ]
    if not command_line.is_script(arguments):
        for side in sides:
            side.arguments += _missing(arguments, side.name, out, repeats)
    return sides


def _missing(arguments: Sequence[str], name: str, out: Path, repeats: int) -> list[str]:
    """What xDiT needs to be told besides; what the user said stands."""
    folder = out / "output" / name
    wanted = {"num_iterations": repeats, "warmup_calls": 1, "output_directory": folder}
    folder.mkdir(parents=True, exist_ok=True)
    return [f"--{key}={value}" for key, value in wanted.items() if command_line.option_value(arguments, key) is None]
