"""The sites of xDiT where the Ulysses exchange happens, and the runtime state that owns what they need."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from xfuser_cocodiff import kernels, modes
from xfuser_cocodiff.choice import planned_mesh
from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.config import CocoDiffConfig, Overlap
from xfuser_cocodiff.exchange import HEADS, SEQUENCE, reshard
from xfuser_cocodiff.options import EXACT
from xfuser_cocodiff.runtime import Runtime
from xfuser_cocodiff.slow_way import SlowWay
from xfuser_cocodiff.traffic import Traffic
from xfuser_cocodiff.virtual import VirtualRanks
from xfuser_cocodiff.xdit import ring
from xfuser_cocodiff.xdit.log import note
from xfuser_cocodiff.xdit.patch import Patch
from xfuser_cocodiff.xdit.platform import compute_device

_USP = "xfuser.model_executor.layers.usp"

_NO_SLOW_AXIS = "--cocodiff_mode {}: no axis is slow, so everything travels exactly; see --cocodiff_slow_axes"

TRAFFIC = Traffic()
"""What all exchanges of this process moved."""

_made: dict[tuple[dist.ProcessGroup, CocoDiffConfig], tuple[Mesh, Runtime | None]] = {}


def patches() -> list[Patch]:
    """Rows that put the exchange in place."""
    return [
        Patch(_USP, "_ft_c_input_all_to_all", "Q, K or V: sequence to heads", _single(HEADS, SEQUENCE), ("x",)),
        Patch(_USP, "_ft_c_output_all_to_all", "O: heads to sequence", _single(SEQUENCE, HEADS), ("x",)),
        Patch(_USP, "_combined_qkv_all_to_all", "Q, K and V in one message", _packed(_alike), ("q", "k", "v", "extra")),
        Patch(
            _USP, "_combined_gqa_qkv_all_to_all", "with fewer K/V heads", _packed(_grouped), ("q", "k", "v", "extra")
        ),
        Patch(
            "yunchang.comm.all_to_all",
            "all_to_all_4D",
            "xDiT's long-context attention (StepVideo, SANA)",
            _yunchang,
            ("input", "scatter_idx", "gather_idx", "group", "use_sync"),
        ),
        Patch(
            "xfuser.core.distributed.runtime_state",
            "initialize_runtime_state",
            "groups of each axis are made once all ranks are there",
            _with_mesh,
            ("pipeline", "engine_config"),
        ),
    ]


def active_mesh() -> Mesh | None:
    """The mesh of the runtime state in force; None where the plugin is not in use."""
    from xfuser.core.distributed.runtime_state import _RUNTIME

    return getattr(_RUNTIME, "cocodiff_mesh", None)


def active_runtime() -> Runtime | None:
    """What codecs know of the run under way; None where nothing is to be approximated."""
    from xfuser.core.distributed.runtime_state import _RUNTIME

    return getattr(_RUNTIME, "cocodiff_runtime", None)


def active_virtual() -> VirtualRanks | None:
    """The ranks that this one stands for; None where it stands for itself."""
    runtime = active_runtime()
    return runtime.virtual if runtime else None


def active_overlap() -> Overlap:
    """What was fixed of the overlap of the runtime state in force."""
    from xfuser.core.distributed.runtime_state import _RUNTIME

    return getattr(_RUNTIME, "cocodiff_overlap", Overlap())


def _fits(tensors: tuple[torch.Tensor, ...], dim: int, mesh: Mesh | None) -> bool:
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
            mesh = active_mesh()
            return reshard([x], scatter_dim, gather_dim, mesh)[0] if _fits((x,), scatter_dim, mesh) else original(x)

        return all_to_all

    return replace


def _packed(fit_together: Callable[..., bool]) -> Callable[[Callable], Callable]:
    def replace(original: Callable) -> Callable:
        @functools.wraps(original)
        def all_to_all(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extra: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            tensors, mesh = (q, k, v, *extra), active_mesh()
            if not (_fits(tensors, HEADS, mesh) and fit_together(*tensors)):
                return original(*tensors)
            return tuple(reshard(tensors, HEADS, SEQUENCE, mesh))

        return all_to_all

    return replace


def _alike(*tensors: torch.Tensor) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extra: torch.Tensor) -> bool:
    """Whether K and V may have fewer heads than Q: what else differs, stock rejects."""
    return q.shape[::3] == k.shape[::3] and _alike(k, v) and _alike(q, *extra)


def _yunchang(original: Callable) -> Callable:
    @functools.wraps(original)
    def all_to_all_4D(  # noqa: N802 (yunchang's name)
        input: torch.Tensor,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        group: dist.ProcessGroup | None = None,
        use_sync: bool = False,
    ) -> torch.Tensor:
        from yunchang.globals import PROCESS_GROUP

        mesh = active_mesh() if group is PROCESS_GROUP.ULYSSES_PG else None
        if {scatter_idx, gather_idx} != {1, 2} or use_sync or not _fits((input,), scatter_idx, mesh):
            return original(input, scatter_idx, gather_idx, group, use_sync)
        return reshard([input], scatter_idx, gather_idx, mesh)[0]

    return all_to_all_4D


def _with_mesh(original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_runtime_state(pipeline: Any = None, engine_config: Any = None) -> None:
        original(pipeline, engine_config)
        from xfuser.core.distributed.runtime_state import _RUNTIME

        if engine_config is not None and _RUNTIME is not None:
            _RUNTIME.cocodiff_mesh, _RUNTIME.cocodiff_runtime = _mesh_and_runtime(pipeline, engine_config)
            config = getattr(engine_config.parallel_config.sp_config, "cocodiff", None)
            _RUNTIME.cocodiff_overlap = config.overlap if config else Overlap()

    return initialize_runtime_state


def unsupported(engine_config: Any) -> str | None:
    """Why this engine's exchanges are left to stock xDiT; the same on every rank, as the engine config is."""
    if engine_config.parallel_config.pp_degree > 1:
        return "PipeFusion keeps K and V of its own"
    if engine_config.runtime_config.use_fp8_comms:
        return "--use_fp8_comms has an all-to-all of its own"
    if engine_config.runtime_config.use_spargeattn_head_balance:
        return "--use_spargeattn_head_balance permutes heads between steps"
    return None


