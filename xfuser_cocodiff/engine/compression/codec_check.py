"""Self-check of the codecs' kernels on this rank's device, which also compiles them before the first step.

Sender and receiver compute references by two kernels, which a compiler may round differently. Differences of single
bits would add up from step to step, unseen. So each codec of a mode encodes and decodes random values once, and its
references and results are compared bit for bit, and with those of PyTorch's kernels. A second branch follows the first
as in guided models, since kernels that code differences to a leading branch are compiled by themselves.

Kernels are compiled for the codecs of all tensors of a message, and for the type and head dim of its values.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.head_format import USUAL_VALUES, HeadFormat
from xfuser_cocodiff.engine.compression.loopback import BY_HEADS, NUM_SLOTS, Loopback
from xfuser_cocodiff.engine.compression.modes import DEFAULT_STEPS
from xfuser_cocodiff.engine.compression.rate_control import LEVELS

_MESSAGES = (BY_HEADS, ("v", "qk"), ("kv",))
"""Messages of a layer: by heads, by heads with V first, and with K and V gathered."""
_GROUPS, _HEADS, _TOKENS = 2, 4, 512
"""Sizes of the values: full blocks of the kernels."""
_CHANGE = 0.05
"""Change of the values from step to step, relative to the values."""
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
    is_joint: bool
    """Whether a second branch follows, coded as the difference to the leading one."""


def failure(
    choice: str,
    mode: str,
    overrides: str | None,
    device: torch.device,
    values: HeadFormat = USUAL_VALUES,
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
        for run in runs:
            if reason := _failure_of_run(choice, run, device, shape, values.dtype):
                return reason
    except Exception as error:  # of a compiler, a driver or a launch
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        kernels.use(choice)
    return None


def _runs(mode: str, overrides: str | None) -> Iterator[_Run]:
    """Yield runs of a few steps in each message: keyframes, and residuals with all bits that a run may have.

    V-Major's steps are those of a run of DEFAULT_STEPS.
    """
    schedule = modes.schedule_of(mode, overrides)
    keyframes = [schedule.codecs(step, None) for step in range(schedule.warmup)]
    first = len(keyframes)
    if schedule.error:
        residuals = [schedule.codecs(first, None, bits) for bits in LEVELS]
    else:
        later = sorted({first, first + 1, first + 2, first + schedule.refresh - 1, DEFAULT_STEPS - 1})
        residuals = [schedule.codecs(step, None) for step in later]
    for messages in _MESSAGES:
        yield _Run([*keyframes, *residuals], messages, bool(schedule.joint))


def _failure_of_run(
    choice: str, run: _Run, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> str | None:
    """Return what is wrong in a run of some steps with values (P, G, H, T, D), or None."""
    generator = torch.Generator().manual_seed(0)
    names = "".join(run.messages)
    first, change, difference = (
        {name: torch.randn(shape, generator=generator).to(device) for name in names} for _ in range(3)
    )
    leading = Loopback(run.messages, run.is_joint)
    following = Loopback(run.messages, run.is_joint, leading)
    for step, codecs in enumerate(run.steps):
        for branch, layer in enumerate((leading, following) if run.is_joint else (leading,)):
            scales = _CHANGE * step, _BRANCH_DIFFERENCE * branch
            values = {
                name: (first[name] + scales[0] * change[name] + scales[1] * difference[name]).to(dtype)
                for name in names
            }
            if reason := _failure_of_step(choice, layer, values, codecs, step):
                return f"{reason}{', in a following branch' * branch}"
    return None


def _failure_of_step(
    choice: str, layer: Loopback, values: Mapping[str, torch.Tensor], codecs: Mapping[str, Codec], step: int
) -> str | None:
    """Return what is wrong in a step of a branch, or None."""
    expected_layer = layer.copy()  # so that differences do not add up
    kernels.use(choice)
    decoded, errors = layer.send(values, codecs, step=step)
    kernels.use(kernels.TORCH)
    expected, expected_errors = expected_layer.send(values, codecs, step=step)
    for name in values:
        reason = _difference(layer, expected_layer, name, decoded[name], expected[name])
        if reason:
            return f"{name.upper()} at {codecs[name]}: {reason}"
    energies, expected_energies = (
        torch.tensor([[error.error_energy, error.value_energy] for error in each.start_readout().read()])
        for each in (errors, expected_errors)
    )
    if not torch.allclose(energies, expected_energies, rtol=_ENERGY_TOLERANCE):
        return f"errors {energies.tolist()} instead of {expected_energies.tolist()}"
    return None


def _difference(
    layer: Loopback,
    expected_layer: Loopback,
    name: str,
    decoded: torch.Tensor,
    expected: torch.Tensor,
) -> str | None:
    """Return what is wrong with a tensor after a step, or None."""
    state, expected_state = (each.link_states[name, ALL_HEADS] for each in (layer, expected_layer))
    sent, received = state.sent, state.received
    if not all(map(torch.equal, sent.stored, received.stored)):
        return _BOTH_ENDS
    different = (decoded != expected).float().mean().item()
    if different > _DIFFERENT:
        return f"{different:.1%} of the values differ from those of PyTorch's kernels"
    gains, expected_gains = sent.gains, expected_state.sent.gains
    if gains is not None and (gains.int() - expected_gains.int()).abs().max() > 1:
        return f"gains {gains.tolist()} instead of {expected_gains.tolist()}"
    return None
