"""A session of xDiT starts: its exchanges get their mesh, and its codecs what they are to do."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.attention.ring_attention import Ring
from xfuser_cocodiff.engine.autotune import tuning_cache
from xfuser_cocodiff.engine.autotune.plan_selection import CommSetup, set_up_comm
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.compression.virtual_ranks import VirtualRanks, VirtualRing
from xfuser_cocodiff.engine.settings.config import MEASURED_SLOW_AXES, CocoDiffConfig
from xfuser_cocodiff.engine.settings.options import AUTO, EXACT
from xfuser_cocodiff.engine.settings.ring_placement import INNER
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.patching.log import begin_session, info_once, warn_always, warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms.platform import compute_device
from xfuser_cocodiff.xdit.session import host_description, ring_groups, usp_versions
from xfuser_cocodiff.xdit.session.session import HEAD_GROUPS_IGNORED, Session, active, all_reduce

_NO_SLOW_AXIS = (
    "no slow axis in the topology {}: mode {!r} has no effect and the run is lossless; name one with "
    "--cocodiff_slow_axes"
)


def patches(activate: Callable[[Any], None]) -> list[Patch]:
    """The row that has a session start with xDiT's own.

    Args:
        ask: told of the pipeline of a session with the plugin.
    """
    return [
        Patch(
            "xfuser.core.distributed.runtime_state",
            "initialize_runtime_state",
            "groups of each axis are made once all ranks are there",
            functools.partial(_with_session, activate),
            ("pipeline", "engine_config"),
        ),
    ]


def _with_session(activate: Callable[[Any], None], original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_runtime_state(pipeline: Any = None, engine_config: Any = None) -> None:
        active().close()
        if engine_config is not None and _config_of(engine_config):
            activate(pipeline)  # once more: a worker of Ray's makes no config
        original(pipeline, engine_config)
        from xfuser.core.distributed.runtime_state import _RUNTIME

        begin_session()
        if engine_config is not None and _RUNTIME is not None:
            _RUNTIME.cocodiff = start_session(pipeline, engine_config)
            _RUNTIME.cocodiff.model = type(getattr(pipeline, "transformer", None)).__name__
            _RUNTIME.cocodiff.select_kernels()

    return initialize_runtime_state


def start_session(pipeline: Any, engine_config: Any) -> Session:
    """The plugin as a session's settings have it. Every rank must call this."""
    parallel, config = engine_config.parallel_config, _config_of(engine_config)
    if config is None:
        _warn_of_other_groups(parallel)
        return Session()
    uses_stock_usp = not usp_versions.is_known()
    if config.virtual and uses_stock_usp:
        because = (
            "--cocodiff_virtual has no effect with this xfuser, whose USP is unknown; install version "
            f"{' or '.join(usp_versions.DIGESTS)}"
        )
        warn_once(because)
        return Session(config, lossless_reason=because)
    if config.virtual:
        if engine_config.runtime_config.use_torch_compile:
            warn_once(
                "--cocodiff_virtual has no effect in compiled graphs: the run is lossless; leave out "
                "--use_torch_compile"
            )
        runtime = _virtual_runtime(config)
        if runtime:
            _lead_through_usp(pipeline)
        lossless = _NO_SLOW_AXIS.format(config.virtual, config.mode)
        return Session(config, runtime=runtime, lossless_reason=None if runtime else lossless)
    if parallel.sp_degree == 1:
        warn_once("--use_cocodiff has no effect with --ulysses_degree 1; set a degree above 1")
        return Session(config)
    from yunchang.globals import PROCESS_GROUP

    group, around = PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG if parallel.ring_degree > 1 else None
    if around and ring_groups.found(group, around) != config.ring:
        warn_once(
            f"--cocodiff_ring {config.ring} has no effect: this process already has process groups with the other "
            "placement, and the run uses stock's all-to-all; start a new process"
        )
        return Session(config)
    if uses_stock_usp:
        lossless = f", and mode {config.mode!r} has no effect" if config.mode != EXACT else ""
        versions = " or ".join(usp_versions.DIGESTS)
        because = (
            f"this xfuser's USP is unknown: it runs unchanged over the plugin's all-to-all{lossless}; install version "
            f"{versions} for overlap and compression"
        )
        warn_once(because)
        config, around = replace(config, mode=EXACT), None
    if around and engine_config.runtime_config.use_torch_compile:
        info_once("--use_torch_compile: ring attention is xDiT's own, and lossless")
        around = None
    if (config.overlap.head_groups or 1) > 1 and engine_config.runtime_config.use_torch_compile:
        warn_once(HEAD_GROUPS_IGNORED)
    if parallel.pp_degree > 1 and config.mode != EXACT:
        session = create_session(group, replace(config, mode=EXACT), around=around)
        session.lossless_reason = (
            f"mode {config.mode!r} has no effect with PipeFusion: the run is lossless; leave out "
            "--pipefusion_parallel_degree to compress"
        )
        warn_once(session.lossless_reason)
        return session
    session = create_session(group, config, around=around)
    session.uses_stock_usp, session.lossless_reason = (
        uses_stock_usp,
        because if uses_stock_usp else session.lossless_reason,
    )
    return session


def _config_of(engine_config: Any) -> CocoDiffConfig | None:
    return getattr(engine_config.parallel_config.sp_config, "cocodiff", None)


def _warn_of_other_groups(parallel: Any) -> None:
    """Say where a session without the plugin has a ring that an earlier one has placed."""
    from yunchang.globals import PROCESS_GROUP

    if parallel.ring_degree > 1 and ring_groups.found(PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG) == INNER:
        warn_once(
            f"the ring has the placement --cocodiff_ring {INNER} of an earlier session, so the run is not "
            "bit-identical to stock: xDiT makes its process groups once; start a new process"
        )


