"""Runs the ranks of `cocodiff compare` on an emulated cluster (`--emulate`).

The command of the emulated cluster acts as the launcher, so every command that can be compared can be compared there.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.lab.comparison.summary import NODE
from xfuser_cocodiff.lab.emulation import cluster
from xfuser_cocodiff.lab.emulation.links import Cluster
from xfuser_cocodiff.lab.emulation.presets import PRESETS
from xfuser_cocodiff.lab.launching import command_line

OPTION = "--emulate"
NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "opencl:cpu"}
"""Environment in which ranks run on the CPU: devices would bypass the emulated links."""
_TOPOLOGY = "cocodiff_topology"


@dataclass(frozen=True)
class EmulationOptions:
    """Options for the emulated cluster."""

    preset: str
    topology: str | None = None
    """Topology of all ranks; by default that of :func:`topology_for`."""
    scale: str = "1"
    """Factor for the rates of the preset."""


def cluster_for(options: EmulationOptions, arguments: Sequence[str]) -> Cluster:
    """Return the emulated cluster for a command.

    Args:
        options: for the cluster.
        arguments: of the xdit command, or an example script and its arguments.

    Raises:
        ValueError: the options are not valid, or have another number of ranks than the command.
    """
    ranks = command_line.num_ranks(arguments)
    topology = options.topology or topology_for(options.preset, arguments)
    built = cluster.of_preset(OPTION, options.preset, topology, options.scale)
    if built.size != ranks:
        raise ValueError(
            f"--topology {options.topology!r} has {built.size} ranks, but the command after -- starts {ranks}; valid "
            f"are topologies of {ranks} ranks"
        )
    return built


def topology_for(preset: str, arguments: Sequence[str]) -> str:
    """Return the topology of all ranks: the command's own, else the preset's, else two nodes.

    Raises:
        ValueError: there is none of these, since the number of ranks is odd.
    """
    ranks, given = command_line.num_ranks(arguments), command_line.option_value(arguments, _TOPOLOGY)
    if preset == FLAT:
        return f"{FLAT}={ranks}"
    if given and _size(given) == ranks:
        return given
    usual = PRESETS[preset].topology if preset in PRESETS else ""
    if usual and _size(usual) == ranks:
        return usual
    if ranks % 2:
        raise ValueError(f"{OPTION} {preset}: {ranks} ranks are not divisible by two nodes; give --topology")
    return "node=2" if ranks == 2 else f"node=2,gpu={ranks // 2}"


def _size(topology: str) -> int | None:
    try:
        return Topology.parse(topology).size
    except ValueError:  # xDiT's command reports it
        return None


def launcher(built: Cluster) -> str:
    """Return the command that starts ranks on a cluster, for :func:`command_line.launch_command`."""
    topology = f"{FLAT}={built.size}" if str(built.topology) == FLAT else str(built.topology)
    options = [f"--preset={built.preset}", f"--topology={topology}", f"--scale={built.scale:g}", "--"]
    return shlex.join([sys.executable, "-m", cluster.__name__, *options])


def check_available(built: Cluster) -> None:
    """Create the cluster and remove it again.

    Raises:
        ValueError: this machine cannot emulate it; the message says why.
    """
    no_op = [sys.executable, "-Sc", ""]
    done = subprocess.run([*shlex.split(launcher(built)), *no_op], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().removeprefix(f"{cluster.PROGRAM}: ")
        raise ValueError(f"{OPTION} {built.preset}: {reason}")


def with_topology(arguments: Sequence[str], built: Cluster) -> list[str]:
    """Add the cluster's topology to a command whose Ulysses groups span all ranks, unless it has one."""
    spans_all_ranks = command_line.option_value(arguments, "ulysses_degree") == str(built.size)
    is_given = command_line.option_value(arguments, _TOPOLOGY) is not None
    return [*arguments] if is_given or not spans_all_ranks else [*arguments, f"--{_TOPOLOGY}={built.topology}"]


def describe(built: Cluster) -> dict[str, Any]:
    """Return the description of the cluster for a record."""
    nodes = next((axis.size for axis in built.topology.axes if axis.name == NODE), 1)
    return {
        **{"preset": built.preset, "scale": built.scale, "topology": str(built.topology), "nodes": nodes},
        "rates": {axis: built.rate(axis) for axis in built.rates},
    }
