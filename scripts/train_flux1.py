#!/usr/bin/env python3
"""Train the small FLUX.1-dev that ships with the project, on one CPU core in a few hours.

    python scripts/train_flux1.py --out xfuser_cocodiff/models/flux1_dev

The autoencoder learns first, on crops; the transformer then learns flow matching in its latents. Text encoders keep
their random weights: a random encoder still tells captions apart, which is all that conditioning needs here.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import skimage.data
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from PIL import Image

from xfuser_cocodiff.models import captions, flux1, slices

SIZE = 128
PHOTO_SHARE = 0.25
"""Of the pictures: there are four, soon known by heart, while slices are never the same twice."""


class Pictures:
    """An endless source of (picture in [-1, 1] of shape (3, SIZE, SIZE), caption)."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        folder = Path(skimage.data.__file__).parent
        self.photos = {name: self._square(Image.open(folder / name)) for name in captions.PHOTOS}

    def draw(self) -> tuple[torch.Tensor, str]:
        if self.rng.uniform() >= PHOTO_SHARE:
            kind = self.rng.choice(slices.KINDS)
            grey = slices.draw(kind, SIZE, self.rng)
            picture, template, name = np.stack([grey] * 3), captions.SLICE_TEMPLATES, captions.SLICES[kind]
        else:
            file = self.rng.choice(list(captions.PHOTOS))
            picture, template, name = self._crop(self.photos[file]), captions.PHOTO_TEMPLATES, captions.PHOTOS[file]
        return torch.tensor(picture * 2 - 1, dtype=torch.float32), self.rng.choice(template).format(name)

    @staticmethod
    def _square(photo: Image.Image) -> Image.Image:
        edge = min(photo.size)
        left, top = (photo.width - edge) // 2, (photo.height - edge) // 2
        return photo.convert("RGB").crop((left, top, left + edge, top + edge)).resize((192, 192), Image.LANCZOS)

    def _crop(self, photo: Image.Image) -> np.ndarray:
        edge = int(self.rng.uniform(0.92, 1.0) * photo.width)
        left, top = self.rng.integers(0, photo.width - edge + 1, 2)
        crop = photo.resize((SIZE, SIZE), Image.BICUBIC, (left, top, left + edge, top + edge))
        return np.asarray(crop, np.float32).transpose(2, 0, 1) / 255


