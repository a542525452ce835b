"""The order of exchanges in a graph, on paper."""

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
    """As Inductor's scheduler has them."""

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
    """A block with an MLP beside its attention, as it is traced."""
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


def test_exchanges_start_early_and_are_waited_for_late() -> None:
    found = names_of(early_sends(graph()))
    for index in range(3):
        own = [name[: -len(str(index))] for name in found if name.endswith(str(index)) and name[0] != "x"]
        assert own[own.index("norm") :][:6] == ["norm", "v", "send_v", "q", "k", "send_qk"]
        assert own.index("send_qk") < own.index("mlp") < own.index("wait")
        assert own[-3:] == ["send_o", "wait_o", "out"]


def test_what_later_layers_need_does_not_lie_in_memory() -> None:
    """Their modulation could all be computed at the first wait."""
    found = names_of(early_sends(graph(6)))
    assert found.index("gate5") > found.index("send_o3")


@pytest.mark.parametrize("seed", range(20))
def test_any_graph_still_can_be_run(seed: int) -> None:
    chance = random.Random(seed)
    nodes = []
    for index in range(60):
        after = chance.sample(range(index), min(index, chance.randrange(4)))
        operator = chance.choice(["", "", "", "cocodiff::send_value", "cocodiff::receive_heads"])
        nodes.append(Node(str(index), tuple(map(str, after)), operator))
    found = early_sends(nodes)
    assert sorted(names_of(found)) == sorted(names_of(nodes))
    place = {node.name: number for number, node in enumerate(found)}
    assert all(place[each] < place[node.name] for node in nodes for each in node.after)
    assert names_of(early_sends(nodes)) == names_of(found)


def test_without_exchanges_nothing_is_moved() -> None:
    nodes = [node for node in graph() if "send" not in node.operator if "wait" not in node.name]
    assert names_of(early_sends(nodes)) == names_of(nodes)


@pytest.mark.parametrize("before", [(False, ["reorder_compute_for_overlap"]), (True, ["sink_waits"])])
def test_inductor_has_its_settings_back_when_an_engine_ends(before: tuple[bool, list[str]]) -> None:
    from torch._inductor import config

    names = "reorder_for_compute_comm_overlap", "reorder_for_compute_comm_overlap_passes"
    with config.patch(dict(zip(names, before, strict=True))):
        for _ in range(2):
            graph_order.order_exchanges()
        assert getattr(config, names[0]) and getattr(config, names[1])[-1] is early_sends
        Session().close()
        assert tuple(getattr(config, name) for name in names) == before
        graph_order.order_exchanges()
        config.reorder_for_compute_comm_overlap_passes = ["raise_comms"]
        Session().close()
        assert config.reorder_for_compute_comm_overlap_passes == ["raise_comms"]  # others' settings stay
