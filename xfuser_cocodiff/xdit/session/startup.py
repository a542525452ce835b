"""The start of a session with its xDiT engine: process groups, plans and codecs, by the options."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from xfuser_cocodiff.engine.attention.ring_attention import Ring
from xfuser_cocodiff.engine.autotune import tuning_cache
from xfuser_cocodiff.engine.autotune.comm_config import CommConfig
from xfuser_cocodiff.engine.autotune.comm_setup import CommSetup, set_up_comm
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.comm import plan_check
from xfuser_cocodiff.engine.comm.plan_check import CheckedMesh
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.engine.compression.default_mode import EXACT
from xfuser_cocodiff.engine.compression.head_format import HeadFormat
from xfuser_cocodiff.engine.compression.reference_check import ReferenceCheck
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.log import begin_session, info_once, warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import device_memory
from xfuser_cocodiff.xdit.platforms.platform import compute_device
from xfuser_cocodiff.xdit.session import (
    host_description,
    kernel_check,
    ring_groups,
    start_messages,
    usp_versions,
    virtual_group,
)
from xfuser_cocodiff.xdit.session.kernel_check import KernelError
from xfuser_cocodiff.xdit.session.reductions import all_reduce
from xfuser_cocodiff.xdit.session.run_report import LoggingReporter
from xfuser_cocodiff.xdit.session.session import Session, active
from xfuser_cocodiff.xdit.settings.config import AUTO, MEASURED_SLOW_AXES, CocoDiffConfig
from xfuser_cocodiff.xdit.settings.ring_placement import OUTER


def patches(activate: Callable[[Any], None], check_all: Callable[[bool], None]) -> list[Patch]:
    """Return the patch that starts a session with each xDiT engine.

    Args:
        activate: called with the pipeline of an engine that uses the plugin.
        check_all: called by every rank before it makes process groups, with whether its engine uses the plugin.
    """
    return [
        Patch(
            "xfuser.core.distributed.runtime_state",
            "initialize_runtime_state",
            "a session starts with each engine, once all ranks have started",
            functools.partial(_with_session, activate, check_all),
            ("pipeline", "engine_config"),
        ),
    ]


def _with_session(activate: Callable[[Any], None], check_all: Callable[[bool], None], original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_runtime_state(pipeline: Any = None, engine_config: Any = None) -> None:
        # A runner with a pipeline wrapper initializes its engine twice: the wrapper does too.
        session = active()
        starts = engine_config is None or not session.was_just_started(engine_config, _config_of(engine_config))
        if starts:
            session.close()
        if engine_config is not None and _config_of(engine_config):
            activate(pipeline)  # again: a Ray worker has created no config
        if engine_config is not None and not host.has_process_groups():
            check_all(_config_of(engine_config) is not None)
        with ring_groups.placed(engine_config):
            original(pipeline, engine_config)
        if starts:
            begin_session()
        elif session.virtual_group:
            session.virtual_group.adopt(pipeline)
        state = host.runtime_state()
        if engine_config is not None and state is not None:
            state.cocodiff = session = start_session(pipeline, engine_config) if starts else session
            session.origin = engine_config, _config_of(engine_config)
            session.select_kernels()

    return initialize_runtime_state


def _config_of(engine_config: Any) -> CocoDiffConfig | None:
    return host.config_of(engine_config.parallel_config)


def start_session(pipeline: Any, engine_config: Any) -> Session:
    """Return the session of an xDiT engine, by its options. All ranks must call this."""
    parallel, config = engine_config.parallel_config, _config_of(engine_config)
    is_compiled = engine_config.runtime_config.use_torch_compile
    if config and config.virtual:
        return virtual_group.start_session(pipeline, config, is_compiled)
    if config and parallel.sp_degree == 1:
        warn_once("--use_cocodiff has no effect with --ulysses_degree 1; set a degree above 1")
        return Session(config)
    groups = host.process_groups()
    group, ring_group = groups.ULYSSES_PG, groups.RING_PG if parallel.ring_degree > 1 else None
    placement = ring_groups.placement(group, ring_group) if ring_group else OUTER
    if ring_group and placement != (config.ring if config else OUTER):
        warn_once(
            f"this process already has process groups of an earlier engine, with --cocodiff_ring {placement}: the run "
            "uses stock's all-to-all in them; start a new process"
        )
        return Session(config)
    if config is None:
        return Session()
    lossless_reason = _lossless_reason(parallel, config)
    if lossless_reason:
        warn_once(lossless_reason)
        config = replace(config, mode=EXACT)
    usp_is_unknown = not usp_versions.is_known()
    if ring_group and is_compiled and not usp_is_unknown:
        info_once("--use_torch_compile: ring attention is xDiT's own, and lossless")
    if (config.overlap.head_groups or 1) > 1 and is_compiled:
        warn_once("--cocodiff_head_groups has no effect in compiled graphs; leave it out, or --use_torch_compile")
    session = create_session(
        group,
        config,
        ring_group=None if usp_is_unknown or is_compiled else ring_group,
        # Beside a ring, also one of xDiT's own, and in PipeFusion, K and V are not gathered.
        may_gather=parallel.ring_degree == 1 and parallel.pp_degree == 1,
        values=kernel_check.head_format(pipeline),
    )
    session.lossless_reason = lossless_reason or session.lossless_reason
    return session


def _lossless_reason(parallel: Any, config: CocoDiffConfig) -> str | None:
    """Return the warning of what makes a run lossless whatever its mode; None if nothing does."""
    is_lossy = config.mode != EXACT
    if not usp_versions.is_known():
        lossless = f", and mode {config.mode!r} has no effect" if is_lossy else ""
        return (
            f"this xfuser's USP is unknown: it runs unchanged over the plugin's all-to-all{lossless}; install version "
            f"{' or '.join(usp_versions.DIGESTS)} for overlap and compression"
        )
    if parallel.pp_degree > 1 and is_lossy:
        return (
            f"mode {config.mode!r} has no effect with PipeFusion: the run is lossless; leave out "
            "--pipefusion_parallel_degree to compress"
        )
    return None


class _Group(NamedTuple):
    """The Ulysses group, or the ring."""

    group: dist.ProcessGroup
    config: CommConfig
    """Config of its communication."""
    cache: TuningCache
    """Its tuning results."""

    def without_codec(self) -> "_Group":
        """Return the group without the speed of kernels that fail: only the links stay as they were measured."""
        given, measured = (each and each.with_codec(0.0, 0.0) for each in (self.config.profile, self.cache.profile))
        return self._replace(config=replace(self.config, profile=given), cache=TuningCache({}, measured))


def create_session(
    group: dist.ProcessGroup,
    config: CocoDiffConfig,
    cache: TuningCache | None = None,
    ring_group: dist.ProcessGroup | None = None,
    may_gather: bool = True,
    values: HeadFormat | None = None,
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
    groups = [_Group(group, config.comm, cache or _load_cache("Ulysses", group, config, config.topology))]
    if ring_group:
        topology = config.ring_topology or Topology.flat(ring_group.size())
        of_ring = replace(config.comm, topology=topology, profile=config.ring_profile, plan=None)
        groups.append(_Group(ring_group, of_ring, _load_cache("ring", ring_group, config, topology)))
    failure = None
    try:
        setups = _set_up(groups, config, may_gather, values)
    except KernelError as error:  # on every rank
        groups, config = [each.without_codec() for each in groups], replace(config, kernels=kernels.TORCH)
        setups = _set_up(groups, config, may_gather, values)
        is_lossless = not any(setup.partition for setup in setups)
        failure = start_messages.other_kernels(str(error), config.mode, is_lossless)
        warn_once(failure)
    info_once(start_messages.links(config, setups, failure is not None))
    setup, *rings = setups
    ring = Ring(rings[0].mesh, dist.get_rank(ring_group), rings[0].partition) if rings else None
    lossless_reason = _announce(config, setup, ring, failure)
    is_lossy = config.mode != EXACT and lossless_reason is None
    session = Session(
        config,
        setup.mesh,
        setup,
        new_runtime(config, setup.partition, ring.partition if ring else None) if is_lossy else None,
        lossless_reason=lossless_reason,
        ring=ring,
        ring_setup=rings[0] if rings else None,
    )
    session.save_tuning()
    if values:
        for each, setup in zip(groups, setups, strict=True):
            rank, size = dist.get_rank(each.group), each.group.size()
            plan_check.check(list(_checked_meshes(setup, size)), rank, size, host.sequence_group().cpu_group)
    if values and session.runtime:
        ring_ranks = dist.get_process_group_ranks(ring_group) if ring_group else []
        check = ReferenceCheck(host.sequence_group().cpu_group)
        session.codecs.check_later(check, dist.get_process_group_ranks(group), ring_ranks)
    return session


def _load_cache(part: str, group: dist.ProcessGroup, config: CocoDiffConfig, topology: Topology) -> TuningCache:
    """Return the tuning cache of a group. All Ulysses groups of a ring get the same, since they tune together."""
    common = host_description.describe(topology, config.kernels, dist.get_backend(group))
    common |= {"part": part, "ring": config.ring}  # the placement decides which ranks are neighbors
    # In the group for host memory, which is gloo's whatever the backend of the device is.
    return tuning_cache.load_shared(
        host.sequence_group().cpu_group, common, host_description.describe_rank(), config.cache
    )


def _set_up(
    groups: Sequence[_Group], config: CocoDiffConfig, may_gather: bool, values: HeadFormat | None
) -> list[CommSetup]:
    """Return mesh, plans and tuning cache of the Ulysses group, and of the ring if there is one, on one comm stream.

    Raises:
        KernelError: the codec, whose speed decides which axes are slow, fails on a rank; on every rank.
    """
    kernels.use(config.kernels)
    host_group = host.sequence_group().cpu_group
    measure_codec = functools.cache(lambda: kernel_check.measure_codec(config, host_group))
    largest = functools.partial(all_reduce, operation="max", timeout=config.timeout)
    setups: list[CommSetup] = []
    for group, comm, cache in groups:
        parent, gathers = setups[0].mesh if setups else None, may_gather and len(groups) == 1
        setups.append(
            set_up_comm(
                *(group, comm, compute_device(), cache, largest, parent, gathers),
                host_group=host_group,
                measure_codec=measure_codec,
            )
        )
    if values and any(setup.partition for setup in setups):
        kernel_check.check(config, host_group, values)
    return setups


def _checked_meshes(setup: CommSetup, size: int) -> Iterator[CheckedMesh]:
    """Yield the meshes of a group, and their ranks by number in the group."""
    yield CheckedMesh(setup.mesh, range(size))
    for partition in {id(each): each for each in (setup.partition, setup.gather)}.values():
        if partition and partition.fast:
            yield CheckedMesh(partition.slow, range(partition.fast_index, size, partition.num_fast))
            yield CheckedMesh(partition.fast, partition.ranks_at(partition.slow_index))


def _announce(config: CocoDiffConfig, setup: CommSetup, ring: Ring | None, kernel_failure: str | None) -> str | None:
    """Log the mode of a session. Return why it compresses nothing, unless it is lossless by its mode.

    Args:
        config: the options.
        setup: communication of the Ulysses group.
        ring: the ring, if there is one.
        kernel_failure: warning that other kernels are in use, which also explains that no measured axis is slow.
    """
    topology = f"{config.topology}, ring {config.ring} {ring.mesh.topology}" if ring else str(config.topology)
    if config.mode == EXACT:
        info_once(f"on: topology {topology}, plan {config.plan or AUTO}; lossless: bit-identical to stock")
        return None
    slow_axes = setup.partition.slow_axis_names if setup.partition else ()
    slow = [", ".join(slow_axes)] if slow_axes else []
    slow += [f"{', '.join(ring.partition.slow_axis_names)} of the ring"] if ring and ring.partition else []
    if slow:
        where = f"{' and '.join(slow)} (topology {topology})"
        num_slow = setup.partition.num_slow if setup.partition else 1
        start_messages.warn_lossy(config, where, slow_axes, num_slow, setup.gather is not None)
        return None
    is_measured = config.slow_axes == MEASURED_SLOW_AXES
    if is_measured and kernel_failure:
        return kernel_failure
    reason = start_messages.no_slow_axis(config, topology)
    (info_once if is_measured else warn_once)(reason)
    return reason


def new_runtime(
    config: CocoDiffConfig,
    partition: AxisLayout | None,
    ring_partition: AxisLayout | None,
    reduce: Callable[..., list[float]] = all_reduce,
) -> CodecRuntime:
    """Return the codecs' runtime of a session.

    Args:
        config: the options.
        partition: slow and fast axes of the Ulysses group; None if it has no slow axis.
        ring_partition: slow and fast axes of the ring; None if it has no slow axis.
        reduce: see :func:`all_reduce`, of all ranks that share the sequence.
    """
    return CodecRuntime(
        partition,
        config.mode,
        config.schedule,
        functools.partial(reduce, operation="sum", timeout=config.timeout),
        memory_budget=config.memory_budget,
        reporter=LoggingReporter(config.mode, config.schedule, (partition, ring_partition)),
        ring_partition=ring_partition,
        device_memory=device_memory.reader(compute_device().type),
        min_over_ranks=functools.partial(reduce, operation="min", timeout=config.timeout),
    )
