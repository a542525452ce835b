"""Draws the images that the small image models are trained on, with their captions, and encodes them."""

from pathlib import Path

import numpy as np
import skimage.data
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from xfuser_cocodiff.lab.models import captions, slices

SIZE = 128
PHOTO_FRACTION = 0.25
"""Fraction of photos among the images. There are only four, while every slice is new."""


class Images:
    """Random images with their captions."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        folder = Path(skimage.data.__file__).parent
        self.photos = {name: self._square(Image.open(folder / name)) for name in captions.PHOTOS}

    def draw(self) -> tuple[torch.Tensor, str]:
        """Return an image of shape (3, SIZE, SIZE) in [-1, 1] and its caption."""
        if self.rng.uniform() >= PHOTO_FRACTION:
            kind = self.rng.choice(slices.KINDS)
            gray = slices.draw(kind, SIZE, self.rng)
            image, template, name = np.stack([gray] * 3), captions.SLICE_TEMPLATES, captions.SLICES[kind]
        else:
            file = self.rng.choice(list(captions.PHOTOS))
            image, template, name = self._crop(self.photos[file]), captions.PHOTO_TEMPLATES, captions.PHOTOS[file]
        return torch.tensor(image * 2 - 1, dtype=torch.float32), self.rng.choice(template).format(name)

    def crops(self, images: int, per_image: int, size: int) -> torch.Tensor:
        """Return random crops of shape (images * per_image, 3, size, size)."""
        crops = []
        for _ in range(images):
            image, _ = self.draw()
            for _ in range(per_image):
                y, x = self.rng.integers(0, SIZE - size + 1, 2)
                crops.append(image[:, y : y + size, x : x + size])
        return torch.stack(crops)

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


@torch.no_grad()
def encode_pool(
    pipe: DiffusionPipeline, images: Images, count: int, fit_scale: bool = False
) -> tuple[torch.Tensor, list[str]]:
    """Return normalized latents of `count` images and their captions; with `fit_scale`, fit the normalization first."""
    latents, texts = [], []
    for _ in range(count // 32):
        batch, batch_texts = zip(*(images.draw() for _ in range(32)), strict=True)
        latents.append(pipe.vae.encode(torch.stack(batch)).latent_dist.mean)
        texts += batch_texts
    latents = torch.cat(latents)
    if fit_scale:
        pipe.vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    return (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor, texts
