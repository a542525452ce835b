"""The start of a session with its xDiT engine: process groups, plans and codecs, by the options."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from xfuser_cocodiff.engine.attention.ring_attention import Ring
from xfuser_cocodiff.engine.autotune import tuning_cache
from xfuser_cocodiff.engine.autotune.comm_config import CommConfig
from xfuser_cocodiff.engine.autotune.plan_selection import CommSetup, set_up_comm
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.comm import plan_check
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.plan_check import CheckedMesh
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout, AxisPartition
from xfuser_cocodiff.engine.compression.mode_names import EXACT
from xfuser_cocodiff.engine.compression.reference_check import ReferenceCheck
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.compression.value_format import ValueFormat
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.log import begin_session, info_always, info_once, warn_always, warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import device_memory
from xfuser_cocodiff.xdit.platforms.platform import compute_device
from xfuser_cocodiff.xdit.session import exchanges, host_description, kernel_check, ring_groups, simulator, usp_versions
from xfuser_cocodiff.xdit.session.kernel_check import KernelError
from xfuser_cocodiff.xdit.session.run_report import LoggingReporter
from xfuser_cocodiff.xdit.session.session import HEAD_GROUPS_IGNORED, Session, active, all_reduce
from xfuser_cocodiff.xdit.session.start_line import start_line
from xfuser_cocodiff.xdit.settings.config import AUTO, MEASURED_SLOW_AXES, CocoDiffConfig
from xfuser_cocodiff.xdit.settings.ring_placement import INNER

NO_SLOW_AXIS = (
    "no slow axis in the topology {}: mode {!r} has no effect and the run is lossless; name one with "
    "--cocodiff_slow_axes"
)
_NO_AXIS_IS_SLOW = (
    "no axis of the topology {} is slow for this device, so mode {!r} compresses nothing and the run is lossless; "
    "--cocodiff_slow_axes names axes to compress"
)


def patches(activate: Callable[[Any], None]) -> list[Patch]:
    """Return the patch that starts a session with each xDiT engine.

    Args:
        activate: called with the pipeline of an engine that uses the plugin.
    """
    return [
        Patch(
            "xfuser.core.distributed.runtime_state",
            "initialize_runtime_state",
            "a session starts with each engine, once all ranks have started",
            functools.partial(_with_session, activate),
            ("pipeline", "engine_config"),
        ),
    ]


def _with_session(activate: Callable[[Any], None], original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_runtime_state(pipeline: Any = None, engine_config: Any = None) -> None:
        # A runner with a pipeline wrapper initializes its engine twice: the wrapper does too.
        session = active()
        starts = engine_config is None or not session.was_just_started(engine_config, _config_of(engine_config))
        if starts:
            session.close()
        if engine_config is not None and _config_of(engine_config):
            activate(pipeline)  # again: a Ray worker has created no config
        original(pipeline, engine_config)
        if starts:
            begin_session()
        elif session.simulator:
            simulator.route_attention(pipeline)
        state = host.runtime_state()
        if engine_config is not None and state is not None:
            state.cocodiff = session = start_session(pipeline, engine_config) if starts else session
            session.origin = engine_config, _config_of(engine_config)
            session.model = type(getattr(pipeline, "transformer", None)).__name__
            session.is_compiled = engine_config.runtime_config.use_torch_compile
            session.select_kernels()

    return initialize_runtime_state


def _config_of(engine_config: Any) -> CocoDiffConfig | None:
    return getattr(engine_config.parallel_config.sp_config, "cocodiff", None)


def start_session(pipeline: Any, engine_config: Any) -> Session:
    """Return the session of an xDiT engine, by its options. All ranks must call this."""
    parallel, config = engine_config.parallel_config, _config_of(engine_config)
    is_compiled = engine_config.runtime_config.use_torch_compile
    if config is None:
        _warn_of_inner_ring(parallel)
        return Session()
    if config.virtual:
        return simulator.start_session(pipeline, config, is_compiled)
    if parallel.sp_degree == 1:
        warn_once("--use_cocodiff has no effect with --ulysses_degree 1; set a degree above 1")
        return Session(config)
    return _start_parallel(parallel, config, is_compiled, kernel_check.value_format(pipeline))


def _warn_of_inner_ring(parallel: Any) -> None:
    """Warn where an engine without the plugin has the process groups of an earlier session."""
    groups = host.process_groups()
    if parallel.ring_degree > 1 and ring_groups.placement(groups.ULYSSES_PG, groups.RING_PG) == INNER:
        warn_once(
            f"the ring has the placement --cocodiff_ring {INNER} of an earlier session, so the run is not "
            "bit-identical to stock: xDiT makes its process groups once; start a new process"
        )


def _start_parallel(parallel: Any, config: CocoDiffConfig, is_compiled: bool, values: ValueFormat) -> Session:
    """Return the session of an engine whose ranks share a sequence."""
    group = host.process_groups().ULYSSES_PG
    ring_group = host.process_groups().RING_PG if parallel.ring_degree > 1 else None
    if ring_group and ring_groups.placement(group, ring_group) != config.ring:
        warn_once(
            f"--cocodiff_ring {config.ring} has no effect: this process already has process groups with the other "
            "placement, and the run uses stock's all-to-all; start a new process"
        )
        return Session(config)
    uses_stock_usp, lossless_reason = not usp_versions.is_known(), None
    if uses_stock_usp:
        lossless_reason = _unknown_usp(config)
        warn_once(lossless_reason)
        config, ring_group = replace(config, mode=EXACT), None
    if ring_group and is_compiled:
        info_once("--use_torch_compile: ring attention is xDiT's own, and lossless")
        ring_group = None
    if (config.overlap.head_groups or 1) > 1 and is_compiled:
        warn_once(HEAD_GROUPS_IGNORED)
    if is_compiled and config.mode == EXACT and config.plan and config.plan.gathers_kv:
        info_once(
            f"--cocodiff_a2a {config.plan}: mode {EXACT!r} does not gather K and V in compiled graphs; all-to-alls by "
            "heads run instead"
        )
    if parallel.pp_degree > 1 and config.mode != EXACT:
        lossless_reason = (
            f"mode {config.mode!r} has no effect with PipeFusion: the run is lossless; leave out "
            "--pipefusion_parallel_degree to compress"
        )
        warn_once(lossless_reason)
        config = replace(config, mode=EXACT)
    # Beside a ring, also one of xDiT's own, and in PipeFusion, K and V are not gathered.
    may_gather = parallel.ring_degree == 1 and parallel.pp_degree == 1
    session = create_session(group, config, ring_group=ring_group, may_gather=may_gather, values=values)
    session.uses_stock_usp = uses_stock_usp
    session.lossless_reason = lossless_reason or session.lossless_reason
    return session


def _unknown_usp(config: CocoDiffConfig) -> str:
    """Return the warning for an xfuser whose USP is unknown."""
    lossless = f", and mode {config.mode!r} has no effect" if config.mode != EXACT else ""
    return (
        f"this xfuser's USP is unknown: it runs unchanged over the plugin's all-to-all{lossless}; install version "
        f"{' or '.join(usp_versions.DIGESTS)} for overlap and compression"
    )


def create_session(
    group: dist.ProcessGroup,
    config: CocoDiffConfig,
    cache: TuningCache | None = None,
    ring_group: dist.ProcessGroup | None = None,
    may_gather: bool = True,
    values: ValueFormat | None = None,
) -> Session:
    """Return a session for the ranks of a Ulysses group, and of a ring. All of them must call this.

    Args:
        group: the Ulysses group.
        config: the options.
        cache: tuning results; when not given, they are loaded from the folder that the options name.
        ring_group: the ring, if there is one.
        may_gather: whether layers may gather K and V along some axes; without effect beside a ring.
        values: format of the model's values, for which kernels are checked if an axis is slow; None for no check.
    """
    caches = [cache or _load_cache(group, config, config.topology, {})]
    if ring_group:
        caches.append(_load_cache(ring_group, config, _ring_topology(config, ring_group), host_description.RING))
    setups: list[CommSetup] = []
    warning = None
    try:
        setups = _set_up_all(group, ring_group, config, caches, may_gather)
        if values and any(setup.partition for setup in setups):
            kernel_check.check(config, host.sequence_group().cpu_group, values)
    except KernelError as error:  # on every rank
        config, before = _with_pytorch_kernels(config), setups
        # The links stay as they were measured; nothing is kept of the slower kernels.
        caches = [TuningCache({}, each.profile and each.profile.with_codec(0.0, 0.0)) for each in caches]
        setups = _set_up_all(group, ring_group, config, caches, may_gather)
        warning = kernel_check.fallback_warning(str(error), config.mode, before, setups)
        warn_once(warning)
    info_once(start_line(config, setups, "PyTorch's, since others fail" if warning else None))
    setup, ring_setup = setups[0], setups[1] if ring_group else None
    ring = Ring(ring_setup.mesh, dist.get_rank(ring_group), ring_setup.partition) if ring_setup else None
    runtime, lossless_reason = _runtime_of(config, setup, ring, warning)
    session = Session(
        config,
        setup.mesh,
        setup,
        runtime,
        lossless_reason=lossless_reason,
        ring=ring,
        ring_setup=ring_setup,
        overlap=config.overlap,
    )
    session.save_tuning()
    if values:
        _check_groups(session, group, ring_group)
    return session


def _check_groups(session: Session, group: dist.ProcessGroup, ring_group: dist.ProcessGroup | None) -> None:
    """Check the plans in use now, and the link references after the first step that is encoded.

    Once in a session is enough, since options, plans and groups stay the same.
    """
    host_group = host.sequence_group().cpu_group
    for each, setup in ((group, session.comm_setup), (ring_group, session.ring_setup)):
        if each and setup:
            rank, size = dist.get_rank(each), dist.get_world_size(each)
            plan_check.check(list(_checked_meshes(setup, size)), rank, size, host_group)
    if session.runtime:
        session.ranks = dist.get_process_group_ranks(group)
        session.ring_ranks = dist.get_process_group_ranks(ring_group) if ring_group else []
        session.reference_check = ReferenceCheck(host_group)


def _checked_meshes(setup: CommSetup, size: int) -> Iterator[CheckedMesh]:
    """Yield the meshes of a group, and their ranks by number in the group."""
    yield CheckedMesh(setup.mesh, range(size))
    for partition in {id(each): each for each in (setup.partition, setup.gather)}.values():
        if partition and partition.fast:
            yield CheckedMesh(partition.slow, range(partition.fast_index, size, partition.num_fast))
            yield CheckedMesh(partition.fast, partition.ranks_at(partition.slow_index))


def _with_pytorch_kernels(config: CocoDiffConfig) -> CocoDiffConfig:
    """Return the options with PyTorch's kernels, and without the speed of others in given profiles."""
    profile, ring_profile = (each and each.with_codec(0.0, 0.0) for each in (config.profile, config.ring_profile))
    return replace(config, kernels=kernels.TORCH, profile=profile, ring_profile=ring_profile)


