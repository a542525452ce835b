"""The hook for --cocodiff_virtual: one rank with the codecs of many virtual ones, which the tools provide."""

import importlib
from typing import Any, Protocol

import torch

from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

_PROVIDER = "xfuser_cocodiff.tools.comparison.virtual_session"
"""Module of virtual ranks. It is imported by name: the integration does not depend on the tools."""


class VirtualGroup(Protocol):
    """Virtual ranks of a single rank."""

    @property
    def is_ring(self) -> bool:
        """Whether they form a ring, in which only K and V are sent."""

    @property
    def gather_layout(self) -> AxisLayout | None:
        """Layout whose slow side is the axes along which layers may gather K and V; None where they may not."""

    def adopt(self, pipeline: Any) -> None:
        """Have the attention of a pipeline computed by xDiT's USP."""

    def attention(self, call: Any) -> torch.Tensor:
        """Return the output of a call of USP as all virtual ranks would compute it together; see `usp_call`."""


def start_session(pipeline: Any, config: CocoDiffConfig, is_compiled: bool) -> Any:
    """Return the session of a single rank with virtual ranks, by its options.

    Args:
        pipeline: pipeline of the run.
        config: options, with the topology of virtual ranks.
        is_compiled: whether xDiT compiles the transformer.
    """
    return importlib.import_module(_PROVIDER).start_session(pipeline, config, is_compiled)
