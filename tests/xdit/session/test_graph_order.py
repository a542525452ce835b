"""The order of all-to-alls in a mock graph."""

import random
from dataclasses import dataclass, field

import pytest

from xfuser_cocodiff.xdit.session import graph_order
from xfuser_cocodiff.xdit.session.graph_order import early_sends
from xfuser_cocodiff.xdit.session.session import Session


@dataclass(frozen=True)
class Dep:
    name: str


@dataclass(frozen=True)
class Kernel:
    _name: str


@dataclass
class Call:
    op_overload: Kernel


@dataclass
class Node:
    """A mock node of Inductor's scheduler."""

    name: str
    after: tuple[str, ...] = ()
    operator: str = ""
    node: Call = field(init=False)

    def __post_init__(self) -> None:
        self.node = Call(Kernel(self.operator or "aten::mm"))

    @property
    def unmet_dependencies(self) -> set[Dep]:
        return {Dep(name) for name in self.after}

    def get_buffer_names(self) -> list[str]:
        return [self.name]

    def get_nodes(self) -> list["Node"]:
        return [self]


def layer(index: int) -> list[Node]:
    """Return the nodes of a block with a parallel MLP, in traced order."""
    x = f"x{index}"
    traced = [
        ("norm", [x], ""),
        ("mlp", ["norm"], ""),
        ("q", ["norm"], ""),
        ("k", ["norm"], ""),
        ("v", ["norm"], ""),
        ("send_v", ["v"], "cocodiff::send_value"),
        ("send_qk", ["q", "k", "send_v"], "cocodiff::send_query_key"),
        ("wait", ["send_qk"], "cocodiff::receive_heads"),
        ("attention", ["wait"], ""),
        ("send_o", ["attention"], "cocodiff::send_output"),
        ("wait_o", ["send_o"], "cocodiff::receive_sequence"),
        ("gate", [f"temb{index}"], ""),
        ("out", ["wait_o", "mlp", "gate"], ""),
    ]
    names = {name for name, _, _ in traced}
    own = [
        Node(f"{name}{index}", tuple(f"{each}{index}" if each in names else each for each in after), operator)
        for name, after, operator in traced
    ]
    return [Node(f"temb{index}"), *own, Node(f"x{index + 1}", (f"out{index}",))]


def names_of(nodes: list[Node]) -> list[str]:
    return [node.name for node in nodes]


def graph(layers: int = 3) -> list[Node]:
    return [Node("x0"), *(node for index in range(layers) for node in layer(index)), Node("end", (f"x{layers}",))]


def test_all_to_alls_start_early_and_are_waited_for_late() -> None:
    found = names_of(early_sends(graph()))
    for index in range(3):
        own = [name[: -len(str(index))] for name in found if name.endswith(str(index)) and name[0] != "x"]
        assert own[own.index("norm") :][:6] == ["norm", "v", "send_v", "q", "k", "send_qk"]
        assert own.index("send_qk") < own.index("mlp") < own.index("wait")
        assert own[-3:] == ["send_o", "wait_o", "out"]


def test_results_for_later_layers_are_not_computed_early() -> None:
    """All modulations could run at the first wait, and would occupy memory."""
    found = names_of(early_sends(graph(6)))
    assert found.index("gate5") > found.index("send_o3")


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_a_random_graph_is_valid(seed: int) -> None:
    generator = random.Random(seed)
    nodes = []
    for index in range(60):
        after = generator.sample(range(index), min(index, generator.randrange(4)))
        operator = generator.choice(["", "", "", "cocodiff::send_value", "cocodiff::receive_heads"])
        nodes.append(Node(str(index), tuple(map(str, after)), operator))
    found = early_sends(nodes)
    assert sorted(names_of(found)) == sorted(names_of(nodes))
    position = {node.name: number for number, node in enumerate(found)}
    assert all(position[each] < position[node.name] for node in nodes for each in node.after)
    assert names_of(early_sends(nodes)) == names_of(found)


def test_a_graph_without_all_to_alls_keeps_its_order() -> None:
    nodes = [node for node in graph() if "send" not in node.operator if "wait" not in node.name]
    assert names_of(early_sends(nodes)) == names_of(nodes)


@pytest.mark.parametrize("before", [(False, ["reorder_compute_for_overlap"]), (True, ["sink_waits"])])
def test_inductors_settings_are_restored_at_the_end_of_a_session(before: tuple[bool, list[str]]) -> None:
    from torch._inductor import config

    names = "reorder_for_compute_comm_overlap", "reorder_for_compute_comm_overlap_passes"
    with config.patch(dict(zip(names, before, strict=True))):
        for _ in range(2):
            graph_order.add_send_pass()
        assert getattr(config, names[0]) and getattr(config, names[1])[-1] is early_sends
        Session().close()
        assert tuple(getattr(config, name) for name in names) == before
        graph_order.add_send_pass()
        config.reorder_for_compute_comm_overlap_passes = ["raise_comms"]
        Session().close()
        assert config.reorder_for_compute_comm_overlap_passes == ["raise_comms"]  # settings changed since then stay
