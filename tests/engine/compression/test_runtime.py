"""Runs, steps and branches without communication: lifetime of link references, keyframes, and log messages."""

import pytest
import torch

from tests.coded_layers import add_errors, reporter, two_nodes
from xfuser_cocodiff.engine.codec import coded_tensor, kernels
from xfuser_cocodiff.engine.codec.link_reference import LinkReference
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.coding_choice import choose
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs, LinkState
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes, ReferenceBytes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.compression.step_errors import TensorError
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.coding_cost import CodingCost

SIZES = LayerSizes(num_values=64, num_v_values=16, row_values=8, value_bytes=4)


def runtime(mode: str = "balanced", overrides: str | None = None) -> CodecRuntime:
    return CodecRuntime(two_nodes(), mode, overrides, lambda values: values)


def send(layer_codecs: LayerCodecs, *energies: tuple[float, float]) -> None:
    """Add errors of V, and bytes, as a collective would."""
    add_errors(layer_codecs, *energies)
    layer_codecs.stats.sent_bytes, layer_codecs.stats.exact_bytes = 10, 100


def set_reference(layer_codecs: LayerCodecs, value: float) -> None:
    """Set the reference of V, as a collective would."""
    link_state = LinkState(LinkReference(is_exact=True), LinkReference())
    link_state.sent.advance(torch.full((4,), float(value)))
    layer_codecs.link_states["v", ALL_HEADS] = link_state


def reference_value(layer_codecs: LayerCodecs) -> float | None:
    """Return the value that :func:`set_reference` has set, or None without a reference."""
    link_state = layer_codecs.link_states.get(("v", ALL_HEADS))
    return link_state and link_state.sent.values[0].item()


def test_references_belong_to_a_layer_and_branch_of_one_run() -> None:
    one = runtime()
    assert one.layer_codecs(CodedCall("a", 1, 0, SIZES)) is None  # no run has begun
    one.begin_run(3)
    keys = [("a", 1, 0), ("a", 1, 1), ("a", 2, 0)]
    for number, key in enumerate(keys):
        set_reference(one.layer_codecs(CodedCall(*key, SIZES)), number)
    one.end_step()
    assert [reference_value(one.layer_codecs(CodedCall(*key, SIZES))) for key in keys] == [0, 1, 2]
    assert one.store.nbytes == 3 * 16
    one.end_step()
    assert [reference_value(one.layer_codecs(CodedCall(*key, SIZES))) for key in keys] == [0, 1, 2]
    one.end_step()  # the last step
    assert one.layer_codecs(CodedCall(*keys[0], SIZES)) is None
    assert one.store.nbytes == 0


def test_an_aborted_run_leaves_no_references() -> None:
    one = runtime()
    one.begin_run(3)
    set_reference(one.layer_codecs(CodedCall("a", 1, 0, SIZES)), 7)
    one.begin_run(3)
    assert reference_value(one.layer_codecs(CodedCall("a", 1, 0, SIZES))) is None
    assert one.clock.step == 0


def follow(one: CodecRuntime, *sizes: LayerSizes) -> bool:
    """Call a layer in several branches of these sizes, and return whether values of the first are kept for others."""
    codecs_of = [one.layer_codecs(CodedCall("a", 1, branch, each)) for branch, each in enumerate(sizes)]
    one.end_step()
    return codecs_of[0].keeps_values


def test_values_are_kept_while_a_branch_follows() -> None:
    """A branch that has been left out is coded by itself when it is back."""
    one = runtime()
    one.begin_run(8)
    assert [follow(one, *[SIZES] * count) for count in (2, 2, 1, 1, 2, 2)] == [True, True, True, False, False, True]


@pytest.mark.parametrize("how", ["heads", "gathered", "ring"])
@pytest.mark.parametrize("num_values", [64, 66])
def test_branches_are_coded_together_if_they_are_equally_long(num_values: int, how: str) -> None:
    ring = two_nodes() if how == "ring" else None
    one = CodecRuntime(None if ring else two_nodes(), "balanced", None, list, ring_partition=ring)
    one.begin_run(8)
    sizes, is_same = [SIZES, SIZES._replace(num_values=num_values)], num_values == SIZES.num_values
    codecs_of, gathers_kv = one.ring_codecs if ring else one.layer_codecs, how == "gathered"
    for _ in range(2):
        calls = [CodedCall("a", 1, branch, each, gathers_kv=gathers_kv) for branch, each in enumerate(sizes)]
        layers = [codecs_of(call) for call in calls]
        one.end_step()
    assert layers[0].keeps_values == (layers[1].leader is not None) == is_same
    coordinates = (2, 1) if how == "heads" else (1, 2)
    planned = [
        ReferenceBytes.of(each, one.schedule, *coordinates, keeps_values=is_same and branch == 1).predicted
        for branch, each in enumerate(sizes)
    ]
    assert one.store.planned_bytes == sum(planned)


