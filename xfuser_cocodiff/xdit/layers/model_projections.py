"""The table of V-First: the projections that V comes from in an attention module, and how V is built of their outputs.

Whether a call builds V so is decided by structure alone: which projections ran, shapes, memory, version counters. A V
that is a view of a projection needs no more. A V that was copied on the way does: its processor must be in the table,
with the same source code.
"""

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from xfuser_cocodiff.xdit.patching import host, symbol_lookup

Columns = Literal["all", "after Q and K", "after Q and K of each head"]
"""Columns of a projection's output that are V's."""
Tokens = Literal["all", "first", "last"]
"""Tokens that are V's: all, or the first or last ones, as many as there are hidden states."""


class Source(NamedTuple):
    """Projections of V in an attention module, as names of submodules."""

    path: str
    """Projection of the hidden states."""
    text_path: str | None = None
    """Projection of the text in joint attention, where the module has one."""
    columns: Columns = "all"
    query_path: str | None = None
    """Projection of Q, where V has a projection of its own."""


class Copied(NamedTuple):
    """How a processor of xDiT copies V."""

    processor: str
    """Name of its class."""
    digest: str
    """Digest of the source code for which this was tested."""
    text: Literal["in front", "behind"] | None = None
    """Where the text's tokens are, if there is a text."""
    repeats_heads: bool = False
    """Whether it repeats heads for grouped-query attention, and does not zero-pad them."""


PROJECTIONS = (
    Source("to_qkv_mlp_proj", columns="after Q and K"),  # single blocks of FLUX.2
    Source("to_qkv", "to_added_qkv", "after Q and K"),  # diffusers' modules with fused projections, MiniMax-H3
    Source("wqkv", columns="after Q and K of each head"),  # StepVideo
    Source("to_v", "add_v_proj", query_path="to_q"),  # all others
)
"""Known projections; a module uses the first row whose `path` it has."""
PROCESSORS = (
    Copied("xFuserFluxAttnProcessor", "c023792ee8225d7d", "in front"),
    Copied("xFuserFlux2AttnProcessor", "7e2d4886fc410e3f", "in front"),
    Copied("xFuserQwenDoubleStreamAttnProcessor", "80aad2b2ffeda8e4", "in front"),
    Copied("xFuserQwenDoubleStreamAttnProcessor", "cfef633e2fbf1293", "in front"),  # with the series in patches/
    Copied("xFuserHunyuanVideoAttnProcessor", "b54682f419622782", "behind"),
    Copied("xFuserHunyuanVideo15AttnProcessor", "ced3f8c2069b6b87", "behind"),
    Copied("xFuserCosmos3AttnProcessor", "7e65903f8053fc12", "behind"),
    Copied("xFuserKrea2AttnProcessor", "8d81ec9cd46ccfc4", repeats_heads=True),
    Copied("xFuserZSingleStreamAttnProcessor", "87b25b1362a9a12a"),
)
"""Processors that copy V; tests compare the bits of each."""


def find_source(module: nn.Module) -> Source | None:
    """Return the projections of V in an attention module; None where the table has no row for it."""
    return next((row for row in PROJECTIONS if row.path in projections_of(module)), None)


def projections_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules of an attention module by name: xDiT's wrappers hold the module of diffusers."""
    return dict((module._modules.get("module") or module).named_children())


def find_copied(processor: Any) -> Copied | None:
    """Return how a processor copies V; None where the table does not have it, or has another version of it.

    With PipeFusion, processors join V with that of other patches, which they keep from earlier steps.
    """
    module, name = type(processor).__module__, type(processor).__name__
    rows = [] if host.has_patches() else [row for row in PROCESSORS if row.processor == name]
    return next((row for row in rows if row.digest == symbol_lookup.source_digest(module, f"{name}.__call__")), None)


class Projection(NamedTuple):
    """A projection that has run."""

    argument: str | None
    """Name of its input among the arguments of the module; None where that is unknown."""
    input: torch.Tensor
    output: torch.Tensor
    version: int
    """Version counter of the output when it was computed."""

    @property
    def is_written(self) -> bool:
        """Whether the output has been written since."""
        return self.output._version != self.version


