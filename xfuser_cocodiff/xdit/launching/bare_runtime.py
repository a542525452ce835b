"""xDiT's groups and runtime state without a pipeline, for benchmarks that run its functions on tensors of their own."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.comm.groups import set_timeout
from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.run_tracking import stock_traffic
from xfuser_cocodiff.xdit.session.session import Session


def start(timeout: float | None = None, ring: int = 1) -> dist.ProcessGroup:
    """Make the ranks that a launcher started one sequence, and return their group.

    Args:
        timeout: seconds that a collective may take; torch's default when not given.
        ring: ring degree; the rest are Ulysses groups of neighbouring ranks.

    Raises:
        ValueError: no launcher started this process as a rank, or the degree does not divide their number.
    """
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"{', '.join(missing)} not set: this command runs on every rank, under torchrun or "
            "scripts/emulated_cluster.sh"
        )
    from xfuser.core.distributed import init_distributed_environment, initialize_model_parallel

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ring < 1 or world % ring:
        raise ValueError(f"--ring {ring} is not valid; valid are divisors of the {world} ranks")
    activation.activate()  # stock's turns too name a rank that is lost
    init_distributed_environment(rank=rank, world_size=world, local_rank=launcher.local_rank(os.environ))
    initialize_model_parallel(sequence_parallel_degree=world, ulysses_degree=world // ring, ring_degree=ring)
    group, *parts = [dist.group.WORLD, *process_groups()]
    if timeout:
        for each in (group, *parts):
            set_timeout(each, timedelta(seconds=timeout))
    return group


def process_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The Ulysses group and the ring that this rank is in."""
    from yunchang.globals import PROCESS_GROUP

    return PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG


def init_runtime_state(heads: int, text_tokens: int) -> None:
    """Put a runtime state in force under which xDiT runs on this world.

    Args:
        heads: attention heads of the model.
        text_tokens: tokens of its text.
    """
    from xfuser import xFuserArgs
    from xfuser.core.distributed import get_runtime_state, initialize_runtime_state

    transformer = SimpleNamespace(config=SimpleNamespace(num_attention_heads=heads))
    ulysses, ring = (group.size() for group in process_groups())
    engine_config, _ = xFuserArgs(model="benchmark", ulysses_degree=ulysses, ring_degree=ring).create_config()
    initialize_runtime_state(SimpleNamespace(transformer=transformer), engine_config)
    get_runtime_state().max_condition_sequence_length = text_tokens


def use_session(session: Session) -> None:
    """Run xDiT's exchanges as a session has them from here on; `Session()` leaves them to stock xDiT."""
    from xfuser.core.distributed.runtime_state import _RUNTIME

    if session.config or session.mesh:
        activation.activate()
    _RUNTIME.cocodiff = session
    session.select_kernels()


def stock_all_to_all() -> Callable[[torch.Tensor], torch.Tensor]:
    """xDiT's own exchange of one tensor: (B, H, S/P, D) to (B, H/P, S, D)."""
    from xfuser.model_executor.layers import usp

    exchange = usp._ft_c_input_all_to_all
    return getattr(exchange, "__wrapped__", exchange)


def count_stock_traffic() -> None:
    """Count stock's collectives as the plugin's are, from here on, and time them when those are timed."""
    from xfuser.model_executor.layers import usp

    usp._sdpa_all_to_all_single = stock_traffic.watch_all_to_all(usp._sdpa_all_to_all_single)


@contextmanager
def without_communication() -> Iterator[None]:
    """Context in which stock's all-to-alls and rings return what they were given: a step without them, but with what
    comes together at its end."""
    from torch.distributed.tensor.experimental import _attention
    from xfuser.model_executor.layers import usp

    ring = sys.modules[_attention._templated_ring_attention.__module__]
    with (
        mock.patch.object(usp, "_sdpa_all_to_all_single", torch.clone),
        mock.patch.object(ring, "_create_rotater", lambda *_: _NoRotation()),
    ):
        yield


class _NoRotation:
    """In the place of what passes K and V on: they stay."""

    def exchange_buffers(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def next_buffer(self) -> torch.Tensor:
        return self._buffer


def compile_transformer(transformer: torch.nn.Module) -> torch.nn.Module:
    """A transformer as xDiT's runner compiles it."""
    from xfuser.model_executor.models.runner_models.base_model import xFuserModel

    xFuserModel._enable_compute_comm_overlap(None)
    return torch.compile(transformer)


def flux_transformer(width: int, heads: int, depth: int, text_width: int) -> torch.nn.Module:
    """A FLUX.1 transformer in xDiT's wrapper, with random weights that are the same on every rank.

    Args:
        width: of the image and text streams; a multiple of 2 * `heads`.
        heads: attention heads.
        depth: layers; a third of them are double blocks, as in FLUX.1.
        text_width: of the text embeddings.
    """
    from xfuser.model_executor.models.transformers.transformer_flux import xFuserFlux1Transformer2DWrapper

    head = width // heads
    rest = head - 2 * (head // 3 // 2 * 2)
    torch.manual_seed(0)
    return xFuserFlux1Transformer2DWrapper(
        in_channels=64,
        num_layers=max(1, depth // 3),
        num_single_layers=depth - max(1, depth // 3),
        attention_head_dim=head,
        num_attention_heads=heads,
        joint_attention_dim=text_width,
        pooled_projection_dim=text_width,
        axes_dims_rope=(rest, (head - rest) // 2, (head - rest) // 2),
    ).eval()
