"""xDiT's own FP8 communication and balanced heads. Both need kernels of AMD's GPUs, which are mocked."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests import ranks
from tests.xdit.attention.test_overlap import start, use_config
from tests.xdit.test_compile import config_of
from xfuser_cocodiff.xdit.session.session import Session

HEADS, HEAD_DIM, TOKENS, STEPS, LAYERS = 8, 16, 12, 4, 2
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        from xfuser.model_executor.layers.usp import USP

        projected = (layer(hidden_states) for layer in (self.to_q, self.to_k, self.to_v))
        qkv = (tensor.unflatten(-1, (HEADS, -1)).transpose(1, 2) for tensor in projected)
        return self.to_out(USP(*qkv, attn_layer=self, head_balance_layer=self).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.attn(hidden_states)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


def attention_of_a_gpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> tuple:
    """Compute attention of quantized tensors, and report the cost of each head."""
    given = options.get("attention_kwargs") or {}
    if given.get("pre_quantized"):
        scales = given["q_descale"], given["k_descale"], given["v_descale"]
        query, key, value = (x.float() * scale for x, scale in zip((query, key, value), scales, strict=True))
    if "_hb_cost_sink" in given:
        given["_hb_cost_sink"].copy_(value.abs().sum((0, 2, 3)))
    return nn.functional.scaled_dot_product_attention(query, key, value), None


class World:
    """Transformer on real ranks, with a runtime state of xDiT."""

    def __init__(self, rank: int) -> None:
        from xfuser.core.distributed import attention_backend, get_runtime_state
        from xfuser.core.distributed.attention_backend import AttentionBackendType
        from xfuser.model_executor.layers import usp

        sys.modules["aiter"] = SimpleNamespace(dtypes=SimpleNamespace(fp8=torch.float8_e4m3fn))
        self.group, *_ = start(rank, depth=1)
        self.state = get_runtime_state()
        self.state.attention_backend = AttentionBackendType.SDPA
        attention_backend.SUPPORTS_PRE_QUANTIZATION_BACKENDS = {AttentionBackendType.SDPA}
        usp._HEAD_BALANCE_BACKENDS = {AttentionBackendType.SDPA}
        usp._FP8_NCCL_NEEDS_VIEW = True  # gloo does not support these types either
        usp.ATTENTION_FUNCTION_REGISTRY[AttentionBackendType.SDPA] = attention_of_a_gpu
        torch.manual_seed(0)
        self.transformer = Transformer()
        self.hidden_states = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))

    def use(self, mode: str | None) -> Any:
        """Use the plugin in a mode, or stock if it is None, and return the session."""
        return use_config(self.group, config_of(self.group.size(), "hierarchical", mode=mode)) if mode else Session()

    def use_fp8(self) -> None:
        """Communicate in FP8 from now on, with a fixed scale."""
        from xfuser.core.distributed import fp8_comms

        self.state.fp8_comms = fp8_comms.Fp8CommsState(0.02)
        layers = [block.attn for block in self.transformer.blocks]
        fp8_comms.register_fp8_comms_eligible_modules(self.transformer, layers)
        self.state.fp8_comms.register_models(SimpleNamespace(transformer=self.transformer))

    @torch.inference_mode()
    def run(self, session: Any) -> list[torch.Tensor]:
        """Return the outputs of the steps of a run."""
        found = []
        if session.runtime:
            session.begin_run(STEPS)
        for number in range(STEPS):
            found.append(self.transformer(self.hidden_states * (1 + 0.02 * number)))
            session.end_step()
        return found


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def send_in_fp8(rank: int) -> None:
    world = World(rank)
    stock = world.use(None)
    plain = world.run(stock)
    world.use_fp8()
    expected = world.run(stock)
    assert not equal(expected, plain)
    session = world.use("exact")
    assert equal(world.run(session), expected)
    values = STEPS * LAYERS * 4 * 2 * TOKENS * WIDTH // 2  # one byte each; half of them are sent along each of two axes
    assert dict(session.traffic.sent_bytes) == {"node": values, "gpu": values}
    # Codecs of a lossy mode replace FP8.
    session = world.use("balanced")
    for found, wanted in zip(world.run(session), plain, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=0.05)
    assert [report.was_keyframe for report in session.runtime.reports] == [True, False, False, False]
    assert all(report.sent_bytes < 0.5 * report.exact_bytes for report in session.runtime.reports[1:])
    assert {*session.runtime.reports[-1].errors} == {f"blocks.{index}.attn" for index in range(LAYERS)}


def test_fp8_communication_follows_the_topology() -> None:
    ranks.run(send_in_fp8, 4)


def balance_heads(rank: int) -> None:
    world = World(rank)
    world.state.runtime_config.use_spargeattn_head_balance = True

    def begin() -> None:
        for block in world.transformer.blocks:
            block.attn.head_perm = torch.arange(HEADS)

    begin()
    expected = world.run(world.use(None))
    assert not torch.equal(world.transformer.blocks[0].attn.head_perm, torch.arange(HEADS))
    for mode in ("exact", "balanced"):
        begin()
        session = world.use(mode)
        assert equal(world.run(session), expected), mode
        assert set(session.traffic.sent_bytes) == {"node", "gpu"}
    assert "moves heads" in session.runtime.inactive_reason


@pytest.mark.slow  # no quick test moves heads
def test_balanced_heads_are_lossless() -> None:
    ranks.run(balance_heads, 4)
