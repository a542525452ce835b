"""Provides dimensions and FLOPs of full-size diffusion transformers.

The dimensions come from `transformer/config.json` of the weights on Hugging Face. Those of FLUX.1, FLUX.2 and
Qwen-Image equal the defaults of diffusers 0.42.1, and a test compares them.
"""

from dataclasses import dataclass

PIXELS_PER_TOKEN = 16
"""Pixels per side of a token: all four models have a VAE of factor 8 and patches of 2x2 latents."""
BYTES_PER_VALUE = 2
"""Bytes of a value in bf16."""


@dataclass(frozen=True)
class Workload:
    """Dimensions of a transformer, and how its pipeline calls it."""

    name: str
    layers: int
    """Layers with attention. A double-stream layer costs as much per token as a single-stream layer."""
    heads: int
    head_dim: int
    mlp_ratio: float
    """Width of the hidden layer of the MLP divided by the width of the model."""
    gated: bool
    """Whether the MLP is gated (SwiGLU), with a gate projection as wide as the hidden layer."""
    text_tokens: int
    """Text tokens in the joint sequence."""
    calls: int = 1
    """Sequential calls per step: 2 where guidance needs a second call."""
    rows_per_image: int = 1
    """Batch rows per image: 2 where guidance is batched."""

    @property
    def width(self) -> int:
        """Number of channels of a token."""
        return self.heads * self.head_dim

    def tokens(self, resolution: int) -> int:
        """Return the length of the joint sequence for a square image of `resolution` pixels per side."""
        return (resolution // PIXELS_PER_TOKEN) ** 2 + self.text_tokens

    @property
    def mlp_projections(self) -> float:
        """Cost of the MLP, in projections from width to width."""
        return self.mlp_ratio * (3 if self.gated else 2)

    def projection_flops(self, tokens: float) -> float:
        """Return the FLOPs of one projection from width to width.

        Modulation, norms and RoPE are not counted: at full size they are less than 1 % of a layer.
        """
        return 2.0 * tokens * self.width**2

    def attention_flops(self, tokens: float, attended: float, heads: float) -> float:
        """Return the FLOPs of attention in one layer: the scores and their product with V.

        Args:
            tokens: number of queries.
            attended: number of tokens that each query attends to.
            heads: number of heads.
        """
        return 4.0 * tokens * attended * heads * self.head_dim


WORKLOADS = {
    workload.name: workload
    for workload in (
        # 19 double-stream and 38 single-stream layers. The pipeline pads T5's text to 512 tokens. Distilled guidance
        # needs one call per step.
        Workload("flux.1-dev", 19 + 38, 24, 128, mlp_ratio=4, gated=False, text_tokens=512),
        # 8 double-stream and 48 single-stream layers. The pipeline pads text to 512 tokens. Guidance is distilled.
        Workload("flux.2-dev", 8 + 48, 48, 128, mlp_ratio=3, gated=True, text_tokens=512),
        # 38 layers with 38 heads; 77 CLIP and 256 T5 tokens. Guidance is batched.
        Workload("sd3.5-large", 38, 38, 64, mlp_ratio=4, gated=False, text_tokens=333, rows_per_image=2),
        # 60 double-stream layers. Text is as long as the prompt, here 128 tokens. True CFG needs two calls per step.
        Workload("qwen-image", 60, 24, 128, mlp_ratio=4, gated=False, text_tokens=128, calls=2),
    )
}
