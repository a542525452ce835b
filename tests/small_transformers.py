"""Small random transformers of nine models, called through xDiT's wrappers as its pipelines call them.

Each is built once in a rank, then readied for every new runtime state. Latents go in and come out whole: models whose
pipelines slice rows (CogVideoX, PixArt-Sigma, HunyuanDiT) have them sliced and gathered here.
Sizes in shapes: B batch, C channels, F frames, R rows, W columns.
"""

from typing import Any

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    HunyuanDiT2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
)
from diffusers.models.embeddings import get_2d_rotary_pos_embed, get_3d_rotary_pos_embed
from torch import nn
from xfuser.core.distributed import (
    get_runtime_state,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
    get_sp_group,
)
from xfuser.core.distributed.runtime_state import DiTRuntimeState
from xfuser.model_executor.models.transformers.cogvideox_transformer_3d import xFuserCogVideoXTransformer3DWrapper
from xfuser.model_executor.models.transformers.hunyuan_transformer_2d import xFuserHunyuanDiT2DWrapper
from xfuser.model_executor.models.transformers.pixart_transformer_2d import xFuserPixArtTransformer2DWrapper
from xfuser.model_executor.models.transformers.transformer_hunyuan_video import xFuserHunyuanVideoTransformer3DWrapper
from xfuser.model_executor.models.transformers.transformer_hunyuan_video15 import (
    xFuserHunyuanVideo15Transformer3DWrapper,
)
from xfuser.model_executor.models.transformers.transformer_ltx2 import xFuserLTX2VideoTransformer3DWrapper
from xfuser.model_executor.models.transformers.transformer_lumina2 import xFuserLumina2Transformer2DWrapper
from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper
from xfuser.model_executor.models.transformers.transformer_z_image import xFuserZImageTransformer2DWrapper

from xfuser_cocodiff.models import weights

STEPS = 2


class Pipeline:
    """What the runtime state and the random weights ask of a pipeline."""

    vae_scale_factor = 8

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer
        self.components = {"transformer": transformer}


class CogVideoXPipeline(Pipeline):
    """The runtime state knows this model by the name of its pipeline."""

    vae_scale_factor_spatial = 8
    vae_scale_factor_temporal = 4


