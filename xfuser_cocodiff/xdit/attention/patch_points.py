"""The sites of xDiT where the Ulysses exchange happens."""

import functools
from collections.abc import Callable

import torch

from xfuser_cocodiff.engine.attention.reshard import HEADS, SEQUENCE, reshard
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session import usp_versions
from xfuser_cocodiff.xdit.session.session import active

_USP = usp_versions.MODULE


def patches() -> list[Patch]:
    """Return the rows that put the exchange in place of functions that are known."""
    rows = [
        Patch(_USP, "_ft_c_input_all_to_all", "Q, K or V: sequence to heads", _single(HEADS, SEQUENCE), ("x",)),
        Patch(_USP, "_ft_c_output_all_to_all", "O: heads to sequence", _single(SEQUENCE, HEADS), ("x",)),
        Patch(_USP, "_combined_qkv_all_to_all", "Q, K and V in one message", _packed(_alike), ("q", "k", "v", "extra")),
        Patch(
            _USP, "_combined_gqa_qkv_all_to_all", "with fewer K/V heads", _packed(_grouped), ("q", "k", "v", "extra")
        ),
    ]
    return [row for row in rows if usp_versions.has(row.symbol)]


def fits(tensors: tuple[torch.Tensor, ...], dim: int, mesh: Mesh | None) -> bool:
    """Whether the exchange can take these tensors. What it leaves, stock handles or rejects in its own words.

    Depends on shapes and dtypes only, which are the same on every rank.
    """
    return mesh is not None and all(
        tensor.ndim == 4 and tensor.shape[dim] % mesh.topology.size == 0 and tensor.dtype == tensors[0].dtype
        for tensor in tensors
    )


def _single(scatter_dim: int, gather_dim: int) -> Callable[[Callable], Callable]:
    def replace(original: Callable) -> Callable:
        @functools.wraps(original)
        def all_to_all(x: torch.Tensor) -> torch.Tensor:
            mesh = active().mesh
            if not fits((x,), scatter_dim, mesh):
                return original(x)
            # Not every backend knows types of 8 bits, and none needs to.
            message = x.view(torch.uint8) if x.element_size() == 1 else x
            return reshard([message], scatter_dim, gather_dim, mesh)[0].view(x.dtype)

        return all_to_all

    return replace


def _packed(fit_together: Callable[..., bool]) -> Callable[[Callable], Callable]:
    def replace(original: Callable) -> Callable:
        @functools.wraps(original)
        def all_to_all(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extra: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            tensors, mesh = (q, k, v, *extra), active().mesh
            if not (fits(tensors, HEADS, mesh) and fit_together(*tensors)):
                return original(*tensors)
            return tuple(reshard(tensors, HEADS, SEQUENCE, mesh))

        return all_to_all

    return replace


def _alike(*tensors: torch.Tensor) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extra: torch.Tensor) -> bool:
    """Whether K and V may have fewer heads than Q: what else differs, stock rejects."""
    return q.shape[::3] == k.shape[::3] and _alike(k, v) and _alike(q, *extra)
