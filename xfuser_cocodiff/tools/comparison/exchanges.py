"""How the attention of a run has crossed each axis, for its record."""

from xfuser_cocodiff.engine.topology.plans import HEADS, KV
from xfuser_cocodiff.xdit.session.session import Session


def of_run(session: Session) -> dict[str, str]:
    """Return how attention of the layers has crossed each axis with several ranks: 'heads', 'kv', or 'heads, kv'."""
    mesh, gather = session.mesh, session.gather
    if mesh is None:
        return {}
    if session.runtime:
        layers = {layer for report in session.runtime.reports for layer in report.errors}
        gathered = {layer for report in session.runtime.reports for layer in report.gathered_layers}
        has_heads, has_gather = not gathered or bool(layers - gathered), bool(gathered)
    else:
        choices = [each.schedule.gathers_kv for each in session.layers.signatures if each.candidates]
        has_heads, has_gather = not choices or not all(choices), any(choices)
    along_gather = ", ".join([HEADS] * has_heads + [KV] * has_gather)
    axes = set(gather.slow_axis_names) if gather else set()
    return {axis.name: along_gather if axis.name in axes else HEADS for axis in mesh.topology.axes if axis.size > 1}


def slow_axes_of_run(session: Session) -> list[str]:
    """Return the slow axes of the Ulysses group in a lossy mode."""
    partition = session.comm_setup.partition if session.comm_setup else None
    return list(partition.slow_axis_names) if partition else []
