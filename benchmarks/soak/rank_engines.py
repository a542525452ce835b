"""Engines of xDiT's runner on one of several ranks, for requests that differ in size, steps and plugin options."""

import contextlib
import gc
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.soak.faults import Fault
from benchmarks.soak.request import Outcome, Request


class RankEngines:
    """Models of xDiT's registry on this rank, loaded by xDiT's runner in float32.

    All ranks run the same requests. Outputs are not decoded: decoding takes as long as the denoising of a small model.

    Args:
        rank: this rank.
        ranks: number of ranks.
        folder: for the store of the process group.
    """

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        from xfuser.core.distributed import init_distributed_environment

        self._rank = rank
        self._runners: dict[str, Any] = {}
        """Runners by model."""
        self._latents: torch.Tensor | None = None
        """Final latents of the last run; None on ranks that decode nothing."""
        self._current: list[str] = []
        """Arguments of the runtime state, which name the model."""
        self._kept: list[BaseException] = []
        """The last error, which a caller may keep, with the frames of its run."""
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        init_distributed_environment(rank=rank, world_size=ranks, local_rank=rank)

    def run(self, request: Request, arguments: list[str], fault: Fault | None) -> Outcome:
        """Run a request, given the arguments of xDiT for it, and return what came of it."""
        outcome = Outcome()
        try:
            runner, values = self._prepared(request, arguments)
            transformer = runner.model.pipe.transformer
            with fault.striking(self._rank, transformer) if fault else contextlib.nullcontext():
                runner.run(runner.preprocess_args({**values, **request.inputs}))
            outcome.digest = self._digest()
        except BaseException as error:
            outcome.error, self._kept = f"{type(error).__name__}: {error}", [error]
        outcome.resources = _resources()
        gc.collect()  # Python's own full collections wait for a quarter of the 800,000 objects that imports create
        return outcome

    def _prepared(self, request: Request, arguments: list[str]) -> tuple[Any, dict[str, Any]]:
        """Return the runner of a request, with its options in force, and the values of its arguments."""
        from xfuser import xFuserArgs
        from xfuser.core.distributed import initialize_runtime_state

        values = _parse(arguments)
        current = [option for option in arguments if option not in request.prompts]
        if request.model not in self._runners:
            self._runners[request.model] = self._loaded(values)
        elif current != self._current:  # a new runtime state, and with it a session
            model = self._runners[request.model].model
            model.engine_config, _ = xFuserArgs.from_runner_args(values).create_config()
            initialize_runtime_state(model._get_runtime_state_pipeline(), model.engine_config)
        self._current, self._latents = current, None
        return self._runners[request.model], values

    def _loaded(self, values: dict[str, Any]) -> Any:
        from xfuser.runner import xFuserModelRunner

        runner = xFuserModelRunner(values)
        runner.initialize(runner.preprocess_args(values))
        runner.model.pipe.to(torch.float32)
        runner.model.pipe.set_progress_bar_config(disable=True)
        runner.model.pipe.vae.decode = self._keep_latents
        return runner

    def _keep_latents(self, latents: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor]:
        self._latents = latents
        return (latents[:, :3],)

    def _digest(self) -> str | None:
        """Return the SHA-256 of the final latents; None on ranks that decode nothing."""
        if self._latents is None:
            return None
        content = self._latents.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(content).hexdigest()


def _parse(arguments: Sequence[str]) -> dict[str, Any]:
    from xfuser.config import FlexibleArgumentParser, xFuserArgs

    return vars(xFuserArgs.add_runner_args(FlexibleArgumentParser()).parse_args([*arguments]))


def _resources() -> dict[str, int]:
    """Return what this process holds. Resident memory includes what was freed; Python's blocks do not."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "python_blocks": sys.getallocatedblocks(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
