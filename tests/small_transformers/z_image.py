"""Z-Image."""

from typing import Any

import torch
from torch import nn
from xfuser.core.distributed import get_sequence_parallel_world_size
from xfuser.model_executor.models.transformers.transformer_z_image import xFuserZImageTransformer2DWrapper

from tests.small_transformers.base import SmallTransformer


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