def train_autoencoder(vae, pictures: Pictures, minutes: float, batch: int = 16, crop: int = 64) -> float:
    """Reconstruction (L1 and gradients) with a small KL term; returns the mean L1 of the last 100 steps.

    The first three channels are held to the picture, four times smaller: neighbouring tokens then resemble each other
    as neighbouring pixels do, and the transformer learns in thousands of steps rather than millions.
    """
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)
    started, history, step = time.time(), [], 0
    while (done := (time.time() - started) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * done)))
        images = []
        for _ in range(batch // 4):
            picture, _ = pictures.draw()
            for _ in range(4):
                y, x = pictures.rng.integers(0, SIZE - crop + 1, 2)
                images.append(picture[:, y : y + crop, x : x + crop])
        images = torch.stack(images)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(images).latent_dist
            decoded = vae.decode(posterior.sample()).sample.float()
        l1 = F.l1_loss(decoded, images)
        edges = sum(F.l1_loss(decoded.diff(dim=d), images.diff(dim=d)) for d in (2, 3))
        anchor = F.mse_loss(posterior.mean[:, :3].float(), F.avg_pool2d(images, 4))
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = l1 + edges + 10 * anchor + 1e-3 * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        history.append(l1.item())
        step += 1
        if step % 100 == 0:
            print(f"autoencoder step {step}: L1 {np.mean(history[-100:]):.4f}, {done:.0%}", flush=True)
    return float(np.mean(history[-100:]))


@torch.no_grad()
def encode_pool(pipe, pictures: Pictures, count: int, fit_scale: bool) -> tuple[torch.Tensor, list[str]]:
    """Latents of `count` pictures in the autoencoder's scale (fitted to them if asked), and their captions."""
    latents, texts = [], []
    for _ in range(count // 32):
        images, batch_texts = zip(*(pictures.draw() for _ in range(32)), strict=True)
        latents.append(pipe.vae.encode(torch.stack(images)).latent_dist.mean)
        texts += batch_texts
    latents = torch.cat(latents)
    if fit_scale:
        pipe.vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    return (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor, texts


class Prompts:
    """Text embeddings of each caption and length, computed once."""

    def __init__(self, pipe) -> None:
        self.pipe, self.known = pipe, {}

    @torch.no_grad()
    def __call__(self, texts: list[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        for text in texts:
            if (text, length) not in self.known:
                embeds, pooled, _ = self.pipe.encode_prompt(text, None, max_sequence_length=length)
                self.known[text, length] = embeds[0], pooled[0]
        embeds, pooled = zip(*(self.known[text, length] for text in texts), strict=True)
        return torch.stack(embeds), torch.stack(pooled)


def make_optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, where it learns faster than AdamW, and AdamW for everything else."""
    blocks = {name: weight for name, weight in model.named_parameters() if "blocks" in name and weight.ndim == 2}
    rest = [weight for name, weight in model.named_parameters() if name not in blocks]
    return [
        torch.optim.Muon(blocks.values(), weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, weight_decay=0.01, betas=(0.9, 0.99)),
    ]


def train_transformer(pipe, pictures: Pictures, minutes: float, save, fit_scale: bool, batch: int = 16):
    """Flow matching with logit-normal times; the averaged weights are kept.

    Returns:
        The mean loss of the last 200 steps, before averaging, and the number of steps.
    """
    model, rng = pipe.transformer, pictures.rng
    latents, texts = encode_pool(pipe, pictures, 8192, fit_scale)
    prompts = Prompts(pipe)
    tokens = pipe._pack_latents(latents, *latents.shape)
    image_ids = pipe._prepare_latent_image_ids(1, latents.shape[2] // 2, latents.shape[3] // 2, "cpu", torch.float32)
    optimizers = make_optimizers(model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998))
    started, saved, history, step = time.time(), time.time(), [], 0
    while (done := (time.time() - started) / (60 * minutes)) < 1:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = 2e-3 * min(1, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * done)))
        chosen = rng.integers(0, len(tokens), batch)
        clean = tokens[chosen]
        # Mostly short prompts, as in training budgets; now and then the padded lengths that scripts ask for.
        length = int(rng.choice([16, 32, 64, 256, 512], p=[0.8, 0.1, 0.07, 0.02, 0.01]))
        embeds, pooled = prompts([texts[i] for i in chosen], length)
        noise = torch.randn_like(clean)
        time_ = torch.sigmoid(torch.randn(batch) + 0.5)
        mixed = torch.lerp(clean, noise, time_[:, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            velocity = model(
                hidden_states=mixed,
                timestep=time_,
                guidance=torch.empty(batch).uniform_(1, 5),
                pooled_projections=pooled,
                encoder_hidden_states=embeds,
                txt_ids=torch.zeros(length, 3),
                img_ids=image_ids,
                return_dict=False,
            )[0]
        loss = F.mse_loss(velocity.float(), noise - clean)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        average.update_parameters(model)
        history.append(loss.item())
        step += 1
        if step % 100 == 0:
            print(f"transformer step {step}: loss {np.mean(history[-100:]):.4f}, {done:.0%}", flush=True)
        if time.time() - saved > 600:
            save(average.module, float(np.mean(history[-200:])), step)
            saved = time.time()
    model.load_state_dict(average.module.state_dict())
    return float(np.mean(history[-200:])), step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument("--autoencoder-minutes", type=float, default=7)
    parser.add_argument("--transformer-minutes", type=float, default=45)
    parser.add_argument("--start", type=Path, help="pipeline to go on from, whose autoencoder is kept as it is")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    os.environ["HF_HUB_OFFLINE"] = "1"
    pictures = Pictures(seed=0)
    if args.start:
        pipe = FluxPipeline.from_pretrained(args.start, torch_dtype=torch.float32)
        before = json.loads((args.start / "training.json").read_text())
    else:
        pipe, before = flux1.pipeline(seed=0), {"steps": 0}
        before["autoencoder_l1"] = train_autoencoder(pipe.vae, pictures, args.autoencoder_minutes)
    # Text encoders as the pipelines will run them: dropout would teach embeddings that never come again.
    pipe.text_encoder.eval()
    pipe.text_encoder_2.eval()
    pipe.vae.eval()
    pipe.transformer.train()

    def save(transformer, loss: float, steps: int) -> None:
        pipe.save_pretrained(args.out)
        transformer.save_pretrained(args.out / "transformer")
        shrink(args.out)
        report = {
            "autoencoder_l1": round(before["autoencoder_l1"], 4),
            "flow_matching_loss": round(loss, 4),
            "steps": before["steps"] + steps,
            "batch": 16,
        }
        (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")

    loss, steps = train_transformer(pipe, pictures, args.transformer_minutes, save, fit_scale=not args.start)
    save(pipe.transformer, loss, steps)


def shrink(folder: Path) -> None:
    """Store all weights in fp16: half the size, and finer than the bf16 that the pipelines run in."""
    from safetensors.torch import load_file, save_file

    for file in folder.rglob("*.safetensors"):
        save_file({k: v.half().contiguous() for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
        file.chmod(0o644)


if __name__ == "__main__":
    main()
