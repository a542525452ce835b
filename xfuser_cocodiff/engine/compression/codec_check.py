"""Self-check of the codecs' kernels on this rank's device, which also compiles them before the first step.

Sender and receiver compute references by two kernels, which a compiler may round differently. Differences of single
bits would add up from step to step, unseen. So each codec of a mode encodes and decodes random values once, and its
references and results are compared bit for bit, and with those of PyTorch's kernels. A second branch follows the first
as in guided models, since kernels that code differences to a leading branch are compiled by themselves.

Kernels are compiled for the codecs of all tensors of a message, and for the type and head dim of its values. Checked
are the messages that a run of more than FEW_STEPS may send, and in messages of one tensor the codecs of shorter runs,
of all layers of a tuned schedule, and of the precisions of mode `auto`.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS
from xfuser_cocodiff.engine.compression.codec import Codec
from xfuser_cocodiff.engine.compression.lead import Lead, decoded_values
from xfuser_cocodiff.engine.compression.loopback import BY_HEADS, NUM_SLOTS, Loopback
from xfuser_cocodiff.engine.compression.modes import (
    DEFAULT_STEPS,
    FEW_STEPS,
    USUAL_STEPS,
    VERY_FEW_STEPS,
    CodecSchedule,
)
from xfuser_cocodiff.engine.compression.precisions import at_precision, precisions_of
from xfuser_cocodiff.engine.compression.value_format import USUAL_VALUES, ValueFormat

_SHORTER = (VERY_FEW_STEPS, FEW_STEPS, USUAL_STEPS)
"""Longest runs of each shorter schedule, in steps."""
_MESSAGES = (BY_HEADS, ("v", "qk"), ("kv",))
"""Messages of a layer: by heads, by heads with V first, and with K and V gathered."""
_ONE_TENSOR = ("v",)
"""The messages in which further codecs are checked; V selects its own tokens."""
_GROUPS, _HEADS, _TOKENS = 2, 4, 512
"""Sizes of the values: full blocks of the kernels."""
_CHANGE = 0.05
"""Change of the values from step to step, relative to the values."""
_MAX_OCTAVES = 6
"""Largest size of a channel relative to the smallest, as a power of two."""
_BRANCH_DIFFERENCE = 0.2
"""Difference of the following branch's values to the leading one's, relative to the values."""
_DIFFERENT, _ENERGY_TOLERANCE = 0.01, 0.01
"""Fraction of the values, and relative difference of the error, by which kernels and PyTorch's may differ: where the
sum over a row rounds differently, its scale may be a neighboring one."""
_BOTH_ENDS = "sender and receiver have different references"


class _Run(NamedTuple):
    """A run of some steps."""

    steps: list[Mapping[str, Codec]]
    """Codecs of each step."""
    messages: tuple[str, ...]
    """Letters of the tensors of each message."""
    joint: float
    """Weight of the leading branch in the difference that is coded for the following one; 0 for one branch."""
    int8_references: bool = False
    """Whether references are stored in int8."""


def failure(
    choice: str,
    mode: str,
    overrides: str | None,
    device: torch.device,
    values: ValueFormat = USUAL_VALUES,
    tokens: int = _TOKENS,
) -> str | None:
    """Return why the kernels of a choice must not be used on this device, or None if they passed.

    Args:
        choice: the kernels, one of kernels.CHOICES, which this process uses.
        mode: a lossy mode, one of options.MODES.
        overrides: changes to the mode's schedule, in its notation.
        device: device of the values.
        values: head dim and type of the model's values.
        tokens: number of tokens.
    """
    shape = NUM_SLOTS, _GROUPS, _HEADS, tokens, values.head_dim
    try:
        runs = list(_runs(mode, overrides))
        for run in (*runs, runs[0]._replace(int8_references=True)):
            if reason := _failure_of_run(choice, run, device, shape, values.dtype):
                return reason
    except Exception as error:  # of a compiler, a driver or a launch
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        kernels.use(choice)
    return None


def _runs(mode: str, overrides: str | None) -> Iterator[_Run]:
    """Yield runs of a few steps: those of a long run in each message, and other codecs in a message of one tensor.

    The steps of a long run are the keyframes, the first residuals and the last step.
    """

    def schedule_of(total: int, is_guided: bool) -> CodecSchedule:
        preset = modes.preset(mode, total, is_guided) or CodecSchedule()
        return CodecSchedule.parse(overrides, preset) if overrides else preset

    long_runs: list[CodecSchedule] = []
    known: set[tuple[Codec, float]] = set()
    for total, is_guided in itertools.product((DEFAULT_STEPS, USUAL_STEPS), (False, True)):
        schedule = schedule_of(total, is_guided)
        if schedule not in long_runs:
            long_runs.append(schedule)
            steps = [schedule.codecs(step, total) for step in _checked_steps(schedule, total)]
            yield from (_Run(steps, messages, schedule.joint) for messages in _MESSAGES)
            known |= {(codec, schedule.joint) for codecs in steps for codec in codecs.values()}
    for total, is_guided in itertools.product((*_SHORTER, DEFAULT_STEPS), (False, True)):
        schedule = schedule_of(total, is_guided)
        layers = [None, *(schedule.allocation.layers if schedule.allocation else ())]
        steps = [schedule.codecs(step, total, layer) for layer in layers for step in _checked_steps(schedule, total)]
        found = {codec for codecs in steps for codec in codecs.values()}
        if mode == "auto":
            found |= {at_precision(codec, each) for codec in found for each in precisions_of(schedule, total)}
        for codec in sorted(found, key=str):
            if (codec, schedule.joint) not in known:
                known.add((codec, schedule.joint))
                keyframe = dict.fromkeys(LETTERS, schedule.keyframe_codec)
                yield _Run([keyframe, *[dict.fromkeys(LETTERS, codec)] * 3], _ONE_TENSOR, schedule.joint)


def _checked_steps(schedule: CodecSchedule, total: int) -> list[int]:
    """Return the numbers of the steps whose codecs are checked."""
    refreshed = {schedule.warmup + schedule.refresh - 1} if schedule.refresh else set()
    return sorted({0, *range(schedule.warmup, schedule.warmup + 3), *refreshed, total - 1} & {*range(total)})


def _failure_of_run(
    choice: str, run: _Run, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> str | None:
    """Return what is wrong in a run of some steps with values (P, G, H, T, D), or None."""
    generator = torch.Generator().manual_seed(0)

    # Channels of other sizes in each slot and head, so that they have scales.
    slots, _, heads, _, dim = shape
    sizes = 2.0 ** torch.randint(0, _MAX_OCTAVES + 1, (slots, 1, heads, 1, dim), generator=generator)

    def draw() -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * sizes).to(device)

    names = "".join(run.messages)
    first, change, difference = ({name: draw() for name in names} for _ in range(3))
    leading = Loopback(run.messages, run.joint, int8_references=run.int8_references)
    following = Loopback(run.messages, run.joint, leading, run.int8_references)
    for step, codecs in enumerate(run.steps):
        for branch, layer in enumerate((leading, following) if run.joint else (leading,)):
            scales = _CHANGE * step, _BRANCH_DIFFERENCE * branch
            values = {
                name: (first[name] + scales[0] * change[name] + scales[1] * difference[name]).to(dtype)
                for name in names
            }
            if reason := _failure_of_step(choice, layer, values, codecs, step):
                where = ["in a following branch"] * branch + ["int8 references"] * run.int8_references
                return ", ".join([reason, *where])
    return None


def _failure_of_step(
    choice: str, layer: Loopback, values: Mapping[str, torch.Tensor], codecs: Mapping[str, Codec], step: int
) -> str | None:
    """Return what is wrong in a step of a branch, or None."""
    expected_layer = layer.copy()  # so that differences do not add up
    kernels.use(choice)
    decoded, stats = layer.send(values, codecs, seed=step)
    kernels.use(kernels.TORCH)
    expected, expected_stats = expected_layer.send(values, codecs, seed=step)
    for name in values:
        reason = _difference(layer, expected_layer, name, codecs[name], decoded[name], expected[name])
        if reason:
            return f"{name.upper()} at {codecs[name]}: {reason}"
    energies, expected_energies = (
        torch.stack([energy for error in each.quant_errors for energy in error] or [torch.zeros(())])
        for each in (stats, expected_stats)
    )
    if not torch.allclose(energies, expected_energies, rtol=_ENERGY_TOLERANCE):
        return f"errors {energies.tolist()} instead of {expected_energies.tolist()}"
    return None


def _difference(
    layer: Loopback,
    expected_layer: Loopback,
    name: str,
    codec: Codec,
    decoded: torch.Tensor,
    expected: torch.Tensor,
) -> str | None:
    """Return what is wrong with a tensor after a step, or None."""
    state, expected_state = (each.link_states[name, ALL_HEADS] for each in (layer, expected_layer))
    sent, received = state.sent, state.received
    for gain in (0.0, 1.0):  # without the reference of the step before, and with it
        if not torch.equal(sent.predict(gain), received.predict(gain)):
            return _BOTH_ENDS
    # References are rounded where they are stored in int8, or converted to a difference after they arrived.
    is_rounded = layer.int8_references or (layer.leader is not None and codec.is_exact)
    if not is_rounded and not torch.equal(decoded, _held_values(layer, name)):
        return "the receiver decodes other values than its reference"
    different = (decoded != expected).float().mean().item()
    if different > _DIFFERENT:
        return f"{different:.1%} of the values differ from those of PyTorch's kernels"
    gains, expected_gains = sent.gains, expected_state.sent.gains
    if gains is not None and (gains.int() - expected_gains.int()).abs().max() > 1:
        return f"gains {gains.tolist()} instead of {expected_gains.tolist()}"
    return None


def _held_values(layer: Loopback, name: str) -> torch.Tensor:
    """Return the values of a tensor that the receiver's reference stands for, (L, G, H, T, D)."""
    received = layer.link_states[name, ALL_HEADS].received
    if layer.leader is None:
        return decoded_values(received, None)
    leading = layer.leader.link_states[name, ALL_HEADS].received
    return decoded_values(received, Lead(leading, received.weight, received.weight))