@pytest.mark.parametrize(("gathers_kv", "tensors"), [(False, 4), (True, 2)])
def test_layers_are_coded_where_links_save_more_than_the_host_adds(gathers_kv: bool, tensors: int) -> None:
    """Without codecs, half of Q, K, V and O crosses two nodes; a coded message has a tenth of the bytes."""
    logged: list[str] = []
    cost = CodingCost(link_seconds_per_byte=1e-6, host_seconds_per_tensor=1e-3)
    one = CodecRuntime(
        two_nodes(device_type="cuda", coding_cost=cost), "balanced", None, list, reporter=reporter(logged)
    )
    for _ in range(2):
        one.begin_run(3)
        coded = []
        boundary = tensors * 1e-3 / (0.9e-6 * 0.5 * 4)  # values whose bytes save as much time as the host needs
        for number, values in enumerate((boundary - 40, boundary + 40)):
            sizes = SIZES._replace(num_values=round(values) // 4 * 4, num_v_values=round(values) // 4)
            coded.append(
                one.layer_codecs(CodedCall(f"blocks.{number}", number, 0, sizes, gathers_kv=gathers_kv)) is not None
            )
        assert coded == [False, True]
        one.end_step()
        assert [report.exact_layers for report in one.reports] == [1]
    [message] = [line for line in logged if "host time" in line]
    assert message.startswith("1 of 2 layers are lossless") and "--cocodiff_slow_axes node" in message
    assert f"add {tensors:g} ms" in message
    assert any(line.startswith("link references of 2 layers") for line in logged)


def is_stateless(layer_codecs: LayerCodecs) -> bool:
    """Return whether no tensor needs a reference."""
    return all(codec.is_exact or codec.is_keyframe for codec in layer_codecs.step.codecs.values())


def test_not_finite_values_on_an_accelerator_make_the_step_after_the_next_lossless() -> None:
    """Check at the end of the next step, on all ranks: the values have arrived by then."""
    partition = two_nodes(device_type="cuda")
    other_rank = [0.0]
    one = CodecRuntime(partition, "balanced", None, lambda values: [*values[:-1], values[-1] + other_rank[0]])
    one.begin_run(50)

    def step(is_bad: float) -> bool:
        layer_codecs = one.layer_codecs(CodedCall("a", 1, 0, SIZES))
        send(layer_codecs, (0.0, 1.0), (torch.nan if is_bad else 0.0, 1.0))
        one.end_step()
        return is_stateless(layer_codecs)

    # Values of step 3 are wrong because the reference of step 2 is: the lossless step 4 mends both.
    assert [step(is_bad) for is_bad in (0, 0, 1, 1, 0, 0, 0)] == [True, False, False, False, True, False, False]
    other_rank[0] = 1.0
    assert [step(0) for _ in range(2)] == [False, True]
    assert [report.repeated for report in one.reports] == [0, 0, 1, 1, 0, 0, 0, 0, 0]


def steps_with_errors(one: CodecRuntime, count: int) -> None:
    """Run steps in which V has an error of 2 %, and 5 % in a run's third step."""
    for step in range(count):
        layer_codecs = one.layer_codecs(CodedCall("a", 1, 0, SIZES))
        assert layer_codecs.step.measures_yardsticks == (step == 0 and not one.yardsticks)
        if layer_codecs.step.measures_yardsticks:
            add_errors(layer_codecs, (1.0, 1e4), name="fp8")
            add_errors(layer_codecs, (4.0, 1e4), name="fp4")
        send(layer_codecs, (1.0, 1e4), (9.0 if step < 2 else 81.0, 1e4))
        one.end_step()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("steps", "error"), [(1, 2), (3, 3)])
def test_every_run_says_its_error_and_bits(device: str, steps: int, error: int) -> None:
    """Over the tensors and all steps of the run, with the errors of FP8 and FP4 at the first step of the first run."""
    logged: list[str] = []
    one = CodecRuntime(two_nodes(device_type=device), "balanced", None, list, reporter=reporter(logged))
    for _ in range(2):
        one.begin_run(steps)
        steps_with_errors(one, steps)
        one.begin_run(3)  # without values, errors or a message
    message = f"error {error}.00% (V {error}.00%) at 3.20 bits per value; FP8 1.00%; FP4 2.00% on "
    found = [line for line in logged if line.startswith("error")]
    assert found == [f"{message}the same tensors", f"{message}those of the first run"]


