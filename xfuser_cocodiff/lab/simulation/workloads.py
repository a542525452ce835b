"""Provides full-size diffusion transformers: dimensions, layers, and how their pipelines call them.

The dimensions come from `transformer/config.json` of the weights on Hugging Face. Those of all but SD3.5 equal the
defaults of diffusers 0.42.1, and a test compares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from xfuser_cocodiff.lab.simulation.layers import (
    BYTES_PER_VALUE,
    CROSS_TEXT,
    IMAGE,
    JOINT,
    ROW,
    TEXT,
    LayerKind,
    Linear,
    Pointwise,
    Work,
    double_stream,
    single_stream,
)

PIXELS_PER_TOKEN = 16
"""Pixels per side of a token: all models have a VAE of factor 8 and patches of 2x2 latents."""
_VIDEO_COLUMNS = 32
"""Divisor of a video's width in pixels: 16:9 rounded down to it gives 832 x 480, 960 x 544 and 1280 x 720."""

_FRAMES_PER_LATENT = 4
"""Frames per latent frame after the first, in both video models."""


def num_latent_frames(frames: int) -> int:
    """Return the number of latent frames of a video."""
    return (frames - 1) // _FRAMES_PER_LATENT + 1


@dataclass(frozen=True)
class Workload:
    """Dimensions of a transformer, and how its pipeline calls it."""

    name: str
    kinds: tuple[LayerKind, ...]
    """Layers with attention."""
    heads: int
    head_dim: int
    text_tokens: int
    """Text tokens in the joint sequence."""
    cross_text_tokens: int = 0
    """Text tokens outside of the sequence, to which cross-attention attends."""
    latent_frames: int | None = None
    """Frames of a video after the VAE; None for images."""
    calls: int = 1
    """Sequential calls per step: 2 where guidance needs a second call."""
    rows_per_image: int = 1
    """Batch rows per image: 2 where guidance is batched."""
    heads_per_kv_head: int = 1
    """Heads of Q for each head of K and V; 1 in all of these models."""
    combines_qkv: bool = False
    """Whether stock xDiT sends Q, K and V in one all-to-all; else in three."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(kind.count for kind in self.kinds)

    @property
    def width(self) -> int:
        """Number of channels of a token."""
        return self.heads * self.head_dim

    def width_of(self, name: str) -> int:
        """Return the number of values of a token in one of q, k, v and o."""
        return self.width // self.heads_per_kv_head if name in "kv" else self.width

    def size(self, resolution: int) -> tuple[int, int]:
        """Return width and height in pixels: a square image, or a video of 16:9 with `resolution` rows."""
        if self.latent_frames is None:
            return resolution, resolution
        return resolution * 16 // 9 // _VIDEO_COLUMNS * _VIDEO_COLUMNS, resolution

    def image_tokens(self, resolution: int) -> int:
        """Return the number of image tokens, of all frames of a video."""
        width, height = (pixels // PIXELS_PER_TOKEN for pixels in self.size(resolution))
        return width * height * (self.latent_frames or 1)

    def tokens(self, resolution: int) -> int:
        """Return the length of the sequence."""
        return self.image_tokens(resolution) + self.text_tokens

    @property
    def projections(self) -> float:
        """Cost of all linear layers of an average layer for an image token, in projections from width to width."""
        counts = {IMAGE: 1.0, JOINT: 1.0, TEXT: 0.0, CROSS_TEXT: 0.0, ROW: 0.0}
        return self.linear_flops(counts) / self.layers / (2 * self.width**2)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of all linear layers in bf16: 96 to 100 % of the model."""
        works = ((kind.count, work) for kind in self.kinds for work in kind.parts)
        values = sum(count * each.inputs * each.outputs for count, work in works for each in work.linear)
        return BYTES_PER_VALUE * values * self.width**2

    def linear_flops(self, counts: Mapping[str, float]) -> float:
        """Return the FLOPs of the linear layers of all layers, for the number of tokens by kind."""
        return sum(kind.count * work.flops(counts, self.width) for kind in self.kinds for work in kind.parts)

    def attention_flops(self, tokens: float, attended: float, heads: float) -> float:
        """Return the FLOPs of attention in one layer: the scores and their product with V.

        Args:
            tokens: number of queries.
            attended: number of tokens that each query attends to.
            heads: number of heads.
        """
        return 4.0 * tokens * attended * heads * self.head_dim


