"""Whole transformers on real ranks: with the plugin, latents are bit-identical to stock xDiT.

Each model runs on few ranks and on eight: these denoise each of its cases as stock and with each topology, and the last
case as stock again. Only ranks import xDiT.
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
from tests.xdit.families import FAMILIES, Family

if TYPE_CHECKING:
    from tests.small_transformers import SmallTransformer

BF16 = torch.bfloat16
PLAIN: list[dict[str, Any]] = [{}, {"batch": 3}, {"dtype": BF16}]
CASES: dict[str, list[dict[str, Any]]] = {
    "Wan": PLAIN,
    "HunyuanVideo": [{"text": 8}, {"text": 9, "batch": 3}, {"text": 9, "dtype": BF16}],
    "HunyuanVideo15": [{"text": 12}, {"text": 13, "batch": 3}, {"text": 13, "dtype": BF16}],
    "ZImageSixHeads": [{}, {"dtype": BF16}],
    "ZImage": PLAIN,
    "CogVideoX": [{"text": 8}, {"text": 9, "batch": 3}, {"text": 9, "dtype": BF16}],
    "Lumina2": [{"text": 16}, {"text": 13}, {"text": 16, "batch": 3}, {"text": 13, "dtype": BF16}],
    "LTX2": PLAIN,
    "HunyuanDiT": PLAIN,
    "Krea2": [{"text": 16}, {"text": 13, "batch": 3}, {"text": 13, "dtype": BF16}],
    "Cosmos3": [{"text": 12}, {"text": 13}],  # one sample; does not cast to bf16
    "MiniMaxH3Fused": [{"text": 56}, {"text": 12}, {"text": 12, "dtype": BF16}],
    "Sana": PLAIN,
    # Each that follows is much like another one.
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
"""Arguments of the models: text whose length is divisible by the degree or not, batches, dtypes."""
SLOW = [*CASES][[*CASES].index("WanA14B") :]
"""Models that are each much like another one: not in the quick set, and at one degree in the whole one."""


@dataclass(frozen=True)
class StockBug:
    """A bug of stock xDiT, with which its latents differ from those of one rank."""

    why: str
    with_any_text: bool = True
    """Whether it concerns all cases; otherwise only text whose length is not divisible by the degree."""

    def concerns(self, case: dict[str, Any], degree: int) -> bool:
        """Return whether the bug concerns a case."""
        return self.with_any_text or case["text"] % degree > 0


_PADDING = "padding tokens are attended to"
STOCK_BUGS = {
    "Cosmos3": StockBug("K and V of replicated text come out of the all-to-all once per rank"),
    "Latte": StockBug("attention over time, whose frames are not sharded, goes through the all-to-all"),
    "FluxControl": StockBug("replicated text comes out of the all-to-all once per rank", with_any_text=False),
    **dict.fromkeys(("Krea2", "Ideogram4"), StockBug(_PADDING, with_any_text=False)),
}
"""Bugs of stock xDiT, by model."""


@dataclass(frozen=True)
class Options:
    """Options of the plugin."""

    topology: str
    a2a: str
    stages: str | None = None
    """Stages with traffic, and the size of each; None where the planner chooses them."""
    v_first: str = "on"
    head_groups: str = "1"


GATHERED = "=kv"
"""Mark of plans that gather K and V along an axis."""
LONG_CONTEXT = "xDiT's long-context attention divides heads over all ranks"
BY_HEADS = {"Sana": (1, LONG_CONTEXT), "StepVideo": (1, LONG_CONTEXT)}
"""Number of layer signatures that cannot gather K and V, and why; in other models all can."""
OPTIONS = {
    2: [
        Options("node=2", "hierarchical:node=kv"),
        Options("flat", "auto", "flat=2"),
        Options("node=1,gpu=2", "hierarchical", "gpu=2", head_groups="2"),
        Options("flat", "flat", "flat=2", v_first="off", head_groups="4"),
    ],
    4: [
        Options("node=2,gpu=2", "hierarchical:gpu,node=kv", head_groups="2"),
        Options("node=2,gpu=2", "flat", "flat=4", v_first="off"),
        Options("node=2,gpu=2", "hierarchical", "node=2,gpu=2", head_groups="2"),
    ],
    8: [
        Options("node=2,gpu=2,tile=2", "hierarchical:tile,gpu,node=kv"),
        Options("node=4,gpu=2", "auto", v_first="auto", head_groups="auto"),
        Options("node=4,gpu=2", "hierarchical:node,gpu", "node=4,gpu=2"),
        Options("node=2,gpu=2,tile=2", "hierarchical", "node=2,gpu=2,tile=2", v_first="auto"),
        Options("node=2,gpu=2,tile=2", "hierarchical:tile+gpu,node", "node=2,tile+gpu=4"),
    ],
}
"""Options to test, by degree."""


@dataclass
class Denoising:
    """The results of one denoising on one rank."""

    latents: torch.Tensor
    mesh: str | None
    """Topology of the session's mesh; None without one."""
    sent_bytes: dict[str, int]
    """Bytes that the plugin sent, by stage."""
    stock_bytes: int
    """Bytes of a rank's inputs to stock xDiT's collectives."""
    early: list[bool]
    """For each layer signature that uses USP whether V can go first."""
    sources: set[str]
    """Projections that V comes from."""
    gathers: list[bool]
    """For each layer signature that uses USP whether it gathers K and V."""


