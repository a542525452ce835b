"""The kinds of layers have the FLOPs of diffusers' blocks."""

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
    LayerKind,
    Linear,
    Pointwise,
    Work,
)
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS

ALL_IMAGE, ALL_TEXT, HEADS, DIM = 960, 64, 24, 16
WIDTH = HEADS * DIM


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def block_of(name: str, kind: str) -> Callable[[], object]:
    """Return a call of one of diffusers' blocks."""
    from diffusers.models.attention import JointTransformerBlock
    from diffusers.models.transformers import transformer_flux as flux
    from diffusers.models.transformers import transformer_flux2 as flux2
    from diffusers.models.transformers import transformer_hunyuan_video as hunyuan
    from diffusers.models.transformers import transformer_qwenimage as qwen
    from diffusers.models.transformers import transformer_wan as wan

    image, text, modulation = zeros(1, ALL_IMAGE, WIDTH), zeros(1, ALL_TEXT, WIDTH), zeros(1, WIDTH)
    angles = zeros(ALL_IMAGE + ALL_TEXT, DIM, dtype=torch.float32)
    rope, image_rope = (angles, angles), (angles[:ALL_IMAGE], angles[:ALL_IMAGE])
    streams = {"hidden_states": image, "encoder_hidden_states": text}
    if name == "flux.1-dev":
        block = flux.FluxTransformerBlock if kind == "double" else flux.FluxSingleTransformerBlock
        return functools.partial(block(WIDTH, HEADS, DIM).bfloat16(), **streams, temb=modulation, image_rotary_emb=rope)
    if name == "flux.2-dev" and kind == "double":
        shared = {"temb_mod_img": zeros(1, 1, 6 * WIDTH), "temb_mod_txt": zeros(1, 1, 6 * WIDTH)}
        block = flux2.Flux2TransformerBlock(WIDTH, HEADS, DIM).bfloat16()
        return functools.partial(block, **streams, **shared, image_rotary_emb=rope)
    if name == "flux.2-dev":
        block = flux2.Flux2SingleTransformerBlock(WIDTH, HEADS, DIM).bfloat16()
        joint, shared = torch.cat([text, image], 1), zeros(1, 1, 3 * WIDTH)
        return functools.partial(block, joint, None, temb_mod=shared, image_rotary_emb=rope)
    if name == "qwen-image":
        complex_rope = [torch.zeros(count, DIM // 2, dtype=torch.complex64) for count in (ALL_IMAGE, ALL_TEXT)]
        block = qwen.QwenImageTransformerBlock(WIDTH, HEADS, DIM).bfloat16()
        more = {"encoder_hidden_states_mask": None, "image_rotary_emb": complex_rope}
        return functools.partial(block, **streams, temb=modulation, **more)
    if name == "sd3.5-large":
        block = JointTransformerBlock(WIDTH, HEADS, DIM, qk_norm="rms_norm").bfloat16()
        return functools.partial(block, **streams, temb=modulation)
    if name == "hunyuanvideo":
        double, single = hunyuan.HunyuanVideoTransformerBlock, hunyuan.HunyuanVideoSingleTransformerBlock
        block = (double if kind == "double" else single)(HEADS, DIM, 4.0).bfloat16()
        return functools.partial(block, image, text, modulation, None, image_rope)
    block = wan.WanTransformerBlock(WIDTH, round(2.7 * WIDTH), HEADS, "rms_norm_across_heads", cross_attn_norm=True)
    block.bfloat16().norm2.float()
    block.scale_shift_table.data = block.scale_shift_table.data.float()
    wan_rope = tuple(each.view(1, ALL_IMAGE, 1, DIM) for each in image_rope)
    return functools.partial(block, image, text, zeros(1, 6, WIDTH, dtype=torch.float32), wan_rope)


QUICK_MODELS = "sd3.5-large", "qwen-image", "wan2.1-14b"
KINDS = pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, id=f"{name} {kind.name}")
        for name, workload in WORKLOADS.items()
        for kind in workload.kinds
    ],
)


def token_counts(name: str) -> dict[str, int]:
    joint = ALL_IMAGE + (0 if name == "wan2.1-14b" else ALL_TEXT)
    return {IMAGE: ALL_IMAGE, TEXT: ALL_TEXT, JOINT: joint, CROSS_TEXT: ALL_TEXT, ROW: 1}


FEW_KINDS = [
    pytest.param(*each.values, id=each.id, marks=() if each.values[0] in QUICK_MODELS else pytest.mark.slow)
    for each in KINDS.args[1]
]
"""Those of the other models are slow: the matrix products of attention take long without fused kernels."""


@pytest.mark.parametrize(("name", "kind"), FEW_KINDS)
def test_flops_equal_those_of_diffusers(name: str, kind: LayerKind) -> None:
    call, counts = block_of(name, kind.name), token_counts(name)
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
