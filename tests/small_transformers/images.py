"""Small transformers of image models."""

from typing import Any, ClassVar

import torch
from diffusers import FluxTransformer2DModel, HunyuanDiT2DModel, PixArtTransformer2DModel, SanaTransformer2DModel
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from torch import nn
from xfuser.core.distributed import get_sequence_parallel_world_size, get_sp_group
from xfuser.model_executor.models.transformers.hunyuan_transformer_2d import xFuserHunyuanDiT2DWrapper
from xfuser.model_executor.models.transformers.pixart_transformer_2d import xFuserPixArtTransformer2DWrapper
from xfuser.model_executor.models.transformers.sana_transformer_2d import xFuserSanaTransformer2DWrapper
from xfuser.model_executor.models.transformers.transformer_flux import xFuserFluxTransformer2DWrapper
from xfuser.model_executor.models.transformers.transformer_ideogram4 import get_ideogram4_transformer_wrapper_class
from xfuser.model_executor.models.transformers.transformer_krea2 import xFuserKrea2Transformer2DWrapper
from xfuser.model_executor.models.transformers.transformer_z_image import xFuserZImageTransformer2DWrapper

from tests.small_transformers.base import RowSharded, SmallTransformer, shard_of


def places(axes: int, image: int = 0) -> torch.Tensor:
    """Return coordinates of 8 x 8 tokens, shape (64, axes); the first is the index of the image."""
    row_and_column = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    return torch.cat([torch.full((64, 1), image), row_and_column, torch.zeros(64, axes - 3, dtype=torch.long)], dim=1)


class FluxControl(RowSharded):
    """FLUX.1 with a control image in additional channels, in the classes of PipeFusion."""

    latent_shape = (64, 16)  # N C
    text = 16
    model = FluxTransformer2DModel
    sizes: ClassVar = {"in_channels": 32, "out_channels": 16}
    wrapper = xFuserFluxTransformer2DWrapper
    pipeline_name = "FluxControlPipeline"  # for which the runtime state doubles the token size
    end_time = 1

    @property
    def inputs(self) -> dict[str, Any]:
        return {"max_condition_sequence_length": self.text, "split_text_embed_in_sp": self.shards_text}

    def condition(self) -> dict[str, Any]:
        self.control = self.noise(*self.latent_shape)
        return {
            "encoder_hidden_states": self.text_shard(self.noise(self.text, 16)),
            "pooled_projections": self.noise(8),
            "guidance": 3.5 * self.ones(dtype=self.dtype),
            "txt_ids": self.text_shard(torch.zeros(self.text, 3)),
        }

    def rope(self, tokens: slice) -> dict[str, Any]:
        return {"img_ids": places(3)[tokens]}

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shard = shard_of(torch.cat([latents, self.control], dim=-1))
        found = SmallTransformer.velocity(self, shard, time)
        velocity = found[0] if isinstance(found, tuple) else found  # a stage also returns the input of the next one
        return get_sp_group().all_gather(velocity, dim=-2)


