"""Baselines of the benchmark: each is a rule of another system, which replaces stock's collectives inside USP.

Attention itself runs in the dtype of the model for all of them: rules change what is sent, and what is computed to send
it, in bytes and kernels. Where a system can be set in several ways, its fastest is taken: scales travel in the message
of their values, and each conversion is one kernel that also changes the layout.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.accelerator.device import EmulatedAccelerator
from benchmarks.cluster.replaced_collectives import (
    Collectives,
    replace_collectives,
    ring_group,
    ulysses_group,
)
from benchmarks.cluster.ring_rules import gathered_attention, residual_attention
from benchmarks.cluster.row_codes import FP4, INT8, STATIC_FP8
from benchmarks.cluster.ulysses_rules import CodedUlysses, UlyssesCodes

AS_IT_IS, GATHER, RESIDUALS = "", "gather", "residuals"
"""What happens to K and V in a ring: stock's ring, one all-gather, or CompactFusion's residuals."""


@dataclass(frozen=True)
class Rule:
    """Rule of another system. Bytes do not depend on the machine: a transport moves what the rule hands to it."""

    name: str
    system: str
    """System that has the rule, as in "rule of ..."."""
    source: str
    """Version or commit and file of the rule, or its pull request."""
    ulysses: UlyssesCodes | None = None
    """How Q, K, V and O are sent in Ulysses groups; None for stock's all-to-alls."""
    ring: str = AS_IT_IS
    """What happens to K and V in a ring."""
    combined: bool | None = None
    """Whether stock sends Q, K and V in one message; None leaves it to the model."""
    plugin_variant: str | None = None
    """Variant of the plugin that is the rule; nothing is replaced then."""

    @property
    def needs_ring(self) -> bool:
        """Whether it needs a ring degree above 1: Ulysses within nodes, the ring across."""
        return self.ring != AS_IT_IS

    @property
    def is_lossless(self) -> bool:
        """Whether K, V, Q and O arrive as they were sent."""
        return not (self.ulysses and self.ulysses.codes) and self.ring != RESIDUALS

    def running(self, device: EmulatedAccelerator) -> AbstractContextManager[None]:
        """Return a context in which xDiT runs by this rule.

        The plugin's session must be inactive, and xDiT's process groups must exist.

        Args:
            device: runs the rule's kernels.
        """
        replaced: dict[str, Any] = {} if self.combined is None else {"combined": self.combined}
        if self.ulysses:
            ulysses = CodedUlysses(self.ulysses, ulysses_group(), device)
            replaced |= {"exchange_inputs": ulysses.exchange_inputs, "exchange_output": ulysses.exchange_output}
        if self.ring == GATHER:
            replaced["ring_attention"] = partial(gathered_attention, ring_group())
        if self.ring == RESIDUALS:
            replaced["ring_attention"] = partial(residual_attention, ring_group(), device)
        return replace_collectives(Collectives(**replaced))


RULES = {
    rule.name: rule
    for rule in (
        Rule("stock", "stock xDiT", "xDiT 0.7.0, usp.py"),
        # FLUX.1, FLUX.2 and Lumina2 set combine_qkv_a2a, other models do not.
        Rule(
            "stock-combined",
            "stock xDiT, Q, K and V in one message",
            "xDiT 0.7.0, usp.py",
            combined=True,
        ),
        Rule(
            "stock-separate",
            "stock xDiT, Q, K and V in three messages",
            "xDiT 0.7.0, usp.py",
            combined=False,
        ),
        # One message after another; scales are fixed or calibrated before, and not sent. xDiT hands FP8 values to the
        # attention kernels of AITER (AMD only), which is not done here.
        Rule(
            "fp8",
            "xDiT's --use_fp8_comms",
            "xDiT 0.7.0, core/distributed/fp8_comms.py",
            UlyssesCodes(dict.fromkeys("qkvo", STATIC_FP8.name), one_message=False, rotates=True),
        ),
        Rule(
            "fp4",
            "LightX2V's FP4 communication",
            "ModelTC/LightX2V@3d2bd26, lightx2v/common/ops/attn/utils/seq_p.py; introduced in ModelTC/LightX2V#917",
            UlyssesCodes(dict.fromkeys("qkvo", FP4.name)),
        ),
        # O stays in bf16. INT8 scales are of rows here; SageAttention2's are of larger groups, 3 % fewer bytes. The
        # statistics of K and V, over all tokens, take no collective of their own here.
        Rule(
            "int8",
            "FlashInfer's INT8 Q and K, FP8 V",
            "flashinfer-ai/flashinfer#4924, open",
            UlyssesCodes({"q": INT8.name, "k": INT8.name, "v": STATIC_FP8.name}),
        ),
        Rule(
            "kv-gather",
            "SGLang and vLLM-Omni: one K/V all-gather in place of the ring",
            "sgl-project/sglang#32667, vllm-project/vllm-omni#7641",
            ring=GATHER,
        ),
        Rule(
            "compact-ring",
            "CompactFusion: 2-bit residuals of K and V in a ring",
            "Cobalt-27/CompactFusion, xfuser/compact/ring.py and fastpath.py (int2)",
            ring=RESIDUALS,
        ),
        Rule(
            "v-first",
            "cache-dit's ulysses_async: V first",
            "vipshop/cache-dit@8987d3d, src/cache_dit/distributed/async_ulysses",
            plugin_variant="exact/flat@v_first=on",
        ),
    )
}
"""All rules by name."""
