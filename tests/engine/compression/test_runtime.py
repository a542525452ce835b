"""Runs, steps and branches, without ranks: what is held, for whom, and until when."""

from types import SimpleNamespace

import pytest
import torch

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression import codecs
from xfuser_cocodiff.engine.compression.codecs import LinkReference, QuantError
from xfuser_cocodiff.engine.compression.layer_codecs import LinkState, codec_for
from xfuser_cocodiff.engine.compression.modes import preset
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes, ReferenceBytes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime

SHARE = LayerSizes(values=64, value=16, head_dim=8, value_bytes=4)


def way_on(device: str) -> SimpleNamespace:
    """Slow axes with two places, which messages of more than 128 bytes take at once."""
    slow = SimpleNamespace(comm_stream=SimpleNamespace(device=torch.device(device)))
    return SimpleNamespace(
        num_slow=2,
        slow=slow,
        is_single_stage=lambda message_bytes: message_bytes > 128,
    )


def runtime(mode: str = "balanced", changes: str | None = None, max_error: float | None = None) -> CodecRuntime:
    return CodecRuntime(way_on("cpu"), mode, changes, max_error, lambda values: values)


def loss(lacking: float, wanted: float) -> QuantError:
    return QuantError(torch.tensor(lacking), torch.tensor(wanted))


def hold(layer_codecs: object, value: float) -> None:
    """As an exchange would leave a reference."""
    link_state = LinkState(LinkReference(), LinkReference())
    link_state.sent.advance(torch.full((4,), float(value)), keeps_change=False)
    layer_codecs.link_states["v", ALL_HEADS] = link_state


def held(layer_codecs: object) -> float | None:
    link_state = layer_codecs.link_states.get(("v", ALL_HEADS))
    return link_state and link_state.sent.expected(0.0)[0].item()


def test_references_belong_to_a_layer_and_a_branch_and_last_for_a_run() -> None:
    one = runtime()
    assert one.layer_codecs("a", 1, 0, SHARE) is None  # no run is under way
    one.begin_run(3)
    keys = [("a", 1, 0), ("a", 1, 1), ("a", 2, 0)]
    for number, key in enumerate(keys):
        hold(one.layer_codecs(*key, SHARE), number)
    one.end_step()
    assert [held(one.layer_codecs(*key, SHARE)) for key in keys] == [0, 1, 2]
    assert one.reference_bytes == 3 * 16
    one.end_step()
    assert [held(one.layer_codecs(*key, SHARE)) for key in keys] == [0, 1, 2]
    one.end_step()  # the last one
    assert one.layer_codecs(*keys[0], SHARE) is None
    assert one.reference_bytes == 0


def test_a_run_that_was_broken_off_leaves_nothing() -> None:
    one = runtime()
    one.begin_run(3)
    hold(one.layer_codecs("a", 1, 0, SHARE), 7)
    one.begin_run(3)
    assert held(one.layer_codecs("a", 1, 0, SHARE)) is None
    assert one.step == 0


def test_the_schedule_goes_by_the_steps_of_the_run() -> None:
    one = runtime("paper", "warmup=1,refresh=0")
    for total in (5, 9):
        one.begin_run(total)
        shares = []
        for _ in range(total):
            shares.append(one.layer_codecs("a", 1, 0, SHARE).codecs["v"].share)
            one.end_step()
        assert shares == pytest.approx([1, *(1 - step / (total - 1) for step in range(1, total))])


def test_layers_that_are_left_out_travel_exactly() -> None:
    one = runtime(changes="exact=blocks.3")
    one.begin_run(3)
    assert one.layer_codecs("blocks.3.attn", 1, 0, SHARE) is None
    assert one.layer_codecs("blocks.30.attn", 2, 0, SHARE) is not None


def test_an_error_above_the_bound_asks_for_an_exact_step() -> None:
    one = runtime(max_error=0.1)
    one.begin_run(9)
    exact = []
    for step in range(6):
        one.layer_codecs("before", 0, 0, SHARE).stats.losses.append(loss(0.0, 1.0))
        layer_codecs = one.layer_codecs("a", 1, 0, SHARE)
        exact.append(layer_codecs.is_stateless)
        error = 0.3 if step == 2 else 0.0 if exact[-1] else 0.05
        layer_codecs.stats.losses += [loss(error**2 * 3, 1.0), loss(error**2, 3.0)]
        one.end_step()
    assert exact == [True, False, False, True, False, False]
    assert [report.was_keyframe for report in one.reports] == exact
    assert one.reports[1].errors == {"before": 0, "a": pytest.approx(0.05)}


def test_the_bound_is_agreed() -> None:
    """Another rank's error counts as one's own."""
    one = CodecRuntime(way_on("cpu"), "balanced", None, 0.1, lambda values: [0.2, 0.0])
    one.begin_run(9)
    one.end_step()
    assert one.layer_codecs("a", 1, 0, SHARE).codecs["v"].is_exact
    one.end_step()
    assert one.layer_codecs("a", 1, 0, SHARE).codecs["v"].is_exact


