"""Provides the kinds of layers of diffusion transformers: their linear layers and pointwise kernels.

`layers.json` has them as xDiT launches them in eager mode; `python -m benchmarks.layer_table` records it. FLOPs follow
from the linear layers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator

LAYERS_FILE = Path(__file__).with_suffix(".json")
BYTES_PER_VALUE = 2
"""Bytes of a value in bf16."""
IMAGE, TEXT, JOINT, CROSS_TEXT, ROW = "image", "text", "joint", "cross-attended text", "row"
"""What a kernel processes: tokens of one stream or of both, text outside of the sequence, or one vector per batch row
(modulation)."""


class Linear(NamedTuple):
    """A linear layer; features are in widths of the model."""

    tokens: str
    inputs: float = 1
    outputs: float = 1


class Pointwise(NamedTuple):
    """Pointwise kernels that run one after the other: norms, modulation, RoPE, activations, residuals."""

    tokens: str
    kernels: int
    passes: float
    """Reads and writes of all kernels together, in tensors of shape (tokens, width) in bf16."""


@dataclass(frozen=True)
class Work:
    """Part of a layer's computation."""

    linear: tuple[Linear, ...] = ()
    pointwise: tuple[Pointwise, ...] = ()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Work":
        """Return the work of an entry of the table of layers, which is empty where there is none."""
        return cls(
            tuple(Linear(*each) for each in values.get("linear", ())),
            tuple(Pointwise(*each) for each in values.get("pointwise", ())),
        )

    @property
    def kernels(self) -> int:
        """Number of kernel launches."""
        return len(self.linear) + sum(each.kernels for each in self.pointwise)

    def flops(self, counts: Mapping[str, float], width: int) -> float:
        """Return the FLOPs of the linear layers.

        Args:
            counts: number of tokens by kind, over all batch rows.
            width: channels of a token.
        """
        return sum(2.0 * counts[each.tokens] * each.inputs * each.outputs * width**2 for each in self.linear)

    def seconds(self, counts: Mapping[str, float], width: int, accelerator: Accelerator) -> float:
        """Return the time on the device; for the arguments see :meth:`flops`."""
        total = 0.0
        for each in self.linear:
            values = counts[each.tokens] * (each.inputs + each.outputs) * width
            weights = each.inputs * each.outputs * width**2
            flops = 2.0 * counts[each.tokens] * weights
            total += accelerator.kernel_seconds(BYTES_PER_VALUE * (values + weights), matmul_flops=flops)
        for tokens, kernels, passes in self.pointwise:
            moved = BYTES_PER_VALUE * passes * counts[tokens] * width
            total += kernels * accelerator.kernel_seconds(moved / kernels)
        return total


@dataclass(frozen=True)
class LayerKind:
    """Layers that cost the same. The reordering around all-to-alls is not part of them."""

    name: str
    count: int
    """Number of layers."""
    query_key: Work
    """Projections, norms and RoPE of Q and K, which V does not need."""
    rest: Work
    """All else, without attention."""
    parallel: Work = Work()
    """MLP parallel to attention, which the plugin defers until Q, K and V are in flight."""
    has_cross_attention: bool = False
    """Whether a second attention, without all-to-alls, attends to the text."""

    @classmethod
    def of(cls, model: str, kind: str, count: int) -> "LayerKind":
        """Return a kind of a model's layers with its recorded kernels; without any if the model is not recorded yet."""
        values = _TABLE.get(model, {}).get(kind, {})
        query_key, rest, parallel = (Work.from_json(values.get(part, {})) for part in ("query_key", "rest", "parallel"))
        return cls(kind, count, query_key, rest, parallel, values.get("has_cross_attention", False))

    @property
    def kernels(self) -> int:
        """Number of kernel launches."""
        return sum(work.kernels for work in self.parts) + 1 + self.has_cross_attention

    @property
    def parts(self) -> tuple[Work, Work, Work]:
        """All parts."""
        return self.query_key, self.rest, self.parallel


_TABLE = json.loads(LAYERS_FILE.read_text()) if LAYERS_FILE.exists() else {}
