"""Effects of operations on fake tensors, kept by the operation and the shapes of its arguments.

Blocks of a transformer repeat the same operations on the same shapes. PyTorch's fake tensors need a fifth of a
millisecond for each, a known effect is repeated in a tenth of that.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from xfuser_cocodiff.lab.accelerator import op_cost
from xfuser_cocodiff.lab.accelerator.provenance import Provenance, Sources, concatenated

_FILLING = {"zeros", "ones", "full", "arange", "new_zeros", "new_ones", "new_full"}
"""Operations that depend on no tensor's values."""
_RANDOM = {
    "new_empty",
    "new_empty_strided",
    "empty_like",
    "rand_like",
    "randn_like",
    "bernoulli",
    "normal_",
    "uniform_",
}
"""Operations whose results equal no others."""
Rule = Literal["copy", "cat", "filled", "new", "computed"]
"""How the sources of a result follow from those of the inputs."""


class Output(NamedTuple):
    """One tensor that an operation returns."""

    input: int | None
    """Index of the input that it is, or a view of; None for new memory."""
    view: tuple | None
    """Shape, strides, dtype and storage offset, unless it is the input itself."""


class Written(NamedTuple):
    """New values in a tensor."""

    target: int
    """Index of the output."""
    rule: Rule
    source: int = 0
    """Index of the input that is copied."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What an operation does."""

    kernels: tuple[float, ...]
    """Durations of its kernels in seconds."""
    outputs: tuple[Output, ...]
    container: Callable[[list], Any]
    """Makes the result of the outputs: one, or a list or tuple of them."""
    writes: tuple[Written, ...]


class UnknownArgumentError(Exception):
    """An argument on which effects cannot depend."""


def describe(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Hashable, list[torch.Tensor]]:
    """Return the key of a call, and its tensors.

    Raises:
        UnknownArgumentError: it has a tensor that is not of the device, or something that is not hashable.
    """
    tensors: list[torch.Tensor] = []
    key: tuple[Hashable, ...] = (
        func,
        _description(args, tensors),
        _description(tuple(kwargs.items()), tensors) if kwargs else None,
    )
    if len(tensors) > 1:
        ids = [id(tensor) for tensor in tensors]
        key = (*key, tuple(ids.index(each) for each in ids))
    return key, tensors


def _description(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor):
            raise UnknownArgumentError
        tensors.append(value)
        return geometry(value)
    if isinstance(value, (tuple, list)):
        return tuple([_description(each, tensors) for each in value])
    if value.__hash__ is None:
        raise UnknownArgumentError
    return type(value), value