def _set_up_all(
    group: dist.ProcessGroup,
    ring_group: dist.ProcessGroup | None,
    config: CocoDiffConfig,
    caches: Sequence[TuningCache],
    may_gather: bool,
) -> list[CommSetup]:
    """Return mesh, plans and tuning cache of a Ulysses group, and of the ring if there is one.

    Raises:
        KernelError: the codec, whose speed decides which axes are slow, fails on a rank; on every rank.
    """
    kernels.use(config.kernels)
    host_group = host.sequence_group().cpu_group
    measure_codec = functools.cache(lambda: kernel_check.measure_codec(config, host_group))
    setup = _set_up(group, config.comm, caches[0], measure_codec, may_gather=may_gather and ring_group is None)
    if ring_group is None:
        return [setup]
    topology = _ring_topology(config, ring_group)
    ring_config = replace(config.comm, topology=topology, profile=config.ring_profile, plan=None)
    return [setup, _set_up(ring_group, ring_config, caches[1], measure_codec, setup.mesh)]


def _set_up(
    group: dist.ProcessGroup,
    config: CommConfig,
    cache: TuningCache,
    measure_codec: Callable[[], tuple[float, float]],
    ulysses_mesh: Mesh | None = None,
    may_gather: bool = False,
) -> CommSetup:
    """Return mesh and plans of a group.

    Args:
        group: a Ulysses group, or a ring, whose messages share the comm stream of the Ulysses group.
        config: config of the group.
        cache: tuning results.
        measure_codec: see :func:`plan_selection.set_up_comm`.
        ulysses_mesh: of the Ulysses group beside a ring, whose comm stream both share.
        may_gather: whether layers may gather K and V along some axes.
    """
    largest = functools.partial(all_reduce, operation="max", timeout=config.timeout)
    return set_up_comm(
        *(group, config, compute_device(), cache, largest, ulysses_mesh, may_gather),
        host_group=host.sequence_group().cpu_group,
        measure_codec=measure_codec,
    )


