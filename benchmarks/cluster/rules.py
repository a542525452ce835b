"""Baselines of the benchmark: each is a rule of another system, which replaces stock's collectives inside USP.

Attention itself runs in the dtype of the model for all of them: rules change what is sent, and what is computed to send
it, in bytes and kernels. Where a system can be set in several ways, its fastest is taken: scales travel in the message
of their values, and each conversion is one kernel that also changes the layout.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from benchmarks.accelerator.device import EmulatedAccelerator
from benchmarks.cluster import fp4_ulysses
from benchmarks.cluster.replaced_collectives import (
    Collectives,
    replace_collectives,
    ring_group,
    ulysses_group,
)
from benchmarks.cluster.ring_rules import gathered_attention, residual_attention


@dataclass(frozen=True)
class Rule:
    """Rule of another system. Bytes do not depend on the machine: a transport moves what the rule hands to it."""

    collectives: Callable[[EmulatedAccelerator], Collectives] = lambda device: Collectives()
    """Returns what replaces stock's collectives, given the device that runs the rule's kernels."""
    needs_ring: bool = False
    """Whether it needs a ring degree above 1: Ulysses within nodes, the ring across."""
    is_lossless: bool = True
    """Whether K, V, Q and O arrive as they were sent."""

    def running(self, device: EmulatedAccelerator) -> AbstractContextManager[None]:
        """Return a context in which xDiT runs by this rule on a device.

        The plugin's session must be inactive, and xDiT's process groups must exist.
        """
        return replace_collectives(self.collectives(device))


def _fp4(device: EmulatedAccelerator) -> Collectives:
    group = ulysses_group()
    return Collectives(
        partial(fp4_ulysses.exchange_inputs, group, device), partial(fp4_ulysses.exchange_output, group, device)
    )


RULES = {
    "stock": Rule(),  # xDiT 0.7.0, usp.py. FLUX.1, FLUX.2 and Lumina2 set combine_qkv_a2a, other models do not.
    "stock-combined": Rule(lambda device: Collectives(combined=True)),
    "stock-separate": Rule(lambda device: Collectives(combined=False)),
    # LightX2V: ModelTC/LightX2V@3d2bd26, lightx2v/common/ops/attn/utils/seq_p.py; introduced in ModelTC/LightX2V#917
    "fp4": Rule(_fp4, is_lossless=False),
    # SGLang and vLLM-Omni, one all-gather of K and V: sgl-project/sglang#32667, vllm-project/vllm-omni#7641
    "kv-gather": Rule(
        lambda device: Collectives(ring_attention=partial(gathered_attention, ring_group())), needs_ring=True
    ),
    # CompactFusion, 2-bit residuals of K and V: Cobalt-27/CompactFusion, xfuser/compact/ring.py and fastpath.py (int2)
    "compact-ring": Rule(
        lambda device: Collectives(ring_attention=partial(residual_attention, ring_group(), device)),
        needs_ring=True,
        is_lossless=False,
    ),
}
"""All rules by name, each with its version or commit and file, or its pull request."""
