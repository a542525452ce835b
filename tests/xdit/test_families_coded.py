"""Modes that approximate, in whole small transformers of all families: every layer is coded, for the bytes that the
schedule promises, and the latents stay near stock's."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.quick import slow_but
from tests.xdit.test_approximation import decibels
from tests.xdit.test_transformers import CASES
from xfuser_cocodiff.engine.compression import codecs, modes
from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, NOT_SENT, BitAllocation
from xfuser_cocodiff.engine.compression.codecs import Codec
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.settings.options import MODES

if TYPE_CHECKING:
    from xfuser_cocodiff.engine.compression.runtime import StepReport

STEPS, DEGREE, BITS = 8, 4, 4


class Coded(NamedTuple):
    """What is to be coded of a model."""

    layers: int
    """That go through the exchange in a step."""
    head_dim: int
    keyframes: tuple[int, ...] = (0,)
    """Steps at which references begin, in 8 bits."""
    decibels: float = 20
    """Of PSNR to stock, at least."""

    def share(self, step: int) -> float:
        """Of exact bytes in float32: a value takes some bits, and a row of them a byte for its scale, which tokens of
        small heads may share."""
        if step in self.keyframes:
            return (self.head_dim + 1) / (self.head_dim * 4)
        together = max(1, 64 // self.head_dim)
        return (self.head_dim * BITS / 8 + 1 / together) / (self.head_dim * 4)


CHAOTIC = 15
"""Decibels of Krea 2, whose small model is chaotic: noise that is moved by a thousandth leads to latents 34 dB away,
where other models come to 65 dB."""
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
    "Sana": Coded(4, 16),
    "StepVideo": Coded(2, 128),
}


class Coding:
    """A small model on one of some ranks, denoised by modes."""

    def __init__(self, rank: int, model: str) -> None:
        from tests.small_transformers import MODELS, prepare_ranks, use

        prepare_ranks(rank, DEGREE)
        self.small = MODELS[model]()
        use(self.small, DEGREE)
        self.stock = self.small.denoise(STEPS)

    def by(self, mode: str | None, schedule: str | None) -> torch.Tensor:
        """Latents; what was done is in the runtime's reports."""
        from tests.small_transformers import use
        from xfuser_cocodiff.xdit.session.session import active

        how = {"topology": "node=2,gpu=2", "slow_axes": "node", "a2a": "flat", "v_first": "on"}
        use(self.small, DEGREE, **how, mode=mode, schedule=schedule)
        session = active()
        self.runtime = session.runtime
        session.runs.begin(STEPS)
        return self.small.denoise(STEPS, session.runs.end_step)

    def by_bits(self) -> "tuple[torch.Tensor, torch.Tensor, list[StepReport]]":
        """Stock's latents, those of a mode by :data:`BITS`, and what it did."""
        latents = self.by("balanced", f"bits={BITS},bits_o={BITS}")
        return self.stock, latents, self.runtime.reports


def code(rank: int, model: str) -> "tuple[torch.Tensor, torch.Tensor, list[StepReport]]":
    return Coding(rank, model).by_bits()


def check_reports(reports: "list[StepReport]", wanted: Coded, steps: int) -> None:
    """Every layer is coded at every step, for the bytes that are promised."""
    assert [report.step for report in reports] == list(range(steps))
    for report in reports:
        assert report.exact_bytes > 0
        assert len(report.errors) == wanted.layers, sorted(report.errors)
        assert 0 < report.error < 0.4, report.errors
        # These messages are small: beside the values in them there are flags, shares of changes, and what aligns them.
        share = wanted.share(report.step)
        assert share <= report.sent_bytes / report.exact_bytes < 1.4 * share, report


def check_bits(model: str, found: "list[tuple[torch.Tensor, torch.Tensor, list[StepReport]]]") -> None:
    for stock, latents, reports in found:
        check_reports(reports, CODED[model], STEPS)
        assert latents.isfinite().all()
        assert not torch.equal(latents, stock)
        assert decibels(latents, stock) > CODED[model].decibels


ONE_TRANSFORMER = [model for model in CASES if CODED[model].keyframes == (0,)]
"""For which every feature of a schedule is tested, and this beside it."""


@pytest.mark.parametrize(
    "model", slow_but(["MiniMaxH3Fused"], ["MiniMaxH3Fused", *sorted(CASES.keys() - {*ONE_TRANSFORMER})])
)
def test_every_layer_is_coded(model: str) -> None:
    check_bits(model, ranks.run(code, DEGREE, model))


FEATURES = [
    None,
    "warmup=0,first=4",
    "warmup=2,first=exact,refresh=2",
    "refresh=3,bits=8->2,bits_o=8",
    "cached=0.8,score=drift,predictor=0",
    "cached=0.2->1,score=change,bits=4,predictor=auto",
    "cached=0.5,score=random,predictor=0.5,bits=2.7",
    "first=8,cached=0.4,score=change",
    "cached=0.6,bits=2,bits_q=2,bits_o=1.6",
    "bits_q=1,bits_k=1.6,bits_v=2.7,predictor=auto",
    "exact={layer}",
    "@{file}",
    "@{file},warmup=2,refresh=4,predictor=0.5,exact={layer}",
]
"""Changes to a mode's schedule; a model's first layer and a tuned file are filled in."""
FIGURES = {**dict.fromkeys("qkv", (4.0, 2.0)), "k": (NOT_SENT, 8.0), "o": (None, 4.0)}
"""Bits of the file, in the first half of a run and in the second."""


def codecs_of(schedule: CodecSchedule, step: int, layer: str | None = None) -> Mapping[str, Codec]:
    """Of a step, at the first of which there is nothing to differ from."""
    return schedule.codecs(step, STEPS, layer) if step else dict.fromkeys(LETTERS, schedule.keyframe_codec)


