"""What small pipelines have in common."""

from typing import Any

import torch
from xfuser.config import EngineConfig

PROMPT, NEGATIVE_PROMPT = "a photo of a cat", "old coins"


class SmallPipeline:
    """A pipeline and how it is called."""

    pipeline: Any
    """What the runtime state is made of."""

    def __init__(self, config: EngineConfig) -> None:
        raise NotImplementedError

    def run(self, steps: int) -> list[torch.Tensor]:
        """Denoise; what it returns on this rank, if anything."""
        raise NotImplementedError


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Noise that is the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
