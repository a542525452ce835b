"""The cost model, against times worked out by hand and the laws that any such model keeps."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.plans import Plan, candidates
from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, Topology

MESSAGE = 12_000_000


def profile_of(sizes: list[int], speeds: list[float], latency: float, launch: float, contention: float = 1) -> Profile:
    topology = Topology.named(**dict(zip(AXIS_NAMES, sizes, strict=False)))
    links = [AxisLink(axis.name, latency, speed) for axis, speed in zip(topology.axes, speeds, strict=False)]
    return Profile(topology, tuple(links), launch, 1e9, 1e9, contention)


machines = st.builds(
    profile_of,
    st.lists(st.integers(2, 4), min_size=3, max_size=3),
    st.lists(st.floats(1e5, 1e10), min_size=3, max_size=3),
    st.floats(0, 1e-3),
    st.floats(0, 1e-3),
    st.floats(1, 3),
)
message_sizes = st.integers(1, 2**30)


def test_times_by_hand() -> None:
    """2 nodes x 3 GPUs x 2 tiles at 1, 2 and 4 MB/s, 12 MB: 1 MB for each rank."""
    machine = profile_of([2, 3, 2], [1e6, 2e6, 4e6], latency=0.1, launch=1.0)
    copy = 0.012
    # Flat: six ranks lie behind the node link, four behind the GPU links, one behind the tile link.
    assert planner.all_to_all_seconds(machine, Plan.flat(machine.topology), MESSAGE) == pytest.approx(1 + 11 * 0.1 + 6)
    # One stage per axis: 6 MB at 4 MB/s, 8 MB at 2 MB/s, 6 MB at 1 MB/s, four messages, two copies.
    by_axis = Plan.hierarchical(machine.topology)
    assert planner.all_to_all_seconds(machine, by_axis, MESSAGE) == pytest.approx(3 + 4 * 0.1 + 1.5 + 4 + 6 + 2 * copy)
    # Merged: 8 MB over the GPU links beside 2 MB over the tile link, then 6 MB.
    merged = Plan.parse("hierarchical:tile+gpu,node", machine.topology)
    assert planner.all_to_all_seconds(machine, merged, MESSAGE) == pytest.approx(2 + 6 * 0.1 + 4 + 6 + copy)


def test_contention_slows_what_drives_several_axes() -> None:
    calm, busy = (profile_of([2, 3, 2], [1e6, 2e6, 4e6], 0, 0, contention) for contention in (1, 2))
    flat, by_axis = Plan.flat(calm.topology), Plan.hierarchical(calm.topology)
    assert planner.all_to_all_seconds(busy, flat, MESSAGE) == pytest.approx(
        2 * planner.all_to_all_seconds(calm, flat, MESSAGE)
    )
    assert planner.all_to_all_seconds(busy, by_axis, MESSAGE) == planner.all_to_all_seconds(calm, by_axis, MESSAGE)


@given(machines, message_sizes)
def test_bytes_over_the_outer_axis_are_the_same_under_every_plan(machine: Profile, message: int) -> None:
    """Only the outer axis' link has a price, so that every plan costs what must cross it."""
    priced = dataclasses.replace(
        machine,
        links=tuple(
            dataclasses.replace(link, latency_seconds=0, bytes_per_second=1e6 if number == 0 else math.inf)
            for number, link in enumerate(machine.links)
        ),
        launch_seconds=0,
        copy_bytes_per_second=math.inf,
        contention=1,
    )
    nodes = machine.topology.shape[0]
    for plan in candidates(machine.topology):
        assert planner.all_to_all_seconds(priced, plan, message) == pytest.approx(message * (nodes - 1) / nodes / 1e6)


@given(machines, message_sizes)
def test_the_choice_saves_what_its_parts_must(machine: Profile, message: int) -> None:
    def parts(plan: Plan) -> int:
        return len(plan.stages) - 1

    chosen = planner.choose_plan(machine, message)
    mine, flat = planner.all_to_all_seconds(machine, chosen, message), Plan.flat(machine.topology)
    assert mine <= planner.all_to_all_seconds(machine, flat, message) * (1 - planner.MARGIN * parts(chosen)) * (
        1 + 1e-9
    )
    for plan in candidates(machine.topology):
        if parts(plan) == parts(chosen):
            assert mine <= planner.all_to_all_seconds(machine, plan, message) * (1 + 1e-9)


@given(machines, message_sizes, st.floats(0.1, 10))
def test_no_choice_depends_on_the_unit_of_time(machine: Profile, message: int, unit: float) -> None:
    scaled = dataclasses.replace(
        machine,
        links=tuple(
            AxisLink(link.name, link.latency_seconds * unit, link.bytes_per_second / unit) for link in machine.links
        ),
        launch_seconds=machine.launch_seconds * unit,
        copy_bytes_per_second=machine.copy_bytes_per_second / unit,
    )
    flat = Plan.flat(machine.topology)
    assert planner.all_to_all_seconds(scaled, flat, message) == pytest.approx(
        unit * planner.all_to_all_seconds(machine, flat, message)
    )
    chosen = planner.choose_plan(machine, message)
    best = planner.all_to_all_seconds(scaled, planner.choose_plan(scaled, message), message)
    assert planner.all_to_all_seconds(scaled, chosen, message) == pytest.approx(best)


