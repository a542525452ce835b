"""Which schedules layers may run by where the planner expects no gain of flat all-to-alls."""

from types import SimpleNamespace

import pytest
import torch

from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.attention import schedule_choice
from xfuser_cocodiff.xdit.attention.schedule_choice import choose_schedules, find_worthwhile
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature, LayerStructure
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap

TOPOLOGY = Topology.flat(2)


@pytest.mark.parametrize("ring", [None, object()])
def test_stock_is_chosen_at_once_unless_the_plugin_has_a_ring(ring: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_choice, "all_reduce", lambda values, *_: values)
    policy = PlanPolicy.fixed(Plan.flat(TOPOLOGY), sends_early=lambda *_: False)
    session = SimpleNamespace(
        overlap=Overlap(),
        mesh=SimpleNamespace(policy=policy, topology=TOPOLOGY),
        runtime=None,
        ring=ring,
        config=CocoDiffConfig(topology=TOPOLOGY),
        head_degree=lambda _: 2,
        tuning_results=SimpleNamespace(schedule_of=lambda _: None),
        layers=SimpleNamespace(signatures=SimpleNamespace(candidates={})),
    )
    signature = LayerSignature(LayerStructure("Attention", "properties"), "key")
    worthwhile = find_worthwhile(signature, session, [torch.zeros(1, 8, 64, 16)] * 3, None, False)
    choose_schedules(signature, session, worthwhile, stock_supports_it=True)
    assert signature.candidates.runs_stock == (ring is None)