def test_on_an_accelerator_what_is_not_finite_is_followed_by_an_exact_step() -> None:
    """Nobody looks before a step has ended; then all ranks do."""
    partition = way_on("cuda")
    of_another_rank = [0.0]
    one = CodecRuntime(partition, "balanced", None, None, lambda values: [values[0], max(values[1], *of_another_rank)])
    one.begin_run(50)

    def step(unsound: float) -> bool:
        layer_codecs = one.layer_codecs("a", 1, 0, SHARE)
        layer_codecs.stats.losses += [loss(0.0, 1.0), loss(torch.nan if unsound else 0.0, 1.0)]
        one.end_step()
        return layer_codecs.is_stateless

    assert [step(unsound) for unsound in (0, 0, 1, 0, 0)] == [True, False, False, True, False]
    of_another_rank[0] = 1.0
    assert [step(0) for _ in range(2)] == [False, True]
    assert [report.repeated for report in one.reports] == [0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", [kernels.TORCH, kernels.TRITON])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("spoilt", "exact"), [({3}, {4}), ({3, 4}, {4}), ({0}, {1})], ids=str)
def test_on_an_accelerator_one_step_heals_what_was_not_finite(
    monkeypatch: pytest.MonkeyPatch, kind: str, bad: float, spoilt: set[int], exact: set[int]
) -> None:
    """At both ends of a link, with what they expect of later values."""
    if kind == kernels.TRITON and torch.accelerator.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    monkeypatch.setattr(kernels, "_wanted", [kind])
    partition = way_on("cuda")
    one, shape = CodecRuntime(partition, "balanced", None, None, lambda values: values), (1, 1, 2, 6, 16)
    one.begin_run(50)
    generator = torch.Generator().manual_seed(5)
    first, change = (torch.randn(shape, generator=generator) for _ in range(2))
    errors, found_exact = [], set()
    for step in range(8):
        layer_codecs = one.layer_codecs("a", 1, 0, SHARE)
        codec = codec_for(layer_codecs, "v", ALL_HEADS, shape, torch.float32)
        link_state = layer_codecs.link_state("v", ALL_HEADS)
        values = first + 0.05 * step * change
        if step in spoilt:
            values[0, 0, 1, 4, 7] = bad
        payload, found = torch.empty(1, codec.payload_bytes(shape, values.dtype), dtype=torch.uint8), values.clone()
        loss = codecs.encode(values, link_state.sent, codec, None, payload)
        codecs.decode(payload, link_state.received, codec, None, found)
        layer_codecs.stats.losses += [loss] if loss else []
        one.end_step()
        assert step in spoilt or found.isfinite().all()
        errors.append((found - values).norm() / values.norm())
        found_exact |= {step} if codec.is_exact else set()
        for reference in (link_state.sent, link_state.received):
            assert reference.expected(0.5).isfinite().all() or (step in spoilt and not codec.is_exact)
        torch.testing.assert_close(
            link_state.sent.expected(0.5), link_state.received.expected(0.5), rtol=0, atol=0, equal_nan=True
        )
    assert found_exact == exact
    if spoilt == {3}:
        assert errors[4] == 0 and 0 < errors[5] < 1.5 * max(errors[1:3])


def test_layers_that_do_not_exist_are_named_with_those_that_are_near() -> None:
    said: list[str] = []
    one = CodecRuntime(
        way_on("cpu"), "balanced", "exact=block.7+blocks.3+blocks.1.attn", None, list, say=said.append, warn=said.append
    )
    for _ in range(2):
        one.begin_run(3)
        for _ in range(3):
            for number in range(12):
                one.layer_codecs(f"blocks.{number}.attn", number, 0, SHARE)
            one.end_step()
    [message] = [line for line in said if line.startswith("exact=")]
    assert message.startswith("exact=block.7 matches no layer; the nearest are blocks.7,")


@pytest.mark.parametrize(
    ("order", "keyframe_codec"), [("aaaabbbb", (0, 4)), ("aaaabbbbabab", (0, 4, 8)), ("abababab", (0, 1, 2))]
)
def test_another_transformer_takes_the_place_of_the_one_before_it(order: str, keyframe_codec: tuple[int, ...]) -> None:
    one = runtime()
    need = ReferenceBytes.of(SHARE, preset("balanced", 20), 2).full
    one.begin_run(20)
    for step, transformer in enumerate(order):
        for branch in (0, 1):
            layer_codecs = one.layer_codecs("attn", transformer, branch, SHARE, transformer)
            # What was left is forgotten, whoever comes back to it.
            assert held(layer_codecs) == (None if step in keyframe_codec else ord(transformer) + branch)
            hold(layer_codecs, ord(transformer) + branch)
        one.end_step()
    assert one.planned_reference_bytes == (2 if keyframe_codec[-1] == 4 else 4) * need


def test_a_budget_is_for_the_transformer_in_use() -> None:
    said: list[str] = []
    need = ReferenceBytes.of(SHARE, preset("balanced", 20), 2).full
    one = CodecRuntime(way_on("cpu"), "balanced", None, None, list, budget=need, say=said.append, warn=said.append)
    one.begin_run(20)
    for transformer in "aabb":
        assert not one.layer_codecs("attn", transformer, 0, SHARE, transformer).compact
        one.end_step()
    assert not any("are lossless" in line for line in said)


def test_two_transformers_of_one_step_keep_what_is_theirs() -> None:
    one = runtime()
    one.begin_run(20)
    for step in range(4):
        for transformer in "ab":
            layer_codecs = one.layer_codecs("attn", transformer, 0, SHARE, transformer)
            assert held(layer_codecs) == (ord(transformer) if step else None)
            hold(layer_codecs, ord(transformer))
        one.end_step()


def test_all_exchanges_of_a_layer_go_alike() -> None:
    """As one of half of its bytes would, in every step: what both ends hold fits one way only."""
    one = runtime()
    one.begin_run(9)
    for _ in range(2):
        found = [one.layer_codecs(str(size), size, 0, SHARE._replace(values=size)).single_stage for size in (64, 66)]
        assert found == [False, True]
        one.end_step()