def _mesh_and_runtime(pipeline: Any, engine_config: Any) -> tuple[Mesh | None, Runtime | None]:
    parallel = engine_config.parallel_config
    config: CocoDiffConfig | None = getattr(parallel.sp_config, "cocodiff", None)
    if config is None:
        return None, None
    kernels.use(config.kernels)
    if config.virtual:
        runtime = _virtual_runtime(config)
        if runtime:
            _lead_through_usp(pipeline)
        return None, runtime
    if parallel.ulysses_degree == 1:
        note("--use_cocodiff with --ulysses_degree 1: there is nothing to move")
        return None, None
    if reason := unsupported(engine_config):
        note(f"{reason}, so this run keeps stock xDiT's all-to-all")
        return None, None
    from yunchang.globals import PROCESS_GROUP

    group = PROCESS_GROUP.ULYSSES_PG
    if parallel.ulysses_degree < parallel.sp_degree and ring.found(group, parallel.ring_degree) != config.ring:
        note(f"groups were made before --cocodiff_ring {config.ring} was known, so this run keeps stock's all-to-all")
        return None, None
    if parallel.ring_degree > 1:
        hint = "" if config.profile else "; with a --cocodiff_profile of all ranks the cost model decides"
        note(f"--cocodiff_ring {config.ring}: each Ulysses group has the topology {config.topology}{hint}")
    if engine_config.runtime_config.use_torch_compile:
        note(
            "--use_torch_compile: exchanges become part of the compiled graphs, where V does not go first, heads stay "
            "in one group, and everything travels exactly"
        )
    return _made_over(group, config)


