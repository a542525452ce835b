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


def make_joint_position_ids(text: int, frames: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Places of video tokens, whose time goes on where that of text ends, then of text, from 1: (S, 3)."""
    video = torch.cartesian_prod(*(torch.arange(size, device=device) for size in (frames, rows, columns)))
    video[:, 0] += text + 1
    return torch.cat([video, F.pad(torch.arange(1, text + 1, device=device)[:, None], (0, 2))])


_cat_interleave = None
"""The wrapper imports this and never calls it."""


class LingBotVideoRotaryEmbedding(nn.Module):
    """Complex numbers of each place."""

    def __init__(self, axes_dims: Sequence[int]) -> None:
        super().__init__()
        self.axes_dims = axes_dims

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        speeds = [256 ** -(torch.arange(0, dim, 2) / dim) for dim in self.axes_dims]
        angles = torch.cat([torch.outer(*pair) for pair in zip(position_ids.T.float(), speeds, strict=True)], dim=-1)
        return torch.polar(torch.ones_like(angles), angles)


class LingBotVideoAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(3))
        self.to_out = nn.Linear(hidden_size, hidden_size)
        self.norm_q, self.norm_k = (nn.RMSNorm(self.head_dim) for _ in range(2))


class LingBotVideoBlock(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6 * hidden_size))
        self.norm1, self.norm2 = (nn.RMSNorm(hidden_size) for _ in range(2))
        self.norm_post_attn, self.norm_post_ffn = (nn.RMSNorm(hidden_size) for _ in range(2))
        self.attn = LingBotVideoAttention(hidden_size, num_heads)
        sizes = hidden_size, intermediate_size, hidden_size
        self.ffn = nn.Sequential(nn.Linear(*sizes[:2]), nn.SiLU(), nn.Linear(*sizes[1:]))

    def forward(
        self, x: torch.Tensor, temb6: torch.Tensor, rotary_emb: torch.Tensor, *masks: torch.Tensor | None
    ) -> torch.Tensor:
        """Tokens (B, S, E) by their modulations (B * S, 6 * E) and turns (B, S, D / 2), complex."""
        modulation = temb6.view(*x.shape[:2], -1) + self.scale_shift_table
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation.chunk(6, dim=-1)
        x = x + gate.tanh() * self.norm_post_attn(self.attn(self.norm1(x) * (1 + scale) + shift, rotary_emb))
        return x + ffn_gate.tanh() * self.norm_post_ffn(self.ffn(self.norm2(x) * (1 + ffn_scale) + ffn_shift))


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
        patch_size: tuple[int, int, int] = (1, 2, 2),
    ) -> None:
        super().__init__()
        self.patch_embedder = nn.Linear(math.prod(patch_size) * in_channels, hidden_size)
        self.text_embedder = nn.Sequential(nn.RMSNorm(text_dim), nn.Linear(text_dim, hidden_size))
        self.rope = LingBotVideoRotaryEmbedding(axes_dims)
        self.time_proj = Timesteps(freq_dim, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embedder = TimestepEmbedding(freq_dim, hidden_size)
        self.time_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))
        sizes = hidden_size, num_attention_heads, intermediate_size
        self.blocks = nn.ModuleList(LingBotVideoBlock(*sizes) for _ in range(depth))
        self.norm_out_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))
        self.norm_out = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.proj_out = nn.Linear(hidden_size, math.prod(patch_size) * out_channels)