@dataclass
class Observation:
    """The denoisings of one case on one rank."""

    stock: Denoising
    with_plugin: dict[Options, Denoising]
    stock_again: Denoising | None
    """Of a model's last case only."""


def observe(rank: int, model: str, degree: int) -> list[Observation]:
    """Run all cases of a model on a rank."""
    *others, last = _build(rank, model, degree)
    return [*(_observe(small, degree) for small in others), _observe(last, degree, is_last=True)]


def denoise_alone(rank: int, model: str) -> list[torch.Tensor]:
    """Return the latents of all float32 cases of a model on a single rank."""
    return [_denoise(small, 1).latents for small in _build(rank, model, 1) if small.dtype == torch.float32]


def _build(rank: int, model: str, degree: int) -> "list[SmallTransformer]":
    from tests.small_transformers import MODELS, prepare_ranks

    prepare_ranks(rank, degree)
    return [MODELS[model](**case) for case in CASES[model]]


def _observe(small: "SmallTransformer", degree: int, is_last: bool = False) -> Observation:
    stock = _denoise(small, degree)
    with_plugin = {options: _denoise(small, degree, options) for options in OPTIONS[degree]}
    if not is_last:
        return Observation(stock, with_plugin, None)
    return Observation(stock, with_plugin, stock_again=_denoise(small, degree))


def _denoise(small: "SmallTransformer", degree: int, options: Options | None = None) -> Denoising:
    """Denoise with the plugin, or as stock xDiT."""
    from tests.small_transformers import use
    from xfuser_cocodiff.xdit.session.session import active

    flags = {name: getattr(options, name) for name in ("topology", "a2a", "v_first", "head_groups") if options}
    use(small, degree, **flags, **({"mode": "exact"} if options else {}))
    active().traffic.reset()
    with _stock_exchange() as calls:
        latents = small.denoise()
    stock_bytes = sum(call.args[-1].nbytes for each in calls for call in each.call_args_list)
    signatures, mesh = [signature for signature in active().layers.signatures if signature.candidates], active().mesh
    early, sources = (
        [signature.ready for signature in signatures],
        {path for signature in signatures if signature.ready for path in signature.structure.recipe.paths},
    )
    sent = dict(active().traffic.sent_bytes)
    gathers = [signature.schedule.gathers_kv for signature in signatures]
    return Denoising(latents, mesh and str(mesh.topology), sent, stock_bytes, early, sources, gathers)


@contextmanager
def _stock_exchange() -> Iterator[list[mock.Mock]]:
    """Yield mocks of the collectives of USP and of yunchang, whose last argument is the tensor that is sent."""
    from xfuser.model_executor.layers import usp

    yunchang = importlib.import_module("yunchang.comm.all_to_all")
    with (
        mock.patch.object(usp, "_sdpa_all_to_all_single", side_effect=usp._sdpa_all_to_all_single) as single,
        mock.patch.object(yunchang, "dist", mock.Mock(wraps=dist)) as collectives,
    ):
        yield [single, collectives.all_to_all_single]