def test_small_messages_go_by_axis_and_large_ones_flat() -> None:
    """24 ranks on equal links: 23 messages against 3 + 2 + 1, and less to send in one piece."""
    machine = profile_of([4, 3, 2], [1e7, 1e7, 1e7], latency=1e-4, launch=1e-5)
    assert str(planner.choose_plan(machine, 1000)) != "flat"
    assert str(planner.choose_plan(machine, 10_000_000)) == "flat"


def test_coded_exchanges_take_all_axes_at_once_where_that_saves_more_than_its_messages_cost() -> None:
    """12 MB, two nodes of two GPUs. In stages: 6 MB along the GPUs, then 0.6 MB across, two messages. At once: 0.6 MB
    across beside 3 MB along the GPUs, four messages."""
    for latency, at_once in ((0.0, True), (0.05, True), (0.2, False)):
        machine = profile_of([2, 2], [1e6, 1e7], latency, launch=1e-3)
        machine = dataclasses.replace(machine, codec_bytes_per_second=1e7)
        took = [planner.exchange_seconds(machine, MESSAGE, 0.1 * MESSAGE, way, ["node"]) for way in (False, True)]
        coding = MESSAGE / 2 / 1e7
        by_hand = [0.6 + 0.6 + 2 * latency + coding, 0.6 + 0.3 + 4 * latency + coding]
        if at_once:
            assert took == pytest.approx(by_hand, rel=0.01)
        else:  # where messages are dear, what is coded goes along one axis after the other, in fewer
            assert took[0] == pytest.approx(by_hand[0], rel=0.01) and took[1] < by_hand[1]
        assert planner.is_single_stage(machine, MESSAGE, ["node"]) == at_once
        assert not planner.is_single_stage(machine, MESSAGE, []) and not planner.is_single_stage(machine, 0, ["node"])
        assert not planner.is_single_stage(machine, MESSAGE, ["node", "gpu"])  # both are the same then


@given(machines, st.integers(2**24, 2**30))
def test_both_ways_of_a_coded_exchange_send_as_much_along_slow_axes(machine: Profile, message: int) -> None:
    *slow, fast = (axis.name for axis in machine.topology.axes)
    ways = [planner.comm_stages(machine, message, 0.1 * message, at_once, slow) for at_once in (False, True)]
    assume(all(leg.plan.is_flat for way in ways for leg in way))  # else axes hand on what others brought
    in_stages, at_once = (
        sum((Counter(leg.plan.sent_bytes(leg.message_bytes)) for leg in way), Counter()) for way in ways
    )
    assert [at_once[axis] for axis in slow] == pytest.approx([in_stages[axis] for axis in slow])
    places = machine.topology.shape[0] * machine.topology.shape[1]
    assert at_once[fast] == pytest.approx(in_stages[fast] * (1 + 0.1) / places)  # what stays, and what is coded


def test_direct_sends_are_used_where_they_are_faster() -> None:
    machine = profile_of([2, 2, 2], [1e6, 1e7, 1e8], latency=1e-4, launch=1e-4)
    faster = dataclasses.replace(
        machine,
        links=(AxisLink("node", 1e-3, 2e6), *machine.links[1:]),  # twice the bandwidth, ten times the latency
    )
    machine = dataclasses.replace(machine, direct=faster)
    assert str(planner.choose_plan(machine, 2**20)) == "flat*"
    assert "*" not in str(planner.choose_plan(machine, 64))
    assert planner.lower_bound_seconds(machine, 2**20) == pytest.approx(2**19 / 2e6)


def test_v_goes_ahead_where_its_bytes_cost_more_than_its_call() -> None:
    """2 ranks, 1 MB/s, so that a message takes half of its bytes, and a call costs 10 ms."""
    machine = profile_of([2], [1e6], latency=0.0, launch=0.01)

    def pays(value_bytes: int, **changes: float) -> bool:
        changed = dataclasses.replace(machine, **changes)
        return planner.early_send_pays(changed, lambda size: Plan.flat(machine.topology), value_bytes, 3 * value_bytes)

    assert pays(10**6)
    assert not pays(10**4)  # 5 ms on the link
    assert pays(10**4, launch_seconds=1e-4)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    machine = profile_of([2, 3, 2], [1e6, 2e6, 4e6], 0.1, 1.0, 1.5)
    machine = dataclasses.replace(machine, direct=machine)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"profile": machine.to_json()}))
    assert Profile.read(file) == machine
    assert Profile.from_json({**machine.to_json(), "overlap": 0.5}) == machine, "as earlier versions wrote it"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda values: values.pop("links"),
        lambda values: values.update(launch_seconds=-1),
        lambda values: values.update(contention="much"),
        lambda values: values.update(copy_bytes_per_second=float("nan")),
        lambda values: values["links"].pop(),
        lambda values: values["links"][0].update(bytes_per_second=0),
        lambda values: values["links"][0].update(colour="red"),
        lambda values: values.update(topology="2x2"),
    ],
)
def test_a_bad_profile_is_refused(spoil, tmp_path: Path) -> None:
    values = profile_of([2, 3, 2], [1e6, 2e6, 4e6], 0.1, 1.0).to_json()
    values = json.loads(json.dumps(values))
    spoil(values)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"profile": values}))
    with pytest.raises(ValueError, match=r"profile.json holds no profile that `cocodiff probe --json` wrote"):
        Profile.read(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"rows": []}', "the entry 'profile' is missing"),
        ("[1, 2]", "the entry 'profile' is missing"),
        ('{"profile": {"topology": "2x2"}}', "'ranks' is missing"),
    ],
)
def test_what_a_file_lacks_is_named(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        Profile.read(file)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.json holds no profile"):
        Profile.read(tmp_path / "absent.json")
