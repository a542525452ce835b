"""`cocodiff compare --emulate`: the ranks of both sides on a cluster that this machine emulates.

That cluster's command is one more launcher, so that any command which can be compared can be compared there.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.lab.comparison.overview import NODE
from xfuser_cocodiff.lab.emulation import cluster
from xfuser_cocodiff.lab.emulation.links import Cluster
from xfuser_cocodiff.lab.emulation.presets import PRESETS
from xfuser_cocodiff.xdit.launching import command_line

OPTION = "--emulate"
NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "opencl:cpu"}
"""Environment in which ranks compute on the CPU: devices would talk to each other past the emulated links."""
_TOPOLOGY = "cocodiff_topology"


@dataclass(frozen=True)
class Wish:
    """What the user asks of an emulated cluster."""

    preset: str
    topology: str | None = None
    """Of all ranks; found by :func:`topology_for` when not given."""
    scale: str = "1"
    """Multiplies the rates of the preset."""


def cluster_for(wish: Wish, arguments: Sequence[str]) -> Cluster:
    """The cluster for a command.

    Args:
        wish: what is asked.
        arguments: of the xdit command, or an example script and its arguments.

    Raises:
        ValueError: the wish is not valid, or is of another number of ranks.
    """
    ranks = command_line.num_ranks(arguments)
    built = cluster.of_preset(OPTION, wish.preset, wish.topology or topology_for(wish.preset, arguments), wish.scale)
    if built.size != ranks:
        raise ValueError(
            f"--topology {wish.topology!r} has {built.size} ranks, but the command after -- starts {ranks}; valid are "
            f"topologies of {ranks} ranks"
        )
    return built


def topology_for(preset: str, arguments: Sequence[str]) -> str:
    """The topology of all ranks of a command: the one that it names, else the preset's, else two nodes.

    Raises:
        ValueError: it must be given.
    """
    ranks, named = command_line.num_ranks(arguments), command_line.option_value(arguments, _TOPOLOGY)
    if preset == FLAT:
        return f"{FLAT}={ranks}"
    if named and _size(named) == ranks:
        return named
    usual = PRESETS[preset].topology if preset in PRESETS else ""
    if usual and _size(usual) == ranks:
        return usual
    if ranks % 2:
        raise ValueError(f"{OPTION} {preset}: {ranks} ranks are not two equal nodes; say by --topology how they nest")
    return "node=2" if ranks == 2 else f"node=2,gpu={ranks // 2}"


def _size(topology: str) -> int | None:
    try:
        return Topology.parse(topology).size
    except ValueError:  # xDiT's command will say so
        return None


def launcher(built: Cluster) -> str:
    """What starts the ranks of a command on a cluster, for :func:`command_line.launch_command`."""
    flat = f"{FLAT}={built.size}" if str(built.topology) == FLAT else str(built.topology)
    options = [f"--preset={built.preset}", f"--topology={flat}", f"--scale={built.scale:g}", "--"]
    return shlex.join([sys.executable, "-m", cluster.__name__, *options])


def check(built: Cluster) -> None:
    """Make the cluster and take it down again.

    Raises:
        ValueError: this machine cannot have it; says why.
    """
    nothing = [sys.executable, "-Sc", ""]
    done = subprocess.run([*shlex.split(launcher(built)), *nothing], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().removeprefix(f"{cluster.PROGRAM}: ")
        raise ValueError(f"{OPTION} {built.preset}: {why}")


def on_cluster(arguments: Sequence[str], built: Cluster) -> list[str]:
    """A command as it is on a cluster: its Ulysses groups have the topology that the links have, unless it says."""
    is_whole = command_line.option_value(arguments, "ulysses_degree") == str(built.size)
    known = command_line.option_value(arguments, _TOPOLOGY) is not None
    return [*arguments] if known or not is_whole else [*arguments, f"--{_TOPOLOGY}={built.topology}"]


def record(built: Cluster) -> dict[str, Any]:
    """What a record says of the cluster."""
    nodes = next((axis.size for axis in built.topology.axes if axis.name == NODE), 1)
    rates = {axis: built.rate(axis) for axis in built.rates}
    known = {"preset": built.preset, "scale": built.scale, "topology": str(built.topology)}
    return {**known, "nodes": nodes, "rates": rates}
