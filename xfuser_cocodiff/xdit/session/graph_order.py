"""The order of operations in compiled graphs: exchanges begin as soon as they can, and are waited for as late.

Inductor leaves an operator where it was traced, and its own passes move collectives only; one of them by how long
things are estimated to take, which ranks could see differently. This one goes by nothing but the graph.
"""

from collections.abc import Sequence
from typing import Any

_SENDS, _RECEIVES = "cocodiff::send", "cocodiff::receive"
_INDUCTORS = ["raise_comms", "sink_waits"]
"""Its own for exchanges that PyTorch traces, where nobody has chosen any: those that estimate nothing."""
_before: tuple[bool, list[Any]] | None = None
"""Inductor's settings before they were changed here."""


def order_exchanges() -> bool:
    """Have Inductor begin exchanges early in the graph that is traced, after whatever else reorders it; always true."""
    global _before
    from torch._inductor import config

    if _before is None:
        _before = config.reorder_for_compute_comm_overlap, config.reorder_for_compute_comm_overlap_passes
    chosen = config.reorder_for_compute_comm_overlap_passes if config.reorder_for_compute_comm_overlap else _INDUCTORS
    config.reorder_for_compute_comm_overlap_passes = [
        *(each for each in chosen if each is not early_sends),
        early_sends,
    ]
    config.reorder_for_compute_comm_overlap = True
    return True


# It is called where a graph is traced, and is no part of it. That is what torch.compiler.assume_constant_result says,
# which would import Dynamo, a second.
order_exchanges._dynamo_marked_constant = True  # type: ignore[attr-defined]


def restore() -> None:
    """Give Inductor its settings back, unless others have changed them since."""
    global _before
    if _before:
        from torch._inductor import config

        if early_sends in config.reorder_for_compute_comm_overlap_passes:
            config.reorder_for_compute_comm_overlap, config.reorder_for_compute_comm_overlap_passes = _before
        _before = None


def early_sends(nodes: Sequence[Any]) -> list[Any]:
    """A pass of Inductor's scheduler.

    What the next send needs comes first. Before a wait comes whatever is ready, as far as the send after the next one
    needs it: what only later layers need would lie in memory until then.

    Args:
        nodes: what is run, in an order that can be run; it is the same on every rank.

    Returns:
        The same nodes in another such order.
    """
    needs = _needs(nodes)
    is_wait = [_calls(node, _RECEIVES) for node in nodes]
    sends = [index for index, node in enumerate(nodes) if _calls(node, _SENDS)]
    # For each send what it cannot be without and those before it can, in the order of the nodes; then all the rest.
    steps: list[list[int]] = []
    seen: set[int] = set()
    for target in [*([send] for send in sends), range(len(nodes))]:
        found, pending = set(), [*target]
        while pending:
            if (index := pending.pop()) not in seen:
                seen.add(index)
                found.add(index)
                pending += needs[index]
        steps.append(sorted(found))
    order: dict[int, None] = {}
    for number, step in enumerate(steps):
        waits_from = next((place for place, index in enumerate(step) if is_wait[index]), len(step))
        order.update(dict.fromkeys(step[:waits_from]))
        if waits_from < len(step):
            for index in [*step[waits_from:], *(steps[number + 1] if number + 1 < len(steps) else [])]:
                if not is_wait[index] and needs[index] <= order.keys():
                    order[index] = None
        order.update(dict.fromkeys(step))
    return [nodes[index] for index in order]


def _needs(nodes: Sequence[Any]) -> list[set[int]]:
    """For each node those that must be run before it."""
    made_by = {name: index for index, node in enumerate(nodes) for name in node.get_buffer_names()}
    found = [{made_by[each.name] for each in node.unmet_dependencies if each.name in made_by} for node in nodes]
    return [needed - {index} for index, needed in enumerate(found)]


def _calls(node: Any, operators: str) -> bool:
    """Whether a node calls one of our operators."""
    return any(
        getattr(getattr(each.node, "op_overload", None), "_name", "").startswith(operators) for each in node.get_nodes()
    )
