"""Lossy modes in small transformers of all families: every layer is coded, for the bytes that the schedule predicts.

Latents stay close to stock's, with all-to-alls by heads and with gathered K and V.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from tests.xdit.test_approximation import decibels
from tests.xdit.test_transformers import CASES, LONG_CONTEXT
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention

if TYPE_CHECKING:
    from xfuser_cocodiff.engine.compression.step_report import StepReport

STEPS, DEGREE, BITS = 8, 4, 4


class Coded(NamedTuple):
    """Expected figures of a model."""

    layers: int
    """Number of coded layers in a step."""
    head_dim: int
    keyframes: tuple[int, ...] = (0,)
    """Keyframe steps, which have 8 bits."""
    decibels: float = 20
    """Minimum PSNR to stock in dB."""
    by_heads: tuple[str, str] | None = None
    """Last part of the names of layers that cannot gather K and V, and why; None where all layers can."""

    def byte_fraction(self, step: int) -> float:
        """Return coded bytes over float32 bytes: bits per value, and a byte per row for its scale."""
        bits = 8 if step in self.keyframes else BITS
        row_tokens = max(1, 64 // self.head_dim)
        return (self.head_dim * bits / 8 + 1 / row_tokens) / (self.head_dim * 4)


CHAOTIC = 15
"""Minimum PSNR of Krea 2 in dB. Its small model is chaotic: noise that changes by a thousandth gives latents at 34 dB,
where other models are at 65 dB."""
BY_HEADS, GATHERED = "flat", "hierarchical:gpu,node=kv"
UNKNOWN = ""
"""Name of a layer in its first call, when it is not wrapped yet."""
EXCHANGES = BY_HEADS, GATHERED
"""Plans: all-to-alls by heads, and K and V gathered along the slow axis."""
CODED = {
    "Wan": Coded(2, 24),
    "WanA14B": Coded(2, 24, keyframes=(0, 4)),
    "HunyuanVideo": Coded(4, 16),
    "HunyuanVideo15": Coded(2, 16),
    "HunyuanDiT": Coded(4, 16),
    "FluxControl": Coded(4, 16),
    "Klein": Coded(6, 16),
    "ZImage": Coded(4, 16),
    "ZImageSixHeads": Coded(4, 16),
    "CogVideoX": Coded(2, 16),
    "ConsisID": Coded(2, 16),
    "Latte": Coded(4, 16),
    "Lumina2": Coded(2, 8),
    "LTX2": Coded(2, 16),
    "Krea2": Coded(2, 16, decibels=CHAOTIC),
    "Krea2Masked": Coded(2, 16, decibels=CHAOTIC),
    "Ideogram4": Coded(2, 16),
    "MiniMaxH3": Coded(2, 32),
    "MiniMaxH3Fused": Coded(2, 32),
    "Cosmos3": Coded(2, 16),
    "Sana": Coded(4, 16, by_heads=("attn1", LONG_CONTEXT)),
    "StepVideo": Coded(2, 128, by_heads=("attn1", LONG_CONTEXT)),
}


class Coding:
    """Runs of a small model on one rank, by mode."""

    def __init__(self, rank: int, model: str) -> None:
        from tests.small_transformers import MODELS, prepare_ranks, use

        prepare_ranks(rank, DEGREE)
        self.small = MODELS[model]()
        use(self.small, DEGREE)
        self.stock = self.small.denoise(STEPS)

    def run(self, mode: str | None, schedule: str | None, exchange: str = BY_HEADS) -> torch.Tensor:
        """Return the latents of a mode with changes to its schedule, and note the layers that gather K and V."""
        how = {"topology": "node=2,gpu=2", "slow_axes": "node", "a2a": exchange, "v_first": "on"}
        return self.denoise(**how, mode=mode, schedule=schedule)

    def denoise(self, **options: str | None) -> torch.Tensor:
        """Return the latents with options of the plugin, and note the layers that gather K and V."""
        from tests.small_transformers import use
        from xfuser_cocodiff.xdit.session.session import active

        use(self.small, DEGREE, **options)
        session = active()
        self.runtime = session.runtime
        session.begin_run(STEPS)
        self.gathered, gathered = set(), UlyssesAttention._gathered
        noting = lambda call, tensors, partition, label, codecs: (  # noqa: E731
            self.gathered.add(label.layer) or gathered(call, tensors, partition, label, codecs)
        )
        with mock.patch.object(UlyssesAttention, "_gathered", noting):
            return self.small.denoise(STEPS, session.end_step)

    def run_bits(self) -> "list[BitsRun]":
        """Return the runs with :data:`BITS` per value, by exchange."""
        schedule = f"bits={BITS}"
        return [
            BitsRun(self.stock, self.run("balanced", schedule, exchange), self.runtime.reports, self.gathered)
            for exchange in EXCHANGES
        ]


class BitsRun(NamedTuple):
    """Latents and reports of a run on one rank."""

    stock: torch.Tensor
    latents: torch.Tensor
    reports: "list[StepReport]"
    gathered: set[str]
    """Names of layers that gathered K and V."""


def run_bits(rank: int, model: str) -> list[BitsRun]:
    return Coding(rank, model).run_bits()


def check_reports(reports: "list[StepReport]", expected: Coded, steps: int) -> None:
    """Check that every layer is coded at every step, for the expected bytes."""
    assert [report.step for report in reports] == list(range(steps))
    for report in reports:
        assert report.exact_bytes > 0
        assert len(report.errors) == expected.layers, sorted(report.errors)
        assert 0 < report.error < 0.4, report.errors
        # Flags, gains and padding add up to 40% to these small messages.
        fraction = expected.byte_fraction(report.step)
        assert fraction <= report.sent_bytes / report.exact_bytes < 1.4 * fraction, report


def check_gathered(layers: Collection[str], gathered: set[str], model: str, exchange: str) -> None:
    """Check which coded layers gathered K and V, and that no lossless one did."""
    by_heads, _ = CODED[model].by_heads or (None, "")
    can_gather = {layer for layer in layers if layer.rpartition(".")[2] != by_heads}
    assert gathered - {UNKNOWN} == (can_gather if exchange == GATHERED else set())


def check_bits(model: str, found: list[list[BitsRun]]) -> None:
    for on_rank in found:
        for exchange, run in zip(EXCHANGES, on_rank, strict=True):
            check_reports(run.reports, CODED[model], STEPS)
            check_gathered(run.reports[0].errors, run.gathered, model, exchange)
            assert run.latents.isfinite().all()
            assert not torch.equal(run.latents, run.stock)
            assert decibels(run.latents, run.stock) > CODED[model].decibels


@pytest.mark.parametrize("model", slow_but(["MiniMaxH3Fused"], CASES))
def test_every_layer_is_coded(model: str) -> None:
    check_bits(model, ranks.run(run_bits, DEGREE, model))


PLAIN = {"2x2": ("Wan", "Lumina2"), "node=4": ("Lumina2",)}
"""Models whose layers gather K and V, by topology: along two coordinates all do, along four those with three heads of Q
for each head of K and V."""


def run_plainly(rank: int, model: str) -> "list[tuple[set[str], list[StepReport], float]]":
    """Return for each topology the layers that gather K and V, the reports, and the PSNR to stock in dB."""
    coding, found = Coding(rank, model), []
    for topology in PLAIN:
        latents = coding.denoise(topology=topology, mode="balanced")
        found.append((coding.gathered - {UNKNOWN}, coding.runtime.reports, decibels(latents, coding.stock)))
    return found


@pytest.mark.slow  # tests/engine/topology has the rule, and attention/test_gathered_usp layers by it
@pytest.mark.parametrize("model", ["Wan", "Lumina2"])
def test_plain_options_gather_where_the_rule_says_so(model: str) -> None:
    for on_rank in ranks.run(run_plainly, DEGREE, model):
        for (topology, models), (gathered, reports, psnr) in zip(PLAIN.items(), on_rank, strict=True):
            assert gathered == (set(reports[0].errors) if model in models else set()), topology
            assert len(reports[0].errors) == CODED[model].layers and psnr > CODED[model].decibels
