"""The collectives of attention along each axis in a run, for its record."""

from collections.abc import Sequence

from xfuser_cocodiff.engine.compression.step_report import StepReport
from xfuser_cocodiff.engine.topology.plans import HEADS, KV
from xfuser_cocodiff.xdit.session.session import Session


def of_run(session: Session) -> dict[str, str]:
    """Return how attention of the layers has crossed each axis with several ranks: 'heads', 'kv', or 'heads, kv'."""
    mesh, gather = session.mesh, session.gather
    if mesh is None:
        return {}
    if session.runtime:
        ways = of_codecs(session.runtime.reports)
    else:
        choices = [each.schedule.gathers_kv for each in session.layers.signatures if each.candidates]
        ways = [HEADS] * (not choices or not all(choices)) + [KV] * any(choices)
    axes = set(gather.slow_axis_names) if gather else set()
    return {axis: ", ".join(ways) if axis in axes else HEADS for axis in mesh.topology.moving_axes}


def of_codecs(reports: Sequence[StepReport]) -> list[str]:
    """Return how coded layers have crossed the slow axes, of HEADS and KV."""
    layers = {layer for report in reports for layer in report.errors}
    gathered = {layer for report in reports for layer in report.gathered_layers}
    return [HEADS] * (not gathered or bool(layers - gathered)) + [KV] * bool(gathered)


def slow_axes_of_run(session: Session) -> list[str]:
    """Return the slow axes of the Ulysses group in a lossy mode."""
    partition = session.comm_setup.partition if session.comm_setup else None
    return list(partition.slow_axis_names) if partition else []
