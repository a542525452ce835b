"""Branches of guidance in one call: the batch then has the same latents for each of them, one after the other."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from xfuser_cocodiff.xdit.layers.module_stack import named_arguments
from xfuser_cocodiff.xdit.layers.root_module import RootModule
from xfuser_cocodiff.xdit.platforms.platform import is_captured

LATENTS = ("hidden_states", "x")
"""Names of the argument that holds latents; the first that is present counts."""
_COUNTS = (2, 3)


class _Found(NamedTuple):
    """What is known of the branches in batches of one size."""

    branches: int
    doubted_since: int | None
    """Step at which the latents were compared, if they may be those of several prompts, which one seed makes equal in
    the first step only; None once that is known."""


class BatchedBranches:
    """Numbers of branches in the batches of one run."""

    def __init__(self) -> None:
        # Not by id: a rank may use one again, another not.
        self._found: weakref.WeakKeyDictionary[RootModule, dict[int, _Found]] = weakref.WeakKeyDictionary()

    def count(
        self, root: RootModule, args: tuple, kwargs: dict[str, Any], step: int, all_agree: Callable[[object], bool]
    ) -> int:
        """Return the number of branches in the batch of a call, 1 if there are none.

        It is found at the first call with each batch size, and confirmed in a later step. All ranks must call this.

        Args:
            root: the transformer.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            step: step of the run.
            all_agree: returns whether all ranks pass the same value; a rank may hold a part of the latents.
        """
        latents = latents_of(root, args, kwargs)
        if latents is None or len(latents) == 1 or is_captured():  # where the host cannot wait for the device
            return 1
        by_size = self._found.setdefault(root, {})
        found = by_size.get(len(latents))
        if found is None or (found.doubted_since is not None and found.doubted_since < step):
            count = count_branches(latents)
            if not all_agree(count) or (found and count != found.branches):
                count = 1
            by_size[len(latents)] = found = _Found(count, step if not found and count > 1 else None)
        return found.branches


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
