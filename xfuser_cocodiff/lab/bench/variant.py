"""The variants that `bench model` compares: stock and modes of the plugin, each with its own run state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.compression.step_report import StepReport
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.bench.transformer import Step
from xfuser_cocodiff.lab.launching import bare_runtime
from xfuser_cocodiff.xdit.session import startup
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig
from xfuser_cocodiff.xdit.settings.parsers import OFF
from xfuser_cocodiff.xdit.settings.resolve import resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks, UlyssesRingSplit

_RUN_STEPS = 50
"""Number of steps of the run that lossy modes are timed in."""
_OPTIONS = {"v_first", "head_groups", "schedule", "slow_axes"}
_GOLDEN = 0.618
"""Golden-ratio stride: positions this fraction of a run apart cover it evenly, for any number of them."""


@dataclass
class Variant:
    """Stock or a mode of the plugin."""

    session: Session = field(default_factory=Session)
    """The plugin's state; an inactive session for stock."""
    plans: dict[str, None] = field(default_factory=dict)
    """Plans of the last step's all-to-alls."""
    a2a_seconds: list[float] = field(default_factory=list)
    """All-to-all time of each step so far."""
    done: int = 0
    """Number of steps so far."""

    @property
    def runtime(self) -> CodecRuntime | None:
        """Compression state; None if nothing is compressed."""
        return self.session.runtime

    def run(self, step: Step, first: bool = False) -> torch.Tensor:
        """Run a denoising step: the first one of a new run if `first`, else the next position of the current run."""
        bare_runtime.use_session(self.session)
        self.plans.clear()
        self.session.traffic.reset()
        if self.runtime:
            self._begin_run() if first else self._advance()
        elif self.session.runs.newest is None:  # schedules are tuned in runs only
            self.session.runs.begin()
        result = step(self.position)
        self.session.runs.end_step()
        self.a2a_seconds.append(sum(self.session.traffic.seconds.values()))
        return result

    def _begin_run(self) -> None:
        """Move to the first step of a new run."""
        self.session.runs.begin(_RUN_STEPS)
        self.runtime.step, self.done = 0, 1

    def _advance(self) -> None:
        """Move to another step of the run: first through its keyframes, then evenly over all other steps."""
        if self.done == 0:
            self._begin_run()
            return
        encoded = [step for step in range(_RUN_STEPS - 1) if not self.runtime.schedule.is_keyframe_step(step)] or [0]
        past = self.done - encoded[0]
        self.runtime.step = self.done if past < 0 else encoded[round(past * _GOLDEN * len(encoded)) % len(encoded)]
        self.done += 1

    @property
    def position(self) -> float:
        """Position in the run, 0 to 1; 0.5 if nothing depends on it."""
        return self.runtime.step / _RUN_STEPS if self.runtime else 0.5

    @property
    def keyframe_fraction(self) -> float:
        """Fraction of a run's steps that are keyframes."""
        if self.runtime is None:
            return 0.0
        return sum(map(self.runtime.schedule.is_keyframe_step, range(_RUN_STEPS))) / _RUN_STEPS

    @property
    def bytes_slow_fraction(self) -> float:
        """Bytes that a run sends on slow axes, relative to sending them exactly."""
        reports = self.runtime.reports if self.runtime else []
        keyframes, encoded = (
            _sent_fraction([report for report in reports if report.was_keyframe == is_keyframe])
            for is_keyframe in (True, False)
        )
        return self.keyframe_fraction * keyframes + (1 - self.keyframe_fraction) * encoded


def parse_mode(mode: str, topology: Topology, split: UlyssesRingSplit, device_type: str = "cpu") -> CocoDiffConfig:
    """Parse a mode in the notation of `--mode`, in which a semicolon stands for a comma inside a value.

    Raises:
        ValueError: the mode or one of its options is not valid.
    """
    main, *fixed = mode.split("@")
    name, _, plan = main.partition("/")
    options = dict(option.partition("=")[::2] for option in fixed)
    try:
        if unknown := options.keys() - _OPTIONS:
            raise ValueError(f"{min(unknown)!r} is not valid after @; valid are {'=, '.join(sorted(_OPTIONS))}=")
        values = {
            "use_cocodiff": True,
            "cocodiff_mode": name,
            "cocodiff_a2a": plan.replace(";", ",") or None,
            "cocodiff_cache": OFF,
        }
        values |= {f"cocodiff_{key}": value.replace(";", ",") for key, value in options.items()}
        ranks = SequenceRanks(split.ulysses, split.ulysses_topology(topology), split.ring, topology)
        return resolve(values, {}, ranks, device_type)
    except ValueError as error:
        raise ValueError(f"--mode {mode!r}: {error}") from None


def of_mode(config: CocoDiffConfig, profile: Profile) -> Variant:
    """Return a variant of the plugin that records the plans it uses."""
    group, around = bare_runtime.process_groups()
    if around.size() > 1:
        config = replace(config, ring_profile=profile.restrict_to(config.ring_topology))
    ulysses = UlyssesRingSplit(group.size(), around.size()).ulysses_topology(profile.topology)
    known = TuningCache({}, profile.restrict_to(ulysses) if group.size() > 1 else None)
    session = startup.create_session(group, config, known, ring_group=around if around.size() > 1 else None)
    choose, plans = session.mesh.policy.choose, dict[str, None]()

    def choose_and_record(message_bytes: int) -> Plan:
        plan = choose(message_bytes)
        plans[str(plan)] = None
        return plan

    session.mesh = replace(session.mesh, policy=replace(session.mesh.policy, choose=choose_and_record))
    return Variant(session, plans)


def without_communication(step: Step) -> Callable[[], object]:
    """Return stock's step with all communication replaced by local copies."""
    stock = Variant()

    def run() -> None:
        with bare_runtime.without_communication():
            stock.run(step)

    return run


def _sent_fraction(reports: Sequence[StepReport]) -> float:
    """Return sent bytes relative to exact ones; 1 without reports."""
    exact = sum(report.exact_bytes for report in reports)
    return sum(report.sent_bytes for report in reports) / exact if exact else 1.0
