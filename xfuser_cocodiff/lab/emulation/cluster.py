"""`scripts/emulated_cluster.sh`: runs a command once per rank of an emulated cluster.

Every rank has its own network namespace and the environment that torchrun would set. Its links are shaped to the
scaled-down rates of a machine; :mod:`links` defines which ranks share a link.
"""

import argparse
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from xfuser_cocodiff.engine.topology.launcher import CLUSTER_VARIABLE
from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.lab.emulation import links, namespaces, ranks, user_namespace
from xfuser_cocodiff.lab.emulation.links import Cluster
from xfuser_cocodiff.lab.emulation.presets import PRESETS

PROGRAM = "emulated_cluster"
USAGE_STATUS = 2
MASTER_PORT = 29500


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status of the first rank that failed, or 2 if nothing could be started."""
    argv = list(sys.argv[1:] if argv is None else argv)

    def start() -> int:
        options = _options(argv)
        cluster = _cluster(options)
        _check_tools()
        return user_namespace.isolated(lambda: _with_errors_printed(lambda: _run(cluster, options.command)))

    return _with_errors_printed(start)


def _with_errors_printed(work: Callable[[], int]) -> int:
    """Call `work` and return its status; print errors in one line."""
    try:
        return work()
    except (ValueError, RuntimeError) as error:
        _print_error(str(error))
        return USAGE_STATUS
    except user_namespace.StoppedError as error:
        _print_error(str(error))
        return error.status


def _print_error(message: str) -> None:
    print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _options(argv: list[str]) -> argparse.Namespace:
    separator = argv.index("--") if "--" in argv else len(argv)
    parser = _Parser(
        prog=PROGRAM,
        description="Run a command once per rank of a cluster emulated on this machine.",
        usage="%(prog)s [--topology T] (--rates R | --preset P) [--scale S] -- COMMAND...",
        epilog="Exit status: that of the first rank that failed, or 2 if nothing was started.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--topology", help="for example node=2,gpu=2,tile=2 or flat=8 (default: eight ranks of the preset)"
    )
    parser.add_argument("--rates", help="Mbit/s of each axis, for example tile=148,gpu=12,node=13.3 or flat=100")
    parser.add_argument("--preset", help=f"rates of a machine, divided by 10000: {', '.join(PRESETS)}")
    parser.add_argument("--scale", default="1", help="multiplies all rates (%(default)s)")
    options = parser.parse_args(argv[:separator])
    options.command = argv[separator + 1 :]
    if not options.command:
        raise ValueError("no command given; it follows after --")
    if shutil.which(options.command[0]) is None:
        raise ValueError(f"command {options.command[0]!r} not found")
    return options


def _cluster(options: argparse.Namespace) -> Cluster:
    if (options.rates is None) == (options.preset is None):
        raise ValueError("give either --rates or --preset")
    if options.preset is not None:
        return of_preset("--preset", options.preset, options.topology, options.scale)
    if options.topology is None:
        raise ValueError("--rates needs --topology, such as --topology node=2,gpu=2,tile=2")
    topology = _topology(options.topology)
    return _with_addresses(topology, _rates(options.rates, topology), None, options.scale)


def of_preset(option: str, name: str, topology: str | None, scale: str) -> Cluster:
    """Return a cluster with the rates of a machine.

    Args:
        option: name of the option, for errors.
        name: name of the preset.
        topology: topology of all ranks; the preset's own if None.
        scale: factor on all rates.

    Raises:
        ValueError: an argument is not valid; names it and the valid values.
    """
    if name not in PRESETS:
        raise ValueError(f"{option} {name!r} is not known; valid are {', '.join(PRESETS)}")
    whole = _topology(topology or PRESETS[name].topology)
    axes = [FLAT] if name == FLAT else _axes(whole)
    if missing := set(axes) - set(PRESETS[name].gigabytes):
        raise ValueError(f"{option} {name} has no links {', '.join(missing)}; a flat topology goes with {option} flat")
    return _with_addresses(whole, PRESETS[name].rates(axes), name, scale)


def _with_addresses(topology: Topology, rates: Mapping[str, float], preset: str | None, scale: str) -> Cluster:
    addresses = tuple(map(namespaces.address, range(topology.size)))
    packet_seconds = links.packet_seconds(topology.size)
    cluster = Cluster(topology, rates, addresses, preset, _number("--scale", scale), packet_seconds=packet_seconds)
    links.check_rates(cluster)
    return cluster


def _topology(text: str) -> Topology:
    """Parse `--topology`: the plugin's notation, or ``flat=N`` for a flat topology of N ranks."""
    size = math.prod(int(number) for number in re.findall(r"\d+", text))
    try:
        if re.fullmatch(r"\s*flat\s*(=\s*\d+\s*)?", text):
            if "=" not in text:
                raise ValueError("'flat' lacks the number of ranks; valid is for example flat=8")
            topology = Topology.flat(size)
        else:
            topology = Topology.parse(text, size)
    except ValueError as error:
        raise ValueError(f"--topology: {error}") from None
    if not 2 <= topology.size <= namespaces.MAX_RANKS:
        raise ValueError(f"--topology {text!r} has {size} ranks; a cluster has 2 to {namespaces.MAX_RANKS}")
    return topology


def _axes(topology: Topology) -> list[str]:
    """Return the names of the axes of more than one rank."""
    return [axis.name for axis in topology.axes if axis.size > 1]


def _rates(text: str, topology: Topology) -> dict[str, float]:
    """Parse `--rates`: one rate for each axis of more than one rank, or ``flat`` alone."""
    pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*(\S+)\s*", part) for part in text.split(",")]
    axes = _axes(topology)
    valid = f"Mbit/s of {', '.join(axes)}, each once, or of flat alone, such as {','.join(f'{a}=10' for a in axes)}"
    rates = [(pair[1], pair[2]) for pair in pairs if pair]
    names = [name for name, _ in rates]
    if len(rates) < len(pairs) or sorted(names) not in (sorted(axes), [FLAT]):
        raise ValueError(f"--rates {text!r} does not fit the topology {topology}; valid are {valid}")
    return {name: _number(f"--rates {name}", rate) for name, rate in rates}


def _number(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{option} {text!r} is not valid; valid are numbers above 0")
    return number


def _check_tools() -> None:
    """Raise RuntimeError if `ip` or `tc` is missing."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise RuntimeError(f"an emulated cluster needs {' and '.join(missing)} of the package iproute2")


def _run(cluster: Cluster, command: Sequence[str]) -> int:
    namespaces.make(cluster)
    inside = [["ip", "netns", "exec", namespaces.name(rank), *command] for rank in range(cluster.size)]
    failure = ranks.run(
        [(line, environment(cluster, rank, os.environ)) for rank, line in enumerate(inside)], ranks.print_line
    )
    if failure is None:
        return 0
    _print_error(f"{failure}; the other ranks were stopped")
    return failure.status


def environment(cluster: Cluster, rank: int, outside: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: the variables that torchrun sets, and the cluster."""
    nodes = next((axis.size for axis in cluster.topology.axes if axis.name == "node"), 1)
    node, local_rank = divmod(rank, cluster.size // nodes)
    return {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # every connection would warn that its address has no host name
        **outside,
        "RANK": str(rank),
        "WORLD_SIZE": str(cluster.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(cluster.size // nodes),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": cluster.addresses[0],
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": cluster.interface,
        "TP_SOCKET_IFNAME": cluster.interface,
        CLUSTER_VARIABLE: cluster.to_json(),
    }


if __name__ == "__main__":
    sys.exit(main())
