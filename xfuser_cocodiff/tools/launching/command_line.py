"""Command lines of xDiT: their options, and how to launch them."""

import argparse
import importlib.util
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.xdit.settings.options import OPTIONS, SHARE_FIELD


def is_script(arguments: Sequence[str]) -> bool:
    """Return whether arguments are those of an example script, rather than of the xdit command."""
    return bool(arguments) and arguments[0].endswith(".py")


def option_value(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option in any spelling that xDiT's parsers accept; the last one counts, as for them.

    Args:
        arguments: a command line.
        name: name of the option, without leading dashes and with underscores.
    """
    values, _ = _parse(arguments, {name: True})
    return getattr(values, name)


def drop_options(arguments: Sequence[str], names: Mapping[str, bool]) -> list[str]:
    """Return the arguments without some options, given by name and whether they have a value."""
    return _parse(arguments, names)[1]


def stock_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the plugin's options, except --cocodiff_share_device, which acts without it."""
    ours = {option.field: option.default is not False for option in OPTIONS if option.field != SHARE_FIELD}
    return drop_options(arguments, ours)


def _parse(arguments: Sequence[str], names: Mapping[str, bool]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, has_value in names.items():
        spellings = {f"--{name}", f"--{name.replace('_', '-')}"}
        how: dict[str, Any] = {"nargs": "?"} if has_value else {"action": "store_true"}
        parser.add_argument(*spellings, dest=name, **how)
    return parser.parse_known_args(arguments)


def launch_command(arguments: Sequence[str], launcher: Sequence[str] | None = None) -> list[str]:
    """Return the command that starts all ranks of an example script or of the xdit command.

    Args:
        arguments: an example script and its arguments, or those of the xdit command.
        launcher: words of the command that starts the ranks instead of torchrun; their number replaces {ranks}. It
            sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT on each rank.
    """
    if launcher is not None:
        program = [sys.executable] if is_script(arguments) else [sys.executable, "-m", "xfuser.runner"]
        ranks = str(num_ranks(arguments))
        return [*(word.replace("{ranks}", ranks) for word in launcher), *program, *arguments]
    if is_script(arguments):
        ranks = f"--nproc_per_node={num_ranks(arguments)}"
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, *arguments]
    # xDiT's default port is fixed, so that two runs could not share a machine.
    port = [] if option_value(arguments, "master_port") else [f"--master_port={_free_port()}"]
    return [sys.executable, "-m", "xfuser.cli", *port, *arguments]


def num_ranks(arguments: Sequence[str]) -> int:
    """Return the number of ranks by xDiT's own rule, from its file alone: importing its package takes seconds."""
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
