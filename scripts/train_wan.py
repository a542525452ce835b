#!/usr/bin/env python3
"""Train the small Wan 2.1 that ships with the project, on one CPU core in 80 minutes.

    python scripts/train_wan.py --out xfuser_cocodiff/lab/models/wan21_t2v

The autoencoder learns first, on crops; the transformer then learns flow matching in its latents, and in the end the
decoder goes on alone. The text encoder keeps its random weights, as those of train_flux1.py.
"""

import numpy as np
import torch
import torch.nn.functional as F
import volumes
from diffusers import WanPipeline
from training import Prompts, arguments, learn, learn_averaged, report, save_pipeline

from xfuser_cocodiff.lab.models import captions, wan21

SIZE = 128
POOL = 2048
BATCH = 16
DROPPED = 0.1
"""Share of videos without their caption, so that the pipeline can guide away from none."""
OTHER_LENGTHS = (16, 64, 226, 512)
"""Of prompts with their padding, beside the usual one: pipelines have defaults of their own."""


class Videos:
    """An endless source of (video in [-1, 1] of shape (3, frames, SIZE, SIZE), caption)."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def draw(self) -> tuple[torch.Tensor, str]:
        kind = self.rng.choice(volumes.KINDS)
        grey = torch.from_numpy(volumes.draw(kind, SIZE, self.rng)) * 2 - 1
        return grey.expand(3, -1, -1, -1), self.rng.choice(captions.VIDEO_TEMPLATES).format(captions.VOLUMES[kind])

    def crops(self, videos: int, of_each: int, frames: int, size: int = 64) -> torch.Tensor:
        """Pieces (videos * of_each, 3, frames, size, size)."""
        found = []
        for _ in range(videos):
            video, _ = self.draw()
            for _ in range(of_each):
                start = self.rng.integers(0, video.shape[1] - frames + 1)
                y, x = self.rng.integers(0, SIZE - size + 1, 2)
                found.append(video[:, start : start + frames, y : y + size, x : x + size])
        return torch.stack(found)


def train_autoencoder(vae, videos: Videos, minutes: float) -> float:
    """Reconstruction (L1 and gradients) with a small KL term; returns the mean L1 of the last 100 steps.

    Two latent frames first, which are cheap; then three, since the decoder remembers frames only from the second on.
    """
    optimizers = [torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)]
    shares = {5: 0.5, 9: 0.5}
    for frames, share in shares.items():
        history = learn(
            f"autoencoder of {frames} frames",
            vae,
            optimizers,
            minutes * share,
            50,
            lambda frames=frames: autoencoder_loss(vae, videos.crops(2, 2, frames)),
        )
    return float(np.mean(history[-100:]))


def autoencoder_loss(vae, pieces: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The loss, and the L1 in it."""
    with torch.autocast("cpu", torch.bfloat16):
        posterior = vae.encode(pieces).latent_dist
        decoded = vae.decode(posterior.sample()).sample.float()
    loss, l1 = distance(decoded, pieces)
    mean, log_variance = posterior.mean.float(), posterior.logvar.float()
    kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
    anchor = F.mse_loss(mean[:, :4], shrunk(pieces))
    return loss + 3 * anchor + 1e-3 * kl, l1


def distance(decoded: torch.Tensor, pieces: torch.Tensor) -> tuple[torch.Tensor, float]:
    """L1 of values and gradients, in time too, and that of values alone."""
    l1 = F.l1_loss(decoded, pieces)
    return l1 + sum(F.l1_loss(decoded.diff(dim=d), pieces.diff(dim=d)) for d in (2, 3, 4)), l1.item()


def shrunk(pieces: torch.Tensor) -> torch.Tensor:
    """What the first four channels of latents are held to: the four quarters of each 8 x 8 pixels, over their frames.

    Neighbouring tokens then resemble each other as neighbouring pixels do, which the transformer learns soon.
    """
    grey = F.avg_pool3d(pieces.mean(1, keepdim=True), (1, 4, 4))
    later = F.avg_pool3d(grey[:, :, 1:], (4, 1, 1))
    quarters = F.pixel_unshuffle(torch.cat([grey[:, :, :1], later], 2).transpose(1, 2), 2)
    return quarters.transpose(1, 2)