_FLUX_NORMS = (Pointwise(IMAGE, 2, 4.2), Pointwise(TEXT, 2, 4.2), Pointwise(JOINT, 18, 56.3))
"""RMSNorm of each stream, as one kernel; concatenation; RoPE in fp32."""
_QWEN_NORMS = (Pointwise(IMAGE, 22, 55.7), Pointwise(TEXT, 22, 55.7), Pointwise(JOINT, 2, 4))
"""RMSNorm of several kernels, and RoPE by complex numbers."""
_SD3_NORMS = (Pointwise(IMAGE, 16, 35.5), Pointwise(TEXT, 16, 35.5), Pointwise(JOINT, 2, 4))
_HUNYUAN_NORMS = (Pointwise(IMAGE, 32, 87.8), Pointwise(TEXT, 16, 35.5), Pointwise(JOINT, 2, 4))
_SWIGLU = (9, 31.0)
_FLUX2_SINGLE = LayerKind(
    "single",
    48,
    # One linear layer gives Q, K, V and the MLP's two inputs; only norms and RoPE come after V.
    Work((), (Pointwise(JOINT, 18, 56.6),)),
    Work(
        (Linear(JOINT, 1, 9), Linear(JOINT, 4, 1)),
        (Pointwise(ROW, 1, 2), Pointwise(JOINT, 3, 6), Pointwise(JOINT, 5, 28)),
    ),
)
_WAN = LayerKind(
    "block",
    40,
    Work((Linear(IMAGE),) * 2, (Pointwise(IMAGE, 2, 4), Pointwise(IMAGE, 16, 30.3))),
    Work(
        (
            *(Linear(IMAGE) for _ in ("v", "out", "cross-attention's q", "cross-attention's out")),
            *(Linear(CROSS_TEXT) for _ in "kv"),
            *(Linear(IMAGE, 1, 2.7), Linear(IMAGE, 2.7, 1)),
        ),
        # Norms and residuals run in fp32.
        (Pointwise(ROW, 3, 44), Pointwise(IMAGE, 5, 18), Pointwise(IMAGE, 20, 72.4), Pointwise(CROSS_TEXT, 1, 2)),
    ),
    has_cross_attention=True,
)

WORKLOADS = {
    workload.name: workload
    for workload in (
        # The pipeline pads T5's text to 512 tokens. Distilled guidance needs one call per step.
        Workload(
            "flux.1-dev",
            (double_stream(19, _FLUX_NORMS), single_stream(38, (Pointwise(JOINT, 18, 56.6),), (4, 8), (3, 15))),
            heads=24,
            head_dim=128,
            text_tokens=512,
            combines_qkv=True,
        ),
        # The pipeline pads text to 512 tokens. Guidance is distilled. The MLP is gated (SwiGLU), and all layers of a
        # kind share their modulation.
        Workload(
            "flux.2-dev",
            (double_stream(8, _FLUX_NORMS, (6, 3), _SWIGLU, own_modulation=False), _FLUX2_SINGLE),
            heads=48,
            head_dim=128,
            text_tokens=512,
            combines_qkv=True,
        ),
        # 77 CLIP and 256 T5 tokens. Guidance is batched.
        Workload(
            "sd3.5-large",
            (double_stream(38, _SD3_NORMS),),
            heads=38,
            head_dim=64,
            text_tokens=333,
            rows_per_image=2,
        ),
        # Text is as long as the prompt, here 128 tokens. True CFG needs two calls per step.
        Workload("qwen-image", (double_stream(60, _QWEN_NORMS),), heads=24, head_dim=128, text_tokens=128, calls=2),
        # 129 frames. The pipeline pads text to 256 tokens, and xDiT keeps those of the prompt. Guidance is distilled.
        Workload(
            "hunyuanvideo",
            (
                double_stream(20, _HUNYUAN_NORMS),
                single_stream(40, (Pointwise(JOINT, 18, 39.5), Pointwise(IMAGE, 16, 52.3)), (5, 10), (4, 17)),
            ),
            heads=24,
            head_dim=128,
            text_tokens=256,
            latent_frames=num_latent_frames(129),
        ),
        # 81 frames. The pipeline pads text to 512 tokens. Guidance needs two calls per step.
        Workload(
            "wan2.1-14b",
            (_WAN,),
            heads=40,
            head_dim=128,
            text_tokens=0,
            cross_text_tokens=512,
            latent_frames=num_latent_frames(81),
            calls=2,
        ),
    )
}
