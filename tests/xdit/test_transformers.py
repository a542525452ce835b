"""Whole transformers on real ranks: with the plugin in use, latents equal those of stock xDiT bit for bit.

Every model runs on few ranks and on eight: there it denoises each of its cases as stock and over each topology, and the
last one with an exchange that is wrong on purpose and as stock again. Only ranks import xDiT.
"""

import functools
import importlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.lab.models.families import FAMILIES, Family

if TYPE_CHECKING:
    from tests.small_transformers import SmallTransformer

BF16 = torch.bfloat16
PLAIN: list[dict[str, Any]] = [{}, {"batch": 3}, {"dtype": BF16}]
CASES: dict[str, list[dict[str, Any]]] = {
    "Wan": PLAIN,
    "HunyuanVideo": [{"text": 8}, {"text": 9, "batch": 3}, {"text": 9, "dtype": BF16}],
    "HunyuanVideo15": [{"text": 12}, {"text": 13, "batch": 3}, {"text": 13, "dtype": BF16}],
    "ZImage": PLAIN,
    "ZImageSixHeads": [{}, {"dtype": BF16}],
    "CogVideoX": [{"text": 8}, {"text": 9, "batch": 3}, {"text": 9, "dtype": BF16}],
    "Lumina2": [{"text": 16}, {"text": 13}, {"text": 16, "batch": 3}, {"text": 13, "dtype": BF16}],
    "LTX2": PLAIN,
    "HunyuanDiT": PLAIN,
    "Krea2": [{"text": 16}, {"text": 13, "batch": 3}, {"text": 13, "dtype": BF16}],
    "Cosmos3": [{"text": 12}, {"text": 13}],  # one sample; casts nothing to bf16
    "MiniMaxH3Fused": [{"text": 56}, {"text": 12}, {"text": 12, "dtype": BF16}],
    "Sana": PLAIN,
    # The quick set has nothing of those that follow.
    "WanA14B": PLAIN,
    "FluxControl": [{"text": 16}, {"text": 13}, {"text": 16, "batch": 3}, {"text": 13, "dtype": BF16}],
    "Klein": PLAIN,
    "ConsisID": [{"text": 8}, {"text": 9, "batch": 3}, {"text": 9, "dtype": BF16}],
    "Latte": PLAIN,
    "Krea2Masked": [{"text": 16}, {"text": 13, "batch": 3}, {"text": 13, "dtype": BF16}],
    "Ideogram4": [{"text": 16}, {"text": 13, "batch": 3}, {"text": 13, "dtype": BF16}],
    "MiniMaxH3": [{"text": 56}, {"text": 12}, {"text": 12, "dtype": BF16}],
    "StepVideo": PLAIN,
}
"""Arguments of the models: text that divides the degree and text that does not, batches, dtypes."""
SLOW = [*CASES][[*CASES].index("WanA14B") :]
"""Models that are each much like another one: not in the quick set, and at one degree in the whole one."""


@dataclass(frozen=True)
class Fault:
    """A fault of stock xDiT, by which its latents are not those of one rank."""

    why: str
    with_any_text: bool = True
    """Or only with text that does not divide the degree."""

    def concerns(self, case: dict[str, Any], degree: int) -> bool:
        """Whether it shows in a case."""
        return self.with_any_text or case["text"] % degree > 0


_FILLING = "tokens that only fill up the sequence are attended to"
FAULTS = {
    "Cosmos3": Fault("K and V of text, of which each rank has all, come out of the exchange once for each rank"),
    "Latte": Fault("attention over time, whose frames are not divided, goes through the exchange"),
    "FluxControl": Fault("text that is not divided comes out of the exchange once for each rank", with_any_text=False),
    **dict.fromkeys(("Krea2", "Ideogram4"), Fault(_FILLING, with_any_text=False)),
}
"""By model."""


@dataclass(frozen=True)
class Way:
    """One way to use the plugin."""

    topology: str
    a2a: str
    stages: str | None = None
    """Stages in which something must move, and the ranks that each crosses; None leaves them to the planner."""
    v_first: str = "on"
    head_groups: str = "1"


