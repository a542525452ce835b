"""Self-check of the codecs' kernels on this rank's device, which also compiles them before the first step.

Sender and receiver compute references by two kernels, which a compiler may round differently. Differences of single
bits would add up from step to step, unseen. So each codec of a mode encodes and decodes random values once, and its
references and results are compared bit for bit, and with those of PyTorch's kernels.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping

import torch

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS
from xfuser_cocodiff.engine.compression.codecs import Codec
from xfuser_cocodiff.engine.compression.loopback import NUM_SLOTS, Loopback
from xfuser_cocodiff.engine.compression.modes import FEW_STEPS, VERY_FEW_STEPS, CodecSchedule

_TOTALS = (VERY_FEW_STEPS, FEW_STEPS, 50)
"""Numbers of steps of a short run and of a long one, which modes schedule differently."""
_GROUPS, _HEADS, _TOKENS, _HEAD_DIM = 2, 4, 512, 128
"""Sizes of the values: full blocks of the kernels."""
_CHANGE = 0.05
"""Change of the values from step to step, relative to the values."""
_DIFFERENT, _ENERGY_TOLERANCE = 0.01, 0.01
"""Fraction of the values, and relative difference of the error, by which kernels and PyTorch's may differ: where the
sum over a row rounds differently, its scale may be a neighboring one."""
_BOTH_ENDS = "sender and receiver have different references"


def failure(choice: str, mode: str, overrides: str | None, device: torch.device, tokens: int = _TOKENS) -> str | None:
    """Return why the kernels of a choice must not be used on this device, or None if they passed.

    Args:
        choice: the kernels, one of kernels.CHOICES, which this process uses.
        mode: a lossy mode, one of options.MODES.
        overrides: changes to the mode's schedule, in its notation.
        device: device of the values.
        tokens: number of tokens.
    """
    try:
        for codecs_of_steps in _schedules(mode, overrides):
            if reason := _failure_of_run(choice, codecs_of_steps, device, tokens):
                return reason
    except Exception as error:  # of a compiler, a driver or a launch
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        kernels.use(choice)
    return None


def _schedules(mode: str, overrides: str | None) -> Iterator[list[Mapping[str, Codec]]]:
    """Yield the codecs of some steps of a short and a long run: keyframes, first residuals and the last step."""
    for total, is_guided in itertools.product(_TOTALS, (False, True)):
        preset = modes.preset(mode, total, is_guided) or CodecSchedule()
        schedule = CodecSchedule.parse(overrides, preset) if overrides else preset
        steps = sorted({0, *range(schedule.warmup, schedule.warmup + 3), total - 1} & {*range(total)})
        yield [schedule.codecs(step, total) for step in steps]
        if schedule.allocation:  # bits of other layers
            keyframe = dict.fromkeys(LETTERS, schedule.keyframe_codec)
            layers = schedule.allocation.layers
            found = {
                codec for layer in layers for step in steps for codec in schedule.codecs(step, total, layer).values()
            }
            for codec in sorted(found, key=str):
                yield [keyframe, *[dict.fromkeys(LETTERS, codec)] * 3]


def _failure_of_run(
    choice: str, codecs_of_steps: list[Mapping[str, Codec]], device: torch.device, tokens: int
) -> str | None:
    """Return what is wrong in a run of some steps, or None."""
    shape = NUM_SLOTS, _GROUPS, _HEADS, tokens, _HEAD_DIM
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    first, change = ({name: draw() for name in LETTERS} for _ in range(2))
    layer = Loopback()
    for step, codecs in enumerate(codecs_of_steps):
        values = {name: (first[name] + _CHANGE * step * change[name]).bfloat16() for name in LETTERS}
        expected_layer = Loopback()
        expected_layer.link_states = copy.deepcopy(layer.link_states)  # so that differences do not add up
        kernels.use(choice)
        decoded, stats = layer.send(values, codecs, seed=step)
        kernels.use(kernels.TORCH)
        expected, expected_stats = expected_layer.send(values, codecs, seed=step)
        for name in LETTERS:
            reason = _difference(layer, expected_layer, name, decoded[name], expected[name])
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
    layer: Loopback, expected_layer: Loopback, name: str, decoded: torch.Tensor, expected: torch.Tensor
) -> str | None:
    """Return what is wrong with a tensor after a step, or None."""
    state, expected_state = (each.link_states[name, ALL_HEADS] for each in (layer, expected_layer))
    sent, received = state.sent, state.received
    for gain in (0.0, 1.0):  # without the reference of the step before, and with it
        if not torch.equal(sent.predict(gain), received.predict(gain)):
            return _BOTH_ENDS
    if not torch.equal(decoded, received.predict()):
        return "the receiver decodes other values than its reference"
    different = (decoded != expected).float().mean().item()
    if different > _DIFFERENT:
        return f"{different:.1%} of the values differ from those of PyTorch's kernels"
    gains, expected_gains = sent.gains, expected_state.sent.gains
    if gains is not None and (gains.int() - expected_gains.int()).abs().max() > 1:
        return f"gains {gains.tolist()} instead of {expected_gains.tolist()}"
    return None
