"""The hook for --cocodiff_virtual: one rank that simulates the codecs of many, which the tools provide."""

import importlib
from typing import Any, Protocol

import torch

from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

_PROVIDER = "xfuser_cocodiff.lab.comparison.virtual_session"
"""Module that simulates ranks. It is imported by name: the integration does not depend on the tools."""


class Simulator(Protocol):
    """Ranks that a single rank simulates."""

    @property
    def is_ring(self) -> bool:
        """Whether they form a ring, in which only K and V are sent."""

    @property
    def gather_layout(self) -> AxisLayout | None:
        """Layout whose slow side is the axes along which layers may gather K and V; None where they may not."""

    def attention(self, call: Any) -> torch.Tensor:
        """Return the output of a call of USP as all simulated ranks would compute it together; see `usp_call`."""


def start_session(pipeline: Any, config: CocoDiffConfig, is_compiled: bool) -> Any:
    """Return the session of a single rank that simulates others, by its options.

    Args:
        pipeline: pipeline of the run.
        config: options, with the topology of virtual ranks.
        is_compiled: whether xDiT compiles the transformer.
    """
    return importlib.import_module(_PROVIDER).start_session(pipeline, config, is_compiled)


def route_attention(pipeline: Any) -> None:
    """Install xDiT's attention processors, which it leaves out on a single rank in some models, such as SD3.5."""
    from xfuser.model_executor.layers import attention_processor as xdit

    processors = xdit.xFuserAttentionProcessorRegister._XFUSER_ATTENTION_PROCESSOR_MAPPING
    for transformer in (getattr(pipeline, name, None) for name in ("transformer", "transformer_2")):
        for module in transformer.modules() if transformer is not None else ():
            processor_class = processors.get(type(getattr(module, "processor", None)))
            if processor_class:
                module.processor = processor_class()
                module.processor.use_long_ctx_attn_kvcache = True  # keeps K and V out of PipeFusion's cache
