"""Builds full-size transformers in xDiT's wrappers, with a few blocks of each kind and without values."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.full_size import transformer_wrappers
from benchmarks.full_size.architectures import ARCHITECTURES
from benchmarks.full_size.inputs import INPUTS, Inputs, Request
from xfuser_cocodiff.tools.simulation.workloads import Workload

DTYPE = torch.bfloat16


@dataclass
class FullSizeTransformer:
    """A transformer of full width whose blocks stand for all blocks of their kind."""

    workload: Workload
    """Dimensions, and how the pipeline calls it: `calls` per step, `rows_per_image` of the batch."""
    model: nn.Module
    """The transformer in xDiT's wrapper."""
    blocks: dict[str, list[nn.Module]]
    """Blocks by kind, in the order of the call."""
    device: torch.device
    """Device of the weights and inputs."""
    _inputs: dict[tuple[int, int], Inputs] = field(default_factory=dict)

    def call(self, resolution: int, batch: int = 1) -> torch.Tensor:
        """Run one forward on this rank's shard, and return its output.

        A step has `workload.calls` such calls. Inputs are created in the first call of each size.

        Args:
            resolution: pixels per side of a square image, or rows of a video of 16:9.
            batch: number of images or videos.

        Raises:
            ValueError: xDiT cannot shard this size.
        """
        inputs = self.inputs(resolution, batch)
        with torch.no_grad(), FullMask() if "encoder_attention_mask" in inputs else nullcontext():
            output = self.model(**inputs, return_dict=False)[0]
        return output[0] if isinstance(output, tuple) else output

    def inputs(self, resolution: int, batch: int = 1) -> Inputs:
        """Return the arguments of the model's forward for a size, the same tensors in each call."""
        if (resolution, batch) not in self._inputs:
            request = Request(self.workload, resolution, batch, self.device, DTYPE)
            self._inputs[resolution, batch] = INPUTS[self.workload.name](request, self.model.config)
        return self._inputs[resolution, batch]

    def initialize(self, resolution: int) -> None:
        """Give random values to weights and inputs, the same on every rank."""
        torch.manual_seed(0)
        for module in self.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for each in self.inputs(resolution).values():
            each.normal_()


def build(workload: Workload, blocks: int, device: torch.device) -> FullSizeTransformer:
    """Return a full-size transformer, and start a runtime state of xDiT for it.

    The process groups of xDiT must exist; see :func:`benchmarks.bare_runtime.start`.

    Args:
        workload: the model, one of :data:`architectures.ARCHITECTURES`.
        blocks: number of blocks of each kind.
        device: device of the weights, which are not initialized.
    """
    parts = ARCHITECTURES[workload.name]
    with torch.device("meta"):
        model = transformer_wrappers.construct(workload.name, parts.sizes(workload, blocks)).eval()
    materialize(model, device, DTYPE)
    model = transformer_wrappers.wrap(workload.name, model)
    return FullSizeTransformer(workload, model, parts.blocks(model), device)


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace all tensors of a model on the meta device by uninitialized ones on a device.

    Like `from_pretrained`, it gives weights and saved buffers a dtype, but not buffers that are computed, and not the
    modules that the model's class keeps in float32. `Module.to_empty` is no alternative: it cannot swap fake tensors.

    Args:
        model: model whose tensors are on the meta device.
        device: device of the new tensors.
        dtype: dtype of its floating-point weights.
    """
    kept = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    for path, module in model.named_modules():
        saved = module._parameters.keys() | module._buffers.keys() - module._non_persistent_buffers_set
        for tensors in (module._parameters, module._buffers, vars(module)):
            for name, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor):
                    continue
                is_cast = name in saved and tensor.is_floating_point() and kept.isdisjoint(f"{path}.{name}".split("."))
                empty = torch.empty(tensor.shape, dtype=dtype if is_cast else tensor.dtype, device=device)
                is_weight = tensors is module._parameters
                tensors[name] = nn.Parameter(empty, requires_grad=False) if is_weight else empty


class FullMask(TorchFunctionMode):
    """Context in which every Boolean mask among the indices of a tensor selects all: its values are not known."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Replace the masks of an index by all positions."""
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(_positions(each) for each in args[1])
        return func(*args, **(kwargs or {}))


def _positions(index: Any) -> Any:
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
    return torch.arange(len(index), device=index.device) if is_mask else index
