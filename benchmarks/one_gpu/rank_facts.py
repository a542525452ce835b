"""Facts about ranks: one over NCCL, several that share the GPU over gloo, and compiled graphs."""

import functools
import logging.handlers
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import bare_runtime, modes
from benchmarks.full_size import transformer
from benchmarks.one_gpu.kernel_facts import call_seconds
from benchmarks.one_gpu.setting import Row, Setting
from xfuser_cocodiff.engine.comm import groups
from xfuser_cocodiff.engine.comm.deadline import Deadline
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.stages import PendingStage, Stages
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.probing import link_survey
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS
from xfuser_cocodiff.xdit.platforms.platform import compute_device
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

Step = Callable[[float], torch.Tensor]
"""A denoising step: takes the position in the run, 0 to 1, and returns the transformer's output."""
FLUX = WORKLOADS["flux.1-dev"]
TOY = replace(FLUX, heads=2, text_tokens=16)
RESOLUTION, TOY_RESOLUTION = 1024, 64
STOCK, FLAT, V_FIRST, CODED = "stock", "flat", "v-first", "balanced"
OPTIONS = {
    "exact": {"cocodiff_mode": "exact"},
    "fast": {"cocodiff_mode": "fast", "cocodiff_slow_axes": "node"},
    FLAT: {"cocodiff_mode": "exact", "cocodiff_a2a": "flat", "cocodiff_v_first": "off"},
    V_FIRST: {"cocodiff_mode": "exact", "cocodiff_a2a": "hierarchical", "cocodiff_v_first": "on"},
    CODED: {"cocodiff_mode": "balanced", "cocodiff_slow_axes": "node"},
}
"""Options of the plugin that are compared with stock."""
MAX_ERROR = 0.3
"""Largest relative error of a lossy step, far above what the mode has."""
STEPS_OF_LAYERS, WARMUP_STEPS, TIMED_STEPS = 50, 3, 5
MAX_TUNED_STEPS = 40
"""Steps after which tuning must be over."""
_BUSY_CYCLES = 4_000_000_000
"""Cycles for which the device is busy: about two seconds."""
_TIMEOUT_SECONDS = 0.8
"""Timeout of which the deadline is half."""


def nccl(setting: Setting) -> Iterator[Row]:
    """Run what the plugin asks of NCCL on one rank: groups, streams, collectives, deadlines, and the error of a group
    that has been aborted."""
    group, device, topology = bare_runtime.start(), compute_device(), Topology.flat(1)
    mesh = Mesh.over(group, topology, timeout=timedelta(minutes=2), device=device)
    created = mesh.stages.groups[Plan.flat(topology).stages[0]]
    known = {"part": "group", "backend": dist.get_backend(created), "is_of_its_own": created is not group}
    known["has_high_priority"] = getattr(created._get_backend(device).options, "is_high_priority_stream", None)
    yield {**known, "timeout_seconds": groups.timeout_of(created, device).total_seconds()}
    block = torch.randn(2**20, device=device)
    plan, gather_plan = Plan.flat(topology), Plan.hierarchical_gather(topology)
    yield _beside_computation(mesh, "all-to-all", lambda: mesh.all_to_all(block.view(*plan.shape, -1), plan), block)
    yield _beside_computation(mesh, "all-gather", lambda: mesh.all_gather(block, gather_plan), block)
    logged = logging.handlers.BufferingHandler(1000)
    logging.getLogger("xfuser_cocodiff").addHandler(logged)
    busy = torch.cuda.Event()
    torch.cuda._sleep(_BUSY_CYCLES)
    busy.record()
    Deadline([dist.get_rank()], "a deadline", _TIMEOUT_SECONDS).end = busy
    torch.cuda.synchronize()
    yield {"part": "deadline", "logged": [record.getMessage() for record in logged.buffer]}
    raised = ""
    try:
        created.abort()
        mesh.all_to_all(block.view(*plan.shape, -1), plan)
    except Exception as error:  # whether and which, depends on NCCL's version
        raised = f"{type(error).__name__}: {error}"
    yield {"part": "aborted group", "raised": raised}


