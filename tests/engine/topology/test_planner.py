"""The cost model, against times computed by hand and invariants of any such model."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
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


@pytest.mark.parametrize(
    ("sizes", "speeds", "slow"),
    [
        ([2, 3, 2], [0.05e9, 0.15e9, 1e9], ("node", "gpu")),
        ([2, 3, 2], [0.15e9, 0.18e9, 1e9], ()),  # none is so slow that codecs pay for it alone
        ([1, 3, 2], [0.05e9, 0.15e9, 1e9], ()),  # nothing crosses an axis of one rank
        ([1, 3, 2], [1e9, 0.05e9, 1e9], ("gpu",)),
        ([2, 3, 2], [1e9, 0.05e9, 0.05e9], ()),  # inside a fast axis
    ],
)
def test_slow_axes_by_links_and_codec(sizes: list[int], speeds: list[float], slow: tuple[str, ...]) -> None:
    """Codec and copies of all machines here have 1 GB/s."""
    machine = profile_of(sizes, speeds, latency=0.0, launch=0.0)
    assert machine.slow_axes == slow
    assert machine.may_have_slow_axes == bool(slow)
    assert not machine.with_codec(0.0, 0.0).slow_axes


def test_predictions_equal_times_computed_by_hand() -> None:
    """2 nodes x 3 GPUs x 2 tiles at 1, 2 and 4 MB/s, 12 MB: 1 MB for each rank."""
    machine = profile_of([2, 3, 2], [1e6, 2e6, 4e6], latency=0.1, launch=1.0)
    copy = 0.012
    # Flat: six peers across the node link, four across the GPU links, one across the tile link.
    assert planner.all_to_all_seconds(machine, Plan.flat(machine.topology), MESSAGE) == pytest.approx(1 + 11 * 0.1 + 6)
    # One stage per axis: 6 MB at 4 MB/s, 8 MB at 2 MB/s, 6 MB at 1 MB/s, four messages, two copies.
    by_axis = Plan.hierarchical(machine.topology)
    assert planner.all_to_all_seconds(machine, by_axis, MESSAGE) == pytest.approx(3 + 4 * 0.1 + 1.5 + 4 + 6 + 2 * copy)
    # Merged: 8 MB over the GPU links beside 2 MB over the tile link, then 6 MB.
    merged = Plan.parse("hierarchical:tile+gpu,node", machine.topology)
    assert planner.all_to_all_seconds(machine, merged, MESSAGE) == pytest.approx(2 + 6 * 0.1 + 4 + 6 + copy)


def test_contention_slows_stages_over_several_axes() -> None:
    free, contended = (profile_of([2, 3, 2], [1e6, 2e6, 4e6], 0, 0, contention) for contention in (1, 2))
    flat, by_axis = Plan.flat(free.topology), Plan.hierarchical(free.topology)
    flat_seconds, by_axis_seconds = (planner.all_to_all_seconds(free, plan, MESSAGE) for plan in (flat, by_axis))
    assert planner.all_to_all_seconds(contended, flat, MESSAGE) == pytest.approx(2 * flat_seconds)
    assert planner.all_to_all_seconds(contended, by_axis, MESSAGE) == by_axis_seconds


@given(machines, message_sizes)
def test_chosen_plan_saves_the_margin_of_its_extra_stages(machine: Profile, message: int) -> None:
    def extra_stages(plan: Plan) -> int:
        return len(plan.stages) - 1

    chosen = planner.choose_plan(machine, message)
    seconds = planner.all_to_all_seconds(machine, chosen, message)
    flat_seconds = planner.all_to_all_seconds(machine, Plan.flat(machine.topology), message)
    assert seconds <= flat_seconds * (1 - planner.MARGIN * extra_stages(chosen)) * (1 + 1e-9)
    for plan in candidates(machine.topology):
        if extra_stages(plan) == extra_stages(chosen):
            assert seconds <= planner.all_to_all_seconds(machine, plan, message) * (1 + 1e-9)


def test_small_messages_have_hierarchical_plans_and_large_ones_flat_plans() -> None:
    """24 ranks on equal links: 23 messages against 3 + 2 + 1, and fewer bytes in one collective."""
    machine = profile_of([4, 3, 2], [1e7, 1e7, 1e7], latency=1e-4, launch=1e-5)
    assert str(planner.choose_plan(machine, 1000)) != "flat"
    assert str(planner.choose_plan(machine, 10_000_000)) == "flat"


def test_v_is_sent_early_where_its_bytes_cost_more_than_a_call() -> None:
    """2 ranks at 1 MB/s; half of the bytes of a message cross the link, and a call costs 10 ms."""
    machine = profile_of([2], [1e6], latency=0.0, launch=0.01)

    def pays(value_bytes: int, **changes: float) -> bool:
        changed = dataclasses.replace(machine, **changes)
        return planner.early_send_pays(changed, lambda size: Plan.flat(machine.topology), value_bytes, 3 * value_bytes)

    assert pays(10**6)
    assert not pays(10**4)  # 5 ms on the link
    assert pays(10**4, launch_seconds=1e-4)


def test_profile_is_read_as_written(tmp_path: Path) -> None:
    machine = profile_of([2, 3, 2], [1e6, 2e6, 4e6], 0.1, 1.0, 1.5)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"profile": machine.to_json()}))
    assert Profile.read(file) == machine
    machine = machine.with_codec(0.0, 0.0)  # not measured
    earlier = {**machine.to_json(), "overlap": 0.5, "direct": machine.to_json()}
    assert Profile.from_json(earlier) == machine, "entries of earlier versions"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda values: values.update(launch_seconds=-1),
        lambda values: values.update(copy_bytes_per_second=float("nan")),
        lambda values: values["links"][0].update(latency_seconds=-1),
        lambda values: values.update(topology="2x2"),
    ],
)
def test_invalid_profile_is_rejected(spoil, tmp_path: Path) -> None:
    values = profile_of([2, 3, 2], [1e6, 2e6, 4e6], 0.1, 1.0).to_json()
    values = json.loads(json.dumps(values))
    spoil(values)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"profile": values}))
    with pytest.raises(ValueError, match=r"profile.json' has no link profile of `cocodiff probe --json`"):
        Profile.read(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"rows": []}', "the entry 'profile' is missing"),
        ('{"profile": {"topology": "2x2"}}', "'ranks' is missing"),
    ],
)
def test_missing_entry_is_named(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        Profile.read(file)


@pytest.mark.parametrize(
    ("num_slow", "heads_per_kv_head", "gathers"),
    [
        (2, 1, True),
        (4, 1, False),
        (3, 2, True),
        (8, 8, True),
    ],
)
def test_k_and_v_are_gathered_where_that_sends_no_more_bytes(
    num_slow: int, heads_per_kv_head: int, gathers: bool
) -> None:
    kv_bytes = 2.0
    by_heads = (2 * heads_per_kv_head + 2) / 2 * kv_bytes * (num_slow - 1) / num_slow  # Q and O, then K and V
    sizes = planner.SentSizes.of(64 * heads_per_kv_head, 64, num_slow, 1)
    if 64 % num_slow == 0:  # else by heads, more are sent
        assert planner.gathers_kv(num_slow, sizes) == gathers
    assert planner.gathers_kv(num_slow, planner.SentSizes(heads_per_kv_head, 1, 1)) == gathers
    assert gathers == (0 < (num_slow - 1) * kv_bytes <= by_heads)


@pytest.mark.parametrize(
    ("nodes", "kv_heads", "by_heads", "gathered"),
    [(2, 24, 64, 64), (4, 24, 96, 144), (8, 24, 112, 336), (2, 8, 128, 32), (4, 8, 192, 48), (8, 8, 224, 112)],
)
def test_zero_padded_heads_count(nodes: int, kv_heads: int, by_heads: int, gathered: int) -> None:
    """24 heads of Q on 32 ranks, in heads that cross the nodes: K is padded to a multiple of all ranks, and Q with it,
    or to one of the ranks of a node; see docs/plans.md."""
    sizes = planner.SentSizes.of(24, kv_heads, nodes, 32 // nodes)
    assert 2 * (sizes.query + sizes.key) * (nodes - 1) / nodes == by_heads
    assert 2 * sizes.gathered_key * (nodes - 1) == gathered
    assert planner.gathers_kv(nodes, sizes) == (gathered <= by_heads)


def test_lossless_layers_try_to_gather_where_the_bytes_or_padded_heads_are_fewer() -> None:
    machine = profile_of([2, 4], [1e9, 1e11], 0, 0)
    size = 1e8
    assert not planner.gather_pays(machine, ["node"], [size] * 3, [size] * 3)  # as many bytes across nodes
    assert planner.gather_pays(machine, ["node"], [size, size / 4, size / 4], [size, size / 4, size / 4])
    assert planner.gather_pays(machine, ["node"], [size * 4 / 3] * 3, [size] * 3)  # 24 heads, padded to 32
    eight = profile_of([8, 4], [1e9, 1e11], 0, 0)
    assert not planner.gather_pays(eight, ["node"], [size, size / 4, size / 4], [size, size / 4, size / 4])