class ZImage(SmallTransformer):
    """64 image and 32 caption tokens; inputs and outputs are lists of samples. Its six heads are zero-padded by the
    attention to the next multiple of the degree."""

    latent_shape = (4, 1, 16, 16)  # C F R W
    heads = 6
    model = xFuserZImageTransformer2DWrapper
    sizes: ClassVar = {
        "all_patch_size": (2,),
        "all_f_patch_size": (1,),
        "n_heads": heads,
        "n_kv_heads": heads,
        "dim": 16 * heads,
        "axes_dims": [4, 6, 6],
        "axes_lens": [64, 32, 32],
    }

    def build(self) -> nn.Module:
        transformer = super().build()
        # xDiT's runner sets this for the runtime state's check; the layers use n_heads.
        degree = get_sequence_parallel_world_size()
        transformer.register_to_config(num_attention_heads=-(-self.heads // degree) * degree)
        return transformer

    def condition(self) -> dict[str, Any]:
        return {"cap_feats": list(self.noise(self.text, 16))}

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.transformer(list(latents), 1 - time, **self.conditions, return_dict=False)[0])


class Krea2(SmallTransformer):
    """Text, then 64 image tokens; each head of K and V is repeated for the heads of Q that share it. Prompts have
    different lengths, whose padding is masked."""

    latent_shape = (64, 16)  # N C
    end_time = 1
    model = xFuserKrea2Transformer2DWrapper
    sizes: ClassVar = {
        "in_channels": 16,
        "num_key_value_heads": 4,
        "text_hidden_dim": 32,
        "num_text_layers": 3,
        "text_num_attention_heads": 4,
        "text_num_key_value_heads": 4,
        "text_intermediate_size": 48,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
    }

    def condition(self) -> dict[str, Any]:
        lengths = torch.tensor([self.text - 3 - sample for sample in range(self.batch)])
        return {
            "encoder_hidden_states": self.noise(self.text, 3, 32),
            "position_ids": torch.cat([torch.zeros(self.text, 3, dtype=torch.long), places(3)]),
            "encoder_attention_mask": torch.arange(self.text) < lengths[:, None],
        }


class Ideogram4(SmallTransformer):
    """Padding, which the wrapper drops, then text and 64 image tokens; guided by a second transformer, which gets the
    image only."""

    latent_shape = (64, 8)  # N C
    padding = 5
    names = "transformer", "unconditional_transformer"
    model = property(lambda self: get_ideogram4_transformer_wrapper_class())
    sizes: ClassVar = {"in_channels": 8, "adaln_dim": 32, "llm_features_dim": 24, "mrope_section": (4, 2, 2)}
    prepare = "_install_xfuser_processors"
    end_time = 1

    def ready(self) -> None:
        for transformer in self.transformers:
            transformer._init_sp_state()

    def condition(self) -> dict[str, Any]:
        is_padding, is_image, is_text = 0, 2, 3
        indicator = torch.tensor([is_padding] * self.padding + [is_text] * self.text + [is_image] * 64)
        text = torch.arange(self.padding + self.text)[:, None].expand(-1, 3)
        return {
            "encoder_hidden_states": self.noise(len(indicator), 24),
            "position_ids": torch.cat([text, 2**16 + places(3)]).expand(self.batch, -1, -1),
            "segment_ids": torch.where(indicator == is_padding, -1, 1).expand(self.batch, -1),
            "indicator": indicator.expand(self.batch, -1),
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        image = {name: given[:, -64:] for name, given in self.conditions.items()}
        image["encoder_hidden_states"] = torch.zeros_like(image["encoder_hidden_states"])
        without = self.transformers[1](latents, timestep=1 - time, **image, return_dict=False)[0]
        # Times are in (0, 1], and the whole sequence may hold an image.
        padded = nn.functional.pad(latents, (0, 0, self.padding + self.text, 0))
        return without + 3 * (super().velocity(padded, 1 - time)[:, -64:] - without)


class HunyuanDiT(RowSharded):
    """64 image tokens and skip connections; all-to-alls in self-attention only."""

    latent_shape = (4, 16, 16)  # C R W
    model = HunyuanDiT2DModel
    sizes: ClassVar = {
        "patch_size": 2,
        "hidden_size": 128,
        "num_layers": 4,
        "cross_attention_dim": 32,
        "cross_attention_dim_t5": 24,
        "pooled_projection_dim": 16,
        "text_len": 6,
        "text_len_t5": 8,
    }
    wrapper = xFuserHunyuanDiT2DWrapper

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


class PixArt(RowSharded):
    """64 image tokens; all-to-alls in self-attention only."""

    latent_shape = (4, 16, 16)  # C R W
    model = PixArtTransformer2DModel
    sizes: ClassVar = {"out_channels": 8, "attention_head_dim": 24, "cross_attention_dim": 192}
    wrapper = xFuserPixArtTransformer2DWrapper
    text_width = 32


class Sana(RowSharded):
    """256 image tokens. Linear self-attention uses yunchang's all-to-all; cross-attention uses USP, also for the
    replicated text."""

    latent_shape = (4, 16, 16)  # C R W
    model = SanaTransformer2DModel
    sizes: ClassVar = {
        "num_cross_attention_heads": 8,
        "cross_attention_head_dim": 16,
        "guidance_embeds": False,
    }
    wrapper = xFuserSanaTransformer2DWrapper
    inputs: ClassVar = {"split_text_embed_in_sp": False}
    text_width = 32
