"""Small random transformers of xDiT's models, called through its wrappers as its pipelines call them.

Each is built once in a rank, then readied for every new runtime state. Latents go in and come out whole: models whose
pipelines slice rows have them sliced and gathered here. A family is imported when one of its models is asked for.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import ClassVar

from tests.small_transformers.base import STEPS, Pipeline, RowSliced, SmallTransformer

__all__ = ["FAMILIES", "MODELS", "STEPS", "Pipeline", "RowSliced", "SmallTransformer"]

FAMILIES = {
    "wan": ("Wan", "WanI2V", "WanTI2V", "WanA14B", "WanVACE"),
    "hunyuan": ("HunyuanVideo", "HunyuanVideo15", "HunyuanVideo15I2V", "HunyuanDiT"),
    "flux": ("Kontext", "FluxControl", "Klein"),
    "qwen": ("QwenEdit", "QwenEditPlus"),
    "z_image": ("ZImage", "ZImageSixHeads"),
    "cogvideox": ("CogVideoX", "ConsisID", "ConsisIDFace"),
    "pixart": ("PixArtSigma",),
    "latte": ("Latte",),
    "lumina": ("Lumina2",),
    "ltx": ("LTX2", "LTX2Gated"),
    "krea": ("Krea2", "Krea2Masked", "Krea2AllHeads"),
    "ideogram": ("Ideogram4", "Ideogram4Guided"),
    "minimax": ("MiniMaxH3", "MiniMaxH3Fused"),
    "cosmos": ("Cosmos3",),
    "sana": ("Sana",),
    "step_video": ("StepVideo",),
    "lingbot": ("LingBotVideo", "LingBotVideoMoE"),
}
"""Modules and their models."""


class _Models(Mapping[str, type[SmallTransformer]]):
    """Models by name."""

    _families: ClassVar = {name: family for family, names in FAMILIES.items() for name in names}

    def __getitem__(self, name: str) -> type[SmallTransformer]:
        return getattr(importlib.import_module(f"{__name__}.{self._families[name]}"), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._families)

    def __len__(self) -> int:
        return len(self._families)


MODELS = _Models()