def geometry(tensor: torch.Tensor) -> tuple:
    """Return shape, strides, dtype and storage offset of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset()


class CallCache:
    """Known effects.

    Args:
        fake: mode of the fake tensors.
        device: their device.
        provenance: sources of all tensors.
    """

    def __init__(self, fake: FakeTensorMode, device: torch.device, provenance: Provenance) -> None:
        self._provenance = provenance
        self._effects: dict[Hashable, Effect] = {}
        self._attributes = vars(FakeTensor(fake, torch.empty(0, device="meta"), device))
        self._device = device

    def get(self, key: Hashable) -> Effect | None:
        """Return the effect of a call if it is known."""
        return self._effects.get(key)

    def learn_kernel(
        self, func: Any, key: Hashable, tensors: Sequence[torch.Tensor], result: Any, kernels: Sequence[float]
    ) -> None:
        """Set the sources of what an operation with at most one kernel has written, and keep its effect.

        Args:
            func: the operation.
            key: key of the call; None to keep nothing.
            tensors: its inputs.
            result: what it returned.
            kernels: durations of its kernels.
        """
        outputs = _outputs_of(result)
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        is_written = [func._schema.is_mutable or each.untyped_storage()._cdata not in storages for each in outputs]
        writes = [_write_of(func, index, bool(tensors)) for index, written in enumerate(is_written) if written]
        self.write(key or self._provenance.new(), writes, tensors, outputs)
        self._keep(key, tensors, result, kernels, writes)

    def learn_composite(
        self, key: Hashable, tensors: Sequence[torch.Tensor], result: Any, kernels: Sequence[float]
    ) -> None:
        """Keep the effect of an operation that consists of others and writes to none of its inputs.

        Args:
            key: key of the call.
            tensors: its inputs.
            result: what it returned.
            kernels: durations of its kernels.
        """
        outputs = _outputs_of(result)
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        sources = [self._provenance.sources(tensor) for tensor in tensors]
        writes = list[Written]()
        for index, output in enumerate(outputs):
            if output.untyped_storage()._cdata in storages:
                continue
            own = self._provenance.sources(output)
            if own in sources:
                writes.append(Written(index, "copy", sources.index(own)))
            elif own == concatenated(sources):
                writes.append(Written(index, "cat"))
            else:
                writes.append(Written(index, "computed" if tensors else "new"))
        self.write(key, writes, tensors, outputs)
        self._keep(key, tensors, result, kernels, writes)

    def _keep(
        self,
        key: Hashable,
        tensors: Sequence[torch.Tensor],
        result: Any,
        kernels: Sequence[float],
        writes: Sequence[Written],
    ) -> None:
        """Keep the effect of a call if its result contains only tensors that can be repeated."""
        returned = list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]
        outputs = [_output(each, tensors) for each in returned]
        num_new = sum(output is not None and output.input is None for output in outputs)
        storages = {each.untyped_storage()._cdata for each in returned if isinstance(each, torch.Tensor)}
        storages -= {each.untyped_storage()._cdata for each in tensors}
        if key is not None and None not in outputs and len(storages) == num_new:
            container = type(result) if isinstance(result, (tuple, list)) else _none if result is None else _only
            self._effects[key] = Effect(tuple(kernels), tuple(filter(None, outputs)), container, tuple(writes))

    def repeat(self, key: Hashable, effect: Effect, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result of a call with a known effect."""
        outputs = [self._make(each, tensors) for each in effect.outputs]
        if effect.writes:
            self.write(key, effect.writes, tensors, outputs)
        return effect.container(outputs)

    def write(
        self, key: Hashable, writes: Sequence[Written], tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Set the sources of everything that a call has written."""
        provenance = self._provenance
        sources = [provenance.sources(tensor) for tensor in tensors]
        for write in writes:
            provenance.write(outputs[write.target], self._follow(write, key, sources))

    def _follow(self, write: Written, key: Hashable, sources: Sequence[Sources]) -> Sources:
        if write.rule == "copy":
            return sources[write.source]
        if write.rule == "cat":
            return concatenated(sources)
        if write.rule == "filled":
            return self._provenance.number(key)
        if write.rule == "new":
            return self._provenance.new()
        return self._provenance.number(key, write.target, *sources)

    def _make(self, output: Output, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        base = None if output.input is None else tensors[output.input]
        if output.view is None:
            return base
        shape, stride, dtype, offset = output.view
        if base is None:
            return self._fake(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
        with torch.inference_mode(base.is_inference()):  # PyTorch checks that a view is as its base
            memory = torch.empty(0, dtype=dtype, device="meta")
            memory.set_(base.untyped_storage(), offset, shape, stride)
            return self._fake(memory)

    def _fake(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor; the class's constructor takes four times as long."""
        tensor = torch.Tensor._make_subclass(
            FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=self._device
        )
        vars(tensor).update(self._attributes)
        return tensor


def _outputs_of(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]


def _write_of(func: Any, index: int, has_inputs: bool) -> Written:
    """Return how an operation with a kernel of its own writes one of its outputs."""
    name = op_cost.name_of(func)
    if name in ("clone", "_to_copy"):
        return Written(index, "copy")
    if name == "copy_":
        return Written(index, "copy", 1)
    if name == "cat":
        return Written(index, "cat")
    if name in _FILLING:
        return Written(index, "filled")
    return Written(index, "computed" if has_inputs and name not in _RANDOM else "new")


def _output(value: Any, tensors: Sequence[torch.Tensor]) -> Output | None:
    """Return the description of a result; None if it is nothing that can be repeated."""
    if not isinstance(value, FakeTensor):
        return None
    for index, tensor in enumerate(tensors):
        if value is tensor:
            return Output(index, None)
    storage = value.untyped_storage()._cdata
    for index, tensor in enumerate(tensors):
        if tensor.untyped_storage()._cdata == storage:
            return Output(index, geometry(value))
    memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if value.storage_offset() or memory.untyped_storage().nbytes() != value.untyped_storage().nbytes():
        return None
    return Output(None, geometry(value))


def _only(outputs: list) -> Any:
    return outputs[0]


def _none(outputs: list) -> None:
    return None
