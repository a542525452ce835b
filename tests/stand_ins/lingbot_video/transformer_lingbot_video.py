"""A video transformer of one stream, with a gated MLP in each block.

It has the names that `xfuser.model_executor.models.transformers.transformer_lingbot_video` imports and touches; the
forwards of the whole and of its attention are those of xDiT's wrapper.
Sizes in shapes: B batch, S tokens, H heads, D head dim, E hidden size.
"""

import math
from collections.abc import Sequence

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from torch import nn
from torch.nn import functional as F


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


class LingBotVideoMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LingBotVideoBlock(nn.Module):
    def __init__(self, hidden_size: int, attention: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6 * hidden_size))
        self.norm1, self.norm2 = (LingBotVideoRMSNorm(hidden_size) for _ in range(2))
        self.norm_post_attn, self.norm_post_ffn = (LingBotVideoRMSNorm(hidden_size) for _ in range(2))
        self.attn, self.ffn = attention, ffn

    def forward(
        self, x: torch.Tensor, temb6: torch.Tensor, rotary_emb: torch.Tensor, *masks: torch.Tensor | None
    ) -> torch.Tensor:
        """Tokens (B, S, E) by their modulations (B * S, 6 * E) and turns (B, S, D / 2), complex."""
        modulation = temb6.view(*x.shape[:2], -1) + self.scale_shift_table
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation.chunk(6, dim=-1)
        dtype = self.attn.to_q.weight.dtype
        attended = self.attn((self.norm1(x) * (1 + scale) + shift).to(dtype), rotary_emb)
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
    ) -> None:
        super().__init__()
        self.patch_embedder = nn.Linear(math.prod(patch_size) * in_channels, hidden_size)
        self.text_embedder = LingBotVideoTextEmbedder(text_dim, hidden_size)
        self.rope = LingBotVideoRotaryEmbedding(axes_dims, axes_lens, rope_theta)
        self.time_proj = Timesteps(freq_dim, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embedder = TimestepEmbedding(freq_dim, hidden_size)
        self.time_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))
        self.blocks = nn.ModuleList(
            LingBotVideoBlock(
                hidden_size,
                LingBotVideoAttention(hidden_size, num_attention_heads, qkv_bias, out_bias),
                LingBotVideoMLP(hidden_size, intermediate_size),
            )
            for _ in range(depth)
        )
        self.norm_out_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))
        self.norm_out = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.proj_out = nn.Linear(hidden_size, math.prod(patch_size) * out_channels)
