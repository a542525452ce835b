"""Records the steps of variants on an emulated accelerator, in one process that stands for all ranks.

xDiT initializes its process groups once in a process. So each split is recorded in a process of its own, forked from
the caller.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch

from benchmarks import bare_runtime, modes
from benchmarks.accelerator import device_type
from benchmarks.accelerator.device import EmulatedAccelerator
from benchmarks.accelerator.program import Program
from benchmarks.cluster import rules
from benchmarks.cluster.cell import Cell
from benchmarks.cluster.variants import Variant
from benchmarks.full_size import transformer as full_size
from benchmarks.full_size import transformer_wrappers
from benchmarks.full_size.transformer import FullSizeTransformer
from xfuser_cocodiff.tools.simulation import assumed_change
from xfuser_cocodiff.xdit.attention import eager_attention
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.layers import schedule_candidates
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

_WARMUP_STEPS = 3
"""Steps after which a variant is in a steady state: layers are known, V's source is known, schedules are set."""
_POSITIONS = (0.125, 0.375, 0.625, 0.875)
"""Positions in the run of the coded steps that are recorded where bits do not vary: the middle of each quarter."""
KEYFRAME = "keyframe"
"""Name of the program of a keyframe."""


@dataclass
class Recording:
    """Recorded steps of a variant."""

    programs: dict[str, Program] = field(default_factory=dict)
    """Distinct steps by name."""
    weights: dict[str, float] = field(default_factory=dict)
    """Fraction of a run's steps that each program stands for."""
    alternatives: dict[str, list[str]] = field(default_factory=dict)
    """Programs of the other overlap schedules among which autotuning would choose, by the program that they could
    replace."""


def record_split(cell: Cell, split: UlyssesRingSplit, variants: Sequence[Variant]) -> dict[str, Recording]:
    """Record variants of the same split in a forked process."""
    transformer_wrappers.preload(cell.model)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        return executor.submit(_record, cell, split, variants).result()


def _record(cell: Cell, split: UlyssesRingSplit, variants: Sequence[Variant]) -> dict[str, Recording]:
    emulated = start_xdit(split)
    with EmulatedAccelerator(cell.machine.accelerator) as emulator:
        model = full_size.build(cell.workload, cell.blocks, emulated)
        recorder = Recorder(emulator, model, cell)
        return {variant.name: recorder.record(variant) for variant in variants}


def start_xdit(split: UlyssesRingSplit) -> torch.device:
    """Start xDiT on rank 0 of a group whose collectives return at once, and return its device."""
    activation.activate()  # before PyTorch knows the device, so that xDiT runs as on a machine without one
    device = device_type.register()
    bare_runtime.start_alone(split.ulysses * split.ring, device_type.BACKEND, split.ring)
    return device


class Recorder:
    """Records variants of one cell in one split.

    Args:
        emulator: emulated accelerator.
        transformer: model on it.
        cell: the cell.
    """

    def __init__(self, emulator: EmulatedAccelerator, transformer: FullSizeTransformer, cell: Cell) -> None:
        self._device, self._transformer, self._cell = emulator, transformer, cell
        for kind, blocks in transformer.blocks.items():
            for index, block in enumerate(blocks):
                block.register_forward_pre_hook(lambda *_, name=f"{kind} {index} begin": emulator.mark(name))
                block.register_forward_hook(lambda *_, name=f"{kind} {index} end": emulator.mark(name))

    def record(self, variant: Variant) -> Recording:
        """Return the recorded steps of a variant."""
        if variant.rule:
            return self._record_rule(variant.rule)
        session = modes.new_session(variant.options, self._cell.profile, variant.split, device_type.DEVICE_TYPE)
        session.schedule_tuner = None  # times would be those of this host; the benchmark compares the schedules itself
        bare_runtime.use_session(session)
        try:
            # Attention by head groups, and of some queries to gathered K and V, has stock's bits with kernels that
            # compute each head and each block of queries on its own. Tensors without values cannot show it.
            with mock.patch.object(eager_attention, "equal_outputs", lambda *_: True):
                return self._record_lossy(session) if session.runtime else self._record_lossless(session)
        finally:
            session.close()
            bare_runtime.use_session(Session())

    def _record_rule(self, rule: str) -> Recording:
        bare_runtime.use_session(Session())
        with rules.running(rule, self._device):
            self._step()  # creates the inputs, and what a rule keeps
            return Recording({"step": self._step()}, {"step": 1.0})

    def _record_lossless(self, session: Session) -> Recording:
        for _ in range(_WARMUP_STEPS):
            self._step(session)
        recording = Recording({"step": self._step(session)}, {"step": 1.0})
        self._record_alternatives(recording, session, "step", partial(self._step, session))
        return recording

    def _record_lossy(self, session: Session) -> Recording:
        assert session.runtime
        schedule, total = session.runtime.schedule, assumed_change.STEPS
        coded = [step for step in range(total) if not schedule.is_keyframe_step(step)]
        bits = assumed_change.bits_of(schedule, total)
        session.begin_run(total)
        session.runtime.fixed_bits = bits  # recorded values have no errors to choose by
        for step in range(max(_WARMUP_STEPS, coded[0] + 2)):
            self._step(session, step)
        recording = Recording()
        chosen = sorted({coded[round(position * (len(coded) - 1))] for position in _POSITIONS})
        if bits:
            chosen = [bits.index(each, coded[0]) for each in dict.fromkeys(bits[coded[0] :])]
        share = {step: bits[coded[0] :].count(bits[step]) if bits else 1 for step in chosen}
        programs = {step: self._step(session, step) for step in chosen}
        sizes = {step: tuple(each.sent for each in program.collectives) for step, program in programs.items()}
        for size in dict.fromkeys(sizes.values()):
            steps = [step for step in chosen if sizes[step] == size]
            name = f"step {steps[0]}"
            recording.programs[name] = programs[steps[0]]
            recording.weights[name] = sum(share[step] for step in steps) / sum(share.values()) * len(coded) / total
            self._record_alternatives(recording, session, name, partial(self._step, session, steps[0]))
        session.begin_run(total)
        recording.programs[KEYFRAME] = self._step(session, 0)
        recording.weights[KEYFRAME] = 1 - len(coded) / total
        return recording

    def _record_alternatives(
        self, recording: Recording, session: Session, name: str, step: Callable[[], Program]
    ) -> None:
        """Record a step by each other candidate that autotuning would compare with the plugin's schedule."""
        candidates = [each.candidates for each in session.layers.signatures if each.candidates]
        undecided = [each for each in candidates if each.chosen is None]
        for index in schedule_candidates.distinct_candidates(undecided)[1:]:
            for each in undecided:
                each.candidate = index
            step()  # V of the first block was still sent by the other schedule
            alternative = f"{name}, {undecided[0].at(index)}"
            recording.programs[alternative] = step()
            recording.alternatives.setdefault(name, []).append(alternative)
        for each in undecided:
            each.candidate = schedule_candidates.PLUGIN
        if undecided:
            step()

    def _step(self, session: Session | None = None, step: int | None = None) -> Program:
        """Run a step and return its program."""
        if session and session.runtime and step is not None:
            session.runtime.clock.step = step
        self._device.begin_step()
        with torch.inference_mode():
            self._transformer.call(self._cell.resolution, self._cell.batch)
        if session:
            session.end_step()
        return self._device.end_step()