class SmallTransformer:
    """A transformer with latents to start from and everything else that its forward takes."""

    latent_shape: tuple[int, ...]
    """Of one sample."""
    text = 12
    """Text tokens where a case does not say."""
    wrapper: type | None = None
    """xDiT's wrapper around a diffusers model; None where the model is xDiT's own class."""
    pipeline_class: type[Pipeline] = Pipeline

    def __init__(self, batch: int = 1, text: int | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.batch, self.text, self.dtype = batch, text or self.text, dtype
        self._generator = torch.Generator().manual_seed(1)
        self.transformer = self.build()
        self.pipeline = weights.fill(self.pipeline_class(self.transformer), seed=0)
        self.transformer.to(dtype)
        self.conditions = self.condition()
        self.start = self.noise(*self.latent_shape)

    def build(self) -> nn.Module:
        raise NotImplementedError

    def condition(self) -> dict[str, Any]:
        """Arguments of the forward that stay the same over the steps."""
        raise NotImplementedError

    def ready(self) -> None:
        """Prepare for the runtime state that has just been initialised."""
        if self.wrapper and not isinstance(self.transformer, self.wrapper):
            self.transformer = self.wrapper(self.transformer)

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Direction of the next step, at times (B,) in (0, 1]."""
        return self.transformer(latents, timestep=1000 * time, **self.conditions, return_dict=False)[0]

    @torch.no_grad()
    def denoise(self) -> torch.Tensor:
        """Latents after STEPS plain Euler steps."""
        latents = self.start
        for step in range(STEPS):
            time = torch.full((self.batch,), 1 - step / STEPS, dtype=self.dtype)
            latents = latents - self.velocity(latents, time) / STEPS
        return latents

    def noise(self, *shape: int) -> torch.Tensor:
        """Noise of shape (B, *shape), the same on every rank."""
        return torch.randn(self.batch, *shape, generator=self._generator).to(self.dtype)

    def ones(self, *shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.ones(self.batch, *shape, dtype=dtype)


class Wan(SmallTransformer):
    """Wan 2.1 text to video: 192 video tokens; only self-attention is exchanged."""

    latent_shape = (4, 3, 16, 16)  # C F R W

    def build(self) -> nn.Module:
        return xFuserWanTransformer3DWrapper(
            patch_size=(1, 2, 2),
            num_attention_heads=8,
            attention_head_dim=24,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=256,
            ffn_dim=64,
            num_layers=2,
            rope_max_seq_len=32,
        )

    def condition(self) -> dict[str, Any]:
        return {"encoder_hidden_states": self.noise(self.text, 16)}


class HunyuanVideo(SmallTransformer):
    """192 video tokens, then text; text that does not divide is replicated and joins at the rear."""

    latent_shape = (4, 3, 16, 16)  # C F R W

    def build(self) -> nn.Module:
        transformer = xFuserHunyuanVideoTransformer3DWrapper(
            in_channels=4,
            out_channels=4,
            num_attention_heads=8,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=2,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(4, 6, 6),
        )
        # The constructor leaves diffusers' processors, which exchange nothing.
        return transformer.install_xdit_attention_processors()

    def condition(self) -> dict[str, Any]:
        # The last token is padding in every sample: the model drops it before it looks at the length.
        mask = self.ones(self.text + 1)
        mask[:, -1] = 0
        return {
            "encoder_hidden_states": self.noise(self.text + 1, 16),
            "encoder_attention_mask": mask,
            "pooled_projections": self.noise(8),
            "guidance": 6000 * self.ones(dtype=self.dtype),
        }


class HunyuanVideo15(SmallTransformer):
    """768 video tokens, then text of two encoders, which joins at the rear where it does not divide."""

    latent_shape = (4, 3, 16, 16)  # C F R W

    def build(self) -> nn.Module:
        return xFuserHunyuanVideo15Transformer3DWrapper(
            in_channels=9,
            out_channels=4,
            num_attention_heads=8,
            attention_head_dim=16,
            num_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=1,
            patch_size_t=1,
            text_embed_dim=16,
            text_embed_2_dim=16,
            image_embed_dim=12,
            rope_axes_dim=(4, 6, 6),
            target_size=640,
            task_type="t2v",
        )

    def condition(self) -> dict[str, Any]:
        glyphs = 4
        return {
            "encoder_hidden_states": self.noise(self.text - glyphs, 16),
            "encoder_attention_mask": self.ones(self.text - glyphs),
            "encoder_hidden_states_2": self.noise(glyphs, 16),
            "encoder_attention_mask_2": self.ones(glyphs),
            "image_embeds": torch.zeros(self.batch, 3, 12, dtype=self.dtype),
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        without_image = latents.new_zeros(self.batch, 5, *latents.shape[2:])
        return super().velocity(torch.cat([latents, without_image], dim=1), time)


class ZImage(SmallTransformer):
    """64 image and 32 caption tokens; lists of samples go in and come out."""

    latent_shape = (4, 1, 16, 16)  # C F R W
    heads = 8

    def build(self) -> nn.Module:
        return xFuserZImageTransformer2DWrapper(
            all_patch_size=(2,),
            all_f_patch_size=(1,),
            in_channels=4,
            dim=16 * self.heads,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=self.heads,
            n_kv_heads=self.heads,
            cap_feat_dim=16,
            axes_dims=[4, 6, 6],
            axes_lens=[64, 32, 32],
        )

    def condition(self) -> dict[str, Any]:
        return {"cap_feats": list(self.noise(self.text, 16))}

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.transformer(list(latents), 1 - time, **self.conditions, return_dict=False)[0])


class ZImageSixHeads(ZImage):
    """Six heads, which the attention pads with zeros to the next multiple of the degree."""

    heads = 6

    def build(self) -> nn.Module:
        transformer = super().build()
        # xDiT's runner does this for the check of the runtime state; the layers go by n_heads.
        degree = get_sequence_parallel_world_size()
        transformer.register_to_config(num_attention_heads=-(-self.heads // degree) * degree)
        return transformer


class Lumina2(SmallTransformer):
    """64 image tokens after the caption; 24 query heads share 8 key heads, packed in one exchange."""

    latent_shape = (4, 16, 16)  # C R W
    wrapper = xFuserLumina2Transformer2DWrapper
    longest = 16

    def build(self) -> nn.Module:
        return Lumina2Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            hidden_size=192,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=24,
            num_kv_heads=8,
            multiple_of=32,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(64, 32, 32),
            cap_feat_dim=16,
        )

    def condition(self) -> dict[str, Any]:
        # Samples of unequal length, and lengths that do not divide, make the wrapper mask keys.
        lengths = torch.tensor([max(1, self.text - sample) for sample in range(self.batch)])
        return {
            "encoder_hidden_states": self.noise(self.longest, 16),
            "encoder_attention_mask": torch.arange(self.longest) < lengths[:, None],
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return super().velocity(latents, (1 - time) / 1000)


class LTX2(SmallTransformer):
    """48 video tokens, exchanged in their self-attention only, and 8 audio tokens, in one row of latents."""

    _video, _audio = (48, 8), (8, 4)  # tokens, channels
    latent_shape = (48 * 8 + 8 * 4,)

    def build(self) -> nn.Module:
        return xFuserLTX2VideoTransformer3DWrapper(
            in_channels=8,
            out_channels=8,
            num_attention_heads=8,
            attention_head_dim=16,
            cross_attention_dim=128,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=8,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=64,
            num_layers=2,
            caption_channels=16,
            rope_type="split",  # with the default the wrapper gathers RoPE along the wrong dim
        )

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
        video, audio = latents.split([48 * 8, 8 * 4], dim=1)
        velocities = self.transformer(
            video.unflatten(1, self._video),
            audio.unflatten(1, self._audio),
            timestep=1000 * time,
            sigma=time,
            **self.conditions,
            return_dict=False,
        )
        return torch.cat([velocity.flatten(1) for velocity in velocities], dim=1)


class RowSliced(SmallTransformer):
    """A model whose pipeline gives each rank a band of latent rows."""

    def ready(self) -> None:
        state = get_runtime_state()
        self.set_input_parameters(state)
        super().ready()
        state.set_patched_mode(False)
        [(first, end)] = state.pp_patches_token_start_end_idx_global
        self.conditions |= self.rope(slice(first, end))

    def set_input_parameters(self, state: DiTRuntimeState) -> None:
        state.set_input_parameters(height=128, width=128, batch_size=self.batch, num_inference_steps=STEPS)

    def rope(self, tokens: slice) -> dict[str, Any]:
        """The forward's argument for rotary embedding of this rank's tokens, where it takes one."""
        return {}

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        band = latents.chunk(get_sequence_parallel_world_size(), dim=-2)[get_sequence_parallel_rank()]
        # PixArt-Sigma and HunyuanDiT predict the variance too, in channels after the velocity's.
        velocity = super().velocity(band.contiguous(), time)[:, : band.shape[1]]
        return get_sp_group().all_gather(velocity.contiguous(), dim=-2)


class PixArtSigma(RowSliced):
    """64 image tokens, exchanged in self-attention only."""

    latent_shape = (4, 16, 16)  # C R W
    wrapper = xFuserPixArtTransformer2DWrapper

    def build(self) -> nn.Module:
        return PixArtTransformer2DModel(
            num_attention_heads=8,
            attention_head_dim=16,
            num_layers=2,
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            caption_channels=32,
            cross_attention_dim=128,
            use_additional_conditions=False,
        )

    def condition(self) -> dict[str, Any]:
        return {
            "encoder_hidden_states": self.noise(self.text, 32),
            "encoder_attention_mask": self.ones(self.text),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }


class HunyuanDiT(RowSliced):
    """64 image tokens and skip connections, exchanged in self-attention only."""

    latent_shape = (4, 16, 16)  # C R W
    wrapper = xFuserHunyuanDiT2DWrapper

    def build(self) -> nn.Module:
        return HunyuanDiT2DModel(
            num_attention_heads=8,
            attention_head_dim=16,
            in_channels=4,
            patch_size=2,
            sample_size=16,
            hidden_size=128,
            num_layers=4,
            mlp_ratio=2.0,
            cross_attention_dim=32,
            cross_attention_dim_t5=24,
            pooled_projection_dim=16,
            text_len=6,
            text_len_t5=8,
        )

    def condition(self) -> dict[str, Any]:
        return {
            "encoder_hidden_states": self.noise(6, 32),
            "text_embedding_mask": self.ones(6),
            "encoder_hidden_states_t5": self.noise(8, 24),
            "text_embedding_mask_t5": self.ones(8),
            "image_meta_size": torch.tensor([128, 128, 128, 128, 0, 0], dtype=self.dtype).repeat(self.batch, 1),
            "style": 0 * self.ones(),
        }

    def rope(self, tokens: slice) -> dict[str, Any]:
        whole = get_2d_rotary_pos_embed(16, ((0, 0), (8, 8)), (8, 8), output_type="pt")
        return {"image_rotary_emb": tuple(part[tokens] for part in whole)}


class CogVideoX(RowSliced):
    """Text, then 192 video tokens; text that does not divide is replicated and joins at the front."""

    latent_shape = (3, 4, 16, 16)  # F C R W
    text = 8
    wrapper = xFuserCogVideoXTransformer3DWrapper
    pipeline_class = CogVideoXPipeline

    def build(self) -> nn.Module:
        return CogVideoXTransformer3DModel(
            num_attention_heads=8,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=16,
            text_embed_dim=16,
            num_layers=2,
            sample_width=16,
            sample_height=16,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=self.text,
            use_rotary_positional_embeddings=True,
        )

    @property
    def splits_text(self) -> bool:
        return self.text % get_sequence_parallel_world_size() == 0

    def condition(self) -> dict[str, Any]:
        text = self.noise(self.text, 16)
        if self.splits_text:
            text = text.chunk(get_sequence_parallel_world_size(), dim=1)[get_sequence_parallel_rank()]
        return {"encoder_hidden_states": text}

    def set_input_parameters(self, state: DiTRuntimeState) -> None:
        state.set_video_input_parameters(
            height=128,
            width=128,
            num_frames=9,
            batch_size=self.batch,
            num_inference_steps=STEPS,
            split_text_embed_in_sp=self.splits_text,
        )

    def rope(self, tokens: slice) -> dict[str, Any]:
        whole = get_3d_rotary_pos_embed(16, ((0, 0), (8, 8)), (8, 8), temporal_size=3)
        return {"image_rotary_emb": tuple(part.unflatten(0, (3, -1))[:, tokens].flatten(0, 1) for part in whole)}


MODELS = {
    model.__name__: model
    for model in (
        Wan,
        HunyuanVideo,
        HunyuanVideo15,
        ZImage,
        ZImageSixHeads,
        CogVideoX,
        PixArtSigma,
        Lumina2,
        LTX2,
        HunyuanDiT,
    )
}
