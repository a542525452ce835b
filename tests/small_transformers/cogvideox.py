"""CogVideoX, and ConsisID, which is made from it."""

from typing import Any

from diffusers import CogVideoXTransformer3DModel, ConsisIDTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import nn
from xfuser.core.distributed.runtime_state import DiTRuntimeState
from xfuser.model_executor.models.transformers.cogvideox_transformer_3d import xFuserCogVideoXTransformer3DWrapper
from xfuser.model_executor.models.transformers.consisid_transformer_3d import xFuserConsisIDTransformer3DWrapper

from tests.small_transformers.base import STEPS, Pipeline, RowSliced


class CogVideoXPipeline(Pipeline):
    """The runtime state knows models by the names of their pipelines."""


class ConsisIDPipeline(Pipeline):
    """As above."""


class CogVideoX(RowSliced):
    """Text, then 192 video tokens; text that does not divide is replicated and joins at the front."""

    latent_shape = (3, 4, 16, 16)  # F C R W
    text = 8
    wrapper = xFuserCogVideoXTransformer3DWrapper
    pipeline_class = CogVideoXPipeline
    wrapped: type[nn.Module] = CogVideoXTransformer3DModel

    def sizes(self) -> dict[str, Any]:
        """Those in which models differ."""
        return {"num_attention_heads": 8}

    def build(self) -> nn.Module:
        return self.wrapped(
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
            **self.sizes(),
        )

    def condition(self) -> dict[str, Any]:
        return {"encoder_hidden_states": self.own_text(self.noise(self.text, 16))}

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


class ConsisID(CogVideoX):
    """CogVideoX in a class of its own."""

    wrapper = xFuserConsisIDTransformer3DWrapper
    pipeline_class = ConsisIDPipeline
    wrapped = ConsisIDTransformer3DModel


class ConsisIDFace(ConsisID):
    """With layers between those of CogVideoX that see a face."""

    def sizes(self) -> dict[str, Any]:
        return {
            "num_attention_heads": 24,  # as degree 8 divides, and 3 its width
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
