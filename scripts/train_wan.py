#!/usr/bin/env python3
"""Trains the small Wan 2.1 of the package on one CPU core, in 80 minutes.

    python scripts/train_wan.py --out xfuser_cocodiff/lab/models/wan21_t2v

The autoencoder is trained first, on crops, then the transformer by flow matching on its latents, and finally the
decoder alone. The text encoder keeps its random weights, as in train_flux1.py.
"""

import numpy as np
import torch
import torch.nn.functional as F
import volumes
from diffusers import WanPipeline
from training import Prompts, arguments, read_training, save_pipeline, train, train_averaged

from xfuser_cocodiff.lab.models import captions, wan21

SIZE = 128
POOL = 2048
"""Number of videos whose latents the transformer is trained on."""
BATCH = 16
CAPTION_DROPOUT = 0.1
"""Fraction of videos without a caption, for classifier-free guidance."""
OTHER_LENGTHS = (16, 64, 226, 512)
"""Padded lengths of prompts beside the usual 32, among them defaults of pipelines."""


class Videos:
    """Random videos with their captions."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def draw(self) -> tuple[torch.Tensor, str]:
        """Return a video of shape (3, frames, SIZE, SIZE) in [-1, 1] and its caption."""
        kind = self.rng.choice(volumes.KINDS)
        gray = torch.from_numpy(volumes.draw(kind, SIZE, self.rng)) * 2 - 1
        return gray.expand(3, -1, -1, -1), self.rng.choice(captions.VIDEO_TEMPLATES).format(captions.VOLUMES[kind])

    def crops(self, videos: int, per_video: int, frames: int, size: int = 64) -> torch.Tensor:
        """Return random crops of shape (videos * per_video, 3, frames, size, size)."""
        crops = []
        for _ in range(videos):
            video, _ = self.draw()
            for _ in range(per_video):
                start = self.rng.integers(0, video.shape[1] - frames + 1)
                y, x = self.rng.integers(0, SIZE - size + 1, 2)
                crops.append(video[:, start : start + frames, y : y + size, x : x + size])
        return torch.stack(crops)


def train_autoencoder(vae, videos: Videos, minutes: float) -> float:
    """Train an autoencoder by L1 of values and gradients and a small KL term; return the mean L1 of 100 steps.

    The first half uses two latent frames, which are cheap, the second half three, since the decoder caches frames only
    from the second on.
    """
    optimizers = [torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)]
    shares = {5: 0.5, 9: 0.5}
    for frames, share in shares.items():
        history = train(
            f"autoencoder of {frames} frames",
            vae,
            optimizers,
            minutes * share,
            50,
            lambda frames=frames: autoencoder_loss(vae, videos.crops(2, 2, frames)),
        )
    return float(np.mean(history[-100:]))


def autoencoder_loss(vae, crops: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the loss and its L1."""
    with torch.autocast("cpu", torch.bfloat16):
        posterior = vae.encode(crops).latent_dist
        decoded = vae.decode(posterior.sample()).sample.float()
    loss, l1 = distance(decoded, crops)
    mean, log_variance = posterior.mean.float(), posterior.logvar.float()
    kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
    anchor = F.mse_loss(mean[:, :4], downsample(crops))
    return loss + 3 * anchor + 1e-3 * kl, l1