WAYS = {
    2: [
        Way("flat", "auto", "flat=2"),
        Way("node=1,gpu=2", "hierarchical", "gpu=2", head_groups="2"),
        Way("flat", "flat", "flat=2", v_first="off", head_groups="4"),
    ],
    4: [
        Way("node=2,gpu=2", "flat", "flat=4", v_first="off"),
        Way("node=2,gpu=2", "hierarchical", "node=2,gpu=2", head_groups="2"),
    ],
    8: [
        Way("node=4,gpu=2", "auto", v_first="auto", head_groups="auto"),
        Way("node=4,gpu=2", "hierarchical:node,gpu", "node=4,gpu=2"),
        Way("node=2,gpu=2,tile=2", "hierarchical", "node=2,gpu=2,tile=2", v_first="auto"),
        Way("node=2,gpu=2,tile=2", "hierarchical:tile+gpu,node*", "node=2,tile+gpu=4"),
    ],
}
"""By degree."""


@dataclass
class Denoising:
    """What one denoising left on one rank."""

    latents: torch.Tensor
    mesh: str | None
    """Topology of the mesh in force; None without one."""
    sent_bytes: dict[str, int]
    """By the plugin, by stage."""
    stock_bytes: int
    """Held by a rank before stock xDiT's collectives."""
    early: list[bool]
    """For each kind of layer that goes through USP whether V can go first."""
    sources: set[str]
    """Projections that V comes from."""


@dataclass
class Observation:
    """The denoisings of one case on one rank."""

    stock: Denoising
    ways: dict[Way, Denoising]
    wrong: Denoising | None
    """With an exchange that is wrong on purpose: of a model's last case, as what follows."""
    stock_again: Denoising | None


def observe(rank: int, model: str, degree: int) -> list[Observation]:
    """On a rank: every case of a model."""
    *others, last = _build(rank, model, degree)
    return [*(_observe(small, degree) for small in others), _observe(last, degree, is_last=True)]


def denoise_alone(rank: int, model: str) -> list[torch.Tensor]:
    """On the only rank: the latents of every case of a model in float32."""
    return [_denoise(small, 1).latents for small in _build(rank, model, 1) if small.dtype == torch.float32]


def _build(rank: int, model: str, degree: int) -> "list[SmallTransformer]":
    from tests.small_transformers import MODELS, prepare_ranks

    prepare_ranks(rank, degree)
    return [MODELS[model](**case) for case in CASES[model]]


def _observe(small: "SmallTransformer", degree: int, is_last: bool = False) -> Observation:
    from xfuser_cocodiff.engine.attention import ulysses

    stock = _denoise(small, degree)
    ways = {way: _denoise(small, degree, way) for way in WAYS[degree]}
    if not is_last:
        return Observation(stock, ways, None, None)
    exact = ulysses.reshard
    with mock.patch.object(ulysses, "reshard", lambda *arguments: [0.5 * tensor for tensor in exact(*arguments)]):
        wrong = _denoise(small, degree, WAYS[degree][-1])
    return Observation(stock, ways, wrong, stock_again=_denoise(small, degree))


def _denoise(small: "SmallTransformer", degree: int, way: Way | None = None) -> Denoising:
    """Denoise with the plugin in a way, or as stock xDiT does."""
    from tests.small_transformers import use
    from xfuser_cocodiff.xdit.session.session import active

    options = {name: getattr(way, name) for name in ("topology", "a2a", "v_first", "head_groups") if way}
    use(small, degree, **options, **({"mode": "exact"} if way else {}))
    active().traffic.reset()
    with _stock_exchange() as calls:
        latents = small.denoise()
    stock_bytes = sum(call.args[-1].nbytes for each in calls for call in each.call_args_list)
    signatures, mesh = [signature for signature in active().layers.signatures if signature.candidates], active().mesh
    early, sources = (
        [signature.ready for signature in signatures],
        {path for signature in signatures for path in signature.recipe.paths},
    )
    sent = dict(active().traffic.sent_bytes)
    return Denoising(latents, mesh and str(mesh.topology), sent, stock_bytes, early, sources)


@contextmanager
def _stock_exchange() -> Iterator[list[mock.Mock]]:
    """Context that yields the collectives of USP and of yunchang, whose last argument is what is sent."""
    from xfuser.model_executor.layers import usp

    yunchang = importlib.import_module("yunchang.comm.all_to_all")
    with (
        mock.patch.object(usp, "_sdpa_all_to_all_single", side_effect=usp._sdpa_all_to_all_single) as single,
        mock.patch.object(yunchang, "dist", mock.Mock(wraps=dist)) as collectives,
    ):
        yield [single, collectives.all_to_all_single]


