"""Where a call of a transformer stands in a run, by what it is given: its timestep, and what carries its prompt.

Nothing here makes the host wait for a device. A timestep that is a number, or lies on the CPU, is known by its value;
one that lies on a device by its place in a storage, as `timesteps[i].expand(batch)` has it. A prompt is known by its
tensor, never by its values: ranks may hold different parts of it, and have to find the same.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.engine.topology import devices as devices
from xfuser_cocodiff.xdit.layers.module_stack import named_arguments

TIMES = ("timestep", "t", "sigma", "timesteps", "vision_timesteps")
"""Names of the argument that changes from step to step, of which the first that is given counts."""
PROMPTS = ("encoder_hidden_states", "cap_feats", "llm_features", "input_ids")
"""Beginnings of the names of arguments that carry a prompt."""


class UnclearError(Exception):
    """The host cannot know where a call stands; says why."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as an object, without holding it."""

    whole: weakref.ref
    """It, or what it is a view of."""
    place: tuple
    """In that, and how often it has been written."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Tensor":
        whole = tensor if tensor._base is None else tensor._base
        return cls(weakref.ref(whole), (tensor.storage_offset(), tensor.shape, tensor.stride(), _version(tensor)))

    def is_(self, other: "Tensor") -> bool:
        """Whether the other one is the same, and has not been written since."""
        return self.whole() is not None and self.whole() is other.whole() and self.place == other.place


@dataclass(frozen=True)
class StepKey:
    """Where a call stands."""

    time: float
    """It says more and more, or less and less, from one step to the next."""
    scale: tuple
    """Times can be compared where this is equal."""
    held: torch.UntypedStorage | None
    """What times are places in; held, so that nothing else gets its address."""
    prompt: tuple[Tensor, ...]
    shapes: tuple[torch.Size, ...]
    """Of all tensors that it was given."""

    @classmethod
    def of(cls, transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> "StepKey":
        """The moment of a call.

        Raises:
            UnclearError: it cannot be known; the same on every rank, since it depends on no value.
        """
        given = named_arguments(transformer, args, kwargs)
        name = next((name for name in TIMES if given.get(name) is not None), None)
        if name is None:
            raise UnclearError(f"its transformer is given no argument named {', '.join(TIMES)}")
        prompt = prompts_of(transformer, args, kwargs)
        if not prompt:
            raise UnclearError(f"its transformer is given no argument named {', '.join(PROMPTS)}")
        shapes = tuple(tensor.shape for value in given.values() for tensor in _tensors(value))
        return cls(*_time(given[name]), tuple(map(Tensor.of, prompt)), shapes)

    def same_prompt(self, other: "StepKey") -> bool:
        """Whether both are given the same prompt, and tensors of the same shapes."""
        pairs = zip(self.prompt, other.prompt, strict=False)
        return self.shapes == other.shapes and all(one.is_(another) for one, another in pairs)


def prompts_of(transformer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call that carry its prompt."""
    given = named_arguments(transformer, args, kwargs)
    return [tensor for name, value in given.items() if name.startswith(PROMPTS) for tensor in _tensors(value)]


def _time(given: Any) -> tuple[float, tuple, torch.UntypedStorage | None]:
    """Time, scale and what is held of it."""
    if not torch.is_tensor(given):
        return float(given), (1,), None
    if given.numel() == 0:
        raise UnclearError("the timestep of its transformer is empty")
    # All ranks of a group denoise by the same timesteps, so their values may decide.
    if _on_host(given):
        return given.double().mean().item(), (given.numel(),), None
    storage = given.untyped_storage()
    return float(given.storage_offset()), (storage.data_ptr(), given.numel(), _version(given)), storage


def _on_host(tensor: torch.Tensor) -> bool:
    return not devices.capabilities(tensor.device.type).is_asynchronous


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
