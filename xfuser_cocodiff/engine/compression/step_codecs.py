"""The codecs of one step: what a schedule and rate control have decided for it, the same on all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

from xfuser_cocodiff.engine.codec.codec import EXACT, Codec


@dataclass(frozen=True, kw_only=True)
class StepCodecs:
    """How the tensors of all layers are coded at one step."""

    codecs: Mapping[str, Codec]
    """Codec of each tensor that has a reference: q, k, v and o. Q, K and V have the same number of active tokens."""
    number: int = 0
    """Number of the step in its run, from 0."""
    keyframe_codec: Codec = EXACT
    """Codec for tensors without a reference; it must be stateless."""
    is_keyframe: bool = False
    """Whether the step uses no references of earlier steps."""
    is_joint: bool = False
    """Whether branches of guidance are coded as differences to the leading one."""
    keeps_references: bool = True
    """Whether references outlive a message; all tensors are keyframes where they do not."""
    has_exact_references: bool = False
    """Whether references are stored as they are, for V-Major."""
    measures_yardsticks: bool = False
    """Whether the errors of FP8 and FP4 on the same tensors are measured too."""
