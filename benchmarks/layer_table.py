"""Writes `layers.json`, from which `cocodiff plan` predicts, with the kernels of one recorded layer of each kind.

    python -m benchmarks.layer_table

It sorts kernels by what they depend on. Kernels before attention that V does not need are those of Q and K; those that
Q, K and V do not need are a parallel MLP.
"""

import json
import multiprocessing
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.accelerator import op_cost
from benchmarks.accelerator.device import EmulatedAccelerator
from benchmarks.cluster import recording
from benchmarks.full_size import transformer, transformer_wrappers
from xfuser_cocodiff.tools.accelerator.accelerators import UNKNOWN
from xfuser_cocodiff.tools.simulation.layers import BYTES_PER_VALUE, CROSS_TEXT, IMAGE, JOINT, LAYERS_FILE, ROW, TEXT
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS, Workload
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

RESOLUTION = 480
"""Resolution of the recorded calls. All numbers of tokens differ at it, which tells whose tokens a kernel processes."""
_MATMULS = ("mm", "addmm", "bmm")


class Kernel(NamedTuple):
    """A kernel that a layer launches."""

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    result: Any

    @property
    def read(self) -> list[torch.Tensor]:
        """Tensors that it reads."""
        return op_cost.tensors_in((self.args, self.kwargs))

    @property
    def written(self) -> list[torch.Tensor]:
        """Tensors that it writes."""
        return op_cost.tensors_in(self.result)


class KernelRecorder(TorchDispatchMode):
    """Context that records the kernels launched in it. Their tensors stay alive, so storages tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not op_cost.is_free(func):
            self.kernels.append(Kernel(func, args, kwargs or {}, result))
        return result


def table(models: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the works of models by kind of layer, as :class:`simulation.layers.LayerKind` reads them."""
    works = {}
    for name in models:
        transformer_wrappers.preload(name)
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
            works[name] = executor.submit(_works, name).result()
    return works


def _works(name: str) -> dict[str, Any]:
    workload = WORKLOADS[name]
    return {kind: _work(workload, kernels) for kind, kernels in record(workload).items()}


def record(workload: Workload) -> dict[str, list[Kernel]]:
    """Return the kernels of the first layer of each of a model's kinds."""
    device = recording.start_xdit(UlyssesRingSplit(1, 1))
    with EmulatedAccelerator(UNKNOWN), KernelRecorder() as recorder:
        model = transformer.build(workload, 1, device)
        layers: dict[str, list[Kernel]] = {}
        for kind in workload.kinds:
            block = model.blocks[kind.name][0]
            block.register_forward_pre_hook(lambda *_: recorder.kernels.clear())
            block.register_forward_hook(lambda *_, name=kind.name: layers.update({name: recorder.kernels.copy()}))
        model.call(RESOLUTION)
    return layers


def _work(workload: Workload, kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Return linear layers and pointwise kernels of each part of a layer, and whether it has cross-attention."""
    attentions = [index for index, kernel in enumerate(kernels) if op_cost.is_attention(kernel.func)]
    before, attention = kernels[: attentions[0]], kernels[attentions[0]]
    query, key, value = attention.args[:3]
    for_value = _needed(before, [value])
    query_key = _needed(before, [query, key]) - for_value
    parallel = {*range(len(before))} - query_key - for_value
    parts = {"query_key": query_key, "parallel": parallel}
    parts["rest"] = {*range(len(kernels))} - query_key - parallel - {*attentions} - _copies_of(attention, kernels)
    each = {name: _part(workload, [kernels[index] for index in sorted(part)]) for name, part in parts.items() if part}
    return {**each, "has_cross_attention": True} if attentions[1:] else each


def _copies_of(attention: Kernel, kernels: Sequence[Kernel]) -> set[int]:
    """Return the indices of kernels that only reorder the output of attention, which belongs to its all-to-all."""
    output = _storages(attention.written)
    copies = (op_cost.name_of(kernel.func) == "clone" and output & _storages(kernel.read) for kernel in kernels)
    return {index for index, is_copy in enumerate(copies) if is_copy}


def _needed(kernels: Sequence[Kernel], tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the indices of the kernels that some tensors depend on."""
    storages, indices = _storages(tensors), set[int]()
    for index, kernel in reversed([*enumerate(kernels)]):
        if storages & _storages(kernel.written):
            indices.add(index)
            storages |= _storages(kernel.read)
    return indices


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _part(workload: Workload, kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Return linear layers, and numbers and passes of pointwise kernels; equal ones are one entry."""
    linear: list[tuple[str, float, float]] = []
    pointwise = Counter[tuple[str, float]]()
    counts, rows, width = _token_counts(workload), workload.rows_per_image, workload.width
    for kernel in kernels:
        if op_cost.name_of(kernel.func) in _MATMULS:
            given, weight = kernel.args[-2:]
            [tokens] = [name for name, count in counts.items() if given.shape[:-1].numel() == count * rows]
            linear.append((tokens, *(round(size / width, 4) for size in weight.shape[-2:])))
        else:
            largest = max([*kernel.read, *kernel.written], key=torch.Tensor.numel)
            tokens = next((name for name, count in counts.items() if count > 1 and count in largest.shape), ROW)
            values = op_cost.op_bytes(*kernel) / BYTES_PER_VALUE
            pointwise[tokens, round(values / (counts[tokens] * rows * width), 2)] += 1
    passes = [[tokens, count, round(count * each, 2)] for (tokens, each), count in pointwise.items()]
    return {"linear": linear, "pointwise": passes}


def _token_counts(workload: Workload) -> dict[str, int]:
    image, text, cross = workload.image_tokens(RESOLUTION), workload.text_tokens, workload.cross_text_tokens
    named = {IMAGE: image, JOINT: (image + text) * (text > 0), TEXT: text, CROSS_TEXT: cross, ROW: 1}
    return {name: count for name, count in named.items() if count}


def to_text(layers: dict[str, dict[str, Any]]) -> str:
    """Return the content of the file: JSON, with a line for each kernel."""
    text = json.dumps(layers, indent=1)
    return re.sub(r"\[\s*([^][{}]*?)\s*\]", lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"


if __name__ == "__main__":
    LAYERS_FILE.write_text(to_text(table(WORKLOADS)))
