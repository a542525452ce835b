"""Says how attention crosses the slow axes: at the start of a session, and in the record of a run."""

from xfuser_cocodiff.engine.compression.mode_names import EXACT, PAPER
from xfuser_cocodiff.engine.topology.plans import GATHER, HEADS, KV
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig


def announced(config: CocoDiffConfig, slow_axes: str, num_slow: int, may_gather: bool) -> str:
    """Return how coded layers cross the slow axes, for the line at the start of a session.

    Args:
        config: the options.
        slow_axes: names of the slow axes.
        num_slow: coordinates on them.
        may_gather: whether coded layers may gather K and V.
    """
    if not may_gather:
        return "all-to-alls by heads"
    if config.plan or num_slow == 2:  # by the planner's rule, two coordinates gather whatever the heads are
        return f"K and V gathered along {slow_axes}, Q and O lossless"
    return (
        "all-to-alls by heads; K and V gathered only where that sends no more bytes, as with "
        f"{num_slow - 1} or more Q heads for each K/V head"
    )


def ignored_gather(config: CocoDiffConfig, slow_axes: str, may_gather: bool) -> str | None:
    """Return the warning for a plan whose gather has no effect in a lossy mode; None where there is none to ignore.

    Args:
        config: the options.
        slow_axes: names of the slow axes, separated by commas.
        may_gather: whether coded layers may gather K and V.
    """
    if may_gather or config.plan is None or not config.plan.gathers_kv:
        return None
    reason = f"the slow axes of mode {config.mode!r} are {slow_axes}"
    valid = f"a plan whose last stage is {slow_axes.replace(', ', '+')}{GATHER}, if these are the outermost axes"
    if config.mode == PAPER:
        reason, valid = f"mode {PAPER!r} does not gather K and V", "other modes"
    return f"{GATHER} of --cocodiff_a2a {config.plan} has no effect: {reason}; valid are {valid}, or a plan without it"


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
    partition = session.comm_setup.partition if session.comm_setup and session.config.mode != EXACT else None
    return list(partition.slow_axis_names) if partition else []
