"""What the scripts that train small models share: the loop, its optimizers, averaged weights, and small files."""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

PEAK = 2e-3
"""Of the learning rate."""
SAVE_SECONDS = 600


def arguments(about: str | None, **minutes: float) -> argparse.Namespace:
    """Parse the command line of a script, and make runs repeat: one seed, no network.

    Args:
        about: the script.
        minutes: that each part learns for, if nothing else is said; 0 leaves it as it is.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline")
    for part, usual in minutes.items():
        parser.add_argument(f"--{part}-minutes", type=float, default=usual)
    parser.add_argument("--start", type=Path, help="pipeline to go on from, whose autoencoder is kept as it is")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    os.environ["HF_HUB_OFFLINE"] = "1"
    return args


def learn(
    what: str,
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    minutes: float,
    warmup: int,
    draw_loss: Callable[[], tuple[torch.Tensor, float]],
    after_step: Callable[[list[float]], object] = lambda history: None,
) -> list[float]:
    """Descend for some minutes, with a learning rate that rises for `warmup` steps and falls as a cosine.

    Args:
        what: is said to learn.
        model: whose weights the optimizers have.
        optimizers: of all weights.
        minutes: to go on.
        warmup: steps.
        draw_loss: the loss of a fresh batch, and the figure to follow.
        after_step: is given all figures so far.

    Returns:
        The figure of each step.
    """
    started, history = time.time(), []
    while (done := (time.time() - started) / (60 * minutes)) < 1:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = PEAK * min(1, (len(history) + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * done)))
        loss, figure = draw_loss()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        history.append(figure)
        if len(history) % 100 == 0:
            print(f"{what} step {len(history)}: {np.mean(history[-100:]):.4f}, {done:.0%}", flush=True)
        after_step(history)
    return history


def learn_averaged(
    what: str,
    model: torch.nn.Module,
    minutes: float,
    draw_loss: Callable[[], torch.Tensor],
    save: Callable[[torch.nn.Module, float, int], None],
) -> None:
    """Train a transformer, keep its averaged weights, and save them now and then and in the end.

    Args:
        what: is said to learn.
        model: is given the averaged weights in the end.
        minutes: to go on.
        draw_loss: the loss of a fresh batch.
        save: is given the averaged model, the mean loss of the last 200 steps before averaging, and the steps so far.
    """
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998))
    saved = time.time()

    def draw() -> tuple[torch.Tensor, float]:
        loss = draw_loss()
        return loss, loss.item()

    def keep(history: list[float]) -> None:
        nonlocal saved
        average.update_parameters(model)
        if time.time() - saved > SAVE_SECONDS:
            save(average.module, float(np.mean(history[-200:])), len(history))
            saved = time.time()

    history = learn(what, model, make_optimizers(model), minutes, 200, draw, keep)
    model.load_state_dict(average.module.state_dict())
    save(model, float(np.mean(history[-200:])), len(history))


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, where it learns faster than AdamW, and AdamW for everything else."""
    blocks = {name: weight for name, weight in model.named_parameters() if "blocks" in name and weight.ndim == 2}
    rest = [weight for name, weight in model.named_parameters() if name not in blocks]
    return [
        torch.optim.Muon(blocks.values(), weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, weight_decay=0.01, betas=(0.9, 0.99)),
    ]


class Prompts:
    """Text embeddings of each caption and length, computed once.

    Args:
        encode: gives the embeddings, without a batch, of a caption at a length.
    """

    def __init__(self, encode: Callable[[str, int], tuple[torch.Tensor, ...]]) -> None:
        self.encode, self.known = encode, {}

    @torch.no_grad()
    def __call__(self, texts: list[str], length: int) -> tuple[torch.Tensor, ...]:
        for text in texts:
            if (text, length) not in self.known:
                self.known[text, length] = self.encode(text, length)
        return tuple(map(torch.stack, zip(*(self.known[text, length] for text in texts), strict=True)))


def report(folder: Path | None) -> dict[str, Any]:
    """How far the pipeline in a folder was trained; without one, not at all."""
    return json.loads((folder / "training.json").read_text()) if folder else {"steps": 0}


def save_pipeline(pipe: Any, transformer: torch.nn.Module, folder: Path, training: dict[str, Any]) -> None:
    """Save a pipeline with this transformer, and how far it was trained, as small as it gets."""
    pipe.save_pretrained(folder)
    transformer.save_pretrained(folder / "transformer")
    shrink(folder)
    forget_paths(folder)
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in training.items()}
    (folder / "training.json").write_text(json.dumps(rounded, indent=2) + "\n")


def shrink(folder: Path) -> None:
    """Store all weights in fp16: half the size, and finer than the bf16 that the pipelines run in."""
    from safetensors.torch import load_file, save_file

    for file in folder.rglob("*.safetensors"):
        save_file({k: v.half().contiguous() for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
        file.chmod(0o644)


def forget_paths(folder: Path) -> None:
    """Leave out where the parts of a pipeline came from."""
    for file in folder.rglob("*.json"):
        config = json.loads(file.read_text())
        if config.pop("_name_or_path", None):
            file.write_text(json.dumps(config, indent=2) + "\n")
