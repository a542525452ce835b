"""Runs a command with stock xDiT and with the plugin, and compares the records of both."""

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from xfuser_cocodiff.engine.compression.mode_names import EXACT, MODES, MULTI_NODE_MODE
from xfuser_cocodiff.lab.comparison import emulate, launch, trace
from xfuser_cocodiff.lab.comparison.metrics import VariantResult, compute_metrics
from xfuser_cocodiff.lab.launching import command_line
from xfuser_cocodiff.lab.reporting import host, record_file
from xfuser_cocodiff.xdit.settings.options import ENABLE_OPTION, OPTIONS, SHARE_FIELD
from xfuser_cocodiff.xdit.settings.variables import TRACE_VARIABLE

STOCK = "stock"
_MODE = "cocodiff_mode"
_VARIABLES = {option.field: option.variable for option in OPTIONS}
_BASELINE_PACKAGES = ("xfuser", "torch", "diffusers")
"""Packages whose versions must be equal for a baseline to be reused."""


class UsageError(ValueError):
    """Error: the command line is not valid for a comparison."""


@dataclass
class RecordedVariant:
    """One variant of a comparison, stock or a mode of the plugin, with the records of its launches."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    launcher: str | None = None
    """Command that starts the ranks; torchrun if not given."""
    folders: list[Path] = field(default_factory=list)
    """Record folders, one per launch so far."""
    launched_command: list[str] = field(default_factory=list)
    """Command line of the last launch."""
    traces: list[Path] = field(default_factory=list)
    """Trace files by rank; empty without tracing."""

    def launch(self, out: Path, console: Console) -> None:
        """Launch the command once and record it in a new folder."""
        label = self.name if not command_line.is_script(self.arguments) else f"{self.name} {len(self.folders) + 1}"
        self.launched_command = command_line.launch_command(self.arguments, self.launcher)
        self.folders.append(launch.run(label, self.launched_command, self.environment, out, console))

    def launch_traced(self, out: Path, console: Console) -> None:
        """Launch the command once more for a trace, apart from the measured launches, which tracing would slow down."""
        arguments = (
            self.arguments if command_line.is_script(self.arguments) else [*self.arguments, "--num_iterations=1"]
        )
        launched_command = command_line.launch_command(arguments, self.launcher)
        environment = {**self.environment, TRACE_VARIABLE: "1"}
        self.traces = trace.files(launch.run(f"{self.name} traced", launched_command, environment, out, console))

    def write_manifest(self, out: Path, repeats: int) -> None:
        """Write into `out` that the launches of this variant are complete, so that --stock can reuse them."""
        manifest = {
            **host.header(),
            "command": shlex.join(self.launched_command),
            "repeats": repeats,
            "records": [folder.name for folder in self.folders],
        }
        _manifest_file(out, self.name).write_text(json.dumps(manifest, indent=2) + "\n")

    def reuse(self, earlier: Path, out: Path, repeats: int) -> None:
        """Take the records of this variant from an earlier comparison instead of launching it.

        Args:
            earlier: folder of that comparison, which may have failed after this variant was complete.
            out: folder of this comparison, to which the records are copied.
            repeats: of this comparison.

        Raises:
            UsageError: the records are missing, or of another command or other package versions.
        """
        try:
            manifest = record_file.read(_manifest_file(earlier, self.name))
            launched_command, recorded = shlex.split(manifest["command"]), manifest["repeats"]
            versions, names = manifest["host"], [_plain(name) for name in manifest["records"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--stock {earlier} is not valid: it has no complete records of {self.name}: {error}"
            ) from None
        expected = command_line.arguments_for_stock(command_line.launch_command(self.arguments, self.launcher))
        if (command_line.arguments_for_stock(launched_command), recorded) != (expected, repeats):
            raise UsageError(
                f"--stock {earlier} is not valid: it ran {shlex.join(launched_command)!r}, repeats: {recorded}; this "
                f"comparison needs {shlex.join(expected)!r}, repeats: {repeats}"
            )
        current = host.header()["host"]
        different = [name for name in _BASELINE_PACKAGES if versions.get(name) != current[name]]
        if different:
            ran_with = ", ".join(f"{name} {versions.get(name)}" for name in different)
            installed = ", ".join(f"{name} {current[name]}" for name in different)
            raise UsageError(f"--stock {earlier} is not valid: it ran with {ran_with}; installed here: {installed}")
        self.launched_command, folder = launched_command, out / "records"
        self.folders = [folder / name for name in names]
        if out.resolve() != earlier.resolve():
            for name in names:
                shutil.copytree(earlier / "records" / name, folder / name, dirs_exist_ok=True)
            shutil.copyfile(_manifest_file(earlier, self.name), _manifest_file(out, self.name))


def _plain(name: str) -> str:
    """Return the name of a folder; raise ValueError if it leads to another one."""
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a folder")
    return name


def _manifest_file(out: Path, variant: str) -> Path:
    return out / "records" / f"{variant}.json"


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison."""

    repeats: int = 3
    """Measured runs of each variant, unless the arguments have ``--num_iterations``."""
    modes: tuple[str, ...] = ()
    """Modes of the plugin, each a variant; if empty, the mode that arguments or environment select."""
    traced: bool = False
    """Whether to launch each variant once more for a trace of its last steps."""
    launcher: str | None = None
    """Command that starts the ranks, see :func:`command_line.launch_command`; torchrun if not given."""
    emulation: emulate.EmulationOptions | None = None
    """Emulated cluster to run on; None runs on this machine's own links."""
    baseline: Path | None = None
    """Folder of an earlier comparison whose records of stock are reused."""


