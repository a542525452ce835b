"""Whole transformers of xDiT's families on four ranks: exact mode has stock's bits, and a lossy mode codes every layer.

Families that xDiT's runner loads as small pipelines are in test_pipelines. Only ranks import xDiT.
"""

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from tests.xdit.families import FAMILIES
from tests.xdit.test_approximation import decibels

if TYPE_CHECKING:
    from tests.small_transformers import SmallTransformer
    from xfuser_cocodiff.engine.compression.step_report import StepReport

DEGREE, STEPS, BITS = 4, 4, 4
BF16 = {"batch": 2, "dtype": torch.bfloat16}
PLAIN: list[dict[str, Any]] = [{}, BF16]
CASES: dict[str, list[dict[str, Any]]] = {
    "HunyuanVideo": [{"text": 8}, {"text": 9, **BF16}],
    "ZImage": PLAIN,
    "CogVideoX": [{"text": 8}, {"text": 9, **BF16}],
    "ConsisID": [{"text": 8}, {"text": 9, **BF16}],
    "Cosmos3": [{"text": 12}, {"text": 13}],  # one sample; does not cast to bf16
    "FluxControl": [{"text": 16}, {"text": 13, **BF16}],
    "HunyuanDiT": PLAIN,
    "Ideogram4": [{"text": 16}, {"text": 13, **BF16}],
    "Krea2": [{"text": 16}, {"text": 13, **BF16}],
    "Latte": PLAIN,
    "LingBotVideo": [{"text": 12}, {"text": 13, "batch": 2}],  # does not cast to bf16
    "LTX2": PLAIN,
    "MiniMaxH3": [{"text": 56}, {"text": 12, **BF16}],
    "PixArt": PLAIN,
    "Sana": PLAIN,
    "StepVideo": PLAIN,
}
"""Arguments of the models: text whose length is divisible by the degree or not, batches, dtypes."""
QUICK = ("HunyuanVideo", "ZImage", "Sana")
"""Text behind the image, heads that the degree does not divide, and yunchang's attention."""
FOUR_LAYERS = ("HunyuanVideo", "HunyuanDiT", "FluxControl", "ZImage", "Latte", "Sana")
"""Models with four coded layers; others have two."""
BY_HEADS = {"Sana": 1, "StepVideo": 1}
"""Number of layer signatures that cannot gather K and V: xDiT's long-context attention divides heads over all ranks."""
TOPOLOGY = {"topology": "node=2,gpu=2"}
HEADS, GATHERED = "hierarchical", "hierarchical:gpu,node=kv"
EXACT = (
    {"a2a": HEADS, "v_first": "on", "head_groups": "2"},
    {"a2a": GATHERED, "v_first": "on", "head_groups": "2"},
    {"a2a": "flat", "v_first": "off", "head_groups": "1"},
)
"""Options of exact mode to test."""


def run_all(rank: int, model: str) -> None:
    """Check all cases in exact mode, and the first one in a lossy mode."""
    from tests.small_transformers import MODELS, prepare_ranks, use

    prepare_ranks(rank, DEGREE)
    for arguments in CASES[model]:
        small = MODELS[model](**arguments)
        use(small, DEGREE)
        stock = small.denoise()
        assert stock.isfinite().all(), arguments
        for options in EXACT:
            use(small, DEGREE, mode="exact", **TOPOLOGY, **options)
            assert torch.equal(small.denoise(), stock), (arguments, options)
            check_layers(model, options)
        use(small, DEGREE)
        assert torch.equal(small.denoise(), stock), arguments
    small = MODELS[model](**CASES[model][0])
    for plan in ("flat", GATHERED):
        run_coded(small, model, plan)


def check_layers(model: str, options: dict[str, str]) -> None:
    """Check which layers gather K and V, and whether V goes first in all, from the projections of the table."""
    from xfuser_cocodiff.xdit.session.session import active

    known = [signature for signature in active().layers.signatures if signature.candidates]
    [family] = (family for family in FAMILIES if model in family.small_models)
    assert active().traffic.sent_bytes and known
    assert {signature.ready for signature in known} == {options["v_first"] == "on"}
    paths = {path for signature in known if signature.ready for path in signature.structure.recipe.paths}
    assert paths <= {*family.v_first}
    gathers = [each.gathers_kv if active().runtime else each.schedule.gathers_kv for each in known]
    assert gathers.count(False) == (BY_HEADS.get(model, 0) if options["a2a"] == GATHERED else len(known))


def run_coded(small: "SmallTransformer", model: str, plan: str) -> None:
    """Check that all layers are coded in all steps, for the expected bytes, and that latents are close to stock's."""
    from tests.small_transformers import use
    from xfuser_cocodiff.xdit.session.session import active

    use(small, DEGREE)
    stock = small.denoise(STEPS)
    options = {"a2a": plan, "v_first": "on"}
    use(small, DEGREE, mode="balanced", schedule=f"bits={BITS}", slow_axes="node", **TOPOLOGY, **options)
    session = active()
    session.begin_run(STEPS)
    latents = small.denoise(STEPS, session.end_step)
    check_reports(session.runtime.reports, 4 if model in FOUR_LAYERS else 2)
    check_layers(model, options)
    assert not torch.equal(latents, stock)
    assert decibels(latents, stock) > 15


def check_reports(reports: "list[StepReport]", layers: int) -> None:
    assert [report.step for report in reports] == list(range(STEPS))
    for report in reports:
        assert len(report.errors) == layers, sorted(report.errors)
        assert 0 < report.error < 0.4, report.errors
        # Scales, flags, gains and padding add up to 45% to these small messages.
        fraction = (BITS if report.step else 8) / 32
        assert fraction <= report.sent_bytes / report.exact_bytes < 1.45 * fraction, report


@pytest.mark.parametrize("model", slow_but(QUICK, CASES))
def test_exact_mode_has_stocks_bits_and_a_lossy_mode_codes_every_layer(model: str) -> None:
    ranks.run(run_all, DEGREE, model)
