"""A video transformer of one stream, with a gated MLP in each block or a mixture of experts.

It has the names that `xfuser.model_executor.models.transformers.transformer_lingbot_video` imports and touches, takes
the weights of the real one under their names, and computes on one rank what that does for text that is all there.
Sizes in shapes: B batch, S tokens, H heads, D head dim, E hidden size, I inner size of an expert.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn
from torch.nn import functional as F

PRECISE = {"time_embedder", "time_modulation", "scale_shift_table", "norm_out_modulation", "router"}
"""Parts that stay in float32 whatever the model is cast to, beside all norms."""


def apply_rotary_emb(x: torch.Tensor, rotary_emb: torch.Tensor) -> torch.Tensor:
    """Turn pairs of values (B, S, H, D) by complex numbers (B, S, D / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotary_emb[:, :, None]).flatten(3).type_as(x)


def make_joint_position_ids(
    text: int, frames: int, rows: int, columns: int, device: torch.device | None = None
) -> torch.Tensor:
    """Places of video tokens, whose time goes on where that of text ends, then of text, from 1: (S, 3)."""
    video = torch.cartesian_prod(*(torch.arange(size, device=device) for size in (frames, rows, columns)))
    video[:, 0] += text + 1
    return torch.cat([video, F.pad(torch.arange(1, text + 1, device=device)[:, None], (0, 2))])