def _beside_computation(mesh: Mesh, name: str, collective: Callable[[], torch.Tensor], block: torch.Tensor) -> Row:
    """Run a collective on the comm stream while the caller's stream is busy."""
    arrived, computed = torch.cuda.Event(), torch.cuda.Event()

    def work() -> torch.Tensor:
        received = collective()
        arrived.record()
        return received

    mesh.start(Label(name), collective, lambda received: received).wait()  # creates the communicator
    torch.cuda.synchronize()
    handle = mesh.start(Label(name), work, lambda received: received)
    torch.cuda._sleep(_BUSY_CYCLES // 40)
    computed.record()
    time.sleep(0.02)
    is_beside = arrived.query() and not computed.query()
    return {"part": name, "is_beside_computation": is_beside, "is_equal": torch.equal(handle.wait().flatten(), block)}


def layers(setting: Setting) -> Iterator[Row]:
    """Yield the host time of a step of two blocks in stock and in each mode, on one of eight ranks without
    communication, and where the host waits in it for the device. Trace a step of `balanced`."""
    ranks = setting.pick(8, 2)
    bare_runtime.start_alone(ranks)
    topology = Topology.parse(f"node=2,gpu={ranks // 2}", ranks)
    links = tuple(AxisLink(axis.name, 1e-5, 1e9) for axis in topology.axes)
    profile = Profile(topology, links, launch_seconds=1e-5, copy_bytes_per_second=1e12, codec_bytes_per_second=1e12)
    step = _step(setting, 1, setting.device, None)
    with (
        mock.patch("xfuser.model_executor.layers.usp._sdpa_all_to_all_single", torch.clone),
        mock.patch.multiple(Stages, start=_return_sent, start_gather=_return_copies),
    ):
        for name, session in _with_stock(("exact", "fast", CODED), profile).items():
            session.schedule_tuner = None
            session.begin_run(STEPS_OF_LAYERS)
            bare_runtime.use_session(session)
            call = functools.partial(_run, step, session, 0.5)
            for number in range(WARMUP_STEPS):
                if session.runtime:
                    session.runtime.clock.step = number
                call()
            calls = [call] * setting.pick(TIMED_STEPS, 1)
            yield {"mode": name, **call_seconds(calls), "host_waits": _host_waits(call)}
        file = setting.folder / "layer.trace.json.gz"
        with torch.profiler.profile() as profiler:
            call()
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    yield {"trace": file.name}


def _return_sent(stages: Stages, buffer: torch.Tensor, plan: Plan, number: int) -> PendingStage:
    dim = plan.dims[number]
    sent = (buffer.movedim(dim, 0) if dim else buffer).contiguous()
    return lambda: sent.movedim(0, dim)


def _return_copies(stages: Stages, block: torch.Tensor, plan: Plan, number: int) -> PendingStage:
    return lambda: block.expand(plan.shape[plan.dims[number]], *block.shape)


def _host_waits(call: Callable[[], object]) -> list[str]:
    """Return the places in a call where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]


def two_ranks(setting: Setting) -> Iterator[Row]:
    """Compare two blocks of a FLUX transformer with stock's: two lossless modes, then four steps of `balanced`."""
    step, sessions = _sessions(setting, 1, (FLAT, V_FIRST, CODED))
    yield from _compared(step, sessions, total=50, steps=4)


def flux(setting: Setting) -> Iterator[Row]:
    """Compare a run of 3 double and 3 single blocks with stock's: equality, change per step, error by layer."""
    step, sessions = _sessions(setting, 3, (V_FIRST, CODED))
    yield from _compared(step, sessions, total=8, steps=8)


def compiled(setting: Setting) -> Iterator[Row]:
    """Compare a compiled transformer with the plugin to one with stock: equality, graph breaks, times."""
    options = setting.pick({}, {"backend": "eager"})
    step, sessions = _sessions(setting, 2, (V_FIRST,), lambda model: torch.compile(model, **options))
    expected = None
    for name, session in sessions.items():
        torch._dynamo.utils.counters.clear()
        session.begin_run(MAX_TUNED_STEPS)  # schedules are tuned in runs only
        for _ in range(MAX_TUNED_STEPS):
            output = _output(step, session, 0.5)
            if session.is_tuned:
                break
        expected = output if expected is None else expected
        row: Row = {"mode": name, "is_equal": torch.equal(output, expected)}
        row |= {kind: dict(torch._dynamo.utils.counters[kind]) for kind in ("stats", "graph_break")}
        yield row | call_seconds([functools.partial(_output, step, session, 0.5)])
        if not row["is_equal"]:
            raise RuntimeError(f"{name}: not bit-identical to stock")


def _sessions(
    setting: Setting, blocks: int, names: tuple[str, ...], compile_with: Callable | None = None
) -> tuple[Step, dict[str, Session]]:
    """Return a step of a FLUX transformer with some blocks of each kind, and the sessions of stock and of OPTIONS."""
    group, device = bare_runtime.start(), compute_device()
    step = _step(setting, blocks, device, compile_with)
    mesh = Mesh.over(group, Topology.named(node=group.size()), device=device)
    return step, _with_stock(names, link_survey.measure_profile(mesh, device))


def _with_stock(names: Iterable[str], profile: Profile) -> dict[str, Session]:
    """Return the sessions of stock and of some OPTIONS, given the links of all ranks."""
    split, device_type = UlyssesRingSplit(profile.topology.size, 1), compute_device().type
    sessions = {name: modes.new_session(OPTIONS[name], profile, split, device_type) for name in names}
    return {STOCK: Session(), **sessions}


def _step(setting: Setting, blocks: int, device: torch.device, compile_with: Callable | None) -> Step:
    """Return a denoising step, whose latents move on a straight line from noise to a target, as in flow matching."""
    full = transformer.build(setting.pick(FLUX, TOY), blocks, device)
    resolution = setting.pick(RESOLUTION, TOY_RESOLUTION)
    full.initialize(resolution)
    if compile_with:
        full.model = compile_with(full.model)
    inputs = full.inputs(resolution)
    noise = inputs["hidden_states"]
    target = torch.randn_like(noise)

    @torch.inference_mode()
    def call(position: float) -> torch.Tensor:
        inputs["hidden_states"] = torch.lerp(noise, target, position)
        inputs["timestep"].fill_(1 - position)
        return full.call(resolution)

    return call


def _compared(step: Step, sessions: dict[str, Session], total: int, steps: int) -> Iterator[Row]:
    """Yield the results of the first steps of a run of `total` steps in each mode, and raise if one is wrong."""
    earlier, wrong = None, set()
    for number in range(steps):
        outputs = {}
        for name, session in sessions.items():
            if number == 0:
                session.begin_run(total)
            if session.runtime:
                session.runtime.clock.step = number
            outputs[name] = _output(step, session, number / total)
        expected = outputs.pop(STOCK)
        yield {"step": number, "mode": STOCK, "change": None if earlier is None else _relative(expected, earlier)}
        for name, output in outputs.items():
            row: Row = {"step": number, "mode": name, "is_equal": torch.equal(output, expected)}
            row["error"] = _relative(output, expected)
            if runtime := sessions[name].runtime:
                report = runtime.reports[-1]
                row |= {"is_keyframe": report.was_keyframe, "error_by_layer": report.errors}
                row |= {"sent_bytes": report.sent_bytes, "exact_bytes": report.exact_bytes}
            if not (row["error"] < MAX_ERROR if runtime else row["is_equal"]):
                wrong.add(name)
            yield row
        earlier = expected
    if wrong:
        raise RuntimeError(f"wrong results of {', '.join(sorted(wrong))}")


def _output(step: Step, session: Session, position: float) -> torch.Tensor:
    """Return the output of a step with a session, at a position of its run."""
    bare_runtime.use_session(session)
    return _run(step, session, position)


def _run(step: Step, session: Session, position: float) -> torch.Tensor:
    output = step(position)
    session.end_step()
    return output


def _relative(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of values relative to their size."""
    return ((values.float() - expected.float()).norm() / expected.float().norm()).item()
