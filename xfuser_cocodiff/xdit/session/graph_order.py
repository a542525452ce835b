"""The order of operations in compiled graphs: all-to-alls start as early and are waited for as late as possible.

Inductor leaves custom operators where they were traced. Its own passes move collectives only, and one of them depends
on estimated times, which may differ between ranks. This pass depends on the graph only.
"""

from collections.abc import Sequence
from typing import Any

_SENDS, _RECEIVES = "cocodiff::send", "cocodiff::receive"
_INDUCTOR_PASSES = ["raise_comms", "sink_waits"]
"""Inductor's own passes for traced collectives, unless the user has set others; these depend on no estimate."""
_before: tuple[bool, list[Any]] | None = None
"""Inductor's settings before :func:`add_send_pass` changed them."""


def add_send_pass() -> bool:
    """Add :func:`early_sends` to Inductor's passes, after all others.

    Returns:
        True, since Dynamo needs a constant.
    """
    global _before
    from torch._inductor import config

    if _before is None:
        _before = config.reorder_for_compute_comm_overlap, config.reorder_for_compute_comm_overlap_passes
    is_on, passes = config.reorder_for_compute_comm_overlap, config.reorder_for_compute_comm_overlap_passes
    others = [each for each in (passes if is_on else _INDUCTOR_PASSES) if each is not early_sends]
    config.reorder_for_compute_comm_overlap_passes = [*others, early_sends]
    config.reorder_for_compute_comm_overlap = True
    return True


# Dynamo calls it while tracing, and leaves it out of the graph. torch.compiler.assume_constant_result sets the same
# attribute, but imports Dynamo, which takes a second.
add_send_pass._dynamo_marked_constant = True  # type: ignore[attr-defined]


def restore() -> None:
    """Restore Inductor's settings, unless they have been changed since."""
    global _before
    if _before:
        from torch._inductor import config

        if early_sends in config.reorder_for_compute_comm_overlap_passes:
            config.reorder_for_compute_comm_overlap, config.reorder_for_compute_comm_overlap_passes = _before
        _before = None


def early_sends(nodes: Sequence[Any]) -> list[Any]:
    """Reorder the nodes of a graph, as a pass of Inductor's scheduler.

    The nodes that the next send needs come first. Before a wait come all nodes that can run, as far as the next send or
    the one after it needs them: results that only later layers need would occupy memory until then.

    Args:
        nodes: in a valid order, the same on all ranks.

    Returns:
        The same nodes in another valid order.
    """
    needs = _needs(nodes)
    is_wait = [_calls(node, _RECEIVES) for node in nodes]
    sends = [index for index, node in enumerate(nodes) if _calls(node, _SENDS)]
    stages = _stages(needs, sends)
    order: dict[int, None] = {}  # an ordered set
    for stage, next_stage in zip(stages, [*stages[1:], []], strict=True):
        first_wait = next((position for position, index in enumerate(stage) if is_wait[index]), len(stage))
        order.update(dict.fromkeys(stage[:first_wait]))
        if first_wait < len(stage):
            for index in [*stage[first_wait:], *next_stage]:
                if not is_wait[index] and needs[index] <= order.keys():
                    order[index] = None
        order.update(dict.fromkeys(stage))
    return [nodes[index] for index in order]


def _stages(needs: Sequence[set[int]], sends: Sequence[int]) -> list[list[int]]:
    """Split a graph into stages: one for each send, with the nodes that it needs and no earlier send does, and one for
    all other nodes. The nodes of a stage keep their order."""
    stages: list[list[int]] = []
    seen: set[int] = set()
    for targets in [*([send] for send in sends), range(len(needs))]:
        stage, pending = set(), [*targets]
        while pending:
            if (index := pending.pop()) not in seen:
                seen.add(index)
                stage.add(index)
                pending += needs[index]
        stages.append(sorted(stage))
    return stages


def _needs(nodes: Sequence[Any]) -> list[set[int]]:
    """Return for each node the indexes of the nodes that it depends on."""
    producers = {name: index for index, node in enumerate(nodes) for name in node.get_buffer_names()}
    needs = [{producers[each.name] for each in node.unmet_dependencies if each.name in producers} for node in nodes]
    return [needed - {index} for index, needed in enumerate(needs)]


def _calls(node: Any, operators: str) -> bool:
    """Return whether a node calls an operator whose name begins so."""
    return any(
        getattr(getattr(each.node, "op_overload", None), "_name", "").startswith(operators) for each in node.get_nodes()
    )
