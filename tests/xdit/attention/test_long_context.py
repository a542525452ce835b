"""Long-context attention of xDiT: bit-identical to stock in exact mode, V-First, and codecs by layer."""

import os
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import bare_runtime
from tests import ranks
from tests.quick import slow
from tests.xdit.attention.test_overlap import start, use_config
from tests.xdit.session.test_session import config_of
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session.session import Session, active
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap

HEADS, HEAD_DIM, TOKENS, STEPS = 8, 16, 24, 4
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    """Attention as in StepVideo and Sana: xDiT's attention between projections."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        for name in ("to_q", "to_k", "to_v", "to_out"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def project(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """Return Q, K and V, (B, S, H, D)."""
        return [layer(hidden_states).unflatten(-1, (HEADS, -1)) for layer in (self.to_q, self.to_k, self.to_v)]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        from xfuser.core.long_ctx_attention import xFuserLongContextAttention, xFuserSanaLinearLongContextAttention

        kind = xFuserSanaLinearLongContextAttention if self.linear else xFuserLongContextAttention
        attended = kind()(None, *self.project(hidden_states))
        return self.to_out(attended if self.linear else attended.flatten(2))


class Transformer(nn.Module):
    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(linear) for _ in range(3))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = hidden_states + block(hidden_states)
        return hidden_states


def attend(rank: int, linear: bool) -> dict[str, Any]:
    group, *_ = start(rank, depth=1)
    torch.manual_seed(0)
    transformer = Transformer(linear)
    hidden_states = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))

    @torch.inference_mode()
    def step(number: int) -> torch.Tensor:
        return transformer(hidden_states * (1 + 0.02 * number))

    bare_runtime.use_session(Session())
    expected = [step(number) for number in range(STEPS)]
    for v_first in (True, False):
        session = use_config(group, config_of("exact", overlap=Overlap(v_first)))
        for number in range(STEPS):
            assert torch.equal(step(number), expected[number]), (v_first, number)
        signatures = [signature for signature in session.layers.signatures if signature.candidates]
        assert {signature.ready for signature in signatures} == {v_first}
        assert {signature.candidates.schedule.v_first for signature in signatures} == {v_first}
    session = use_config(group, config_of("balanced", schedule="bits=4"))
    session.begin_run(STEPS)
    errors = []
    for number in range(STEPS):
        found = step(number)
        errors.append(((found - expected[number]).norm() / expected[number].norm()).item())
        session.end_step()
    return {"errors": errors, "reports": session.runtime.reports}


@pytest.mark.parametrize("linear", [False, slow(True)])
def test_exact_mode_equals_stock_and_codecs_know_layers(linear: bool) -> None:
    for found in ranks.run(attend, 2, linear):
        errors, reports = found["errors"], found["reports"]
        assert 0 < errors[0] < 0.01 and 0 < errors[-1] < 0.02
        assert [report.was_keyframe for report in reports] == [True, False, False, False]
        assert {*reports[-1].errors} == {f"blocks.{index}" for index in range(3)}
        # 4 bits of 32, a scale per row, and a flag and padding in messages of a few kB.
        assert all(0.12 < report.sent_bytes / report.exact_bytes < 0.17 for report in reports[1:])


def attend_with_padding(rank: int) -> None:
    """Check eight heads on three ranks against attention on one rank, also with codecs."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "0"  # not used
    group = bare_runtime.start()
    bare_runtime.init_runtime_state(9, 0)
    torch.manual_seed(0)
    transformer = Transformer(linear=False)
    whole = torch.randn(2, 3 * TOKENS, WIDTH, generator=torch.Generator().manual_seed(9))

    def on_one_rank(hidden_states: torch.Tensor) -> torch.Tensor:
        for block in transformer.blocks:
            query, key, value = (tensor.transpose(1, 2) for tensor in block.project(hidden_states))
            attended = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
            hidden_states = hidden_states + block.to_out(attended)
        return hidden_states

    topology = Topology.flat(3)
    flat = {"topology": topology, "plan": Plan.flat(topology), "slow_axes": ("flat",)}
    for mode, tolerance in (("exact", 1e-5), ("balanced", 0.1)):
        for v_first in (True, False):
            use_config(group, CocoDiffConfig(mode=mode, overlap=Overlap(v_first, 1), **flat))
            active().begin_run(STEPS)
            for number in range(STEPS):
                states = whole * (1 + 0.02 * number)
                with torch.inference_mode():
                    found = transformer(states.chunk(3, 1)[rank])
                    expected = on_one_rank(states).chunk(3, 1)[rank]
                assert torch.allclose(found, expected, atol=tolerance), (mode, v_first, number)
                active().end_step()


def test_padded_heads_equal_attention() -> None:
    ranks.run(attend_with_padding, 3)
