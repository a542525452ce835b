"""Replacement of the collectives inside xDiT's USP, to run schedules of other systems in xDiT's own transformers."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

Attention = Callable[..., tuple[torch.Tensor, ...]]
"""xDiT's attention function: O and more from Q, K and V, each (B, H, S, D)."""
RingAttention = Callable[[Attention, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]
"""O from the attention function, Q, K, V and the keyword arguments of the attention function."""


@dataclass(frozen=True)
class Collectives:
    """What USP does instead of stock's collectives; None keeps stock's."""

    exchange_inputs: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
    """Reshards tensors from sequence-sharded to head-sharded. It is given Q, K and V at once where they have the same
    shape, whatever the model does in stock."""
    exchange_output: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Reshards O from head-sharded to sequence-sharded."""
    ring_attention: RingAttention | None = None
    """Computes attention over K and V of all ranks of a ring."""
    combined: bool | None = None
    """Whether stock's collective sends Q, K and V of the same shape in one message; None leaves it to the model."""


@contextmanager
def replace_collectives(collectives: Collectives) -> Iterator[None]:
    """Return a context in which USP uses other collectives.

    USP itself stays, because models hold it: its globals and the default of an argument are replaced. The plugin's
    session must be inactive, as stock runs.
    """
    from xfuser.model_executor.layers import usp

    with ExitStack() as stack:
        for name, replacement in _replacements(collectives, usp):
            stack.enter_context(mock.patch.object(usp, name, replacement))
        if collectives.exchange_inputs or collectives.combined:
            stock = inspect.unwrap(usp.USP)
            parameters = inspect.signature(stock).parameters.values()
            defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
            combining = tuple({**defaults, "combine_qkv_a2a": True}.values())
            stack.enter_context(mock.patch.object(stock, "__defaults__", combining))
        yield


def ulysses_group() -> torch.distributed.ProcessGroup:
    """Return the Ulysses group of this rank."""
    from yunchang.globals import PROCESS_GROUP

    return PROCESS_GROUP.ULYSSES_PG


def ring_group() -> torch.distributed.ProcessGroup:
    """Return the ring of this rank."""
    from yunchang.globals import PROCESS_GROUP

    return PROCESS_GROUP.RING_PG


def _replacements(collectives: Collectives, usp: Any) -> Iterator[tuple[str, Callable]]:
    """Return the functions of USP's module to replace, by name."""
    single = usp._ft_c_input_all_to_all
    if collectives.combined is False:
        yield "_combined_qkv_all_to_all", lambda *tensors: tuple(map(single, tensors))
        yield "_combined_gqa_qkv_all_to_all", lambda *tensors: tuple(map(single, tensors))
    if exchange := collectives.exchange_inputs:

        def combined(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extra: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            return (*exchange([q, k, v]), *map(single, extra))

        yield "_ft_c_input_all_to_all", lambda x: exchange([x])[0]
        yield "_combined_qkv_all_to_all", combined
        yield "_combined_gqa_qkv_all_to_all", combined
    if collectives.exchange_output:
        yield "_ft_c_output_all_to_all", collectives.exchange_output
    if ring_attention := collectives.ring_attention:

        def ring_attn(
            function: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
        ) -> torch.Tensor:
            return ring_attention(function, query, key, value, options)

        yield "ring_attn", ring_attn
