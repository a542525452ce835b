"""Diffusion transformers of real size: heads, tokens, and FLOPs of a layer.

Dimensions are those of the `transformer/config.json` beside the weights on Hugging Face; where diffusers' own defaults
(0.42.1) are the model's, as for FLUX.1, FLUX.2 and Qwen-Image, a test compares with them.
"""

from dataclasses import dataclass

PIXELS_PER_TOKEN = 16
"""Side of a token in pixels: all four models have a VAE of factor 8 and patches of 2x2 latents."""
BYTES_PER_VALUE = 2
"""bf16."""


@dataclass(frozen=True)
class Workload:
    """A transformer and how its pipeline calls it."""

    name: str
    layers: int
    """Layers with attention. One with a stream for text and one for the image costs a token what a single one does."""
    heads: int
    head_dim: int
    mlp_ratio: float
    """Width of the hidden layer over the width of the model."""
    gated: bool
    """Whether the hidden layer has a gate of its size beside it (SwiGLU)."""
    text_tokens: int
    """Text tokens in the joint sequence."""
    calls: int = 1
    """Calls per step, one after the other: 2 where guidance is computed by a second call."""
    rows: int = 1
    """Rows of the batch per picture: 2 where guidance is batched."""

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    def tokens(self, resolution: int) -> int:
        """Length of the joint sequence for a square picture of `resolution` pixels."""
        return (resolution // PIXELS_PER_TOKEN) ** 2 + self.text_tokens

    @property
    def mlp_projections(self) -> float:
        """The MLP in projections from width to width."""
        return self.mlp_ratio * (3 if self.gated else 2)

    def projection_flops(self, tokens: float) -> float:
        """Return the FLOPs of one projection from width to width.

        Of a layer, modulation, norms and RoPE are not counted: they are less than 1 % at real sizes.
        """
        return 2.0 * tokens * self.width**2

    def attention_flops(self, tokens: float, attended: float, heads: float) -> float:
        """Return the FLOPs of attention in one layer: scores, and their product with V."""
        return 4.0 * tokens * attended * heads * self.head_dim


WORKLOADS = {
    workload.name: workload
    for workload in (
        # 19 double and 38 single layers. The pipeline pads T5's text to 512 tokens. Guidance is distilled: one call.
        Workload("flux.1-dev", 19 + 38, 24, 128, mlp_ratio=4, gated=False, text_tokens=512),
        # 8 double and 48 single layers; the pipeline pads text to 512 tokens. Guidance is distilled.
        Workload("flux.2-dev", 8 + 48, 48, 128, mlp_ratio=3, gated=True, text_tokens=512),
        # SD3.5 large: 38 layers of 38 heads; 77 CLIP and 256 T5 tokens; guidance batched.
        Workload("sd3.5-large", 38, 38, 64, mlp_ratio=4, gated=False, text_tokens=333, rows=2),
        # 60 double layers. Text is as long as the prompt, which is taken to be 128 tokens; true CFG: two calls.
        Workload("qwen-image", 60, 24, 128, mlp_ratio=4, gated=False, text_tokens=128, calls=2),
    )
}
