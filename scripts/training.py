"""Provides the training loop, the optimizers and the saving of weights for the scripts that train small models."""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

PEAK_LEARNING_RATE = 2e-3
SAVE_SECONDS = 600
"""Seconds between two checkpoints."""


def arguments(about: str | None, **minutes: float) -> argparse.Namespace:
    """Parse the command line of a script, set the seed and disable network access.

    Args:
        about: description of the script.
        minutes: default training time of each part.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline")
    for part, default in minutes.items():
        parser.add_argument(f"--{part}-minutes", type=float, default=default)
    parser.add_argument("--start", type=Path, help="pipeline to continue from, with a frozen autoencoder")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    os.environ["HF_HUB_OFFLINE"] = "1"
    return args


def train(
    name: str,
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    minutes: float,
    warmup: int,
    draw_loss: Callable[[], tuple[torch.Tensor, float]],
    after_step: Callable[[list[float]], object] = lambda history: None,
) -> list[float]:
    """Train for some minutes, with linear warmup and cosine decay of the learning rate.

    Args:
        name: name of the model in progress lines.
        model: model to train.
        optimizers: optimizers of all weights.
        minutes: training time.
        warmup: number of warmup steps.
        draw_loss: returns the loss of a new batch and the metric to report.
        after_step: called after each step with all metrics so far.

    Returns:
        Metric of each step.
    """
    started, history = time.time(), []
    while (done := (time.time() - started) / (60 * minutes)) < 1:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = (
                PEAK_LEARNING_RATE
                * min(1, (len(history) + 1) / warmup)
                * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * done)))
            )
        loss, metric = draw_loss()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        history.append(metric)
        if len(history) % 100 == 0:
            print(f"{name} step {len(history)}: {np.mean(history[-100:]):.4f}, {done:.0%}", flush=True)
        after_step(history)
    return history


def train_averaged(
    name: str,
    model: torch.nn.Module,
    minutes: float,
    draw_loss: Callable[[], torch.Tensor],
    save: Callable[[torch.nn.Module, float, int], None],
    decay: float = 0.998,
) -> None:
    """Train a transformer, and save its averaged weights every SAVE_SECONDS and at the end.

    Args:
        name: name of the model in progress lines.
        model: model to train; it has the averaged weights at the end.
        minutes: training time.
        draw_loss: returns the loss of a new batch.
        save: called with the averaged model, the mean loss of the last 200 steps and the number of steps.
        decay: of the average with each step.
    """
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))
    saved = time.time()

    def draw() -> tuple[torch.Tensor, float]:
        loss = draw_loss()
        return loss, loss.item()

    def update_average(history: list[float]) -> None:
        nonlocal saved
        average.update_parameters(model)
        if time.time() - saved > SAVE_SECONDS:
            save(average.module, float(np.mean(history[-200:])), len(history))
            saved = time.time()

    history = train(name, model, make_optimizers(model), minutes, 200, draw, update_average)
    model.load_state_dict(average.module.state_dict())
    save(model, float(np.mean(history[-200:])), len(history))


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, where it converges faster, and AdamW for all other weights."""
    blocks = {name: weight for name, weight in model.named_parameters() if "blocks" in name and weight.ndim == 2}
    rest = [weight for name, weight in model.named_parameters() if name not in blocks]
    return [
        torch.optim.Muon(blocks.values(), weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, weight_decay=0.01, betas=(0.9, 0.99)),
    ]


class Prompts:
    """Cache of text embeddings by caption and length.

    Args:
        encode: returns the embeddings of a caption at a length, without a batch dim.
    """

    def __init__(self, encode: Callable[[str, int], tuple[torch.Tensor, ...]]) -> None:
        self.encode, self.cache = encode, {}

    @torch.no_grad()
    def __call__(self, texts: list[str], length: int) -> tuple[torch.Tensor, ...]:
        """Return the embeddings of a batch of captions."""
        for text in texts:
            if (text, length) not in self.cache:
                self.cache[text, length] = self.encode(text, length)
        return tuple(map(torch.stack, zip(*(self.cache[text, length] for text in texts), strict=True)))


def read_training(folder: Path | None) -> dict[str, Any]:
    """Return the training record of the pipeline in a folder; without a folder, that of an untrained one."""
    return json.loads((folder / "training.json").read_text()) if folder else {"steps": 0}


def save_pipeline(pipe: Any, transformer: torch.nn.Module, folder: Path, training: dict[str, Any]) -> None:
    """Save a pipeline with a transformer and a training record, in as few bytes as possible."""
    pipe.save_pretrained(folder)
    transformer.save_pretrained(folder / "transformer")
    convert_to_fp16(folder)
    remove_paths(folder)
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in training.items()}
    (folder / "training.json").write_text(json.dumps(rounded, indent=2) + "\n")


def convert_to_fp16(folder: Path) -> None:
    """Convert all weights to fp16: half the size, and more precise than the bf16 in which the pipelines run."""
    from safetensors.torch import load_file, save_file

    for file in folder.rglob("*.safetensors"):
        save_file({k: v.half().contiguous() for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
        file.chmod(0o644)


def remove_paths(folder: Path) -> None:
    """Remove local paths from the configurations of a pipeline."""
    for file in folder.rglob("*.json"):
        config = json.loads(file.read_text())
        if config.pop("_name_or_path", None):
            file.write_text(json.dumps(config, indent=2) + "\n")
