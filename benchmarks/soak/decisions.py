"""What a session has chosen by measurements or by the machine: all that could differ between two runs of a command."""

from typing import Any

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.xdit.platforms import platform
from xfuser_cocodiff.xdit.session.session import Session

_MESSAGE_BYTES = tuple(2**exponent for exponent in range(10, 31, 4))
"""Sizes for which a record lists the plans of all-to-alls: 1 KiB to 1 GiB."""


def of_run(session: Session) -> dict[str, Any]:
    """Return the choices of the last run as JSON values, the same on all ranks of a group; empty for stock xDiT.

    Returns:
        "plans" by message bytes, "profile" of the links that the planner used, "schedules" of overlap by class of
        attention modules, "codec_schedule" of a lossy mode, and "kernels" of its codecs.
    """
    config, mesh, setup = session.config, session.mesh, session.comm_setup
    if config is None or mesh is None:
        return {}
    profile = setup.profile if setup else None
    return {
        "plans": {str(size): str(mesh.policy.choose(size)) for size in _MESSAGE_BYTES},
        "profile": profile and profile.to_json(),
        "schedules": _schedules(session),
        "codec_schedule": str(session.runtime.schedule) if session.runtime else None,
        "kernels": kernels.resolve(config.kernels, platform.compute_device().type) if session.runtime else None,
    }


def _schedules(session: Session) -> dict[str, list[str]]:
    """Return the overlap schedules in use by class of attention modules; "not chosen" while they are timed."""
    found: dict[str, set[str]] = {}
    for signature in session.layers.signatures:
        if signature.candidates:
            chosen = signature.candidates.chosen
            found.setdefault(signature.name, set()).add("not chosen" if chosen is None else str(chosen))
    return {name: sorted(each) for name, each in found.items()}