def _ring_topology(config: CocoDiffConfig, ring_group: dist.ProcessGroup) -> Topology:
    return config.ring_topology or Topology.flat(ring_group.size())


def _load_cache(
    group: dist.ProcessGroup, config: CocoDiffConfig, topology: Topology, part: dict[str, str]
) -> TuningCache:
    """Return the tuning cache of a group. All Ulysses groups of a ring get the same, since they tune together."""
    common = {**host_description.describe(topology, config.kernels, dist.get_backend(group)), **part}
    if host.sequence_group().world_size > dist.get_world_size(group):
        common["ring"] = config.ring  # the placement decides which ranks are neighbors
    # In the group for host memory, which is gloo's whatever the backend of the device is.
    return tuning_cache.load_shared(
        host.sequence_group().cpu_group, common, host_description.describe_rank(), config.cache
    )


def _runtime_of(
    config: CocoDiffConfig, setup: CommSetup, ring: Ring | None, kernel_warning: str | None
) -> tuple[CodecRuntime | None, str | None]:
    """Return the codecs' runtime of a session, and log its mode; None where all communication is lossless, with the
    reason unless that is the mode.

    Args:
        config: the options.
        setup: communication of the Ulysses group.
        ring: the ring, if there is one.
        kernel_warning: warning that kernels are slower than usual, which also explains that no axis is slow.
    """
    partition, ring_partition = setup.partition, ring.partition if ring else None
    topology = f"{config.topology}, ring {config.ring} {ring.mesh.topology}" if ring else str(config.topology)
    if config.mode == EXACT:
        plan = config.plan or AUTO
        info_once(f"on: topology {topology}, plan {plan}; lossless: bit-identical to stock")
        return None, None
    if partition is None and ring_partition is None:
        is_measured = config.slow_axes == MEASURED_SLOW_AXES
        if is_measured and kernel_warning:
            return None, kernel_warning
        reason = (_NO_AXIS_IS_SLOW if is_measured else NO_SLOW_AXIS).format(topology, config.mode)
        (info_once if is_measured else warn_once)(reason)
        return None, reason
    slow_axes, may_gather = _slow_axes(partition, config.topology) if partition else "", setup.gather is not None
    if partition and (ignored := exchanges.ignored_gather(config, slow_axes, may_gather)):
        warn_once(ignored)
    slow = [slow_axes] if partition else []
    slow += [f"{_slow_axes(ring_partition, ring.mesh.topology)} of the ring"] if ring_partition else []
    how = f": {exchanges.announced(config, slow_axes, partition.num_slow, may_gather)}" if partition else ""
    warn_lossy(config, f"{' and '.join(slow)} (topology {topology}){how}")
    return new_runtime(config, partition, functools.partial(all_reduce, timeout=config.timeout), ring_partition), None


