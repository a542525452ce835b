"""Branches of guidance in one call: the batch then has the same latents for each of them, one after the other."""

from dataclasses import dataclass
from typing import Any

import torch

from xfuser_cocodiff.xdit.layers.module_stack import named_arguments
from xfuser_cocodiff.xdit.layers.root_module import RootModule

LATENTS = ("hidden_states", "x")
"""Names of the argument that holds latents; the first that is present counts."""
_COUNTS = (2, 3)


@dataclass(frozen=True)
class BatchedBranches:
    """What is known of the branches in batches of one size."""

    count: int
    """Number of branches; 1 if there are none."""
    step: int
    """Step of the run at which the latents were compared last."""
    is_doubtful: bool
    """Whether the latents may be those of several prompts, which one seed makes equal in the first step only."""


def latents_of(root: RootModule, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the latents of a transformer's call, (B, ...); None where no tensor is known to hold them."""
    given = named_arguments(root.transformer, args, kwargs)
    latents = next((given[name] for name in LATENTS if name in given), None)
    return latents if torch.is_tensor(latents) else None


def count_branches(latents: torch.Tensor) -> int:
    """Return the number of branches in a batch of latents (B, ...): 1 unless its parts are bit-identical.

    The host waits for the device.
    """
    for count in _COUNTS:
        if len(latents) % count == 0:
            first, *others = latents.chunk(count)
            if all(torch.equal(first, other) for other in others):
                return count
    return 1
