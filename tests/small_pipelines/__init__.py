"""Small pipelines with random weights, whose loops are those of their models.

Those in :data:`PIPELINES` are built once in a rank, for stock's configuration, and get a new runtime state for every
other one; those of Wan are written to where xDiT's runner finds them.
"""

import importlib
from typing import Any

from tests.small_pipelines.base import SmallPipeline

__all__ = ["PIPELINES", "SmallPipeline", "build"]

PIPELINES = {
    "MiniMaxH3": "minimax",
    "MiniMaxH3Ref2VA": "minimax",
    "LingBotVideo": "lingbot",
    "LingBotVideoMoE": "lingbot",
    "SD3": "stable_diffusion_3",
    "PixArtAlpha": "pixart_alpha",
}
"""Their modules, which are imported when one of theirs is asked for."""


def build(name: str, config: Any) -> SmallPipeline:
    """A pipeline for a configuration of xDiT's engine."""
    return getattr(importlib.import_module(f"{__name__}.{PIPELINES[name]}"), name)(config)
