"""Count the kernels that Triton would compile for a GPU that need not be present.

    python -m tests.engine.codec.count_compilations balanced

Runs in its own process, since tests run the kernels by the interpreter. Kernels are neither compiled nor launched:
counted are the variants that Triton tells apart by their arguments. Prints as JSON the number of variants that the
self-check of a mode has, and how many more there are in runs after it.
"""

import json
import sys
from collections.abc import Callable, Mapping

import torch
import triton

from tests.coded_layers import layer_codecs
from tests.engine.codec.launches import KERNELS, as_on_accelerators, self_check, set_target
from xfuser_cocodiff.engine.codec import triton_kernels
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.loopback import Loopback
from xfuser_cocodiff.engine.compression.message import Message
from xfuser_cocodiff.engine.compression.step_errors import StepErrors

SHAPES = (  # slots, groups, heads, tokens, head dim
    (2, 4, 3, 144, 128),
    (4, 2, 1, 262, 128),
)
MESSAGES = (("qkv", "o"), ("v", "qk", "o"), ("kv",))
STEPS = 4
BITS = (8, 4, 5.3, 8), (8, 3.2, 1.6, 2.7)
"""Bits of each step of a run."""


class CountedKernel:
    """Stand-in for a Triton kernel that counts its variants."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self._kernel, self.count = kernel, 0
        kernel._do_compile = self._compile

    def _compile(self, key: str, *_: object, **__: object) -> object:
        self.count += 1
        variants, *_ = self._kernel.device_caches[0]
        variants[key] = object()
        return variants[key]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *values, **options: self._kernel.warmup(*values, grid=grid, **options)


def send(layer: Loopback, values: Mapping[str, torch.Tensor], codecs: Mapping, step: int, errors: StepErrors) -> None:
    """Send a step of a layer on the second coordinate, or the values of a gather."""
    leader = layer.leader and layer.leader.link_states
    how = {"is_joint": layer.is_joint, "leader": leader, "keeps_values": layer.is_joint and leader is None}
    of_layer = layer_codecs(None, codecs, layer.link_states, step=step, errors=errors, **how)
    for names in layer.messages:
        tensors, copies = [values[name] for name in names], len(values[names[0]]) - 1 if names == "kv" else None
        sent = [tensor[:1] for tensor in tensors] if copies else tensors
        coded = Message(Label(names), sent, of_layer, range(1, 2), copies=copies)
        received = coded.encode().expand(len(tensors[0]), -1).contiguous()
        coded.decode(received, tensors, lambda buffer: buffer)


def run(mode: str, bits: tuple[float, ...], is_guided: bool, messages: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Run the first steps of a run with a layer of each branch, at the bits that rate control might choose."""
    schedule, total = modes.PRESETS[mode], 50
    leading = Loopback(messages, bool(schedule.joint) and is_guided)
    branches = [leading, Loopback(messages, bool(schedule.joint), leading)][: 1 + is_guided]
    errors = StepErrors()
    values = {name: torch.empty(shape, dtype=torch.bfloat16) for name in "qkvo"}
    for step in range(STEPS):
        for branch in branches:
            send(branch, values, schedule.codecs(step, total, bits[step]), step, errors)


def main() -> None:
    mode = sys.argv[1]
    set_target(90)
    counted = [CountedKernel(getattr(triton_kernels, name)) for name in KERNELS]
    for name, kernel in zip(KERNELS, counted, strict=True):
        setattr(triton_kernels, name, kernel)

    def count() -> int:
        return sum(kernel.count for kernel in counted)

    with as_on_accelerators():
        self_check(mode)
        found = {"self-check": count(), "runs": {}}
        for bits in BITS:
            for is_guided in (False, True):
                for messages in MESSAGES:
                    for shape in SHAPES:
                        before = count()
                        run(mode, bits, is_guided, messages, shape)
                        found["runs"][f"bits {bits}, guided: {is_guided}, {messages}, {shape}"] = count() - before
    print(json.dumps(found))


if __name__ == "__main__":
    main()
