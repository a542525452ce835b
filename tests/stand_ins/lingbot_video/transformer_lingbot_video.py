"""A video transformer of one stream, with a gated MLP in each block or a mixture of experts.

It has the names that `xfuser.model_executor.models.transformers.transformer_lingbot_video` imports and touches, and
computes on one rank what that wrapper computes on many.
Sizes in shapes: B batch, S tokens, H heads, D head dim, E hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import Timesteps
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn
from torch.nn import functional as F


def apply_rotary_emb(x: torch.Tensor, rotary_emb: torch.Tensor) -> torch.Tensor:
    """Turn pairs of values (B, S, H, D) by complex numbers (B, S, D / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotary_emb[:, :, None]).flatten(3).type_as(x)


def make_joint_position_ids(
    text: int, frames: int, rows: int, columns: int, device: torch.device | None = None
) -> torch.Tensor:
    """Places of video tokens, then of text behind the last frame: (S, 3)."""
    video = torch.cartesian_prod(*(torch.arange(size, device=device) for size in (frames, rows, columns)))
    return torch.cat([video, (frames + torch.arange(text, device=device))[:, None].expand(-1, 3)])


def _cat_interleave(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Video tokens and text tokens, joined; the wrapper imports this and never calls it."""
    return torch.cat([video, text], dim=1)


class LingBotVideoRotaryEmbedding(nn.Module):
    """Complex numbers of each place, made when they are first asked for."""

    def __init__(self, axes_dims: Sequence[int], axes_lens: Sequence[int]) -> None:
        super().__init__()
        self.axes_dims, self.axes_lens = axes_dims, axes_lens
        self.freqs_cis: list[torch.Tensor] | None = None

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        if self.freqs_cis is None:
            self.freqs_cis = [self._table(*sizes) for sizes in zip(self.axes_dims, self.axes_lens, strict=True)]
        return torch.cat([table[places] for table, places in zip(self.freqs_cis, position_ids.T, strict=True)], dim=-1)

    @staticmethod
    def _table(dim: int, length: int) -> torch.Tensor:
        angles = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, dim, 2) / dim))
        return torch.polar(torch.ones_like(angles), angles)


class LingBotVideoAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(hidden_size, hidden_size) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(self.head_dim, eps=1e-6) for _ in range(2))

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
        self.gate, self.up = (nn.Linear(hidden_size, intermediate_size) for _ in range(2))
        self.down = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LingBotVideoSparseMoeBlock(nn.Module):
    """Each token goes through the experts that score highest for it."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, num_experts_per_tok: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden_size, num_experts)
        self.experts = nn.ModuleList(LingBotVideoMLP(hidden_size, intermediate_size) for _ in range(num_experts))
        self.num_experts_per_tok = num_experts_per_tok

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).softmax(-1).topk(self.num_experts_per_tok)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            result.index_add_(0, token, scores[token, place, None] * expert(tokens[token]))
        return result.view_as(x)


class LingBotVideoBlock(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, ffn: nn.Module) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6 * hidden_size))
        self.norm1, self.norm_post_attn, self.norm2, self.norm_post_ffn = (nn.RMSNorm(hidden_size) for _ in range(4))
        self.attn, self.ffn = LingBotVideoAttention(hidden_size, num_heads), ffn

    def forward(
        self,
        x: torch.Tensor,
        temb6: torch.Tensor,
        rotary_emb: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        moe_padding_mask: torch.Tensor | None = None,
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
        attended = self.attn(self.norm1(x) * (1 + scale) + shift, rotary_emb, attention_mask)
        x = x + gate.tanh() * self.norm_post_attn(attended)
        fed = self.ffn(self.norm2(x) * (1 + ffn_scale) + ffn_shift)
        return x + ffn_gate.tanh() * self.norm_post_ffn(fed)


class LingBotVideoTimeEmbedding(nn.Sequential):
    """Its input, which the wrapper makes in float32, comes in the dtype of its weights."""

    def __init__(self, freq_dim: int, hidden_size: int) -> None:
        super().__init__(nn.Linear(freq_dim, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self[0].weight.dtype))


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
        num_experts: int = 0,
        num_experts_per_tok: int = 0,
        moe_intermediate_size: int = 0,
    ) -> None:
        super().__init__()
        patch = patch_size[0] * patch_size[1] * patch_size[2]
        self.patch_embedder = nn.Linear(patch * in_channels, hidden_size)
        self.text_embedder = nn.Linear(text_dim, hidden_size)
        self.rope = LingBotVideoRotaryEmbedding(axes_dims, axes_lens)
        self.time_proj = Timesteps(freq_dim, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embedder = LingBotVideoTimeEmbedding(freq_dim, hidden_size)
        self.time_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

        def ffn() -> nn.Module:
            if not num_experts:
                return LingBotVideoMLP(hidden_size, intermediate_size)
            return LingBotVideoSparseMoeBlock(hidden_size, moe_intermediate_size, num_experts, num_experts_per_tok)

        blocks = (LingBotVideoBlock(hidden_size, num_attention_heads, ffn()) for _ in range(depth))
        self.blocks = nn.ModuleList(blocks)
        self.norm_out_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))
        self.norm_out = nn.RMSNorm(hidden_size)
        self.proj_out = nn.Linear(hidden_size, patch * out_channels)

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
        x = self.proj_out(self.norm_out(x) * (1 + scale) + shift)[:, : video.shape[1]]
        x = x.view(batch, *grid, p, q, r, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        sample = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)
