"""What one engine of xDiT has of the plugin. It lies on xDiT's runtime state, and ends with it: what one engine knows,
counts and holds, another one in the same process never sees."""

import os
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed._functional_collectives as functional

from xfuser_cocodiff import kernels
from xfuser_cocodiff.coding import Coding
from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.config import CocoDiffConfig, Overlap
from xfuser_cocodiff.exchange import send_to_heads
from xfuser_cocodiff.lane import Handle
from xfuser_cocodiff.memory import Share
from xfuser_cocodiff.options import AUTO, RECORD_VARIABLE
from xfuser_cocodiff.part import Part
from xfuser_cocodiff.runtime import Runtime
from xfuser_cocodiff.traffic import Label, Traffic
from xfuser_cocodiff.virtual import VirtualRanks
from xfuser_cocodiff.xdit.layers import Layer, Layers, Root
from xfuser_cocodiff.xdit.platform import compute_device, is_captured
from xfuser_cocodiff.xdit.runs import Runs


@dataclass(eq=False)
class Engine:
    """The plugin in one engine; by itself, one that leaves everything to stock xDiT."""

    config: CocoDiffConfig | None = None
    mesh: Mesh | None = None
    """None where stock xDiT's exchanges run, and where one rank stands for many."""
    runtime: Runtime | None = None
    """What codecs know of the run under way; None where nothing is to be approximated."""
    exact_because: str | None = None
    """Why nothing is to be approximated although a mode that does was asked for."""
    overlap: Overlap = field(default_factory=Overlap)
    """What is fixed of how exchanges overlap with computation."""
    layers: Layers = field(init=False)
    """The attention layers that are followed."""
    runs: Runs = field(init=False)
    """The runs that were declared, or are recognised."""
    traffic: Traffic = field(init=False)
    """What exchanges moved, stock's too where somebody watches them."""

    def __post_init__(self) -> None:
        self.layers = Layers(self._follows, self.send_value, self.all_agree, self._counts, self._called)
        self.runs = Runs(lambda: self.runtime, self.layers.end_step)
        self.traffic = self.mesh.traffic if self.mesh else Traffic(timed=bool(os.environ.get(RECORD_VARIABLE)))

    @property
    def virtual(self) -> VirtualRanks | None:
        """The ranks that this one stands for; None where it stands for itself."""
        return self.runtime.virtual if self.runtime else None

    def enter(self) -> None:
        """Have what is below engines do as this one is set."""
        kernels.use(self.config.kernels if self.config else AUTO)

    def close(self) -> None:
        """Leave modules as they were, and drop what is held of a run."""
        self.layers.clear()
        self.runs.clear()

    def _counts(self) -> bool:
        return self is active() and not torch.compiler.is_compiling()

    def _called(self, root: Root, args: tuple, kwargs: dict[str, Any]) -> None:
        self.runs.called(root, args, kwargs)

    def _follows(self) -> bool:
        return self.mesh is not None and self._counts()

    # What all ranks agree on.

    def reduced(self, values: list[float], operation: str) -> list[float]:
        """Numbers reduced by 'sum', 'min' or 'max' over all ranks that share a sequence: in a ring, Ulysses groups must
        decide alike too. All of these ranks must call this."""
        from xfuser.core.distributed import get_sp_group

        device, lane = compute_device(), self.mesh.lane
        own = torch.tensor(values, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        own = own if lane.staged else own.to(device)

        def reduce() -> torch.Tensor:
            return functional.wait_tensor(functional.all_reduce(own, operation, get_sp_group().device_group))

        # In the lane, where it cannot overtake an exchange that is under way.
        return lane.run(reduce).tolist()

    def all_agree(self, value: object) -> bool:
        """Whether all ranks that share a sequence pass the same."""
        # 24 bits are exact in any floating type used here.
        digest = zlib.crc32(repr(value).encode()) & 0xFFFFFF
        lowest, highest = self.reduced([digest, -digest], "min")
        return lowest == -highest

    # What travels.

    def coding(self, layer: Layer | None, share: Share | None) -> Coding | None:
        """How the exchanges of a layer are coded in this call; all ranks find the same."""
        if self.runtime is None or layer is None or layer.root.run is None or layer.again:
            return None
        if share is None:
            self.runtime.refuse("its K and V are of other tokens than its Q, which is not understood")
            return None
        if is_captured():
            self.runtime.refuse("a CUDA graph is captured, which would repeat what codecs did at one step")
            return None

        def found() -> Coding | None:
            return self.runtime.coding(layer.name, id(layer), layer.branch, share, id(layer.root))

        if layer.call is None:  # its first call ever, which is not followed yet
            return found()
        if layer.call.coding is None:
            layer.call.coding = found()
        return layer.call.coding

    def send_value(self, value: torch.Tensor, layer: Layer) -> Handle:
        """Start the exchange of a layer's V, or of its first part where the call has several."""
        part = Part(0, layer.call.schedule.groups)
        return send_to_heads(
            [value], self.mesh, Label("v", layer.name), part, self.coding(layer, layer.call.kind.share)
        )


_NONE = Engine()
"""In force while xDiT has no runtime state."""


def active() -> Engine:
    """The engine of the runtime state in force."""
    from xfuser.core.distributed.runtime_state import _RUNTIME

    return getattr(_RUNTIME, "cocodiff", None) or _NONE
