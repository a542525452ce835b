#!/usr/bin/env python3
"""Trains the small Stable Diffusion 3.5 of the package on one CPU core, in 25 minutes of its time.

    python scripts/train_sd35.py --out xfuser_cocodiff/lab/models/sd35_large

The autoencoder is that of the small FLUX.1-dev. The transformer starts from FLUX.1-dev's blocks and learns its
velocities of captioned images; an eighth of the images has no caption, for classifier-free guidance. The text encoders
keep their random weights, as in train_flux1.py.
"""

import shutil

import torch
import torch.nn.functional as F
from diffusers import FluxPipeline, FluxTransformer2DModel, SD3Transformer2DModel, StableDiffusion3Pipeline
from images import Images, encode_pool
from train_flux1 import embeddings as flux_embeddings
from training import Prompts, arguments, read_training, save_pipeline, train_averaged

from xfuser_cocodiff.lab.models import hub, sd35

POOL = 2048
"""Number of images whose latents the transformer is trained on."""
BATCH = 8
CAPTION_DROPOUT = 0.12
"""Fraction of images without a caption, for classifier-free guidance."""
CLIP_TOKENS = 77
LENGTHS = {(16, 16): 0.7, (CLIP_TOKENS, 32): 0.2, (CLIP_TOKENS, 256): 0.1}
"""Probabilities of text lengths: tokens of CLIP and of T5. Short texts are cheap; pipelines pad both."""


@torch.no_grad()
def start_from_flux1(model: SD3Transformer2DModel, flux: FluxTransformer2DModel) -> None:
    """Copy the weights of a small FLUX.1 to where they fit; single-stream blocks serve both streams."""
    source, target = flux.state_dict(), model.state_dict()
    copied = {}
    for name, weight in target.items():
        if name in source and source[name].shape == weight.shape:
            copied[name] = source[name]
    double, blocks = len(flux.transformer_blocks), len(model.transformer_blocks)
    for block in range(double, min(blocks, double + len(flux.single_transformer_blocks))):
        old, new = f"single_transformer_blocks.{block - double}.", f"transformer_blocks.{block}."
        copied |= {new + name: weight for name, weight in split_single(source, old).items()}
    copied["pos_embed.proj.weight"] = source["x_embedder.weight"].unflatten(1, (-1, 2, 2))
    copied["pos_embed.proj.bias"] = source["x_embedder.bias"]
    # FLUX.1 orders the values of a patch by channel, row and column, SD3 by row, column and channel.
    for end in ("weight", "bias"):
        values = source[f"proj_out.{end}"]
        copied[f"proj_out.{end}"] = values.unflatten(0, (-1, 4)).transpose(0, 1).flatten(0, 1)
    # The last block discards its text, and normalizes it with other weights.
    fitting = {name: copied[name] for name in copied.keys() & target.keys() if copied[name].shape == target[name].shape}
    model.load_state_dict(fitting, strict=False)


def split_single(source: dict[str, torch.Tensor], block: str) -> dict[str, torch.Tensor]:
    """Return a single-stream block of FLUX.1 as a joint block, which has an MLP after its attention."""
    split: dict[str, torch.Tensor] = {}
    for end in ("weight", "bias"):
        for own, text in (("to_q", "add_q_proj"), ("to_k", "add_k_proj"), ("to_v", "add_v_proj")):
            split[f"attn.{own}.{end}"] = split[f"attn.{text}.{end}"] = source[f"{block}attn.{own}.{end}"]
        modulation = source[f"{block}norm.linear.{end}"]
        split[f"norm1.linear.{end}"] = split[f"norm1_context.linear.{end}"] = torch.cat([modulation] * 2)
        split[f"ff.net.0.proj.{end}"] = split[f"ff_context.net.0.proj.{end}"] = source[f"{block}proj_mlp.{end}"]
    for own, text in (("norm_q", "norm_added_q"), ("norm_k", "norm_added_k")):
        split[f"attn.{own}.weight"] = split[f"attn.{text}.weight"] = source[f"{block}attn.{own}.weight"]
    out, bias = source[f"{block}proj_out.weight"], source[f"{block}proj_out.bias"]
    attention, mlp = out.split([out.shape[0], out.shape[1] - out.shape[0]], 1)
    for stream in ("attn.to_out.0", "attn.to_add_out"):
        split |= {f"{stream}.weight": attention, f"{stream}.bias": torch.zeros_like(bias)}
    for stream in ("ff.net.2", "ff_context.net.2"):
        split |= {f"{stream}.weight": mlp, f"{stream}.bias": bias}
    return split


