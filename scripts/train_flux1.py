#!/usr/bin/env python3
"""Trains the small FLUX.1-dev of the package on one CPU core, in a few hours.

    python scripts/train_flux1.py --out xfuser_cocodiff/lab/models/flux1_dev

The autoencoder is trained first, on crops, then the transformer by flow matching on its latents. The text encoders keep
their random weights, which are enough to distinguish captions.
"""

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from images import Images, encode_pool
from training import Prompts, arguments, read_training, save_pipeline, train, train_averaged

from xfuser_cocodiff.lab.models import flux1

BATCH = 16


def train_autoencoder(vae, images: Images, minutes: float, crop: int = 64) -> float:
    """Train an autoencoder by L1 of values and gradients and a small KL term; return the mean L1 of 100 steps.

    The first three latent channels are regularized to the downsampled image. Neighboring tokens then resemble each
    other, and the transformer needs thousands of steps instead of millions.
    """

    def draw_loss() -> tuple[torch.Tensor, float]:
        batch = images.crops(BATCH // 4, 4, crop)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(batch).latent_dist
            decoded = vae.decode(posterior.sample()).sample.float()
        l1 = F.l1_loss(decoded, batch)
        edges = sum(F.l1_loss(decoded.diff(dim=d), batch.diff(dim=d)) for d in (2, 3))
        anchor = F.mse_loss(posterior.mean[:, :3].float(), F.avg_pool2d(batch, 4))
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        return l1 + edges + 10 * anchor + 1e-3 * kl, l1.item()

    optimizers = [torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)]
    return float(np.mean(train("autoencoder", vae, optimizers, minutes, 50, draw_loss)[-100:]))


def train_transformer(pipe, images: Images, minutes: float, save, fit_scale: bool) -> None:
    """Train a transformer by flow matching with logit-normal times."""
    model, rng = pipe.transformer, images.rng
    latents, texts = encode_pool(pipe, images, 8192, fit_scale)
    prompts = Prompts(lambda text, length: embeddings(pipe, text, length))
    tokens = pipe._pack_latents(latents, *latents.shape)
    image_ids = pipe._prepare_latent_image_ids(1, latents.shape[2] // 2, latents.shape[3] // 2, "cpu", torch.float32)

    def draw_loss() -> torch.Tensor:
        chosen = rng.integers(0, len(tokens), BATCH)
        clean = tokens[chosen]
        # Mostly short prompts, which are cheap; sometimes the padded lengths that scripts use.
        length = int(rng.choice([16, 32, 64, 256, 512], p=[0.8, 0.1, 0.07, 0.02, 0.01]))
        embeds, pooled = prompts([texts[i] for i in chosen], length)
        noise = torch.randn_like(clean)
        time = torch.sigmoid(torch.randn(BATCH) + 0.5)
        mixed = torch.lerp(clean, noise, time[:, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            velocity = model(
                hidden_states=mixed,
                timestep=time,
                guidance=torch.empty(BATCH).uniform_(1, 5),
                pooled_projections=pooled,
                encoder_hidden_states=embeds,
                txt_ids=torch.zeros(length, 3),
                img_ids=image_ids,
                return_dict=False,
            )[0]
        return F.mse_loss(velocity.float(), noise - clean)

    train_averaged("transformer", model, minutes, draw_loss, save)


def embeddings(pipe, text: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embeddings of the tokens and the pooled embedding of a caption."""
    embeds, pooled, _ = pipe.encode_prompt(text, None, max_sequence_length=length)
    return embeds[0], pooled[0]


def main() -> None:
    """Run the script."""
    args = arguments(__doc__, autoencoder=7, transformer=45)
    images, training = Images(seed=0), read_training(args.start)
    if args.start:
        pipe = FluxPipeline.from_pretrained(args.start, torch_dtype=torch.float32)
    else:
        pipe = flux1.pipeline(seed=0)
        training["autoencoder_l1"] = train_autoencoder(pipe.vae, images, args.autoencoder_minutes)
    # Text encoders without dropout, as in inference.
    pipe.text_encoder.eval()
    pipe.text_encoder_2.eval()
    pipe.vae.eval()
    pipe.transformer.train()

    def save(transformer, loss: float, steps: int) -> None:
        so_far = {"flow_matching_loss": loss, "steps": training["steps"] + steps, "batch": BATCH}
        save_pipeline(pipe, transformer, args.out, {"autoencoder_l1": training["autoencoder_l1"], **so_far})

    train_transformer(pipe, images, args.transformer_minutes, save, fit_scale=not args.start)


if __name__ == "__main__":
    main()