class Messages:
    """Tells what crosses slow axes from what is handed to the exchange, by sizes alone."""

    def __init__(self) -> None:
        from xfuser_cocodiff.engine.compression import coded_all_to_all
        from xfuser_cocodiff.engine.compression.runtime import CodecRuntime

        self.seen: dict[tuple, tuple[dict, list]] = {}
        send, layer_codecs = coded_all_to_all.start, CodecRuntime.layer_codecs

        def asked(runtime: CodecRuntime, layer: str, key: Any, branch: int, *given: Any) -> Any:
            self._call, self._step = (layer, key, branch), runtime.step
            return layer_codecs(runtime, layer, key, branch, *given)

        def sent(pieces: Any, targets: Any, mesh: Any, layer_codecs: Any, label: Any, group: Any, *more: Any) -> Any:
            partition, key = layer_codecs.partition, (self._step, self._call, label.tensors == "o", group)
            shapes, flags = self.seen.setdefault(key, ({}, []))
            links = (
                partition.num_slow - 1
                if not layer_codecs.single_stage
                else (partition.num_slow - 1) * partition.num_fast
            )
            for name, piece in zip(label.tensors, pieces, strict=True):
                batch, *rest = piece.shape[-4:]
                shapes[name] = (links, batch * (1 if layer_codecs.single_stage else partition.num_fast), *rest)
            flags.append(codecs.aligned(1))
            return send(pieces, targets, mesh, layer_codecs, label, group, *more)

        coded_all_to_all.start, CodecRuntime.layer_codecs = sent, asked

    def expected(self, schedule: CodecSchedule) -> list[tuple[int, int]]:
        """Bytes of each step, by a schedule and as they are; clears what was seen."""
        found = [(0, 0)] * STEPS
        for (step, (layer, *_), *_), (shapes, flags) in self.seen.items():
            names = "".join(shapes)
            used = codecs_of(schedule, step, layer)
            links = next(iter(shapes.values()))[0]
            size = modes.link_bytes(used, names, [*shapes.values()], torch.float32) + sum(flags[1:])
            exact = 4 * sum(map(math.prod, shapes.values()))
            found[step] = found[step][0] + links * size, found[step][1] + exact
        self.seen.clear()
        return found


def code_by_features(
    rank: int, model: str, cases: list[tuple[str, str | None]], folder: str
) -> "tuple[tuple[torch.Tensor, torch.Tensor, list[StepReport]], list[tuple]]":
    """What a mode by :data:`BITS` did, and what each case promised and did: whether steps are exact, bytes and reports;
    and its latents and stock's."""
    coding, found = Coding(rank, model), []
    messages, by_bits = Messages(), coding.by_bits()
    layers = sorted(coding.runtime.reports[0].errors)
    file = Path(folder, "tuned.json")
    if rank == 0:
        file.write_text(
            json.dumps(BitAllocation((0.0, 0.5), dict.fromkeys(layers, FIGURES), 8.0, steps=STEPS).to_json())
        )
    dist.barrier()
    messages.seen.clear()
    for mode, feature in cases:
        changes = feature and feature.format(layer=layers[0], file=file)
        latents = coding.by(None if feature and feature.startswith("@") else mode, changes)
        schedule = modes.preset(mode, STEPS)
        schedule = CodecSchedule.parse(changes, schedule) if changes else schedule
        exact_steps = [all(codec.is_exact for codec in codecs_of(schedule, step).values()) for step in range(STEPS)]
        left_out = len([layer for layer in layers if schedule.is_lossless_layer(layer)])
        done = messages.expected(schedule), coding.runtime.reports, latents
        found.append((exact_steps, left_out, *done, coding.stock))
    return by_bits, found


TRANSFORMERS = {"Ideogram4": 2}
"""Those of a step, where there are several: their layers have the same names."""


def check_features(model: str, cases: list[tuple[str, str | None]], folder: Path) -> None:
    lossy = set()
    by_bits, by_cases = zip(*ranks.run(code_by_features, DEGREE, model, cases, str(folder)), strict=True)
    check_bits(model, by_bits)
    for rank in by_cases:
        for case, (exact_steps, left_out, foreseen, reports, latents, stock) in zip(cases, rank, strict=True):
            for report, is_exact, (sent, exact) in zip(reports, exact_steps, foreseen, strict=True):
                as_it_is = report.exact_bytes - exact  # of layers that always travel exactly
                assert report.sent_bytes == sent + as_it_is, (case, report)
                assert (as_it_is > 0) == (left_out > 0), (case, report)
                assert report.exact_layers == left_out * TRANSFORMERS.get(model, 1), (case, report)
                assert report.repeated == 0 and len(report.errors) == CODED[model].layers, (case, report)
                # Of a token that was sent long ago nothing may be left: an error of root two, more if extrapolated.
                assert report.error < (1e-9 if is_exact else 2), (case, report)
                lossy |= {case} if report.error else set()  # a rank may have nothing but zeros to send
            assert latents.isfinite().all() and not torch.equal(latents, stock), case
    assert lossy == {*cases}


def cases_of(number: int) -> list[tuple[str, str | None]]:
    """Of a model by its number: all features, each in another mode than in the model before, and all modes."""
    return [(MODES[1:][(number + place) % len(MODES[1:])], feature) for place, feature in enumerate(FEATURES)]


@pytest.mark.parametrize("model", slow_but(["Cosmos3"], ONE_TRANSFORMER))
def test_every_mode_and_every_feature_of_a_schedule(model: str, tmp_path: Path) -> None:
    """Pairwise over models, modes and features: for the bytes that the schedule foretells, and finite errors."""
    check_features(model, cases_of(ONE_TRANSFORMER.index(model)), tmp_path)