class TextEmbeddings:
    """Embeddings of captions at any length of their texts.

    Args:
        pipe: pipeline with the text encoders.
    """

    def __init__(self, pipe: StableDiffusion3Pipeline) -> None:
        self._prompts = Prompts(
            lambda text, length: tuple(
                embeds[0] for embeds in pipe.encode_prompt(text, None, None, max_sequence_length=length)[::2]
            )
        )

    def __call__(self, texts: list[str], clip: int, t5: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings of shape (B, clip + t5, width), CLIP's tokens before T5's, and the pooled ones."""
        embeds, pooled = self._prompts(texts, t5)
        return torch.cat([embeds[:, :clip], embeds[:, CLIP_TOKENS:]], 1), pooled


def noisy(clean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logit-normal times, the latents at these times, and their velocities."""
    noise = torch.randn_like(clean)
    time = torch.sigmoid(torch.randn(len(clean)) + 0.7)
    return time, torch.lerp(clean, noise, time[:, None, None, None]), noise - clean


def train_transformer(pipe: StableDiffusion3Pipeline, flux: FluxPipeline, images: Images, minutes: float, save) -> None:
    """Train a transformer on the velocities of FLUX.1-dev, and on those of the images where there is no caption."""
    rng = images.rng
    latents, texts = encode_pool(pipe, images, POOL)
    embeddings, flux_velocity = TextEmbeddings(pipe), FluxVelocity(flux, latents.shape[-1])

    def draw_loss() -> torch.Tensor:
        chosen = rng.integers(0, POOL, BATCH)
        captions, dropped = [texts[i] for i in chosen], torch.from_numpy(rng.uniform(size=BATCH) < CAPTION_DROPOUT)
        prompts = ["" if drop else text for drop, text in zip(dropped, captions, strict=True)]
        embeds, pooled = embeddings(prompts, *list(LENGTHS)[rng.choice(len(LENGTHS), p=list(LENGTHS.values()))])
        time, mixed, velocity = noisy(latents[chosen])
        target = torch.where(dropped[:, None, None, None], velocity, flux_velocity(mixed, time, captions))
        return F.mse_loss(pipe.transformer(mixed, embeds, pooled, 1000 * time, return_dict=False)[0], target)

    # Fewer steps than in the other scripts, so the average spans fewer as well.
    train_averaged("transformer", pipe.transformer, minutes, draw_loss, save, decay=0.99)


@torch.no_grad()
def flow_matching_loss(transformer: SD3Transformer2DModel, pipe: StableDiffusion3Pipeline, count: int = 128) -> float:
    """Return the mean squared error of velocities of new images, with captions padded as by `cocodiff quality`."""
    latents, texts = encode_pool(pipe, Images(seed=1), count)
    embeds, pooled = TextEmbeddings(pipe)(texts, CLIP_TOKENS, 32)
    time, mixed, velocity = noisy(latents)
    return F.mse_loss(transformer(mixed, embeds, pooled, 1000 * time, return_dict=False)[0], velocity).item()


class FluxVelocity:
    """Velocity of latents by a trained FLUX.1.

    Args:
        pipe: its pipeline.
        edge: height and width of the latents.
    """

    def __init__(self, pipe: FluxPipeline, edge: int) -> None:
        self._pipe = pipe
        self._prompts = Prompts(lambda text, length: flux_embeddings(pipe, text, length))
        self._image_ids = pipe._prepare_latent_image_ids(1, edge // 2, edge // 2, "cpu", torch.float32)

    @torch.no_grad()
    def __call__(self, mixed: torch.Tensor, time: torch.Tensor, texts: list[str], length: int = 16) -> torch.Tensor:
        """Return the velocity at latents of shape (B, C, edge, edge), times of shape (B,) and B captions."""
        embeds, pooled = self._prompts(texts, length)
        tokens = self._pipe.transformer(
            hidden_states=self._pipe._pack_latents(mixed, *mixed.shape),
            timestep=time,
            guidance=torch.full_like(time, 3.5),
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(length, 3),
            img_ids=self._image_ids,
            return_dict=False,
        )[0]
        rows = mixed.shape[-1] // 2
        return tokens.unflatten(1, (rows, rows)).unflatten(3, (-1, 2, 2)).permute(0, 3, 1, 4, 2, 5).reshape(mixed.shape)


def main() -> None:
    """Run the script."""
    args = arguments(__doc__, transformer=75)
    images, training = Images(seed=0), read_training(args.start)
    flux = FluxPipeline.from_pretrained(hub.SHIPPED["FLUX.1-dev"], torch_dtype=torch.float32)
    if args.start:
        pipe = StableDiffusion3Pipeline.from_pretrained(args.start, vae=flux.vae, torch_dtype=torch.float32)
    else:
        pipe = sd35.pipeline(seed=0)
        pipe.vae = flux.vae
        start_from_flux1(pipe.transformer, flux.transformer)
    # Without dropout, as in inference.
    for module in (*pipe.components.values(), *flux.components.values()):
        if isinstance(module, torch.nn.Module):
            module.eval()
    pipe.transformer.train()

    def save(transformer: SD3Transformer2DModel, loss: float, steps: int) -> None:
        losses = {"flow_matching_loss": flow_matching_loss(transformer, pipe), "distillation_loss": loss}
        so_far = {"steps": training["steps"] + steps, "batch": BATCH, "caption_dropout": CAPTION_DROPOUT}
        save_pipeline(pipe, transformer, args.out, losses | so_far)
        shutil.rmtree(args.out / "vae")  # FLUX.1-dev has it

    train_transformer(pipe, flux, images, args.transformer_minutes, save)


if __name__ == "__main__":
    main()
