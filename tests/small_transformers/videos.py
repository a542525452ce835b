"""Small transformers of video models."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from diffusers import CogVideoXTransformer3DModel, ConsisIDTransformer3DModel, LatteTransformer3DModel
from diffusers.models.embeddings import Timesteps, get_3d_rotary_pos_embed
from torch import nn
from xfuser.core.distributed import get_sp_group
from xfuser.model_executor.models.customized.step_video_t2v.blocks import StepVideoTransformerBlock
from xfuser.model_executor.models.transformers.cogvideox_transformer_3d import xFuserCogVideoXTransformer3DWrapper
from xfuser.model_executor.models.transformers.consisid_transformer_3d import xFuserConsisIDTransformer3DWrapper
from xfuser.model_executor.models.transformers.latte_transformer_3d import xFuserLatteTransformer3DWrapper
from xfuser.model_executor.models.transformers.transformer_cosmos3 import get_cosmos3_transformer_wrapper_class
from xfuser.model_executor.models.transformers.transformer_hunyuan_video import xFuserHunyuanVideoTransformer3DWrapper
from xfuser.model_executor.models.transformers.transformer_lingbot_video import (
    get_lingbot_video_classes,
    xFuserLingBotVideoTransformer3DWrapper,
)
from xfuser.model_executor.models.transformers.transformer_ltx2 import xFuserLTX2VideoTransformer3DWrapper
from xfuser.model_executor.models.transformers.transformer_minimax_h3 import xFuserMiniMaxH3Transformer3DWrapper
from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

from tests.sizes import build
from tests.small_transformers.base import RowSharded, SmallTransformer, shard_of


class Wan(SmallTransformer):
    """192 video tokens; text in cross-attention, without all-to-alls."""

    latent_shape = (4, 3, 16, 16)  # C F R W
    model = xFuserWanTransformer3DWrapper
    sizes: ClassVar = {"patch_size": (1, 2, 2), "attention_head_dim": 24, "rope_max_seq_len": 32}


class HunyuanVideo(SmallTransformer):
    """192 video tokens, then text; text that is not divisible by the degree is replicated and joins at the rear."""

    latent_shape = (4, 3, 16, 16)  # C F R W
    model = xFuserHunyuanVideoTransformer3DWrapper
    prepare = "install_xdit_attention_processors"  # the constructor has diffusers' processors, without all-to-alls

    def condition(self) -> dict[str, Any]:
        # The last token is padding in every sample: the model drops it before it checks the length.
        mask = self.ones(self.text + 1)
        mask[:, -1] = 0
        return {
            "encoder_hidden_states": self.noise(self.text + 1, 16),
            "encoder_attention_mask": mask,
            "pooled_projections": self.noise(8),
            "guidance": 6000 * self.ones(dtype=self.dtype),
        }


class CogVideoX(RowSharded):
    """Text, then 192 video tokens; text that is not divisible by the degree is replicated and joins at the front."""

    latent_shape = (3, 4, 16, 16)  # F C R W
    text = 8
    model = CogVideoXTransformer3DModel
    wrapper = xFuserCogVideoXTransformer3DWrapper
    pipeline_name = "CogVideoXPipeline"
    of_kind: ClassVar[dict[str, Any]] = {}

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "time_embed_dim": 16,
            "sample_width": 16,
            "sample_height": 16,
            "sample_frames": 9,
            "temporal_compression_ratio": 4,
            "max_text_seq_length": self.text,
            "use_rotary_positional_embeddings": True,
            **self.of_kind,
        }

    @property
    def inputs(self) -> dict[str, Any]:
        return {"num_frames": 9, "split_text_embed_in_sp": self.shards_text}

    def condition(self) -> dict[str, Any]:
        return {"encoder_hidden_states": self.text_shard(self.noise(self.text, 16))}

    def rope(self, tokens: slice) -> dict[str, Any]:
        whole = get_3d_rotary_pos_embed(16, ((0, 0), (8, 8)), (8, 8), temporal_size=3)
        return {"image_rotary_emb": tuple(part.unflatten(0, (3, -1))[:, tokens].flatten(0, 1) for part in whole)}


class ConsisID(CogVideoX):
    """CogVideoX in another class, with additional layers that attend to a face."""

    model = ConsisIDTransformer3DModel
    wrapper = xFuserConsisIDTransformer3DWrapper
    pipeline_name = "ConsisIDPipeline"
    of_kind: ClassVar = {
        "num_attention_heads": 24,  # divisible by degree 8; its width by 3
        "is_train_face": True,
        "cross_attn_interval": 1,
        "cross_attn_dim_head": 8,
        "cross_attn_num_heads": 2,
        "LFE_id_dim": 16,
        "LFE_vit_dim": 16,
        "LFE_depth": 5,
        "LFE_dim_head": 8,
        "LFE_num_heads": 2,
        "LFE_num_querie": 4,
        "LFE_output_dim": 256,
    }

    def condition(self) -> dict[str, Any]:
        face = {"id_cond": self.noise(16), "id_vit_hidden": [self.noise(5, 16) for _ in range(5)]}
        return super().condition() | face


class Latte(RowSharded):
    """3 frames of 64 tokens; all-to-alls in self-attention within a frame, and over time."""

    latent_shape = (4, 3, 16, 16)  # C F R W
    model = LatteTransformer3DModel
    sizes: ClassVar = {
        "out_channels": 8,
        "patch_size": 2,
        "attention_bias": True,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "video_length": 3,
    }
    wrapper = xFuserLatteTransformer3DWrapper
    inputs: ClassVar = {"num_frames": 3}
    text_width = 32


class SoundAndVision(SmallTransformer):
    """Video and audio tokens in one tensor of latents."""

    video: tuple[int, int]  # N C
    audio: tuple[int, int]

    def both(self, latents: torch.Tensor, **times: torch.Tensor) -> torch.Tensor:
        """Return the velocities of video and audio in one tensor."""
        count = self.video[0] * self.video[1]
        video, audio = latents[:, :count].unflatten(1, self.video), latents[:, count:].unflatten(1, self.audio)
        velocities = self.transformer(video, audio, **times, **self.conditions, return_dict=False)
        return torch.cat([velocity.flatten(1) for velocity in velocities], dim=1)


class LTX2(SoundAndVision):
    """48 video tokens, with all-to-alls in their self-attention only, and 8 audio tokens."""

    video, audio = (48, 8), (8, 4)
    latent_shape = (48 * 8 + 8 * 4,)
    model = xFuserLTX2VideoTransformer3DWrapper
    sizes: ClassVar = {
        "in_channels": 8,
        "out_channels": 8,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 8,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 64,
        "caption_channels": 16,
        "rope_type": "split",  # with the default the wrapper gathers RoPE along the wrong dim
    }

    def condition(self) -> dict[str, Any]:
        return {
            "encoder_hidden_states": self.noise(self.text, 16),
            "audio_encoder_hidden_states": self.noise(self.text, 16),
            "encoder_attention_mask": self.ones(self.text),
            "audio_encoder_attention_mask": self.ones(self.text),
            "num_frames": 3,
            "height": 4,
            "width": 4,
            "audio_num_frames": 8,
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.both(latents, timestep=1000 * time, sigma=time)


IS_VIDEO, IS_TEXT, IS_AUDIO = range(3)


class MiniMaxH3(SoundAndVision):
    """Text, then 8 audio and 64 video tokens, packed and padded to a multiple of 64; Q, K and V are one projection."""

    video, audio = (64, 16), (8, 8)
    latent_shape = (64 * 16 + 8 * 8,)
    model = xFuserMiniMaxH3Transformer3DWrapper
    prepare = "fuse_qkv_projections"  # as in xDiT's runner
    sizes: ClassVar = {
        **dict.fromkeys(("attention_head_dim", "freq_dim", "time_embed_hidden_dim", "time_embed_dim"), 32),
        **{"hidden_size": 64, "audio_in_channels": 8, "rope_freq_dim": 4},
    }

    def condition(self) -> dict[str, Any]:
        sizes = self.text, 8, 64
        text, audio, video = torch.arange(sum(sizes)).split(sizes)
        same = torch.arange(self.text + 8)[:, None].expand(-1, 3)
        return {
            "encoder_hidden_states": self.noise(self.text, 16),
            "timestep_indices": torch.zeros(sum(sizes), dtype=torch.long),
            "token_tags": torch.tensor([IS_TEXT] * self.text + [IS_AUDIO] * 8 + [IS_VIDEO] * 64),
            "position_ids": torch.cat([same, torch.cartesian_prod(*map(torch.arange, (4, 4, 4)))]),
            "text_indices": text,
            "audio_indices": audio,
            "video_indices": video,
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.both(latents, timestep=1000 * time[:1])  # the distinct timesteps, of which each token has one


class Cosmos3(SmallTransformer):
    """48 video tokens, which also attend to replicated text, whose K and V are part of the all-to-all."""

    latent_shape = (4, 3, 8, 8)  # C F R W
    model = property(lambda self: get_cosmos3_transformer_wrapper_class())
    prepare = "_install_xfuser_processors"
    sizes: ClassVar = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "latent_channel": 4,
        "latent_patch_size": 2,
        "num_key_value_heads": 8,
        "patch_latent_dim": 16,
        "rope_axes_dim": (4, 2, 2),
        "vocab_size": 64,
    }

    def condition(self) -> dict[str, Any]:
        text, video = torch.arange(self.text + 48).split([self.text, 48])
        places = torch.cartesian_prod(*map(torch.arange, (3, 4, 4)))
        return {
            "input_ids": torch.randint(64, (self.text,), generator=self._generator),
            "text_indexes": text,
            "position_ids": torch.cat([text[:, None].expand(-1, 3), self.text + places]).T,
            "und_len": self.text,
            "sequence_length": self.text + 48,
            "vision_token_shapes": [(3, 4, 4)],
            "vision_sequence_indexes": video,
            "vision_mse_loss_indexes": video,
            "vision_noisy_frame_indexes": [torch.arange(3)],
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        given = {"vision_tokens": [latents], "vision_timesteps": 1000 * time.expand(48)}
        [velocity] = self.transformer(**given, **self.conditions)[0]
        return velocity


class LingBotVideo(SmallTransformer):
    """192 video tokens, then text: the model is a reimplementation, since LingBot's is on no package index."""

    latent_shape = (4, 3, 16, 16)  # C F R W
    sizes: ClassVar = {"hidden_size": 128, "depth": 2, "freq_dim": 32, "axes_dims": (4, 6, 6)}

    def build(self) -> nn.Module:
        sys.path.append(str(Path(__file__).parents[1] / "stand_ins"))
        plain, wrapper = get_lingbot_video_classes()[0], xFuserLingBotVideoTransformer3DWrapper
        transformer = build(plain, **self.sizes)
        # As in the wrapper's from_pretrained, its only constructor.
        transformer.__class__ = type(wrapper.__name__, (wrapper, plain), {})
        transformer._install_usp_attention()
        return transformer