FEW_RANKS = [*zip((model for model in CASES if model not in SLOW), itertools.cycle([2, 4]))]
EIGHT_RANKS = [(model, 8) for model, _ in FEW_RANKS[::3]]
"""Three axes, for some models: they are below what differs between models."""
ALL = [*FEW_RANKS, *EIGHT_RANKS, *zip(SLOW, itertools.cycle([8, 4]))]
QUICK = [each for each in FEW_RANKS if each[0] in ("HunyuanVideo", "ZImageSixHeads")]
"""Text behind the image, on two axes; heads that the degree does not divide."""
RUNS = [pytest.param(run, marks=() if run in QUICK else pytest.mark.slow) for run in ALL]


@dataclass
class Observed:
    """The observations of all ranks for each case of a model."""

    model: str
    degree: int
    cases: list[tuple[Observation, ...]]


@pytest.fixture(scope="module", params=RUNS, ids="{0[0]}-{0[1]}".format)
def observed(request: pytest.FixtureRequest) -> Observed:
    """Run all cases of a model at a degree."""
    model, degree = request.param
    return Observed(model, degree, list(zip(*ranks.run(observe, degree, model, degree), strict=True)))


@functools.cache
def alone(model: str) -> list[torch.Tensor]:
    """Return the latents of all cases at degree 1."""
    [latents] = ranks.run(denoise_alone, 1, model)
    return latents


def family_of(small: str) -> Family:
    """Return the family of a small model."""
    return next(family for family in FAMILIES if small in family.small_models)


def observations(observed: Observed) -> Iterator[tuple[str, Observation]]:
    """Yield each case on each rank, with a name for messages."""
    for case, on_ranks in zip(CASES[observed.model], observed.cases, strict=True):
        for rank, observation in enumerate(on_ranks):
            yield f"{case} on rank {rank}", observation


def test_latents_equal_stock(observed):
    for case, observation in observations(observed):
        assert observation.stock.latents.isfinite().all(), case
        for options, denoising in observation.with_plugin.items():
            assert torch.equal(denoising.latents, observation.stock.latents), (case, options)


def test_all_traffic_follows_the_topology(observed):
    for case, observation in observations(observed):
        held = observation.stock.stock_bytes
        assert held > 0, case
        for options, denoising in observation.with_plugin.items():
            assert denoising.mesh == options.topology, (case, options)
            sizes = [stage.split("=") for stage in options.stages.split(",")] if options.stages else []
            expected = {stage: held * (int(size) - 1) // int(size) for stage, size in sizes}
            assert denoising.sent_bytes == (expected or denoising.sent_bytes) != {}, (case, options)
            may_run_stock = options.a2a == options.v_first == options.head_groups == "auto"  # timed steps choose
            assert denoising.stock_bytes == 0 or may_run_stock, (case, options)


def test_plan_with_kv_gathers_in_every_layer_that_can(observed):
    by_heads, _ = BY_HEADS.get(observed.model, (0, ""))
    for case, observation in observations(observed):
        for options, denoising in observation.with_plugin.items():
            expected = by_heads if GATHERED in options.a2a else len(denoising.gathers)
            assert denoising.gathers.count(False) == expected, (case, options)


def test_v_goes_first_in_every_layer(observed):
    for case, observation in observations(observed):
        for options, denoising in observation.with_plugin.items():
            assert {*denoising.early} == {options.v_first != "off"}, (case, options)
            assert denoising.sources <= {*family_of(observed.model).v_first}, (case, options)


def test_without_the_flag_xdit_is_stock(observed):
    for case, observation in observations(observed):
        for denoising in filter(None, (observation.stock, observation.stock_again)):
            assert denoising.mesh is None, case
            assert not denoising.sent_bytes, case
            assert torch.equal(denoising.latents, observation.stock.latents), case


def test_stock_agrees_with_one_rank(observed):
    """Checks the cases themselves: with wrong arguments, some models silently drop a part of the sequence."""
    bug = STOCK_BUGS.get(observed.model)
    in_float32 = [pair for pair in zip(CASES[observed.model], observed.cases, strict=True) if "dtype" not in pair[0]]
    for (case, on_ranks), latents in zip(in_float32, alone(observed.model), strict=True):
        difference = _difference(on_ranks[0].stock.latents, latents)
        if bug and bug.concerns(case, observed.degree):
            assert difference > 1e-3, (case, f"fixed: {bug.why}")
        else:
            assert difference < 1e-5, case


def _difference(latents: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the maximum difference, relative to the maximum value."""
    return ((latents - reference).abs().max() / reference.abs().max()).item()