@dataclass(frozen=True)
class Recipe:
    """How V, shape (B, H, S, D), is built: V's columns of each projection, joined along the sequence; some of the
    tokens; heads repeated for grouped-query attention; then zero-padded heads. It holds for any number of tokens."""

    arguments: Mapping[str, str]
    """Name of the input of each projection, by path, in the order of their tokens."""
    columns: Columns
    tokens: Tokens
    heads: int
    """Heads of V."""
    head_dim: int
    repeats: int = 1
    """Number of Q heads that share a head of V."""
    is_view: bool = True
    """Whether V is a view of the projection."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Projections, in the order of their tokens."""
        return tuple(self.arguments)

    def build(self, projections: Mapping[str, Projection], num_hidden: int) -> torch.Tensor:
        """Return V, built from projections by path and the number of hidden states.

        Raises:
            RuntimeError: shapes do not fit the recipe; also IndexError and ValueError.
        """
        parts = [self._v_heads(projections[path].output) for path in self.arguments]
        joint = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if self.tokens != "all":
            joint = joint.narrow(1, joint.shape[1] - num_hidden if self.tokens == "last" else 0, num_hidden)
        value = joint.transpose(1, 2)
        if self.repeats > 1:
            value = value.repeat_interleave(self.repeats, 1)
        missing = self.heads - value.shape[1]
        return torch.cat([value, value.new_zeros(value.shape[0], missing, *value.shape[2:])], 1) if missing else value

    def fits(self, value: torch.Tensor, projections: Mapping[str, Projection], num_hidden: int) -> bool:
        """Return whether V may be built so: by its shape and dtype, and where it is a view, by its place in memory."""
        with contextlib.suppress(RuntimeError, IndexError, ValueError):  # shapes that do not fit
            built = self.build(projections, num_hidden)
            is_same_kind = built.shape == value.shape and built.dtype == value.dtype
            return is_same_kind and (not self.is_view or _place(built) == _place(value))
        return False

    def _v_heads(self, output: torch.Tensor) -> torch.Tensor:
        """Return V in a projection's output, shape (B, S, heads, D), as a view."""
        output = output.unsqueeze(0) if output.ndim == 2 else output  # Cosmos3 has no batch dim
        if self.columns == "after Q and K of each head":
            return output.unflatten(-1, (-1, 3 * self.head_dim)).narrow(-1, 2 * self.head_dim, self.head_dim)
        width = self.heads * self.head_dim
        columns = output if self.columns == "all" else output.narrow(-1, 2 * width, width)
        return columns.unflatten(-1, (-1, self.head_dim))


def find_recipe(
    value: torch.Tensor, source: Source, processor: Any, projections: Mapping[str, Projection], num_hidden: int
) -> Recipe | None:
    """Return how V was built from projections; None where that is unknown. No values are read.

    Args:
        value: V, shape (B, H, S, D).
        source: projections of the module.
        processor: of the module.
        projections: those that have run, by path.
        num_hidden: number of hidden states.
    """
    arguments = {path: each.argument for path, each in projections.items() if each.argument and not each.is_written}
    if source.path not in arguments:
        return None
    own, text = ({path: arguments[path]} if path in arguments else {} for path in (source.path, source.text_path))
    of = functools.partial(Recipe, columns=source.columns, heads=value.shape[1], head_dim=value.shape[3])
    recipes = [of(own, tokens=tokens) for tokens in ("all", "first", "last")]  # some cut off the text's V
    if copied := find_copied(processor):
        repeats = value.shape[1] * value.shape[3] // projections[source.path].output.shape[-1]
        of = functools.partial(of, tokens="all", repeats=repeats if copied.repeats_heads else 1, is_view=False)
        recipes += [of(text | own if copied.text == "in front" else own | text), of(own)]
    return next((recipe for recipe in recipes if recipe.fits(value, projections, num_hidden)), None)


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Return where a tensor lies in memory. Dims of size 1 have any stride."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr(), tuple(stride for size, stride in strides if size > 1)
