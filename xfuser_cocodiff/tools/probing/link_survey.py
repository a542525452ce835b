"""`cocodiff probe`: measures every pair of ranks and every axis, and infers the topology."""

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.autotune import codec_probe
from xfuser_cocodiff.engine.autotune.link_probe import Probe
from xfuser_cocodiff.engine.autotune.timing import gather
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.probing import pairwise_links
from xfuser_cocodiff.tools.probing.topology_inference import infer_topology
from xfuser_cocodiff.tools.reporting import record_header
from xfuser_cocodiff.xdit.platforms import platform


def measure(
    group: dist.ProcessGroup, topology: Topology | None, device: torch.device, timeout: float | None = None
) -> dict[str, Any]:
    """Measure the links between the ranks of a group. Collective: every rank must call it.

    Args:
        group: all ranks.
        topology: topology whose axes are measured; the inferred one if None.
        device: device of the messages.
        timeout: seconds after which an unresponsive rank fails the probe; the default of `pairwise_links` if None.

    Returns:
        The record of `cocodiff probe --json`, the same on every rank. Its `profile` is the planner's input.
    """
    started = time.perf_counter()
    measured = pairwise_links.measure_pairs(group, device, timeout or pairwise_links.TIMEOUT_SECONDS)
    tiles = int(max_over_ranks(launcher.tiles_per_gpu(os.environ, platform.device_name()), device))
    inferred = infer_topology(measured, _ranks_per_node(group.size(), device), tiles)
    topology = topology or inferred
    profile_started = time.perf_counter()
    mesh = Mesh.over(group, topology, timeout=timedelta(seconds=timeout) if timeout else None, device=device)
    profile = measure_profile(mesh, device)
    ended = time.perf_counter()
    return {
        **record_header.header(),
        "topology_inferred": str(inferred),
        "topology": str(topology),
        "slow_axes": list(profile.slow_axes),
        "axes": [
            {
                "name": axis.name,
                "size": axis.size,
                "latency_us": 1e6 * (profile.launch_seconds + link.latency_seconds * (axis.size - 1)),
                "bytes_per_second": link.bytes_per_second,
            }
            for axis, link in zip(topology.axes, profile.links, strict=True)
        ],
        "pairs": measured.to_json(),
        "profile": profile.to_json(),
        "seconds": max_over_ranks(ended - started, device),
        "profile_seconds": max_over_ranks(ended - profile_started, device),
    }


def measure_profile(mesh: Mesh, device: torch.device) -> Profile:
    """Measure the links of a mesh, and the codec beside them; every rank of the mesh must call this.

    Args:
        mesh: mesh with a process group for each axis of its topology and for all of them.
        device: device of the messages.
    """
    probe = Probe(mesh, device)
    return probe.measure().with_codec(*codec_probe.measure(device, probe.fastest))


def max_over_ranks(value: float, device: torch.device) -> float:
    """Return the maximum of a value over all ranks."""
    return gather(torch.tensor(value, dtype=torch.float64, device=device), dist.group.WORLD).max().item()


def _ranks_per_node(size: int, device: torch.device) -> int | None:
    """Return the ranks per node if the launchers of all ranks agree on it, else None. Collective."""
    # SLURM's variables are also set for processes that another launcher started inside a SLURM job.
    own = launcher.ranks_per_node(os.environ) or 0
    most_nodes = int(os.environ.get("SLURM_NNODES") or size)
    own = own if own and size // own <= most_nodes else 0
    largest, least = max_over_ranks(own, device), -max_over_ranks(-own, device)
    return int(largest) if largest == least and largest else None
