"""Where an attention module's V comes from: found by comparing what reaches USP with what the module's parts return."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Called:
    """One call of a part of an attention module."""

    path: str
    """The part's name inside the module."""
    given: torch.Tensor
    returned: torch.Tensor


@dataclass(frozen=True)
class Piece:
    """Columns of what a projection returns, (B, S, C), or (S, C) for one sample."""

    path: str
    column: int
    columns: int
    width: int = 0
    """Columns that each head has in the projection, among which these are; 0 where those of all heads lie together."""

    def of(self, returned: torch.Tensor) -> torch.Tensor:
        """The columns of what the projection returns, (B, S, columns)."""
        if not self.width:
            return returned.narrow(-1, self.column, self.columns)
        heads = returned.unflatten(-1, (-1, self.width))
        return heads.narrow(-1, self.column, self.columns // heads.shape[-2]).flatten(-2)


@dataclass(frozen=True)
class Recipe:
    """How V, (B, H, S, D), is put together: pieces along the sequence, of which a part counts, each head so many times,
    and heads of zeros."""

    pieces: tuple[Piece, ...]
    first_token: int
    shape: tuple[int, ...]
    """Of V."""
    repeats: int = 1
    """Of each head, where several heads of Q share one."""

    @property
    def paths(self) -> set[str]:
        """The projections."""
        return {piece.path for piece in self.pieces}

    def build(self, returned: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """V from what the projections return.

        Args:
            returned: by path.

        Raises:
            RuntimeError, IndexError, ValueError: their shapes are not those of the recipe.
        """
        _, heads, tokens, head_dim = self.shape
        columns = [piece.of(_batched(returned(piece.path))) for piece in self.pieces]
        joint = torch.cat(columns, 1) if len(columns) > 1 else columns[0]
        value = joint.narrow(1, self.first_token, tokens).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        if self.repeats > 1:
            value = value.repeat_interleave(self.repeats, 1)
        missing = heads - value.shape[1]
        return torch.cat([value, value.new_zeros(value.shape[0], missing, *value.shape[2:])], 1) if missing else value


def find_recipe(value: torch.Tensor, calls: Sequence[Called]) -> Recipe | None:
    """How a value came from the calls of the parts; None where it did not, or in a way that is not known here."""
    returned = {called.path: _batched(called.returned) for called in calls}
    for pieces in _arrangements(value, calls):
        tokens = sum(returned[piece.path].shape[1] for piece in pieces)
        first_tokens = {0, tokens - value.shape[2]}  # some models project text too, and cut it off
        for first_token, repeats in itertools.product(first_tokens, _repeats(value, pieces)):
            recipe = Recipe(pieces, first_token, tuple(value.shape), repeats)
            if torch.equal(recipe.build(returned.__getitem__), value):
                return recipe
    return None


def _batched(returned: torch.Tensor) -> torch.Tensor:
    """What a projection returns, with a dim for samples."""
    return returned.unsqueeze(0) if returned.ndim == 2 else returned


def _repeats(value: torch.Tensor, pieces: tuple[Piece, ...]) -> set[int]:
    """How often each head of some pieces may be in a value."""
    heads = pieces[0].columns // value.shape[3]
    return {1} if value.shape[1] % heads else {1, value.shape[1] // heads}


def _arrangements(value: torch.Tensor, calls: Sequence[Called]) -> Iterator[tuple[Piece, ...]]:
    """Pieces, alone and in pairs, that are large enough to be the value."""
    tokens = value.shape[2]
    pieces = list(_pieces(value, calls))
    for piece, length in pieces:
        if length >= tokens:
            yield (piece,)
    for first, length in pieces:
        for second, other_length in pieces:
            alike = first.columns == second.columns
            if alike and first.path != second.path and length + other_length == tokens:
                yield first, second


def _pieces(value: torch.Tensor, calls: Sequence[Called]) -> Iterator[tuple[Piece, int]]:
    """Pieces that may hold some of the value, with their tokens; those of outer parts first."""
    batch, heads, _, head_dim = value.shape
    for called in sorted(calls, key=lambda called: called.path.count(".")):
        sizes = _batched(called.returned).shape
        if len(sizes) != 3 or sizes[0] != batch or called.returned.dtype != value.dtype:
            continue
        if sizes[2] <= heads * head_dim and sizes[2] % head_dim == 0:
            yield Piece(called.path, 0, sizes[2]), sizes[1]
        if sizes[2] >= 3 * heads * head_dim:  # Q, K and V in one projection
            yield Piece(called.path, 2 * heads * head_dim, heads * head_dim), sizes[1]
        if sizes[2] == 3 * heads * head_dim:  # or those of one head, then of the next one
            yield Piece(called.path, 2 * head_dim, heads * head_dim, 3 * head_dim), sizes[1]
