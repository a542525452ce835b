"""Kinds of layers with joint and cross-attention have the FLOPs of diffusers' blocks."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator
from xfuser_cocodiff.tools.simulation.layers import (
    CROSS_TEXT,
    IMAGE,
    JOINT,
    ROW,
    TEXT,
    Linear,
    Pointwise,
    Work,
)
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS

ALL_IMAGE, ALL_TEXT, HEADS, DIM = 960, 64, 24, 16
WIDTH = HEADS * DIM


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def block_of(name: str) -> Callable[[], object]:
    """Return a call of one of diffusers' blocks."""
    from diffusers.models.transformers import transformer_qwenimage as qwen
    from diffusers.models.transformers import transformer_wan as wan

    image, text, modulation = zeros(1, ALL_IMAGE, WIDTH), zeros(1, ALL_TEXT, WIDTH), zeros(1, WIDTH)
    angles = zeros(ALL_IMAGE, DIM, dtype=torch.float32)
    if name == "qwen-image":
        complex_rope = [torch.zeros(count, DIM // 2, dtype=torch.complex64) for count in (ALL_IMAGE, ALL_TEXT)]
        block = qwen.QwenImageTransformerBlock(WIDTH, HEADS, DIM).bfloat16()
        more = {"encoder_hidden_states_mask": None, "image_rotary_emb": complex_rope}
        streams = {"hidden_states": image, "encoder_hidden_states": text}
        return functools.partial(block, **streams, temb=modulation, **more)
    block = wan.WanTransformerBlock(WIDTH, round(2.7 * WIDTH), HEADS, "rms_norm_across_heads", cross_attn_norm=True)
    block.bfloat16().norm2.float()
    block.scale_shift_table.data = block.scale_shift_table.data.float()
    wan_rope = (angles.view(1, ALL_IMAGE, 1, DIM),) * 2
    return functools.partial(block, image, text, zeros(1, 6, WIDTH, dtype=torch.float32), wan_rope)


def token_counts(name: str) -> dict[str, int]:
    joint = ALL_IMAGE + (0 if name == "wan2.1-14b" else ALL_TEXT)
    return {IMAGE: ALL_IMAGE, TEXT: ALL_TEXT, JOINT: joint, CROSS_TEXT: ALL_TEXT, ROW: 1}


@pytest.mark.parametrize("name", ["qwen-image", "wan2.1-14b"])
def test_flops_equal_those_of_diffusers(name: str) -> None:
    call, counts, [kind] = block_of(name), token_counts(name), WORKLOADS[name].kinds
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()  # the counter does not support the fused CPU kernel
    attended = counts[JOINT] + (ALL_TEXT if kind.has_cross_attention else 0)
    attention = 4 * counts[JOINT] * attended * WIDTH
    linear = sum(work.flops(counts, WIDTH) for work in kind.parts)
    assert linear + attention == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_work_takes_the_time_of_its_kernels() -> None:
    accelerator = Accelerator("test", 100.0, 1.0, 1.0, 10.0, 3.0, 0.0, 0.0)
    counts = {IMAGE: 5.0, ROW: 1.0}
    work = Work((Linear(IMAGE, 1, 2), Linear(ROW, 1, 6)), (Pointwise(IMAGE, 4, 6.0),))
    # Width 4: 320 FLOPs, and 2 x (60 + 32) bytes; 2 x (28 + 96) bytes of weights; four kernels of 60 bytes each.
    assert work.seconds(counts, 4, accelerator) == pytest.approx(18.4 + 24.8 + 4 * 6)
    assert work.seconds(counts, 4, Accelerator("slow", 1.0, 1.0, 1.0, 1e9, 3.0, 0.0, 0.0)) == 320 + 192 + 4 * 3
    assert (work.flops(counts, 4), work.kernels) == (320 + 192, 6)
