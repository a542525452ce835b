"""Watches an unmodified xDiT run, with or without the plugin in use, and leaves a record of it for each rank.

Each rank keeps in rank{r}.json, rewritten after every run:

    {"rank", "degree", "topology" (null where the plugin is not in use), "device", "runs": [run, ...],
     "layers": {class of attention modules: [whether V can go first in them, or why not]}}
    run = {"total_steps", "steps": [step, ...], "peak_memory_bytes", "latents_sha256",
           "coded_fraction": bytes sent on slow axes, of what they would be without codecs; null in exact mode,
           "coded_reason": why that is 0 or null, else null,
           "codecs": null in exact mode, else [{"errors": {layer: relative error}, "sent_bytes" on slow axes,
                     "exact_bytes", "repeated", "was_keyframe", "reference_bytes"}, ...] by step}
    step = {"seconds", "a2a_seconds": {stage: seconds}, "sent_bytes": {stage: bytes},
            "in_flight_seconds" of exchanges, summed over layers, "hidden_seconds" of these behind computation: null on
            an accelerator, where the host does not see when exchanges end}

Rank 0 also keeps progress.json and the last run's final latents, and every rank that gets a picture keeps the last
run's first one: not all decode, and in some of xDiT's pipelines only the last does. Where a trace is asked for, every
rank keeps trace{r}.json.gz of its last run's last steps. A process that runs no pipeline, such as the one that launches
the ranks, leaves nothing.
"""

import atexit
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from xfuser_cocodiff.engine.settings.options import EXACT, RECORD_VARIABLE, TRACE_VARIABLE
from xfuser_cocodiff.lab.comparison.image_grid import strip
from xfuser_cocodiff.lab.comparison.tracer import Tracer
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.run_tracking import stock_traffic
from xfuser_cocodiff.xdit.session.session import Session, active


class Recorder:
    """The record of one rank; listens to :mod:`run_clock`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[dict[str, Any]] = []
        self.latents: torch.Tensor | None = None
        self._clock = 0.0

    @functools.cached_property
    def rank(self) -> int:
        """Known when a run begins: Ray's workers import xDiT before they are told."""
        return int(os.environ.get("RANK", "0"))

    @functools.cached_property
    def _tracer(self) -> Tracer | None:
        return Tracer(self.folder / f"trace{self.rank}.json.gz") if os.environ.get(TRACE_VARIABLE) else None

    def patches(self) -> list[Patch]:
        """Return the rows that it needs beside those of the clock."""
        pictures = self.watch_pictures
        return [
            Patch("diffusers.image_processor", "VaeImageProcessor.postprocess", "the pictures of a run", pictures),
            Patch("diffusers.video_processor", "VideoProcessor.postprocess_video", "a run's video", pictures),
            *stock_traffic.patches(),
        ]

    def watch_pictures(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def postprocess(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self.keep_picture(output)
            return output

        return postprocess

    def begin_run(self, total: int | None) -> None:
        """Start a new run."""
        self.end_run()
        if not self.runs:
            atexit.register(self.end_run)  # a pipeline that returns latents makes no picture, which would end the run
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{RECORD_VARIABLE}={self.folder} is not valid: {error}; valid is a folder") from None
        self.runs.append({"total_steps": total, "steps": []})
        active().traffic.reset()
        active().traffic.timed = True
        _memory().reset_peak_memory_stats()
        self._trace()
        self._clock = self._now()

    def end_step(self, latents: torch.Tensor | None) -> None:
        """Take the account of a step and keep its latents."""
        traffic = active().traffic
        unseen = torch.accelerator.is_available()
        layers = traffic.hidden_by_layer().values()
        step = {
            "seconds": self._now() - self._clock,
            "a2a_seconds": traffic.seconds,
            "sent_bytes": dict(traffic.sent_bytes),
            "in_flight_seconds": None if unseen else sum(in_flight for in_flight, _ in layers),
            "hidden_seconds": None if unseen else sum(hidden for _, hidden in layers),
        }
        run = self.runs[-1]
        run["steps"].append(step)
        self.latents = latents
        if self.rank == 0:
            progress = {"run": len(self.runs), "step": len(run["steps"]), "total_steps": run["total_steps"]}
            self._write("progress.json", progress)
        traffic.reset()
        self._trace()
        self._clock = self._now()

    def _trace(self) -> None:
        if self._tracer:
            self._tracer.stands(len(self.runs[-1]["steps"]), self.runs[-1]["total_steps"])

    def end_run(self) -> None:
        """Complete the run that is under way, if one is, and write the record."""
        if self._tracer:
            self._tracer.stop()
        if self.latents is None:
            if self.runs and self.runs[-1]["steps"] and "latents_sha256" not in self.runs[-1]:
                warn_once(f"{RECORD_VARIABLE}: a run gave no latents, as run.step(latents) does, and is left out")
            return
        run, latents = self.runs[-1], self.latents.detach().cpu().contiguous()
        run["peak_memory_bytes"] = _memory().max_memory_allocated()
        run.update(_coded(active()))
        runtime = active().runtime
        run["codecs"] = [dataclasses.asdict(report) for report in runtime.reports] if runtime else None
        run["latents_sha256"] = hashlib.sha256(latents.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        if self.rank == 0:
            save_file({"latents": latents}, self.folder / "latents.safetensors")
        self.latents = None
        self._write(f"rank{self.rank}.json", {"rank": self.rank, **_engine(), "runs": self._complete()})

    def _complete(self) -> list[dict[str, Any]]:
        """Runs that took steps: some pipelines show progress of other work too."""
        return [run for run in self.runs if "latents_sha256" in run]

    def _write(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file that a reader sees whole or not at all."""
        partial = self.folder / f"{name}.partial"
        partial.write_text(json.dumps(value, indent=2))
        partial.replace(self.folder / name)

    def keep_picture(self, output: Any) -> None:
        """Save the pictures, or frames of the first video, of what a pipeline returns."""
        self.end_run()
        if self.runs and (picture := strip(output)) is not None:
            picture.save(self.folder / f"picture{self.rank}.png")

    @staticmethod
    def _now() -> float:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()


def _coded(session: Session) -> dict[str, Any]:
    """What share of its bytes a run has sent on slow axes, or why it was all."""
    runtime, config = session.runtime, session.config
    if config is None or config.mode == EXACT:
        return {"coded_fraction": None, "coded_reason": "stock xDiT" if config is None else f"mode {EXACT}"}
    if runtime is None:
        reason = session.lossless_reason or "stock xDiT's own all-to-all runs"
        return {"coded_fraction": 0.0, "coded_reason": reason}
    sent, exact = (sum(getattr(report, name) for report in runtime.reports) for name in ("sent_bytes", "exact_bytes"))
    return {"coded_fraction": sent / exact if exact else 0.0, "coded_reason": None if exact else session.runs.reason}


def _memory() -> Any:
    """The module that accounts for memory; on a CPU the plugin's stand-ins in torch.cuda do."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.get_device_module(accelerator) if accelerator else torch.cuda


def _engine() -> dict[str, Any]:
    """What xDiT and the plugin were set to."""
    mesh = active().mesh
    return {
        "degree": stock_traffic.ulysses_degree(),
        "topology": str(mesh.topology) if mesh else None,
        "device": _device(),
        "layers": active().layers.signatures.report(),
    }


def _device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return f"CPU, threads per rank: {torch.get_num_threads()}"
    return torch.get_device_module(accelerator).get_device_name()
