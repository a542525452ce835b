"""Rules of other systems on real ranks: results, bytes handed to collectives, and shapes without values."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff.engine.codec.codec import EXACT
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.accelerator import device, device_type
from xfuser_cocodiff.lab.accelerator.accelerators import ACCELERATORS
from xfuser_cocodiff.lab.accelerator.program import RecordedCollective
from xfuser_cocodiff.lab.bench import transformer as model
from xfuser_cocodiff.lab.cluster_bench.coded_ulysses import CodedUlysses, UlyssesCodes
from xfuser_cocodiff.lab.cluster_bench.coding_kernels import residual_bytes
from xfuser_cocodiff.lab.cluster_bench.rules import RULES, Rule
from xfuser_cocodiff.lab.comparison import quality
from xfuser_cocodiff.lab.launching import bare_runtime

BATCH, HEADS, TOKENS, DIM = 2, 8, 48, 32
LAUNCHES = {"fp4": 2 + 2, "int8": 2 + 2 + 2, "fp8-rows": 6 + 2, "fp8": 2 + 6 + 2}
SHAPE = (1, 24, 9216, 128)
WORDS = ("query", "key", "value")
REPLACING = [rule for rule in RULES.values() if rule.plugin_variant is None]
ERRORS = {"fp8": 0.073, "fp8-rows": 0.041, "fp4": 0.247, "int8": 0.026, "compact-ring": 0.037}
"""Relative errors of O for these tensors, a record: CompactFusion's after a step that changed K and V by a tenth."""


def bytes_per_value(rule: Rule, letter: str, head_dim: int, itemsize: int = 2) -> float:
    """Return the bytes of a value in all-to-alls; `itemsize` is that of a value that is not encoded."""
    return (rule.ulysses or UlyssesCodes()).row_bytes(letter, head_dim, itemsize) / head_dim


