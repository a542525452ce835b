"""Runs a command once per rank of an emulated cluster.

Every rank has its own network namespace and the environment that torchrun would set. Its links are shaped to the
scaled-down rates of a machine; :mod:`links` defines which ranks share a link.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from emulation import links, namespaces
from emulation.links import Cluster
from emulation.presets import PRESETS
from xfuser_cocodiff.cli.demo import NO_DEVICES
from xfuser_cocodiff.engine.topology.launcher import CLUSTER_VARIABLE
from xfuser_cocodiff.engine.topology.topology import FLAT, Topology

PROGRAM = "emulated_cluster"
MASTER_PORT = 29500
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ISOLATED = "--isolated"
"""First argument of the process that runs in the cluster's own namespaces."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status of the first rank that failed; 2 if nothing could be started."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    is_isolated = arguments[:1] == [_ISOLATED]
    arguments = arguments[is_isolated:]
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    command, parser = arguments[separator + 1 :], _parser()
    options = parser.parse_args(arguments[:separator])
    try:
        cluster = _cluster(options)
        if not command or shutil.which(command[0]) is None:
            raise ValueError(f"the command after -- is not valid: {command[:1]} not found")
        return _run_ranks(cluster, command) if is_isolated else _isolate(arguments)
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:
        _print(str(error))
        return 2


def _print(message: str) -> None:
    print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Run a command once per rank of a cluster emulated on this machine.",
        usage="%(prog)s [--topology T] (--rates R | --preset P) [--scale S] -- COMMAND...",
        epilog="Exit status: that of the first rank that failed, or 2 if nothing was started.",
        allow_abbrev=False,
    )
    parser.add_argument("--topology", help="such as node=2,gpu=2,tile=2 or flat=8 (default: eight ranks of the preset)")
    rates = parser.add_mutually_exclusive_group(required=True)
    rates.add_argument("--rates", help="Mbit/s of each axis, such as tile=148,gpu=12,node=13.3, or one port: flat=100")
    rates.add_argument("--preset", choices=PRESETS, help="rates of a machine, divided by 10000")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all rates (%(default)s)")
    return parser


def _cluster(options: argparse.Namespace) -> Cluster:
    """Return the cluster of a command line.

    Raises:
        ValueError: the options are not valid.
    """
    text = options.topology or (PRESETS[options.preset].topology if options.preset else "")
    try:
        topology = Topology.flat(int(text[5:])) if text.startswith(f"{FLAT}=") else Topology.parse(text)
    except ValueError as error:
        raise ValueError(f"--topology: {error}") from None
    if not 2 <= topology.size <= namespaces.MAX_RANKS:
        raise ValueError(f"--topology {text!r} has {topology.size} ranks; a cluster has 2 to {namespaces.MAX_RANKS}")
    axes = [axis.name for axis in topology.axes if axis.size > 1]
    if options.preset and (unknown := {*axes} - {*PRESETS[options.preset].gigabytes}):
        raise ValueError(f"--preset {options.preset} has no rate of {', '.join(unknown)} in --topology {text}")
    rates = PRESETS[options.preset].rates(axes) if options.preset else _rates(options.rates, axes)
    scaled = {axis: rate * options.scale for axis, rate in rates.items()}
    links.check_rates(scaled)
    return Cluster(topology, scaled, options.preset, options.scale, links.packet_seconds(topology.size))


def _rates(text: str, axes: Sequence[str]) -> dict[str, float]:
    """Parse `--rates`: one rate for each axis of more than one rank, or ``flat`` alone."""
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        rates = {name.strip(): float(rate) for name, _, rate in pairs}
    except ValueError:
        rates = {}
    if len(rates) < len(pairs) or {*rates} not in ({*axes}, {FLAT}):
        raise ValueError(f"--rates {text!r} is not valid; valid are Mbit/s of {', '.join(axes)}, or of {FLAT} alone")
    return rates


def isolation() -> list[str]:
    """Return the prefix that runs a command in namespaces of its own, as root in them.

    Raises:
        RuntimeError: this machine lacks programs or permissions for it.
    """
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        raise RuntimeError(f"an emulated cluster needs {', '.join(missing)} of the packages iproute2 and util-linux")
    for user in ([], ["--map-root-user"]):
        prefix = ["unshare", *user, "--net", "--mount", "--pid", "--fork", "--mount-proc"]
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
        if tried.returncode == 0:
            return prefix
    reason = tried.stderr.strip()
    raise RuntimeError(f"an emulated cluster needs root or user namespaces, and neither is permitted here: {reason}")


def _isolate(arguments: Sequence[str]) -> int:
    """Run this program in namespaces of its own, which end with it, and it with this process."""

    def stop(number: int, _: object) -> NoReturn:
        _print(f"stopped by {signal.Signals(number).name}")
        sys.exit(128 + number)

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    line = [*isolation(), sys.executable, str(Path(__file__).parent), _ISOLATED, *arguments]
    # Its input ends when this process does, however it does. A new session: Ctrl-C reaches this process alone.
    with subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True) as process:
        return process.wait()


def _run_ranks(cluster: Cluster, command: Sequence[str]) -> int:
    """Run the ranks as the first process of a PID namespace: when it ends, the kernel kills all others."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)  # for the names of `ip netns`
    namespaces.make(cluster)
    running: dict[int, tuple[int, subprocess.Popen]] = {}
    for rank in range(cluster.size):
        line = ["ip", "netns", "exec", namespaces.name(rank), *command]
        process = subprocess.Popen(line, env=environment(cluster, rank, os.environ), stdin=subprocess.DEVNULL)
        running[process.pid] = rank, process  # kept: Python reaps the process of an object that is gone
    while running:
        ended, status = os.wait()  # reaps orphans too, as a first process must
        code = os.waitstatus_to_exitcode(status)
        failed, _ = running.pop(ended, (None, None))
        if failed is not None and code:
            how = f"failed with exit status {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
            _print(f"rank {failed} {how}; the other ranks were stopped")
            return code if code > 0 else 128 - code
    return 0


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def environment(cluster: Cluster, rank: int, outside: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: the variables that torchrun sets, and the cluster."""
    node, local_rank = divmod(rank, cluster.size // cluster.num_nodes)
    return {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # every connection would warn that its address has no host name
        **outside,
        **NO_DEVICES,  # they would bypass the emulated links
        "RANK": str(rank),
        "WORLD_SIZE": str(cluster.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(cluster.size // cluster.num_nodes),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": links.address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": links.INTERFACE,
        "TP_SOCKET_IFNAME": links.INTERFACE,
        CLUSTER_VARIABLE: cluster.to_json(),
    }