def distance(decoded: torch.Tensor, crops: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the L1 of values and of gradients in space and time, and the L1 of values alone."""
    l1 = F.l1_loss(decoded, crops)
    return l1 + sum(F.l1_loss(decoded.diff(dim=d), crops.diff(dim=d)) for d in (2, 3, 4)), l1.item()


def downsample(crops: torch.Tensor) -> torch.Tensor:
    """Return the target of the first four latent channels: means of the quarters of each 8 x 8 pixels and their frames.

    Neighboring tokens then resemble each other, which shortens the training of the transformer.
    """
    gray = F.avg_pool3d(crops.mean(1, keepdim=True), (1, 4, 4))
    later = F.avg_pool3d(gray[:, :, 1:], (4, 1, 1))
    quarters = F.pixel_unshuffle(torch.cat([gray[:, :, :1], later], 2).transpose(1, 2), 2)
    return quarters.transpose(1, 2)


def sharpen_decoder(vae, videos: Videos, minutes: float) -> float:
    """Train the decoder alone, with frozen latents; return the mean L1 of the last 100 steps."""
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)

    def draw_loss() -> tuple[torch.Tensor, float]:
        crops = videos.crops(2, 2, volumes.FRAMES)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                latents = vae.encode(crops).latent_dist.sample()
            decoded = vae.decode(latents).sample.float()
        return distance(decoded, crops)

    weights = [weight for weight in vae.parameters() if weight.requires_grad]
    optimizers = [torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.0)]
    return float(np.mean(train("decoder", vae, optimizers, minutes, 50, draw_loss)[-100:]))


@torch.no_grad()
def encode_pool(pipe, videos: Videos, fit_scale: bool) -> tuple[torch.Tensor, list[str]]:
    """Return normalized latents of POOL videos and their captions; with `fit_scale`, fit the normalization first."""
    latents, texts = [], []
    for count in range(0, POOL, BATCH):
        batch, batch_texts = zip(*(videos.draw() for _ in range(BATCH)), strict=True)
        latents.append(pipe.vae.encode(torch.stack(batch)).latent_dist.mean)
        texts += batch_texts
        if count % 512 == 0:
            print(f"encoded {count} of {POOL} videos", flush=True)
    latents = torch.cat(latents)
    if fit_scale:
        mean, deviation = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
        pipe.vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())
    config = pipe.vae.config
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std)
    )
    return (latents - mean) / deviation, texts


def train_transformer(pipe, videos: Videos, minutes: float, save, fit_scale: bool) -> None:
    """Train a transformer by flow matching, with the timestep shift of the scheduler."""
    model, rng = pipe.transformer, videos.rng
    latents, texts = encode_pool(pipe, videos, fit_scale)
    prompts = Prompts(lambda text, length: (pipe.encode_prompt(text, None, False, max_sequence_length=length)[0][0],))

    def draw_loss() -> torch.Tensor:
        chosen = rng.integers(0, POOL, BATCH)
        clean, prompt = latents[chosen], [texts[i] if rng.uniform() >= CAPTION_DROPOUT else "" for i in chosen]
        length = 32 if rng.uniform() < 0.85 else int(rng.choice(OTHER_LENGTHS))
        [embeds] = prompts(prompt, length)
        noise = torch.randn_like(clean)
        time = torch.sigmoid(1.2 * torch.randn(BATCH) + np.log(pipe.scheduler.config.flow_shift))
        mixed = torch.lerp(clean, noise, time[:, None, None, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            velocity = model(mixed, 1000 * time, embeds, return_dict=False)[0]
        return F.mse_loss(velocity.float(), noise - clean)

    train_averaged("transformer", model, minutes, draw_loss, save)


def main() -> None:
    """Run the script."""
    args = arguments(__doc__, autoencoder=15, transformer=50, decoder=8)
    videos, training = Videos(seed=0), read_training(args.start)
    if args.start:
        pipe = WanPipeline.from_pretrained(args.start, torch_dtype=torch.float32)
    else:
        pipe = wan21.pipeline(seed=0)
        training["autoencoder_l1"] = train_autoencoder(pipe.vae, videos, args.autoencoder_minutes)
    # Text encoder without dropout, as in inference.
    pipe.text_encoder.eval()
    pipe.transformer.train()

    def save(transformer, loss: float, steps: int) -> None:
        so_far = {"flow_matching_loss": loss, "steps": training["steps"] + steps, "batch": BATCH}
        save_pipeline(pipe, transformer, args.out, {**training, **so_far})

    if args.transformer_minutes:
        train_transformer(pipe, videos, args.transformer_minutes, save, fit_scale=not args.start)
        training = read_training(args.out)
    if args.decoder_minutes:
        training["autoencoder_l1"] = sharpen_decoder(pipe.vae, videos, args.decoder_minutes)
        save_pipeline(pipe, pipe.transformer, args.out, training)


if __name__ == "__main__":
    main()
