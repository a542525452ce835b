"""The projections that V comes from in an attention module, and how V is built from their outputs."""

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Columns = Literal["all", "after Q and K", "after Q and K of each head"]
"""Columns of a projection's output that are V's."""
Tokens = Literal["all", "first", "last"]
"""Tokens that are V's: all, or the first or last ones, as many as there are hidden states."""


@dataclass(frozen=True)
class Source:
    """Projections of V in an attention module, as paths of submodules."""

    path: str
    """Projection of the hidden states."""
    text_path: str | None = None
    """Projection of the text in joint attention, where the module has one."""
    columns: Columns = "all"
    query_path: str | None = None
    """Projection of Q, where V has a projection of its own."""


TABLE = (
    Source("to_qkv_mlp_proj", columns="after Q and K"),  # single blocks of FLUX.2
    Source("to_qkv", "to_added_qkv", "after Q and K"),  # diffusers' modules with fused projections, MiniMax-H3
    Source("wqkv", columns="after Q and K of each head"),  # StepVideo
    Source("to_v", "add_v_proj", query_path="to_q"),  # all others
)
"""Known projections; a module uses the first row whose `path` it has."""
PREFIXES = ("", "module.")
"""Prefixes of the paths: xDiT's wrappers hold the module of diffusers."""


def find_source(module: nn.Module) -> Source | None:
    """Return the projections of V in an attention module, with full paths; None where the table has no row for it."""
    paths = {path for path, _ in module.named_modules()}
    for prefix, row in itertools.product(PREFIXES, TABLE):
        if prefix + row.path in paths:
            text_path, query_path = (
                prefix + name if name and prefix + name in paths else None for name in (row.text_path, row.query_path)
            )
            return Source(prefix + row.path, text_path, row.columns, query_path)
    return None


@dataclass(frozen=True)
class Recipe:
    """How V, shape (B, H, S, D), is built: V's columns of each projection, joined along the sequence; some of the
    tokens; heads repeated for grouped-query attention; then zero-padded heads. It holds for any number of tokens."""

    paths: tuple[str, ...]
    """Projections, in the order of their tokens."""
    columns: Columns
    tokens: Tokens
    heads: int
    """Heads of V."""
    head_dim: int
    repeats: int = 1
    """Number of Q heads that share a head of V."""

    def build(self, outputs: Mapping[str, torch.Tensor], num_hidden: int) -> torch.Tensor:
        """Return V, built from the outputs of projections by path and the number of hidden states.

        Raises:
            RuntimeError: shapes do not fit the recipe; also IndexError and ValueError.
        """
        parts = [self._v_columns(_with_batch_dim(outputs[path])) for path in self.paths]
        joint = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if self.tokens != "all":
            joint = joint.narrow(1, joint.shape[1] - num_hidden if self.tokens == "last" else 0, num_hidden)
        value = joint.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.repeats > 1:
            value = value.repeat_interleave(self.repeats, 1)
        missing = self.heads - value.shape[1]
        return torch.cat([value, value.new_zeros(value.shape[0], missing, *value.shape[2:])], 1) if missing else value

    def is_in_place(self, value: torch.Tensor, outputs: Mapping[str, torch.Tensor], num_hidden: int) -> bool:
        """Return whether V is a view of the projections' outputs."""
        built = self.build(outputs, num_hidden)
        return (built.data_ptr(), built.stride()) == (value.data_ptr(), value.stride())

    def _v_columns(self, output: torch.Tensor) -> torch.Tensor:
        """Return the columns of V in a projection's output, shape (B, S, columns)."""
        heads, head_dim = self.heads, self.head_dim
        if self.columns == "after Q and K":
            return output.narrow(-1, 2 * heads * head_dim, heads * head_dim)
        if self.columns == "after Q and K of each head":
            return output.unflatten(-1, (-1, 3 * head_dim)).narrow(-1, 2 * head_dim, head_dim).flatten(-2)
        return output


def find_recipes(
    value: torch.Tensor, columns: Columns, outputs: Mapping[str, torch.Tensor], num_hidden: int
) -> list[Recipe]:
    """Return all recipes that build a bit-identical V from outputs of projections; several fit equal values, as zeros.

    Args:
        value: V, shape (B, H, S, D).
        columns: columns of the outputs that are V's.
        outputs: of the projections, by path.
        num_hidden: number of hidden states.
    """
    (_, heads, tokens, head_dim), recipes = value.shape, []
    for count in range(1, len(outputs) + 1):  # V may come from fewer projections than there are
        for paths in itertools.permutations(outputs, count):
            has_all = sum(_with_batch_dim(outputs[path]).shape[1] for path in paths) == tokens
            kept: tuple[Tokens, ...] = ("all",) if has_all else ("first", "last")  # some models cut off the text's V
            if count > 1 and not has_all:
                continue  # fewer projections suffice
            width = outputs[paths[0]].shape[-1] if columns == "all" else heads * head_dim
            repeats = {1, max(heads * head_dim // width, 1)}  # 1 where heads are zero-padded
            for part, repeat in itertools.product(kept, repeats):
                recipe = Recipe(paths, columns, part, heads, head_dim, repeat)
                with contextlib.suppress(RuntimeError, IndexError, ValueError):  # shapes that do not fit
                    if torch.equal(recipe.build(outputs, num_hidden), value):
                        recipes.append(recipe)
    return recipes


def _with_batch_dim(output: torch.Tensor) -> torch.Tensor:
    """Return the output of a projection as (B, S, columns)."""
    return output.unsqueeze(0) if output.ndim == 2 else output
