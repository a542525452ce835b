"""Records an unmodified xDiT run, with or without the plugin, on every rank.

Each rank writes rank{r}.json after every run:

    {"rank", "ranks": their number, "arguments": the command line, "host", "mode" (null in stock), "degree",
     "ring_degree", "topology" (null if the plugin is inactive), "device", "runs": [run, ...],
     "slow_axes": [axis, ...], "exchange": {axis: "heads", "kv" or "heads, kv" if layers differ} of the last run,
     "layers": {class of attention modules: [whether its V can be sent first, or why not]},
     "cluster": the emulated cluster that the rank runs on, or null}
    run = {"total_steps", "steps": [step, ...], "peak_memory_bytes", "latents_sha256",
           "coded_fraction": bytes sent on slow axes over those without compression; null in exact mode,
           "coded_reason": why it is 0 or null, else null,
           "mean_error", "error": {"k", "v", ...}, "bits", "yardsticks": {"fp8", "fp4"}: see `RunErrors`,
           "codecs": null in exact mode, else [{"error": mean over tensors, "bits": of residuals, "errors": {layer:
                     largest error of a tensor}, "sent_bytes" on slow axes, "exact_bytes", "repeated", "was_keyframe",
                     "reference_bytes"}, ...] by step}
    step = {"seconds", "is_timed": whether communication is timed, "a2a_seconds": {stage: seconds}; empty if it is not,
            "sent_bytes": {stage: bytes}}

Timed communication takes events that users' runs do without, so it is timed in one of four steps.

Rank 0 also writes the final latents of the last run. Every rank that decodes writes the first image of the last run;
in some of xDiT's pipelines only the last rank decodes. A process without a pipeline, such as the launcher of the ranks,
writes nothing.
"""

import atexit
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from xfuser_cocodiff.engine.compression.default_mode import EXACT
from xfuser_cocodiff.engine.compression.step_report import RunErrors, StepReport
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.engine.topology.launcher import CLUSTER_VARIABLE
from xfuser_cocodiff.tools.comparison import axis_collectives
from xfuser_cocodiff.tools.comparison.image_grid import image_grid
from xfuser_cocodiff.tools.comparison.instant import Instant, now, seconds_between
from xfuser_cocodiff.tools.comparison.stage_timer import StageTimer
from xfuser_cocodiff.tools.launching import stock_traffic
from xfuser_cocodiff.tools.reporting import record_header
from xfuser_cocodiff.xdit.patching import log
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms.platform import compute_device
from xfuser_cocodiff.xdit.session.session import Session, active
from xfuser_cocodiff.xdit.settings.variables import RECORD_VARIABLE

TIMED_PERIOD = 4
"""One of so many steps has timed communication, and the others measure step time."""


