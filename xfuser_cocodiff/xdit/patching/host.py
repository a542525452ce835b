"""What attention, layers and sessions read of xDiT, in one place, and the names that have to exist for it.

The names are patches that replace nothing: one that has moved is found when the plugin is installed, rather than in the
middle of a run. xDiT's own USP uses other names; see `session.usp_versions`.
"""

from typing import Any

from xfuser_cocodiff.xdit.patching.patch import Patch

_XDIT, _MODULE = "xfuser.core.distributed", "torch.nn.modules.module"
_COLLECTIVES = "torch.distributed._functional_collectives"

REQUIRED = (
    Patch(_XDIT, "get_runtime_state", "the current runtime state", None),
    Patch(_XDIT, "runtime_state_is_initialized", "whether there is one", None),
    Patch(_XDIT, "model_parallel_is_initialized", "whether there are process groups", None),
    Patch(_XDIT, "get_sp_group", "the ranks that share a sequence", None),
    Patch(_XDIT, "get_ring_parallel_world_size", "the ranks of a ring", None),
    Patch("yunchang.globals", "PROCESS_GROUP", "Ulysses groups and rings", None),
    Patch(_COLLECTIVES, "AsyncCollectiveTensor", "collectives in graphs", None),
    Patch(_COLLECTIVES, "all_to_all_single", "collectives in graphs", None),
    Patch(_MODULE, "Module._wrapped_call_impl", "which modules are running", None),
    Patch(_MODULE, "Module._compiled_call_impl", "replaced calls of modules", None),
    Patch("torch._dynamo.symbolic_convert", "InstructionTranslator", "the layer whose call is traced", None),
    Patch("torch._inductor.config", "reorder_for_compute_comm_overlap", "the order of collectives in graphs", None),
    Patch("torch.autograd.profiler", "_is_profiler_enabled", "names of collectives in a trace", None),
)
"""Names of xDiT and PyTorch that the plugin uses without replacing them, except for those that its modules import."""

CONFIG_FIELD = "cocodiff"
"""Field of xDiT's config of sequence parallelism that holds the plugin's config."""


def runtime_state() -> Any:
    """Return xDiT's runtime state, which holds the plugin's session; None before an engine has started."""
    from xfuser.core.distributed import get_runtime_state, runtime_state_is_initialized

    return get_runtime_state() if runtime_state_is_initialized() else None


def config_of(parallel_config: Any) -> Any:
    """Return the plugin's config in a parallel config of xDiT, which may be older than the plugin; None without one."""
    return getattr(parallel_config.sp_config, CONFIG_FIELD, None)


def has_process_groups() -> bool:
    """Return whether xDiT has made its process groups."""
    from xfuser.core.distributed import model_parallel_is_initialized

    return model_parallel_is_initialized()


def has_patches() -> bool:
    """Return whether PipeFusion divides the sequence into patches, so that layers keep K and V of the others."""
    state = runtime_state()
    return state is not None and state.num_pipeline_patch > 1


def backend_name(backend: Any = None) -> str:
    """Return the name of an attention backend, such as "SDPA"; by default that of the current step, the same on all
    ranks."""
    backend = runtime_state().attention_backend if backend is None else backend
    return getattr(backend, "name", str(backend)).upper()


def sequence_group() -> Any:
    """Return xDiT's group of all ranks that share a sequence."""
    from xfuser.core.distributed import get_sp_group

    return get_sp_group()


def ring_degree() -> int:
    """Return the number of ranks in a ring."""
    from xfuser.core.distributed import get_ring_parallel_world_size

    return get_ring_parallel_world_size()


def process_groups() -> Any:
    """Return yunchang's groups, with `ULYSSES_PG` and `RING_PG`."""
    from yunchang.globals import PROCESS_GROUP

    return PROCESS_GROUP


def usp() -> Any:
    """Return the module of xDiT's USP."""
    from xfuser.model_executor.layers import usp

    return usp