@contextmanager
def recorded_bytes() -> Iterator[list[tuple[str, int]]]:
    """Record the collectives of a rank with the bytes of their input, without those of ranks to themselves."""
    sent: list[tuple[str, int]] = []
    to_all, gather = collectives.all_to_all_single, collectives.all_gather_single

    def all_to_all(
        x: torch.Tensor, output_split_sizes: Any, input_split_sizes: Any, group: Any, *tag: str
    ) -> torch.Tensor:
        sent.append(("all-to-all" if input_split_sizes is None else "permute", x.nbytes))
        return to_all(x, output_split_sizes, input_split_sizes, group, *tag)

    def all_gather(x: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        sent.append(("all-gather", x.nbytes))
        return gather(x, *rest, **kwargs)

    with (
        mock.patch.object(collectives, "all_to_all_single", all_to_all),
        mock.patch.object(collectives, "all_gather_single", all_gather),
    ):
        yield sent


def whole_tensors(step: int = 0) -> list[torch.Tensor]:
    """Return Q, K and V (B, H, S, D) of all ranks; K has a mean, as real ones have."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, *changes = (torch.randn(BATCH, HEADS, TOKENS, DIM, generator=generator) for _ in range(6))
    tensors = [q, k + torch.linspace(-3, 3, DIM), v]
    return [tensor + 0.1 * step * change for tensor, change in zip(tensors, changes, strict=True)]


def run_rules(rank: int, ring: int, names: list[str]) -> dict[str, Any]:
    """Return the O of this rank and the recorded bytes by rule, in the second of two steps."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    bare_runtime.start(ring=ring)
    bare_runtime.init_runtime_state(HEADS, 0)
    from xfuser.model_executor.layers import usp

    def attend(step: int) -> torch.Tensor:
        shards = [tensor.chunk(dist.get_world_size(), 2)[rank].contiguous() for tensor in whole_tensors(step)]
        return held(*shards)

    results = {}
    held, before, defaults = usp.USP, dict(vars(usp)), inspect.unwrap(usp.USP).__defaults__  # as models hold it
    for name in names:
        with RULES[name].running() as begin_step:
            for step in range(2):
                begin_step()
                with recorded_bytes() as sent:
                    output = attend(step)
        results[name] = output, sent
        assert all(vars(usp)[key] is value for key, value in before.items()), name
        assert inspect.unwrap(usp.USP).__defaults__ == defaults
    return results


def relative_errors(results: list[dict[str, Any]], name: str) -> float:
    whole = torch.cat([of_rank[name][0] for of_rank in results], 2)
    expected = scaled_dot_product_attention(*whole_tensors(1))
    return ((whole - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("world", slow_but([2], [2, 4]))
def test_rules_of_ulysses_compute_attention(world: int) -> None:
    chosen = [rule for rule in REPLACING if not rule.needs_ring]
    results = ranks.run(run_rules, world, 1, [rule.name for rule in chosen])
    for rule in chosen:
        error = relative_errors(results, rule.name)
        if rule.is_lossless:
            assert all(torch.equal(of_rank[rule.name][0], of_rank["stock"][0]) for of_rank in results)
        else:
            assert error == pytest.approx(ERRORS[rule.name], rel=0.1), rule.name
        sent = results[0][rule.name][1]
        per_letter = {
            name: bytes_per_value(rule, name, DIM, 4) * BATCH * HEADS * TOKENS * DIM // world for name in "qkvo"
        }
        assert sum(size for kind, size in sent if kind == "all-to-all") == sum(per_letter.values())
        inputs = [size for kind, size in sent if kind == "all-to-all"][:-1]
        separate = [per_letter[name] for name in "qkv"]
        one_message = rule.ulysses.one_message if rule.ulysses else bool(rule.combined)
        assert inputs == ([sum(separate)] if one_message else separate)


def test_rings_of_other_systems_compute_attention() -> None:
    names = ["stock", "kv-gather", "compact-ring", "fp4"]
    results = ranks.run(run_rules, 4, 2, names)
    block = [BATCH, HEADS // 2, TOKENS // 2, DIM]
    in_ring = {}
    for name in names:
        sent = results[0][name][1]
        assert relative_errors(results, name) == pytest.approx(ERRORS.get(name, 0), rel=0.1, abs=1e-6), name
        [kind], sizes = {kind for kind, _ in sent} - {"all-to-all"}, [n for kind, n in sent if kind != "all-to-all"]
        in_ring[name] = kind, sum(sizes)
        plain = 2 * torch.Size(block).numel() * 4
        assert sum(sizes) == (residual_bytes((2, *block)) if name == "compact-ring" else plain)
    assert {kind for kind, _ in in_ring.values()} == {"all-gather", "permute"}
    assert in_ring["compact-ring"][1] < in_ring["stock"][1] / 10 == in_ring["kv-gather"][1] / 10


def send_as_it_is(rank: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    bare_runtime.start()
    from xfuser.model_executor.layers import usp

    group, world = bare_runtime.process_groups()[0], dist.get_world_size()
    tensors = [tensor.chunk(world, 2)[rank].contiguous().bfloat16() for tensor in whole_tensors()]
    for one_message in (True, False):
        ulysses = CodedUlysses(UlyssesCodes(one_message=one_message, overlaps=not one_message), group)
        expected = [usp._ft_c_input_all_to_all(tensor) for tensor in tensors]
        received = ulysses.exchange_inputs("qkv", tensors)
        assert all(map(torch.equal, received, expected))
        assert torch.equal(ulysses.exchange_output(received[0]), usp._ft_c_output_all_to_all(expected[0]))
    few = [tensors[0], *(tensor[:, :4] for tensor in tensors[1:])]  # grouped-query attention
    received = CodedUlysses(UlyssesCodes(), group).exchange_inputs("qkv", few)
    assert all(map(torch.equal, received, map(usp._ft_c_input_all_to_all, few)))


def test_tensors_without_a_code_arrive_as_through_stock() -> None:
    ranks.run(send_as_it_is, 4)


def send_by_codes(rank: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    bare_runtime.start()
    group, world = bare_runtime.process_groups()[0], dist.get_world_size()
    for rule in [rule for rule in REPLACING if rule.ulysses and rule.name != "fp8"]:  # whose scales are not sent
        virtual = quality.BASELINES[rule.quality_case.series](Topology.parse("2x2"), ("node",))
        codecs = LayerCodecs(None, dict.fromkeys("qkvo", EXACT), {}, CodecStats())
        shards = [tensor.chunk(world, 2)[rank] for tensor in whole_tensors()]
        received = CodedUlysses(rule.ulysses, group).exchange_inputs("qkv", shards)
        judged = virtual.transmit("qkv", whole_tensors(), [TOKENS], codecs)
        for own, whole in zip(received, judged, strict=True):
            torch.testing.assert_close(own, whole.chunk(world, 1)[rank], rtol=0, atol=1e-5, msg=rule.name)
        sent = sum(bytes_per_value(rule, name, DIM, 4) for name in "qkv") * BATCH * HEADS * TOKENS * DIM
        assert codecs.stats.sent_bytes == sent


def test_quality_judges_what_ranks_receive() -> None:
    ranks.run(send_by_codes, 4)


def attend_with_text(rank: int, names: list[str]) -> dict[str, torch.Tensor]:
    """Return O by rule in a layer whose text is replicated on every rank and joined behind K and V."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    bare_runtime.start(ring=2)
    bare_runtime.init_runtime_state(HEADS, 0)
    from xfuser.model_executor.layers import usp

    image = [tensor[:, :, :32].chunk(4, 2)[rank].contiguous() for tensor in whole_tensors()]
    text = {f"joint_{name}": tensor[:, :, 32:] for name, tensor in zip(WORDS, whole_tensors(), strict=True)}
    results = {}
    for name in names:
        with RULES[name].running() as begin_step:
            begin_step()
            results[name] = usp.USP(*image, **text, joint_strategy="rear")
    return results


def test_rules_support_replicated_text() -> None:
    results = ranks.run(attend_with_text, 4, ["stock", "kv-gather", "fp8", "fp8-rows", "fp4", "int8"])
    for of_rank in results:
        expected = of_rank.pop("stock")
        for name, output in of_rank.items():
            error = ((output - expected).norm() / expected.norm()).item()
            limits = (0, 1e-6) if RULES[name].is_lossless else (0.3 * ERRORS[name], 1.2 * ERRORS[name])
            assert limits[0] <= error <= limits[1], (name, error)


def run_flux(rank: int, names: list[str]) -> dict[str, tuple[torch.Tensor, int]]:
    """Return the output of FLUX.1, which asks for combined messages, and the number of collectives, by rule."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    bare_runtime.start()
    step = model.step(model.Shape(128, 3, 64, 8))
    results = {}
    for name in names:
        with RULES[name].running() as begin_step, recorded_bytes() as sent:
            begin_step()
            results[name] = step(), len(sent)
    return results


def test_rules_reach_the_transformers_of_xdit() -> None:
    results = ranks.run(run_flux, 2, ["stock", "stock-combined", "stock-separate", "fp8-rows", "fp4", "int8"])[0]
    expected, calls = results["stock"]
    assert results["stock-combined"][1] == calls and results["stock-separate"][1] == 2 * calls
    for name, (output, count) in results.items():
        error = ((output - expected).norm() / expected.norm()).item()
        assert error == 0 if RULES[name].is_lossless else 1e-5 < error < 0.1
        assert count == {"stock-separate": 2, "fp8-rows": 2, "int8": 1.5}.get(name, 1) * calls


class OneRankGroup:
    """Group whose collectives return tensors of the right shape."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = lambda: size, lambda: 0


@pytest.mark.parametrize("rule", [rule for rule in REPLACING if rule.ulysses], ids=lambda rule: rule.name)
def test_codes_need_no_values(rule: Rule) -> None:
    def gather(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.cat([x] * 4)

    sent: list[int] = []
    with (
        FakeTensorMode(),
        mock.patch.object(collectives, "all_to_all_single", lambda x, *_: sent.append(x.nbytes) or x.clone()),
        mock.patch.object(collectives, "all_gather_single", gather),
    ):
        ulysses = CodedUlysses(rule.ulysses, OneRankGroup(4))
        tensors = [torch.empty(1, 24, 1152, 128, dtype=torch.bfloat16) for _ in range(3)]
        received = ulysses.exchange_inputs("qkv", tensors)
        assert all(each.shape == (1, 6, 4608, 128) and each.dtype == torch.bfloat16 for each in received)
        assert all(each.is_contiguous() for each in received)
        assert ulysses.exchange_output(received[0]).shape == tensors[0].shape
    assert sum(sent) == sum(bytes_per_value(rule, name, 128) for name in "qkvo") * tensors[0].numel()


def test_rules_state_their_source_and_quality() -> None:
    for name, rule in RULES.items():
        assert rule.name == name and rule.text.startswith("rule of ") and rule.source
        if rule.quality_case:
            assert rule.quality_case.series in quality.BASELINES
        has_code = rule.ulysses is not None or rule.ring == "residuals"
        assert rule.is_lossless is not has_code
    assert bytes_per_value(RULES["fp4"], "k", 128) == 4.5 / 8
    assert bytes_per_value(RULES["fp8-rows"], "k", 128) == 2
    assert residual_bytes((2, 1, 12, 2304, 128)) / (2 * 12 * 2304 * 128) == pytest.approx(0.25, abs=0.003)


def run_on_accelerator(rank: int) -> dict[str, tuple[int, float, list[RecordedCollective]]]:
    """Return launches, kernel seconds and collectives of one attention by rule, on an emulated accelerator."""
    emulated = device_type.register()
    dist.destroy_process_group()
    dist.init_process_group(device_type.BACKEND, store=FakeStore(), rank=0, world_size=4)
    results = {}
    with device.EmulatedAccelerator(ACCELERATORS["h100-sxm"]) as emulator, torch.inference_mode():
        tensors = [torch.empty(SHAPE, dtype=torch.bfloat16, device=emulated) for _ in range(3)]
        for rule in REPLACING:
            if rule.ulysses:
                ulysses = CodedUlysses(rule.ulysses, dist.group.WORLD)
                for _ in range(2):
                    emulator.begin_step()
                    received = ulysses.exchange_inputs("qkv", tensors)
                    ulysses.exchange_output(received[0])
                    program = emulator.end_step()
                results[rule.name] = program.launches, program.kernel_seconds, program.collectives
    return results


def test_kernels_cost_their_bytes_on_an_accelerator() -> None:
    [results] = ranks.run(run_on_accelerator, 1)
    # Each message is encoded and decoded; FP8 rotates Q and K, INT8 collects and merges statistics.
    assert {name: launches for name, (launches, *_) in results.items()} == LAUNCHES
    values = torch.Size(SHAPE).numel()
    bandwidth = ACCELERATORS["h100-sxm"].bytes_per_second
    for name, (_, seconds, sent) in results.items():
        coded = sum(bytes_per_value(RULES[name], letter, SHAPE[-1]) for letter in "qkvo") * values
        assert sum(sum(each.sent) for each in sent) == pytest.approx(coded, rel=0.001), name
        # All of Q, K, V and O are read once and written once in bf16, and their codes are written and read.
        if name in ("fp4", "fp8-rows"):
            assert seconds == pytest.approx((4 * 2 * 2 * values + 2 * coded) / bandwidth, rel=1e-6)
    first, second = results["fp8-rows"][2][:2]
    assert not second.start.offsets and not first.start.offsets  # the second does not wait for the first
    assert results["fp8"][2][1].start.offsets
