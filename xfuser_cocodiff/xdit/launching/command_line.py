"""xDiT's command lines: reading options in them, and launching them as xDiT itself would."""

import importlib.util
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from xfuser_cocodiff.engine.settings.options import OPTIONS
from xfuser_cocodiff.engine.topology.launcher import SHARE_FIELD

_LAUNCH_OPTIONS = ("master_port", "output_directory")
"""Options that say where a launch happens."""


def is_script(arguments: Sequence[str]) -> bool:
    """Whether the arguments are an example script and its own arguments, rather than those of the xdit command."""
    return bool(arguments) and arguments[0].endswith(".py")


def option_value(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option, in any spelling that xDiT's parsers take; the last one wins, as there.

    Args:
        arguments: a command line.
        name: the option without its dashes, with underscores.
    """
    value = None
    for position, argument in enumerate(arguments):
        spelled, equals, given = argument.partition("=")
        if _is_option(spelled, name):
            value = given if equals else next(iter(arguments[position + 1 :]), None)
    return value


def without_flag(arguments: Sequence[str], name: str) -> list[str]:
    """The arguments less a flag that takes no value."""
    return _drop_options(arguments, {name: False})


def _is_option(argument: str, name: str) -> bool:
    return argument.startswith("--") and argument[2:].replace("-", "_") == name


def stock_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line less the plugin's options, but for the one that acts without it: that ranks share a device."""
    ours = {option.field: option.default is not False for option in OPTIONS if option.field != SHARE_FIELD}
    return _drop_options(arguments, ours)


def arguments_for_stock(arguments: Sequence[str]) -> list[str]:
    """A command line less what stock xDiT takes no notice of: the plugin's options, and places of single launches."""
    return _drop_options(stock_arguments(arguments), dict.fromkeys(_LAUNCH_OPTIONS, True))


def _drop_options(arguments: Sequence[str], names: Mapping[str, bool]) -> list[str]:
    """The arguments less options by name, each with whether it takes a value."""
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        spelled, equals, _ = argument.partition("=")
        name = next((name for name in names if _is_option(spelled, name)), None)
        if is_value:
            is_value = False
        elif name:
            is_value = names[name] and not equals
        else:
            kept.append(argument)
    return kept


def launch_command(arguments: Sequence[str], launcher: str | None = None) -> list[str]:
    """The command that starts all ranks of a script, or xDiT's own command.

    Args:
        arguments: an example script and its arguments, or those of the xdit command.
        launcher: what starts the ranks in place of torchrun, such as "mpiexec -n {ranks} rank.sh"; {ranks} becomes
            their number. It gives each rank RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: the launcher is no command line.
    """
    if launcher is not None:
        program = [] if is_script(arguments) else ["-m", "xfuser.runner"]
        start = shlex.split(launcher.replace("{ranks}", str(num_ranks(arguments))))
        if not start:
            raise ValueError("No command")
        return [*start, sys.executable, *program, *arguments]
    if is_script(arguments):
        ranks = f"--nproc_per_node={num_ranks(arguments)}"
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, *arguments]
    # xDiT's default port is fixed, and would let no two runs share a machine.
    port = [] if option_value(arguments, "master_port") else [f"--master_port={_free_port()}"]
    return [sys.executable, "-m", "xfuser.cli", *port, *arguments]


def num_ranks(arguments: Sequence[str]) -> int:
    """By xDiT's own rule, whose file is read past its package: importing that takes seconds."""
    package = importlib.util.find_spec("xfuser")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("xfuser is not installed", name="xfuser")
    file = Path(package.submodule_search_locations[0], "cli.py")
    spec = importlib.util.spec_from_file_location("xfuser_command", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_nproc_from_args(list(arguments))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
