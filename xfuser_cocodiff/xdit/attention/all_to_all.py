"""Patches of xDiT's Ulysses all-to-alls."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from xfuser_cocodiff.engine.attention.reshard import HEADS, SEQUENCE, reshard
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session import usp_versions
from xfuser_cocodiff.xdit.session.session import active

_USP = usp_versions.MODULE
_runs_stock = False
"""Whether stock's own all-to-alls run at the moment."""


def patches() -> list[Patch]:
    """Return the patches of xDiT's all-to-all functions, except for those that are unknown."""
    rows = [
        Patch(
            _USP,
            "_ft_c_input_all_to_all",
            "Q, K or V: sequence-sharded to head-sharded",
            _single(HEADS, SEQUENCE),
            ("x",),
        ),
        Patch(_USP, "_ft_c_output_all_to_all", "O: head-sharded to sequence-sharded", _single(SEQUENCE, HEADS), ("x",)),
        Patch(
            _USP,
            "_combined_qkv_all_to_all",
            "Q, K and V in one message",
            _packed(_have_same_shape),
            ("q", "k", "v", "extra"),
        ),
        Patch(
            _USP,
            "_combined_gqa_qkv_all_to_all",
            "Q, K and V with fewer K/V heads in one message",
            _packed(_have_grouped_heads),
            ("q", "k", "v", "extra"),
        ),
    ]
    return [replace(row, condition=functools.partial(usp_versions.has, row.symbol)) for row in rows]


@contextlib.contextmanager
def stock() -> Iterator[None]:
    """Return a context in which stock's own all-to-alls run."""
    global _runs_stock
    _runs_stock = True
    try:
        yield
    finally:
        _runs_stock = False


def _mesh() -> Mesh | None:
    return None if _runs_stock else active().mesh


def is_supported(tensors: tuple[torch.Tensor, ...], dim: int, mesh: Mesh | None) -> bool:
    """Return whether the plugin's all-to-all supports these tensors; stock handles or rejects others.

    Depends only on shapes and dtypes, which are equal on every rank.
    """
    return mesh is not None and all(
        tensor.ndim == 4 and tensor.shape[dim] % mesh.topology.size == 0 and tensor.dtype == tensors[0].dtype
        for tensor in tensors
    )


def _single(scatter_dim: int, gather_dim: int) -> Callable[[Callable], Callable]:
    def replace(original: Callable) -> Callable:
        @functools.wraps(original)
        def all_to_all(x: torch.Tensor) -> torch.Tensor:
            mesh = _mesh()
            if not is_supported((x,), scatter_dim, mesh):
                return original(x)
            # Not every backend supports 8-bit types, and none has to.
            message = x.view(torch.uint8) if x.element_size() == 1 else x
            return reshard([message], scatter_dim, gather_dim, mesh)[0].view(x.dtype)

        return all_to_all

    return replace


def _packed(are_compatible: Callable[..., bool]) -> Callable[[Callable], Callable]:
    def replace(original: Callable) -> Callable:
        @functools.wraps(original)
        def all_to_all(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extra: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            tensors, mesh = (q, k, v, *extra), _mesh()
            if not (is_supported(tensors, HEADS, mesh) and are_compatible(*tensors)):
                return original(*tensors)
            return tuple(reshard(tensors, HEADS, SEQUENCE, mesh))

        return all_to_all

    return replace


def _have_same_shape(*tensors: torch.Tensor) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _have_grouped_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extra: torch.Tensor) -> bool:
    """Return whether shapes differ only in the number of heads of K and V; stock rejects other differences."""
    return q.shape[::3] == k.shape[::3] and _have_same_shape(k, v) and _have_same_shape(q, *extra)