def sharpen_decoder(vae, videos: Videos, minutes: float) -> float:
    """Go on with the decoder alone, under which the transformer's latents stay what they are; returns the L1."""
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)

    def draw_loss() -> tuple[torch.Tensor, float]:
        pieces = videos.crops(2, 2, volumes.FRAMES)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                latents = vae.encode(pieces).latent_dist.sample()
            decoded = vae.decode(latents).sample.float()
        return distance(decoded, pieces)

    weights = [weight for weight in vae.parameters() if weight.requires_grad]
    optimizers = [torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.0)]
    return float(np.mean(learn("decoder", vae, optimizers, minutes, 50, draw_loss)[-100:]))


@torch.no_grad()
def encode_pool(pipe, videos: Videos, fit_scale: bool) -> tuple[torch.Tensor, list[str]]:
    """Latents of a pool of videos in the autoencoder's scale (fitted to them if asked), and their captions."""
    latents, texts = [], []
    for drawn in range(0, POOL, BATCH):
        batch, batch_texts = zip(*(videos.draw() for _ in range(BATCH)), strict=True)
        latents.append(pipe.vae.encode(torch.stack(batch)).latent_dist.mean)
        texts += batch_texts
        if drawn % 512 == 0:
            print(f"encoded {drawn} of {POOL} videos", flush=True)
    latents = torch.cat(latents)
    if fit_scale:
        mean, deviation = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
        pipe.vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())
    config = pipe.vae.config
    mean, deviation = (torch.tensor(of).view(1, -1, 1, 1, 1) for of in (config.latents_mean, config.latents_std))
    return (latents - mean) / deviation, texts


def train_transformer(pipe, videos: Videos, minutes: float, save, fit_scale: bool) -> None:
    """Flow matching at times as the scheduler shifts them."""
    model, rng = pipe.transformer, videos.rng
    latents, texts = encode_pool(pipe, videos, fit_scale)
    prompts = Prompts(lambda text, length: (pipe.encode_prompt(text, None, False, max_sequence_length=length)[0][0],))

    def draw_loss() -> torch.Tensor:
        chosen = rng.integers(0, POOL, BATCH)
        clean, said = latents[chosen], [texts[i] if rng.uniform() >= DROPPED else "" for i in chosen]
        length = 32 if rng.uniform() < 0.85 else int(rng.choice(OTHER_LENGTHS))
        [embeds] = prompts(said, length)
        noise = torch.randn_like(clean)
        time = torch.sigmoid(1.2 * torch.randn(BATCH) + np.log(pipe.scheduler.config.flow_shift))
        mixed = torch.lerp(clean, noise, time[:, None, None, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            velocity = model(mixed, 1000 * time, embeds, return_dict=False)[0]
        return F.mse_loss(velocity.float(), noise - clean)

    learn_averaged("transformer", model, minutes, draw_loss, save)


def main() -> None:
    args = arguments(__doc__, autoencoder=15, transformer=50, decoder=8)
    videos, training = Videos(seed=0), report(args.start)
    if args.start:
        pipe = WanPipeline.from_pretrained(args.start, torch_dtype=torch.float32)
    else:
        pipe = wan21.pipeline(seed=0)
        training["autoencoder_l1"] = train_autoencoder(pipe.vae, videos, args.autoencoder_minutes)
    # The text encoder as the pipelines will run it: dropout would teach embeddings that never come again.
    pipe.text_encoder.eval()
    pipe.transformer.train()

    def save(transformer, loss: float, steps: int) -> None:
        so_far = {"flow_matching_loss": loss, "steps": training["steps"] + steps, "batch": BATCH}
        save_pipeline(pipe, transformer, args.out, {**training, **so_far})

    if args.transformer_minutes:
        train_transformer(pipe, videos, args.transformer_minutes, save, fit_scale=not args.start)
        training = report(args.out)
    if args.decoder_minutes:
        training["autoencoder_l1"] = sharpen_decoder(pipe.vae, videos, args.decoder_minutes)
        save_pipeline(pipe, pipe.transformer, args.out, training)


if __name__ == "__main__":
    main()