def create_session(
    group: dist.ProcessGroup,
    config: CocoDiffConfig,
    known: TuningCache | None = None,
    around: dist.ProcessGroup | None = None,
) -> Session:
    """A session over the ranks of a group, every one of which must call this.

    Args:
        group: a Ulysses group.
        config: the settings.
        known: what was found of the machine; when not given, what the settings' folder keeps.
        around: a ring, if there is one.
    """
    planned = _planned(group, config, known)
    of_ring = _planned_ring(around, config, planned) if around else None
    session = Session(
        config,
        planned.mesh,
        planned,
        ring=Ring(of_ring.mesh, dist.get_rank(around), of_ring.partition) if of_ring else None,
        ring_setup=of_ring,
        overlap=config.overlap,
    )
    session.keep()
    session.runtime = _runtime_over(session)
    return session


def _planned(
    group: dist.ProcessGroup,
    config: CocoDiffConfig,
    known: TuningCache | None,
    beside: Mesh | None = None,
) -> CommSetup:
    if known is None:
        known = _shared(group, config, config.topology, host_description.RING if beside else {})
    largest = functools.partial(all_reduce, operation="max", timeout=config.timeout)
    return set_up_comm(group, config, compute_device(), known, largest, beside)


def _shared(group: dist.ProcessGroup, config: CocoDiffConfig, topology: Topology, part: dict[str, str]) -> TuningCache:
    """What is known of the links of a group. It is that of all Ulysses groups beside a ring: they try things together,
    and must begin alike."""
    from xfuser.core.distributed import get_sp_group

    common = {**host_description.described(topology, config.kernels, dist.get_backend(group)), **part}
    if get_sp_group().world_size > dist.get_world_size(group):
        common["ring"] = config.ring  # by which ranks are neighbours in it
    # By the group for what lies on the host, which is gloo's wherever the device's may be another one's.
    return tuning_cache.load_shared(get_sp_group().cpu_group, common, host_description.this_rank(), config.cache)


def _planned_ring(around: dist.ProcessGroup, config: CocoDiffConfig, planned: CommSetup) -> CommSetup:
    """What a ring goes by, whose exchanges wait for those of the Ulysses group as these do for each other."""
    of_ring = replace(config, topology=_ring_topology(config, around.size()), profile=config.ring_profile, plan=None)
    return _planned(around, of_ring, None, planned.mesh)


def _ring_topology(config: CocoDiffConfig, degree: int) -> Topology:
    return config.ring_topology or Topology.flat(degree)


def _runtime_over(session: Session) -> CodecRuntime | None:
    """What codecs are to know of runs; None where nothing is to be approximated."""
    config, partition, ring_partition = (
        session.config,
        session.comm_setup.partition,
        session.ring.partition if session.ring else None,
    )
    around = f", ring {config.ring} {session.ring.mesh.topology}" if session.ring else ""
    if config.mode == EXACT:
        plan = config.plan or AUTO
        info_once(f"on: topology {config.topology}{around}, plan {plan}; lossless: bit-identical to stock")
        return None
    if partition is None and ring_partition is None:
        session.lossless_reason = _NO_SLOW_AXIS.format(f"{config.topology}{around}", config.mode)
        warn_once(session.lossless_reason)
        return None
    where = [_slow(partition, config.topology)] if partition else []
    where += [f"{_slow(ring_partition, session.ring.mesh.topology)} of the ring"] if ring_partition else []
    _tell(config, f"{' and '.join(where)} (topology {config.topology}{around})")
    return _runtime(config, partition, functools.partial(session.all_reduce, operation="max"), None, ring_partition)


def _slow(partition: AxisPartition, topology: Topology) -> str:
    """Its slow axes."""
    moving = [axis.name for axis in topology.axes if axis.size > 1]
    return ", ".join(moving[dim] for dim in partition.slow_indices)


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


def _virtual_runtime(config: CocoDiffConfig) -> CodecRuntime | None:
    if config.mode == EXACT:
        warn_once(f"--cocodiff_virtual has no effect with --cocodiff_mode {EXACT}; choose another mode")
        return None
    slow = config.profile.slow_axes if config.slow_axes == MEASURED_SLOW_AXES else config.slow_axes
    virtual = (VirtualRing if config.virtual_ring else VirtualRanks)(config.virtual, slow)
    if virtual.num_slow == 1:
        warn_once(_NO_SLOW_AXIS.format(config.virtual, config.mode))
        return None
    kind = "a virtual ring" if config.virtual_ring else "virtual ranks"
    _tell(config, f"{', '.join(slow)} ({kind} {config.virtual})")
    return _runtime(config, None, list, virtual)


def _tell(config: CocoDiffConfig, where: str) -> None:
    warn_once(
        f"lossy: mode {config.mode!r} compresses communication on {where}; --cocodiff_mode {EXACT} is bit-identical to "
        "stock"
    )


def _runtime(
    config: CocoDiffConfig,
    partition: AxisPartition | None,
    agreed: Callable[[list[float]], list[float]],
    virtual: VirtualRanks | None,
    ring_partition: AxisPartition | None = None,
) -> CodecRuntime:
    kernels.prepare(config.kernels, compute_device().type)
    return CodecRuntime(
        partition,
        config.mode,
        config.schedule,
        config.max_error,
        agreed,
        virtual,
        budget=config.memory_budget,
        say=info_once,
        warn=warn_always,
        ring_partition=ring_partition,
    )