WIDTH, HEAD_DIM = 1024, 128
"""Head dim of StepVideo, the only one that its rotary embedding supports."""


class StepVideoModel(nn.Module):
    """A minimal model around the blocks in xDiT; the rest of StepVideo is in its own repository."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=WIDTH // HEAD_DIM)
        self.proj_in, self.text_in = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)
        self.time_proj, self.time_in = Timesteps(32, True, 0), nn.Linear(32, 6 * WIDTH)
        blocks = (StepVideoTransformerBlock(WIDTH, HEAD_DIM, ff_inner_dim=64) for _ in range(2))
        self.transformer_blocks = nn.ModuleList(blocks)
        self.proj_out = nn.Linear(WIDTH, 16)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        return_dict: bool,
    ) -> tuple[torch.Tensor]:
        """Return the velocity of a shard of tokens (B, N, 16)."""
        hidden_states, text = self.proj_in(hidden_states), self.text_in(encoder_hidden_states)
        time = self.time_in(self.time_proj(timestep).to(text.dtype))
        for block in self.transformer_blocks:
            hidden_states = block(hidden_states, text, timestep=time, rope_positions=[3, 4, 4])
        return (self.proj_out(hidden_states),)


class StepVideo(SmallTransformer):
    """48 video tokens; yunchang's all-to-all in self-attention only."""

    latent_shape = (48, 16)  # N C
    model = StepVideoModel

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return get_sp_group().all_gather(super().velocity(shard_of(latents), time), dim=-2)
