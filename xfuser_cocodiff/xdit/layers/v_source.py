"""Where an attention module's V comes from: a table of projections, and how V is put together from what they return."""

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Columns = Literal["all", "third third", "third third of each head"]
"""Which columns of what a projection returns are V's."""


@dataclass(frozen=True)
class Source:
    """The projections that V comes from."""

    own: str
    """Submodule that projects V of the hidden states."""
    of_text: str | None = None
    """Submodule that projects V of a text beside them, where the module has one."""
    columns: Columns = "all"
    query: str | None = None
    """Submodule that projects Q, where V has a projection of its own."""


TABLE = (
    Source("to_qkv_mlp_proj", columns="third third"),  # single blocks of FLUX.2
    Source("to_qkv", "to_added_qkv", "third third"),  # diffusers' modules whose projections were fused, MiniMax-H3
    Source("wqkv", columns="third third of each head"),  # StepVideo
    Source("to_v", "add_v_proj", query="to_q"),  # all others
)
"""The first counts whose own projection a module has."""
INSIDE = ("", "module.")
"""Where that is looked for: xDiT's wrappers hold diffusers' module."""


def source_of(module: nn.Module) -> Source | None:
    """The row of the table that an attention module goes by, with paths in that module; None where it has none."""
    paths = {path for path, _ in module.named_modules()}
    for prefix, row in itertools.product(INSIDE, TABLE):
        if prefix + row.own in paths:
            of_text, query = (
                prefix + name if name and prefix + name in paths else None for name in (row.of_text, row.query)
            )
            return Source(prefix + row.own, of_text, row.columns, query)
    return None


@dataclass(frozen=True)
class Recipe:
    """How V, (B, H, S, D), is put together: projections along the sequence, of which a part counts, each head so many
    times, and heads of zeros."""

    paths: tuple[str, ...]
    """The projections, in the order in which their tokens lie."""
    columns: Columns
    first_token: int
    shape: tuple[int, ...]
    """Of V."""
    repeats: int = 1
    """Of each head, where several heads of Q share one."""

    def build(self, returned: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """V from what the projections return, by path.

        Raises:
            RuntimeError, IndexError, ValueError: their shapes are not those of the recipe.
        """
        _, heads, tokens, head_dim = self.shape
        parts = [self._own(_batched(returned[path])) for path in self.paths]
        joint = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        value = joint.narrow(1, self.first_token, tokens).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        if self.repeats > 1:
            value = value.repeat_interleave(self.repeats, 1)
        missing = heads - value.shape[1]
        return torch.cat([value, value.new_zeros(value.shape[0], missing, *value.shape[2:])], 1) if missing else value

    def is_in_place(self, value: torch.Tensor, returned: Mapping[str, torch.Tensor]) -> bool:
        """Whether V lies where the projections have put it."""
        built = self.build(returned)
        return (built.data_ptr(), built.stride()) == (value.data_ptr(), value.stride())

    def _own(self, returned: torch.Tensor) -> torch.Tensor:
        """V's columns."""
        _, heads, _, head_dim = self.shape
        if self.columns == "third third":
            return returned.narrow(-1, 2 * heads * head_dim, heads * head_dim)
        if self.columns == "third third of each head":
            return returned.unflatten(-1, (-1, 3 * head_dim)).narrow(-1, 2 * head_dim, head_dim).flatten(-2)
        return returned


def find_recipes(value: torch.Tensor, columns: Columns, returned: Mapping[str, torch.Tensor]) -> list[Recipe]:
    """All ways in which a value may have come from what projections returned, bit for bit: several of values that are
    equal, such as zeros."""
    shape, found = tuple(value.shape), []
    for count in range(1, len(returned) + 1):  # text that goes another way is not needed
        for paths in itertools.permutations(returned, count):
            lengths = [_batched(returned[path]).shape[1] for path in paths]
            tokens = sum(lengths)
            width = returned[paths[0]].shape[-1] if columns == "all" else shape[1] * shape[3]
            first_tokens = {0, tokens - shape[2]}  # some models project text too, and cut it off
            repeats = {1, max(shape[1] * shape[3] // width, 1)}  # or heads of zeros follow
            for first_token, often in itertools.product(first_tokens, repeats):
                if count > 1 and not (first_token < lengths[0] and first_token + shape[2] > tokens - lengths[-1]):
                    continue  # fewer paths are enough
                recipe = Recipe(paths, columns, first_token, shape, often)
                with contextlib.suppress(RuntimeError, IndexError, ValueError):  # shapes that do not fit
                    if torch.equal(recipe.build(returned), value):
                        found.append(recipe)
    return found


def _batched(returned: torch.Tensor) -> torch.Tensor:
    """What a projection returns, with a dim for samples."""
    return returned.unsqueeze(0) if returned.ndim == 2 else returned