def _slow_axes(partition: AxisPartition, topology: Topology) -> str:
    """Return the names of the slow axes, separated by commas."""
    return ", ".join(partition.slow_axis_names)


def warn_lossy(config: CocoDiffConfig, links: str) -> None:
    """Warn that a mode compresses communication on some links, which the text names."""
    warn_once(
        f"lossy: mode {config.mode!r} compresses communication on {links}; --cocodiff_mode {EXACT} is "
        "bit-identical to stock"
    )


def new_runtime(
    config: CocoDiffConfig,
    partition: AxisLayout | None,
    all_reduce: Callable[[list[float], str], list[float]],
    ring_partition: AxisLayout | None,
) -> CodecRuntime:
    """Return the codecs' runtime of a session.

    Args:
        config: the options.
        partition: slow and fast axes of the Ulysses group; None if it has no slow axis.
        all_reduce: reduces numbers over all ranks that share the sequence by "sum" or "min".
        ring_partition: slow and fast axes of the ring; None if it has no slow axis.
    """
    partitions = partition, ring_partition
    return CodecRuntime(
        partition,
        config.mode,
        config.schedule,
        lambda values: all_reduce(values, "sum"),
        memory_budget=config.memory_budget,
        reporter=LoggingReporter(config.mode, config.schedule, partitions, info_always, warn_always),
        ring_partition=ring_partition,
        device_memory=device_memory.reader(compute_device().type),
        min_over_ranks=lambda values: all_reduce(values, "min"),
    )
