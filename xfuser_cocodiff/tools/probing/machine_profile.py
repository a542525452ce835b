"""The whole link profile of a mesh: its links, and the codec beside them."""

import torch

from xfuser_cocodiff.engine.autotune import codec_probe
from xfuser_cocodiff.engine.autotune.link_probe import Probe
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.topology.link_profile import Profile


def measure(mesh: Mesh, device: torch.device) -> Profile:
    """Measure the link profile of a mesh and the codec; every rank of the mesh must call this.

    Args:
        mesh: mesh with a process group for each axis of its topology and for all of them.
        device: device of the messages.
    """
    probe = Probe(mesh, device)
    return probe.measure().with_codec(*codec_probe.measure(device, probe.fastest))