FEW_RANKS = [*zip((model for model in CASES if model not in SLOW), itertools.cycle([2, 4]))]
ALL = [*FEW_RANKS, *((model, 8) for model, _ in FEW_RANKS), *zip(SLOW, itertools.cycle([8, 4]))]
SIMILAR = {"HunyuanVideo15", "ZImage", "HunyuanDiT", "Krea2", "MiniMaxH3Fused", "Sana"}
"""Models that are not quick here: similar ones are, and MiniMax-H3 is in test_families_coded and test_run_loops."""
QUICK = [(model, degree) for model, degree in FEW_RANKS if model not in SIMILAR]
RUNS = [pytest.param(run, marks=() if run in QUICK else pytest.mark.slow) for run in ALL]


@dataclass
class Observed:
    """For each case of a model what every rank observed."""

    model: str
    degree: int
    cases: list[tuple[Observation, ...]]


@pytest.fixture(scope="module", params=RUNS, ids="{0[0]}-{0[1]}".format)
def observed(request: pytest.FixtureRequest) -> Observed:
    """A model at a degree."""
    model, degree = request.param
    return Observed(model, degree, list(zip(*ranks.run(observe, degree, model, degree), strict=True)))


@functools.cache
def alone(model: str) -> list[torch.Tensor]:
    """Latents of every case at degree 1."""
    [latents] = ranks.run(denoise_alone, 1, model)
    return latents


def family_of(small: str) -> Family:
    """The row that a small model stands for."""
    return next(family for family in FAMILIES if small in family.small)


def observations(observed: Observed) -> Iterator[tuple[str, Observation]]:
    """Every case on every rank, and how to call it in a message."""
    for case, on_ranks in zip(CASES[observed.model], observed.cases, strict=True):
        for rank, observation in enumerate(on_ranks):
            yield f"{case} on rank {rank}", observation


def test_latents_equal_stock(observed):
    for case, observation in observations(observed):
        assert observation.stock.latents.isfinite().all(), case
        for way, denoising in observation.ways.items():
            assert torch.equal(denoising.latents, observation.stock.latents), (case, way)


def test_every_exchange_goes_over_the_topology(observed):
    for case, observation in observations(observed):
        held = observation.stock.stock_bytes
        assert held > 0, case
        for way, denoising in observation.ways.items():
            assert denoising.mesh == way.topology, (case, way)
            sizes = [stage.split("=") for stage in way.stages.split(",")] if way.stages else []
            expected = {stage: held * (int(size) - 1) // int(size) for stage, size in sizes}
            assert denoising.sent_bytes == (expected or denoising.sent_bytes) != {}, (case, way)
            assert denoising.stock_bytes == 0, (case, way)


def test_v_goes_first_in_every_layer(observed):
    for case, observation in observations(observed):
        for way, denoising in observation.ways.items():
            assert denoising.early and all(denoising.early), (case, way)
            assert denoising.sources <= {*family_of(observed.model).v_first}, (case, way)


def test_without_the_flag_xdit_is_stock(observed):
    for case, observation in observations(observed):
        for denoising in filter(None, (observation.stock, observation.stock_again)):
            assert denoising.mesh is None, case
            assert not denoising.sent_bytes, case
            assert torch.equal(denoising.latents, observation.stock.latents), case


def test_a_wrong_exchange_changes_the_latents(observed):
    for observation in observed.cases[-1]:
        assert _difference(observation.wrong.latents, observation.stock.latents) > 0.1


def test_stock_agrees_with_one_rank(observed):
    """Guards the cases: called in a wrong way, some models silently leave out a part of the sequence."""
    fault = FAULTS.get(observed.model)
    in_float32 = [pair for pair in zip(CASES[observed.model], observed.cases, strict=True) if "dtype" not in pair[0]]
    for (case, on_ranks), latents in zip(in_float32, alone(observed.model), strict=True):
        difference = _difference(on_ranks[0].stock.latents, latents)
        if fault and fault.concerns(case, observed.degree):
            assert difference > 1e-3, (case, f"no longer so: {fault.why}")
        else:
            assert difference < 1e-5, case


def _difference(latents: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return ((latents - reference).abs().max() / reference.abs().max()).item()
