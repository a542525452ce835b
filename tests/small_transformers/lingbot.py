"""LingBot-Video, of a model of the same make where its own package is not there."""

import sys
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from xfuser.model_executor.models.transformers.transformer_lingbot_video import (
    get_lingbot_video_classes,
    xFuserLingBotVideoTransformer3DWrapper,
)

from tests.small_transformers.base import SmallTransformer

sys.path.append(str(Path(__file__).parents[1] / "stand_ins"))
MODEL, *_ = get_lingbot_video_classes()  # here, since ranks have the modules of their server, but not its sys.path


def wrapped(**sizes: int) -> xFuserLingBotVideoTransformer3DWrapper:
    """A transformer with the sizes in which models differ."""
    transformer = MODEL(
        in_channels=4,
        out_channels=4,
        hidden_size=128,
        num_attention_heads=8,
        depth=2,
        intermediate_size=64,
        text_dim=16,
        freq_dim=32,
        axes_dims=(4, 6, 6),
        axes_lens=(64, 32, 32),
        **sizes,
    )
    # As from_pretrained of the wrapper makes it, which has no other way in.
    wrapper = xFuserLingBotVideoTransformer3DWrapper
    transformer.__class__ = type(wrapper.__name__, (wrapper, MODEL), {})
    transformer._install_usp_attention()
    return transformer


class LingBotVideo(SmallTransformer):
    """192 video tokens, then text."""

    latent_shape = (4, 3, 16, 16)  # C F R W
    text = 16
    sizes: ClassVar = {}

    def build(self) -> nn.Module:
        return wrapped(**self.sizes)

    def condition(self) -> dict[str, Any]:
        return {"encoder_hidden_states": self.noise(self.text, 16)}


class LingBotVideoMoE(LingBotVideo):
    """With experts."""

    sizes: ClassVar = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