@dataclass(frozen=True)
class _LaunchTarget:
    """How and where the ranks of all variants are started."""

    arguments: Sequence[str]
    launcher: str | None
    environment: Mapping[str, str]
    cluster: dict[str, Any] | None = None
    """Description of the emulated cluster for the record."""

    @property
    def default_mode(self) -> str:
        """Mode that the plugin selects if none is given."""
        return MULTI_NODE_MODE if self.cluster and self.cluster["nodes"] > 1 else EXACT


def compare(arguments: Sequence[str], out: Path, console: Console, options: CompareOptions) -> dict[str, Any]:
    """Run a command with stock xDiT and with the plugin, and return the record of the comparison.

    Args:
        arguments: of the xdit command, or an example script and its arguments.
        out: folder for records, logs and pictures; created if missing.
        console: to print progress on.
        options: of the comparison.

    Returns:
        The record; paths in it are relative to `out`.

    Raises:
        UsageError: the arguments or options are not valid.
        LaunchError: a launch of xDiT failed.
        RecordError: the records of a launch are missing or incomplete.
    """
    degree, script = ulysses_degree(arguments), command_line.is_script(arguments)
    repeats = options.repeats if script else _number(arguments, "num_iterations", options.repeats)
    if repeats < 1:
        raise UsageError(
            f"{'--repeats' if script else '--num_iterations'} {repeats} is not valid; valid are integers from 1"
        )
    _check_modes(options.modes, arguments)
    target = _select_target(arguments, options)
    if degree == ring_degree(arguments) == 1:
        console.print("--ulysses_degree is 1: there is no communication, so all variants run the same code")
    variants = make_variants(
        target.arguments, target.environment, out, repeats, target.launcher, options.modes, target.default_mode
    )
    with launch.exit_on_sigterm():
        runs = _run_variants(variants, out, repeats, options, console)
    launches = "one per repeat" if script else "one"
    return {**host.header(), "repeats": repeats, "launches": launches, "cluster": target.cluster, "runs": runs}


def _check_modes(modes: Sequence[str], arguments: Sequence[str]) -> None:
    for mode in modes:
        if mode not in MODES or list(modes).count(mode) > 1:
            raise UsageError(
                f"--modes {','.join(modes)!r} is not valid; valid are {', '.join(MODES)}, each at most once"
            )
    if modes and (selected := command_line.option_value(arguments, _MODE)):
        raise UsageError(f"--modes {','.join(modes)} and --{_MODE} {selected} are mutually exclusive")


def _select_target(arguments: Sequence[str], options: CompareOptions) -> _LaunchTarget:
    """Return where the ranks run: on this machine, by the launcher if one is given, or on an emulated cluster."""
    if options.emulation is None:
        _check_launcher(arguments, options.launcher)
        return _LaunchTarget(arguments, options.launcher, os.environ)
    if options.launcher is not None:
        raise UsageError(f"--launcher and {emulate.OPTION} are mutually exclusive: both start the ranks")
    try:
        cluster = emulate.cluster_for(options.emulation, arguments)
        emulate.check_available(cluster)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return _LaunchTarget(
        emulate.with_topology(arguments, cluster),
        emulate.launcher(cluster),
        {**os.environ, **emulate.NO_DEVICES},
        emulate.describe(cluster),
    )


def _run_variants(
    variants: Sequence[RecordedVariant], out: Path, repeats: int, options: CompareOptions, console: Console
) -> list[dict[str, Any]]:
    """Launch the variants, all or all but stock, and return one run of the record for each."""
    (out / "records").mkdir(parents=True, exist_ok=True)
    to_launch = variants
    if options.baseline:
        variants[0].reuse(options.baseline, out, repeats)
        to_launch = variants[1:]
    console.print(f"comparing {', '.join(variant.name for variant in variants)}; repeats of each: {repeats}")
    try:
        _launch(to_launch, out, repeats, options.traced, console)
        return _make_runs(variants, out, repeats)
    except BaseException:
        if _manifest_file(out, STOCK).exists():
            console.print(f"the records of {STOCK} are complete: add --stock {out} to reuse them")
        raise


