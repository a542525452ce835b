"""Provides full-size diffusion transformers: dimensions, layers, and how their pipelines call them.

Dimensions in `models.json` come from `transformer/config.json` of the weights on Hugging Face; those of all but SD3.5
equal the defaults of diffusers 0.42.1, and a test compares them. Layers are recorded; see :mod:`layers`.
"""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from xfuser_cocodiff.tools.simulation.layers import BYTES_PER_VALUE, LayerKind

PIXELS_PER_TOKEN = 16
"""Pixels per side of a token: all models have a VAE of factor 8 and patches of 2x2 latents."""
_VIDEO_COLUMNS = 32
"""Divisor of a video's width in pixels: 16:9 rounded down to it gives 832 x 480, 960 x 544 and 1280 x 720."""
_FRAMES_PER_LATENT = 4
"""Frames per latent frame after the first, in both video models."""


@dataclass(frozen=True)
class Workload:
    """Dimensions of a transformer, and how its pipeline calls it."""

    name: str
    kinds: tuple[LayerKind, ...]
    """Layers with attention."""
    heads: int
    head_dim: int
    text_tokens: int
    """Text tokens in the joint sequence."""
    image_rule: str
    """How xDiT handles image tokens that are not divisible by the degree; see :mod:`sharding`."""
    text_rule: str
    """How it handles text tokens."""
    cross_text_tokens: int = 0
    """Text tokens outside of the sequence, to which cross-attention attends."""
    frames: int | None = None
    """Frames of a video; None for images."""
    calls: int = 1
    """Sequential calls per step: 2 where guidance needs a second call."""
    rows_per_image: int = 1
    """Batch rows per image: 2 where guidance is batched."""
    combines_qkv: bool = False
    """Whether stock xDiT sends Q, K and V in one all-to-all; else in three."""

    @classmethod
    def from_json(cls, name: str, values: dict[str, Any]) -> "Workload":
        """Return the model of an entry of the table."""
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        return cls(name, **known, kinds=tuple(LayerKind.of(name, *each) for each in values["layers"].items()))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(kind.count for kind in self.kinds)

    @property
    def width(self) -> int:
        """Number of channels of a token."""
        return self.heads * self.head_dim

    @property
    def latent_frames(self) -> int:
        """Frames after the VAE; 1 for images."""
        return (self.frames - 1) // _FRAMES_PER_LATENT + 1 if self.frames else 1

    def size(self, resolution: int) -> tuple[int, int]:
        """Return width and height in pixels: a square image, or a video of 16:9 with `resolution` rows."""
        if self.frames is None:
            return resolution, resolution
        return resolution * 16 // 9 // _VIDEO_COLUMNS * _VIDEO_COLUMNS, resolution

    def image_tokens(self, resolution: int) -> int:
        """Return the number of image tokens, of all frames of a video."""
        width, height = (pixels // PIXELS_PER_TOKEN for pixels in self.size(resolution))
        return width * height * self.latent_frames

    def tokens(self, resolution: int) -> int:
        """Return the length of the sequence."""
        return self.image_tokens(resolution) + self.text_tokens

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of all linear layers in bf16: 96 to 100 % of the model."""
        works = ((kind.count, work) for kind in self.kinds for work in kind.parts)
        values = sum(count * each.inputs * each.outputs for count, work in works for each in work.linear)
        return BYTES_PER_VALUE * values * self.width**2

    def attention_flops(self, tokens: float, attended: float, heads: float) -> float:
        """Return the FLOPs of attention in one layer: the scores and their product with V.

        Args:
            tokens: number of queries.
            attended: number of tokens that each query attends to.
            heads: number of heads.
        """
        return 4.0 * tokens * attended * heads * self.head_dim


_TABLE = json.loads(Path(__file__).with_name("models.json").read_text())
WORKLOADS = {name: Workload.from_json(name, values) for name, values in _TABLE.items()}
"""Models by name."""
ALIASES = {alias: name for name, values in _TABLE.items() for alias in values["aliases"]}
"""Other names of models."""


def find_workload(name: str) -> Workload:
    """Return a model by name, alias or identifier on Hugging Face; capitals, dashes and underscores do not matter.

    Raises:
        ValueError: an unknown model.
    """
    known = {_plain(each): WORKLOADS[ALIASES.get(each, each)] for each in (*WORKLOADS, *ALIASES)}
    if (plain := _plain(name.rpartition("/")[2])) not in known:
        raise ValueError(f"--model {name!r} is not valid; valid are {', '.join((*WORKLOADS, *ALIASES))}")
    return known[plain]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
