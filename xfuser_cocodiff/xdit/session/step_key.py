"""Keys of transformer calls, from timestep and prompt, which tell the steps and runs of calls apart.

The host never waits for a device here. A timestep on the host is compared by value, one on a device by its offset in a
storage, as in `timesteps[i].expand(batch)`. A prompt is compared by the identity of its tensor, never by value: ranks
may hold different parts of it, and must make the same decision.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.xdit.layers.module_stack import named_arguments

TIMES = ("timestep", "t", "sigma", "timesteps", "vision_timesteps")
"""Names of the argument that changes from step to step; the first that is present counts."""
PROMPTS = ("encoder_hidden_states", "cap_feats", "llm_features", "input_ids")
"""Prefixes of the names of arguments that hold a prompt."""


class UnknownStepError(Exception):
    """The step of a call cannot be known on the host; the message says why."""


@dataclass(frozen=True)
class TensorKey:
    """The identity of a tensor, which it does not keep alive."""

    base: weakref.ref
    """Reference to the tensor, or to the one that it is a view of."""
    view: tuple
    """Offset, shape and stride of the view, and the version counter."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorKey":
        base = tensor if tensor._base is None else tensor._base
        return cls(weakref.ref(base), (tensor.storage_offset(), tensor.shape, tensor.stride(), _version(tensor)))

    def is_same(self, other: "TensorKey") -> bool:
        """Return whether both are the same tensor, which has not been written in between."""
        return self.base() is not None and self.base() is other.base() and self.view == other.view


@dataclass(frozen=True)
class StepKey:
    """The timestep and the prompt of a call."""

    time: float
    """Timestep: its value, or its offset in :attr:`storage`. It changes in one direction from step to step."""
    scale: tuple
    """Kind of :attr:`time`; times are compared only if their scales are equal."""
    storage: torch.UntypedStorage | None
    """Storage of the timesteps if they are on a device; kept alive, so that no other one gets its address."""
    prompt: tuple[TensorKey, ...]
    """Keys of the prompt's tensors."""
    shapes: tuple[torch.Size, ...]
    """Shapes of all tensors among the arguments."""

    @classmethod
    def of(cls, transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> "StepKey":
        """Return the key of a call.

        Raises:
            UnknownStepError: there is no key; on all ranks, since that depends on no value.
        """
        given = named_arguments(transformer, args, kwargs)
        name = next((name for name in TIMES if given.get(name) is not None), None)
        if name is None:
            raise UnknownStepError(f"its transformer is given no argument named {', '.join(TIMES)}")
        prompt = prompts_of(transformer, args, kwargs)
        if not prompt:
            raise UnknownStepError(f"its transformer is given no argument named {', '.join(PROMPTS)}")
        shapes = tuple(tensor.shape for value in given.values() for tensor in _tensors(value))
        return cls(*_time(given[name]), tuple(map(TensorKey.of, prompt)), shapes)

    def has_same_prompt(self, other: "StepKey") -> bool:
        """Return whether both calls have the same prompt, and tensors of the same shapes."""
        pairs = zip(self.prompt, other.prompt, strict=False)
        return self.shapes == other.shapes and all(one.is_same(another) for one, another in pairs)


def prompts_of(transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call that hold its prompt."""
    given = named_arguments(transformer, args, kwargs)
    return [tensor for name, value in given.items() if name.startswith(PROMPTS) for tensor in _tensors(value)]


def _time(timestep: Any) -> tuple[float, tuple, torch.UntypedStorage | None]:
    """Return time, scale and storage of a :class:`StepKey`."""
    if not torch.is_tensor(timestep):
        return float(timestep), (1,), None
    if timestep.numel() == 0:
        raise UnknownStepError("the timestep of its transformer is empty")
    # All ranks of a group have the same timesteps, so that a decision may depend on their values.
    if _on_host(timestep):
        return timestep.double().mean().item(), (timestep.numel(),), None
    storage = timestep.untyped_storage()
    scale = storage.data_ptr(), timestep.numel(), _version(timestep)
    return float(timestep.storage_offset()), scale, storage


def _on_host(tensor: torch.Tensor) -> bool:
    return not devices.capabilities(tensor.device.type).is_asynchronous


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or all tensors in nested lists and tuples."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