def _launch(variants: Sequence[RecordedVariant], out: Path, repeats: int, traced: bool, console: Console) -> None:
    """Launch each variant as often as needed, and write its manifest when its records are complete."""
    for variant in variants:
        _manifest_file(out, variant.name).unlink(missing_ok=True)
    rounds = repeats if command_line.is_script(variants[0].arguments) else 1
    for number in range(rounds):
        # The order alternates, so that no variant always runs first.
        for variant in variants[:: 1 if number % 2 == 0 else -1]:
            variant.launch(out, console)
            if number == rounds - 1:
                VariantResult.read(variant.folders, repeats // rounds)  # raises if a record is incomplete
                variant.write_manifest(out, repeats)
    if traced:
        for variant in variants:
            variant.launch_traced(out, console)


def _make_runs(variants: Sequence[RecordedVariant], out: Path, repeats: int) -> list[dict[str, Any]]:
    """Return one run of the record per variant."""
    arguments = variants[0].arguments
    per_launch = 1 if command_line.is_script(arguments) else repeats
    results = [VariantResult.read(variant.folders, per_launch) for variant in variants]
    return [
        {
            "name": variant.name,
            "model": command_line.option_value(arguments, "model"),
            "degree": ulysses_degree(arguments),
            "ring_degree": ring_degree(arguments),
            "command": shlex.join(variant.launched_command),
            "trace": variant.traces[0].relative_to(out).as_posix() if variant.traces else None,
            "overlap": trace.overlaps(variant.traces),
            **compute_metrics(result, results[0], out),
        }
        for variant, result in zip(variants, results, strict=True)
    ]


def ulysses_degree(arguments: Sequence[str]) -> int:
    """Check the arguments of a command and return its Ulysses degree.

    Raises:
        UsageError: there is no command, or it does not use Ulysses attention.
    """
    if not arguments:
        raise UsageError("xDiT's arguments are missing: put them, or a script and its arguments, after --")
    if command_line.is_script(arguments) and not Path(arguments[0]).is_file():
        raise UsageError(f"script {arguments[0]} does not exist")
    if command_line.option_value(arguments, "ulysses_degree") is None:
        raise UsageError(
            "--ulysses_degree is missing after --: the plugin speeds up Ulysses attention, so there is nothing to "
            "compare without it; try --ulysses_degree 2"
        )
    return _number(arguments, "ulysses_degree", 1)


def ring_degree(arguments: Sequence[str]) -> int:
    """Return the ring degree of a command, whose K and V the plugin codes."""
    return _number(arguments, "ring_degree", 1)


def _number(arguments: Sequence[str], name: str, default: int) -> int:
    value = command_line.option_value(arguments, name)
    try:
        return default if value is None else int(value)
    except ValueError:
        raise UsageError(f"--{name} {value!r} is not valid; valid are integers") from None


def _check_launcher(arguments: Sequence[str], launcher: str | None) -> None:
    try:
        command_line.launch_command(arguments, launcher)
    except ValueError as error:
        raise UsageError(f"--launcher {launcher!r} is not valid: {error}; valid is a command line") from None


def make_variants(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    out: Path,
    repeats: int,
    launcher: str | None = None,
    modes: Sequence[str] = (),
    default_mode: str = EXACT,
) -> list[RecordedVariant]:
    """Return stock and one variant per mode: the same command, with different options of the plugin.

    Without `modes` there is one variant, of the mode that the arguments or the environment select, or of
    `default_mode`.
    """
    environment = {name: value for name, value in environment.items() if name != "COCODIFF_DISABLE"}
    own_variables = {variable for field, variable in _VARIABLES.items() if field != SHARE_FIELD}
    stock_environment = {name: value for name, value in environment.items() if name not in own_variables}
    base = command_line.without_flag(arguments, ENABLE_OPTION)
    arguments_by_mode = {mode: [*base, f"--{_MODE}={mode}"] for mode in modes}
    if not arguments_by_mode:
        mode = command_line.option_value(arguments, _MODE) or environment.get(_VARIABLES[_MODE]) or default_mode
        arguments_by_mode[mode] = base
    variants = [
        RecordedVariant(STOCK, command_line.stock_arguments(arguments), stock_environment, launcher),
        *(
            RecordedVariant(mode, [*line, f"--{ENABLE_OPTION}"], environment, launcher)
            for mode, line in arguments_by_mode.items()
        ),
    ]
    if not command_line.is_script(arguments):
        for variant in variants:
            variant.arguments += _default_arguments(arguments, variant.name, out, repeats)
    return variants


def _default_arguments(arguments: Sequence[str], variant: str, out: Path, repeats: int) -> list[str]:
    """Return the arguments that a measurement adds to those of the xdit command, unless the user gave them."""
    folder = out / "output" / variant
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {"num_iterations": repeats, "warmup_calls": 1, "output_directory": folder}
    return [
        f"--{name}={value}" for name, value in defaults.items() if command_line.option_value(arguments, name) is None
    ]