class Recorder:
    """Record of one rank; a listener of :class:`xfuser_cocodiff.xdit.run_tracking.run_tracker.RunTracker`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[dict[str, Any]] = []
        self.latents: torch.Tensor | None = None
        self._step_began: Instant = 0.0
        self._timer: StageTimer | None = None
        """Timer of the communication of this step; None if it is not timed."""
        self._unresolved: list[tuple[dict[str, Any], Instant, Instant]] = []
        """Steps of the current run, with the instants of their start and end."""

    @functools.cached_property
    def rank(self) -> int:
        """Rank of this process; known when a run begins."""
        return log.rank()

    def patches(self) -> list[Patch]:
        """Return the patches that it needs in addition to those of the run tracker."""
        images = self.wrap_postprocess
        return [
            Patch("diffusers.image_processor", "VaeImageProcessor.postprocess", "images of a run", images),
            Patch("diffusers.video_processor", "VideoProcessor.postprocess_video", "videos of a run", images),
            *stock_traffic.patches(),
        ]

    def wrap_postprocess(self, original: Callable) -> Callable:
        """Wrap a function that decodes images, to save them."""

        @functools.wraps(original)
        def postprocess(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self.save_image(output)
            return output

        return postprocess

    def begin_run(self, total: int | None) -> None:
        """Start a new run."""
        self.end_run()
        if not self.runs:
            atexit.register(self.end_run)  # no image ends the last run of a pipeline that returns latents
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{RECORD_VARIABLE}={self.folder} is not valid: {error}; valid is a folder") from None
        self.runs.append({"total_steps": total, "steps": []})
        self._unresolved.clear()  # of a run that was not completed
        _memory().reset_peak_memory_stats()
        self._begin_step()

    def end_step(self, latents: torch.Tensor | None) -> None:
        """Record a step and keep its latents, which may be those of the last step."""
        ended = now(compute_device())
        step = {
            "seconds": 0.0,  # until the end of the run
            "is_timed": self._timer is not None,
            "a2a_seconds": self._timer.seconds() if self._timer else {},
            "sent_bytes": dict(active().traffic.sent_bytes),
        }
        self.runs[-1]["steps"].append(step)
        self._unresolved.append((step, self._step_began, ended))
        self.latents = latents
        self._begin_step()

    def _begin_step(self) -> None:
        number, total = len(self.runs[-1]["steps"]), self.runs[-1]["total_steps"]
        self._timer = StageTimer() if is_timed(number, total) else None
        active().traffic.reset()
        active().traffic.timer = self._timer
        self._step_began = now(compute_device())

    def end_run(self) -> None:
        """Complete the current run, if there is one, and write the record."""
        if self.latents is None:
            if self.runs and self.runs[-1]["steps"] and "latents_sha256" not in self.runs[-1]:
                warn_once(
                    f"{RECORD_VARIABLE}: a run is not recorded, since no latents were passed to run.step(latents)"
                )
            return
        for step, began, ended in self._unresolved:
            step["seconds"] = seconds_between(began, ended)
        self._unresolved.clear()
        run, latents = self.runs[-1], self.latents.detach().cpu().contiguous()
        run["peak_memory_bytes"] = _memory().max_memory_allocated()
        runtime = active().runtime
        run["codecs"] = [_without_lists(report) for report in runtime.reports] if runtime else None
        errors = (runtime.reports, runtime.yardsticks, runtime.value_bytes) if runtime else ([], {}, 0)
        run |= {**_compression(active()), **RunErrors.of(*errors)._asdict()}
        run["latents_sha256"] = hashlib.sha256(latents.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        if self.rank == 0:
            save_file({"latents": latents}, self.folder / "latents.safetensors")
        self.latents = None
        complete = [run for run in self.runs if "latents_sha256" in run]  # some pipelines have bars for other work
        record = {"rank": self.rank, **_settings(), "runs": complete}
        file = self.folder / f"rank{self.rank}.json"
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=2))
        partial.replace(file)

    def save_image(self, output: Any) -> None:
        """Save the images that a pipeline returns, or frames of its first video."""
        self.end_run()
        if self.runs and (image := image_grid(output)) is not None:
            image.save(self.folder / f"image{self.rank}.png")


def is_timed(number: int, total: int | None) -> bool:
    """Return whether communication is timed in a step.

    Args:
        number: the step in its run, from 0.
        total: steps of the run; None if unknown, as in a user's loop.
    """
    return number % TIMED_PERIOD == (min(TIMED_PERIOD, total) - 1 if total else 1)


def _compression(session: Session) -> dict[str, Any]:
    """Return the fraction of bytes that compression left on slow axes, or why it was inactive."""
    runtime, config = session.runtime, session.config
    if config is None or config.mode == EXACT:
        return {"coded_fraction": None, "coded_reason": "stock xDiT" if config is None else f"mode {EXACT}"}
    if runtime is None:
        reason = session.lossless_reason or "stock xDiT's own all-to-all runs"
        return {"coded_fraction": 0.0, "coded_reason": reason}
    sent, exact = (sum(getattr(report, name) for report in runtime.reports) for name in ("sent_bytes", "exact_bytes"))
    return {"coded_fraction": sent / exact if exact else 0.0, "coded_reason": None if exact else session.runs.reason}


def _without_lists(report: StepReport) -> dict[str, Any]:
    """Return a step's report with the mean of its errors, in place of the error of every tensor."""
    means = {**dataclasses.asdict(report), "error": report.error}
    return {name: value for name, value in means.items() if name not in ("tensor_errors", "yardstick_errors")}


def _memory() -> Any:
    """Return the module with memory statistics; on a CPU it is torch.cuda, which the plugin patches."""
    device = compute_device()
    return torch.cuda if device == CPU else torch.get_device_module(device)


def _settings() -> dict[str, Any]:
    """Return what this process is, and the settings of xDiT and the plugin that it runs with."""
    session, is_cpu = active(), compute_device() == CPU
    return {
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "arguments": sys.argv,
        "host": record_header.header()["host"],
        "cluster": json.loads(os.environ.get(CLUSTER_VARIABLE, "null")),
        "mode": session.config and session.config.mode,
        **stock_traffic.degrees(),
        "topology": str(session.mesh.topology) if session.mesh else None,
        "device": f"CPU, threads per rank: {torch.get_num_threads()}" if is_cpu else _memory().get_device_name(),
        "slow_axes": axis_collectives.slow_axes_of_run(session),
        "exchange": axis_collectives.of_run(session),
        "layers": session.layers.signatures.report(),
    }