def _cat_interleave(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Video tokens and text tokens, joined; the wrapper imports this and never calls it."""
    return torch.cat([video, text], dim=1)


class LingBotVideoRotaryEmbedding(nn.Module):
    """Complex numbers of each place, made when they are first asked for."""

    def __init__(self, axes_dims: Sequence[int], axes_lens: Sequence[int], theta: float) -> None:
        super().__init__()
        self.axes_dims, self.axes_lens, self.theta = axes_dims, axes_lens, theta
        self.freqs_cis: list[torch.Tensor] | None = None

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        if self.freqs_cis is None:
            self.freqs_cis = [self._table(*sizes) for sizes in zip(self.axes_dims, self.axes_lens, strict=True)]
        return torch.cat([table[places] for table, places in zip(self.freqs_cis, position_ids.T, strict=True)], dim=-1)

    def _table(self, dim: int, length: int) -> torch.Tensor:
        speeds = 1 / self.theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), speeds).float()
        return torch.polar(torch.ones_like(angles), angles)


class LingBotVideoRMSNorm(nn.RMSNorm):
    """In float32, whatever it is given."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__(size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type_as(x)


class LingBotVideoTextEmbedder(nn.Module):
    def __init__(self, text_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.norm = LingBotVideoRMSNorm(text_dim)
        self.linear_1, self.linear_2 = nn.Linear(text_dim, hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.silu(self.linear_1(self.norm(x))))


class LingBotVideoAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, qkv_bias: bool, out_bias: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(hidden_size, hidden_size, bias=qkv_bias) for _ in range(3))
        self.to_out = nn.Linear(hidden_size, hidden_size, bias=out_bias)
        self.norm_q, self.norm_k = (LingBotVideoRMSNorm(self.head_dim) for _ in range(2))

    def forward(
        self, x: torch.Tensor, rotary_emb: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        query, key, value = (to(x).unflatten(2, (self.num_heads, -1)) for to in (self.to_q, self.to_k, self.to_v))
        query = apply_rotary_emb(self.norm_q(query), rotary_emb)
        key = apply_rotary_emb(self.norm_k(key), rotary_emb)
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        attended = F.scaled_dot_product_attention(*heads_first, attn_mask=attention_mask)
        return self.to_out(attended.transpose(1, 2).flatten(2))


class LingBotVideoMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LingBotVideoRouter(nn.Module):
    def __init__(self, hidden_size: int, num_experts: int, num_experts_per_tok: int) -> None:
        super().__init__()
        self.num_experts_per_tok = num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, and what each of them counts; the bias is only for the choice."""
        scores = F.linear(tokens.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.num_experts_per_tok).indices
        shares = F.normalize(scores.gather(1, chosen), p=1, dim=1)
        return chosen, shares.type_as(tokens)


class LingBotVideoGroupedExperts(nn.Module):
    """Gated MLPs: w1 gates (I, E), w3 goes up (I, E), w2 down (E, I), each for all experts."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, tokens: torch.Tensor, expert: int) -> torch.Tensor:
        inner = F.silu(F.linear(tokens, self.w1[expert])) * F.linear(tokens, self.w3[expert])
        return F.linear(inner, self.w2[expert])


class LingBotVideoSparseMoeBlock(nn.Module):
    """Each token goes through the experts that score highest for it."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, num_experts_per_tok: int) -> None:
        super().__init__()
        self.router = LingBotVideoRouter(hidden_size, num_experts, num_experts_per_tok)
        self.experts = LingBotVideoGroupedExperts(num_experts, hidden_size, intermediate_size)

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        chosen, shares = self.router(tokens)
        result = torch.zeros_like(tokens)
        for expert in range(len(self.router.weight)):
            token, place = torch.where(chosen == expert)
            result.index_add_(0, token, shares[token, place, None] * self.experts(tokens[token], expert))
        return result.view_as(x)


class LingBotVideoBlock(nn.Module):
    def __init__(self, hidden_size: int, attention: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6 * hidden_size))
        self.norm1, self.norm2 = (LingBotVideoRMSNorm(hidden_size) for _ in range(2))
        self.norm_post_attn, self.norm_post_ffn = (LingBotVideoRMSNorm(hidden_size) for _ in range(2))
        self.attn, self.ffn = attention, ffn

    def forward(
        self,
        x: torch.Tensor,
        temb6: torch.Tensor,
        rotary_emb: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        moe_padding_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """A block.

        Args:
            x: (B, S, E).
            temb6: modulation of each token, (B * S, 6 * E).
            rotary_emb: (B, S, D / 2), complex.
            attention_mask: keys that are there.
            moe_padding_mask: tokens that are there.
        """
        modulation = temb6.view(*x.shape[:2], -1) + self.scale_shift_table
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation.chunk(6, dim=-1)
        dtype = self.attn.to_q.weight.dtype
        attended = self.attn((self.norm1(x) * (1 + scale) + shift).to(dtype), rotary_emb, attention_mask)
        x = x + (gate.tanh() * self.norm_post_attn(attended)).type_as(x)
        fed = self.ffn((self.norm2(x) * (1 + ffn_scale) + ffn_shift).to(dtype))
        return x + (ffn_gate.tanh() * self.norm_post_ffn(fed)).type_as(x)


class LingBotVideoTransformer3DModel(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden_size: int,
        num_attention_heads: int,
        depth: int,
        intermediate_size: int,
        text_dim: int,
        freq_dim: int,
        axes_dims: tuple[int, ...],
        axes_lens: tuple[int, ...],
        patch_size: tuple[int, int, int] = (1, 2, 2),
        rope_theta: float = 256.0,
        qkv_bias: bool = False,
        out_bias: bool = True,
        num_experts: int = 0,
        num_experts_per_tok: int = 8,
        moe_intermediate_size: int = 512,
    ) -> None:
        super().__init__()
        self.patch_embedder = nn.Linear(math.prod(patch_size) * in_channels, hidden_size)
        self.text_embedder = LingBotVideoTextEmbedder(text_dim, hidden_size)
        self.rope = LingBotVideoRotaryEmbedding(axes_dims, axes_lens, rope_theta)
        self.time_proj = Timesteps(freq_dim, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embedder = TimestepEmbedding(freq_dim, hidden_size)
        self.time_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

        def block() -> nn.Module:
            attention = LingBotVideoAttention(hidden_size, num_attention_heads, qkv_bias, out_bias)
            if not num_experts:
                return LingBotVideoBlock(hidden_size, attention, LingBotVideoMLP(hidden_size, intermediate_size))
            sizes = moe_intermediate_size, num_experts, num_experts_per_tok
            return LingBotVideoBlock(hidden_size, attention, LingBotVideoSparseMoeBlock(hidden_size, *sizes))

        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm_out_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))
        self.norm_out = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.proj_out = nn.Linear(hidden_size, math.prod(patch_size) * out_channels)

    def to(self, *args: Any, **kwargs: Any) -> "LingBotVideoTransformer3DModel":
        precise = {name: value for name, value in self.state_dict().items() if _is_precise(name)}
        super().to(*args, **kwargs)
        device = self.patch_embedder.weight.device
        self.load_state_dict({name: value.to(device) for name, value in precise.items()}, strict=False, assign=True)
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """Velocity of latents (B, C, F, R, W), on one rank."""
        batch, _, frames, rows, columns = hidden_states.shape
        p, q, r = self.config.patch_size
        grid = frames // p, rows // q, columns // r
        patches = hidden_states.unflatten(4, (-1, r)).unflatten(3, (-1, q)).unflatten(2, (-1, p))
        video = self.patch_embedder(patches.permute(0, 2, 4, 6, 3, 5, 7, 1).flatten(4).flatten(1, 3))
        text = self.text_embedder(encoder_hidden_states)
        x = torch.cat([video, text], dim=1)
        rotary = self.rope(make_joint_position_ids(text.shape[1], *grid, x.device)).expand(batch, -1, -1)
        time = self.time_embedder(self.time_proj(timestep.float()))[:, None].expand(-1, x.shape[1], -1).flatten(0, 1)
        for block in self.blocks:
            x = block(x, self.time_modulation(time), rotary)
        shift, scale = self.norm_out_modulation(time).view(*x.shape[:2], -1).chunk(2, dim=-1)
        x = self.norm_out(x) * (1 + scale) + shift
        x = self.proj_out(x.to(self.proj_out.weight.dtype))[:, : video.shape[1]]
        x = x.view(batch, *grid, p, q, r, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        sample = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


def _is_precise(name: str) -> bool:
    return any(part in PRECISE or part.startswith("norm") for part in name.split("."))