@pytest.mark.parametrize("total", [None, 4])
def test_only_the_last_step_is_an_end_that_all_ranks_reach(total: int | None) -> None:
    """Where a run ends elsewhere, others may not follow in a collective."""
    logged: list[str] = []
    summed: list[list[float]] = []
    one = CodecRuntime(
        two_nodes(), "paper", None, lambda values: summed.append(values) or values, reporter=reporter(logged, "paper")
    )
    one.begin_run(total)
    steps_with_errors(one, 3)
    one.end_run(is_complete=True)
    for end in (one.end_run, lambda: one.begin_run(4)):  # aborted
        one.begin_run(total)
        steps_with_errors(one, 3)
        end()
    message = "error 3.00% (V 3.00%) at 3.20 bits per value on this rank; FP8 1.00%; FP4 2.00% on the same tensors"
    assert [line for line in logged if line.startswith("error")] == [message]
    assert not summed


def test_bits_of_a_run_do_not_follow_from_another_one() -> None:
    one, found = runtime(), []
    for error in (1.0, 1e-8):
        one.begin_run(6)
        for _ in range(3):
            layer_codecs = one.layer_codecs(CodedCall("a", 1, 0, SIZES))
            found.append(layer_codecs.step.codecs["v"].bits)
            send(layer_codecs, (error, 1.0))
            one.end_step()
    first, second = found[:3], found[3:]
    assert first[:2] == second[:2] and first[2] == 8 and second[2] == 1.6


@pytest.mark.parametrize(
    ("bad_steps", "exact", "bad", "backend"),
    [
        ({3}, {5}, torch.nan, kernels.TORCH),
        ({3, 4}, {5}, torch.inf, kernels.TRITON),
        ({0}, {2}, torch.nan, kernels.TORCH),
    ],
    ids=str,
)
def test_one_lossless_step_on_an_accelerator_recovers_from_not_finite_values(
    monkeypatch: pytest.MonkeyPatch, bad_steps: set[int], exact: set[int], bad: float, backend: str
) -> None:
    """Recover at both ends of a link, previous references included, from bad values at the first steps that are given;
    the second ones are lossless."""
    if backend == kernels.TRITON and torch.accelerator.is_available():
        pytest.skip("Triton's interpreter is off if there is a GPU")
    monkeypatch.setattr(kernels, "_selected", [backend])
    one, shape = CodecRuntime(two_nodes(device_type="cuda"), "balanced", None, list), (1, 1, 2, 6, 16)
    one.begin_run(50)
    generator = torch.Generator().manual_seed(5)
    first, change = (torch.randn(shape, generator=generator) for _ in range(2))
    errors, found_exact = [], set()
    for step in range(8):
        layer_codecs = one.layer_codecs(CodedCall("a", 1, 0, SIZES))
        codec, _ = choose(layer_codecs, "v", ALL_HEADS, shape, torch.float32)
        link_state = layer_codecs.link_state("v", ALL_HEADS)
        values = first + 0.05 * step * change
        if step in bad_steps:
            values[0, 0, 1, 4, 7] = bad
        payload, found = torch.empty(1, codec.payload_bytes(shape, values.dtype), dtype=torch.uint8), values.clone()
        energies = layer_codecs.errors.add([] if codec.is_exact else [TensorError("v", "a")], devices.CPU)
        coded_tensor.encode([coded_tensor.CodedTensor(values, link_state.sent, codec, None, payload)], energies)
        coded_tensor.decode([coded_tensor.CodedTensor(found, link_state.received, codec, None, payload)])
        one.end_step()
        follows_bad = step in bad_steps or (step - 1 in bad_steps - found_exact and not codec.is_exact)
        assert found.isfinite().all() != follows_bad
        errors.append((found - values).norm() / values.norm())
        found_exact |= {step} if codec.is_exact else set()
        for reference in (link_state.sent, link_state.received):
            assert reference.values.isfinite().all() or (follows_bad and not codec.is_exact)
        assert all(map(torch.equal, link_state.sent.stored, link_state.received.stored))
    assert found_exact == exact
    if bad_steps == {3}:
        assert errors[5] == 0 and 0 < errors[6] < 1.25 * modes.BALANCED.error


@pytest.mark.parametrize(
    ("order", "keyframes"), [("aaaabbbb", (0, 4)), ("aaaabbbbabab", (0, 4, 8)), ("abababab", (0, 1, 2))]
)
def test_another_transformer_drops_references_of_the_one_before(order: str, keyframes: tuple[int, ...]) -> None:
    one = runtime()
    # The second branch is coded as the difference to the first, whose values are kept.
    need = sum(ReferenceBytes.of(SIZES, one.schedule, 2, keeps_values=keeps).predicted for keeps in (False, True))
    for _ in range(2):  # the second run as the first
        one.begin_run(20)
        for step, transformer in enumerate(order):
            for branch in (0, 1):
                layer_codecs = one.layer_codecs(CodedCall("attn", transformer, branch, SIZES, transformer))
                assert reference_value(layer_codecs) == (None if step in keyframes else ord(transformer) + branch)
                set_reference(layer_codecs, ord(transformer) + branch)
            one.end_step()
        assert one.store.planned_bytes == (1 if keyframes[-1] == 4 else 2) * need