def _made_over(group: dist.ProcessGroup, config: CocoDiffConfig) -> tuple[Mesh, Runtime | None]:
    """The mesh of a group and its runtime; made once, since process groups are dear and never freed singly."""
    key = group, config
    if key not in _made:
        for stale in [known for known in _made if known[0] is not group]:  # of a world that was torn down
            del _made[stale]
        mesh, way = planned_mesh(group, config, compute_device(), TRAFFIC)
        _made[key] = mesh, make_runtime(config, mesh, way)
    return _made[key]


def make_runtime(config: CocoDiffConfig, mesh: Mesh, way: SlowWay | None) -> Runtime | None:
    """What codecs are to know of runs; None where nothing is to be approximated."""
    if config.mode == EXACT:
        return None
    if way is None:
        note(_NO_SLOW_AXIS.format(config.mode))
        return None

    def largest(values: list[float]) -> list[float]:
        return agreed_numbers(mesh, values, "max")

    runtime = _runtime(config, way, largest, None)
    moving = [axis.name for axis in config.topology.axes if axis.size > 1]
    slow = ", ".join(moving[dim] for dim in way.slow_dims)
    _tell(config, slow, runtime)
    return runtime


def _lead_through_usp(pipeline: Any) -> None:
    """Give attention to xDiT where a rank that is alone leaves it to diffusers, as in SD3.5."""
    from xfuser.model_executor.layers import attention_processor as xdit

    processors = xdit.xFuserAttentionProcessorRegister._XFUSER_ATTENTION_PROCESSOR_MAPPING
    for transformer in (getattr(pipeline, name, None) for name in ("transformer", "transformer_2")):
        for module in transformer.modules() if transformer is not None else ():
            ours = processors.get(type(getattr(module, "processor", None)))
            if ours:
                module.processor = ours()
                module.processor.use_long_ctx_attn_kvcache = True  # K and V are not to go to PipeFusion's cache


def _virtual_runtime(config: CocoDiffConfig) -> Runtime | None:
    if config.mode == EXACT:
        note(f"--cocodiff_virtual with --cocodiff_mode {EXACT}: there is nothing to see")
        return None
    moving = [axis.name for axis in config.virtual.axes if axis.size > 1]
    profile = config.profile and config.profile.slow_axes
    slow = config.slow_axes or profile or (moving[:-1] if len(moving) > 1 else moving)
    virtual = VirtualRanks(config.virtual, tuple(slow))
    if virtual.places == 1:
        note(_NO_SLOW_AXIS.format(config.mode))
        return None
    runtime = _runtime(config, None, list, virtual)
    ranks = f"virtual ranks {config.virtual}, slow axes {', '.join(slow)}"
    _tell(config, ranks, runtime)
    return runtime


def _tell(config: CocoDiffConfig, where: str, runtime: Runtime) -> None:
    expected = "as you changed it" if config.schedule else f"{modes.QUALITY[config.mode]} in a small model"
    exact = f"--cocodiff_mode {EXACT} equals stock xDiT bit for bit"
    note(f"mode {config.mode} on {where}: {runtime.schedule} ({expected}); {exact}")


def _runtime(
    config: CocoDiffConfig,
    way: SlowWay | None,
    agreed: Callable[[list[float]], list[float]],
    virtual: VirtualRanks | None,
) -> Runtime:
    return Runtime(
        way, config.mode, config.schedule, config.max_error, agreed, virtual, budget=config.memory_budget, say=note
    )


def agreed_numbers(mesh: Mesh, values: list[float], operation: str) -> list[float]:
    """Numbers reduced by 'sum', 'min' or 'max' over all ranks that share a sequence: in a ring, Ulysses groups must
    decide alike too."""
    from xfuser.core.distributed import get_sp_group

    own = torch.tensor(values, dtype=torch.float64 if compute_device().type == "cpu" else torch.float32)
    own = own if mesh.lane.staged else own.to(compute_device())

    def reduce() -> torch.Tensor:
        return functional.wait_tensor(functional.all_reduce(own, operation, get_sp_group().device_group))

    # In the lane, where it cannot overtake an exchange that is under way.
    return mesh.lane.run(reduce).tolist()
