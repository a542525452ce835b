"""Engine of xDiT's runner on one of several ranks, for requests that differ in size, steps and plugin options."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch


class RankEngine:
    """Model of xDiT's registry on this rank, loaded by xDiT's runner.

    All ranks call each method with the same arguments. It runs in float32, and outputs are not decoded: decoding takes
    as long as the denoising of a small model.

    Args:
        arguments: of the `xdit` command.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        from xfuser.runner import xFuserModelRunner

        values = _parse(arguments)
        self._runner = xFuserModelRunner(values)
        self._runner.initialize(self._runner.preprocess_args(values))
        self._arguments = [*arguments]
        self.latents: torch.Tensor | None = None
        """Final latents of the last run; None on ranks that decode nothing."""
        self.pipe.to(torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        self.pipe.vae.decode = self._keep_latents

    @property
    def pipe(self) -> Any:
        """Pipeline of the model."""
        return self._runner.model.pipe

    def configure(self, arguments: Sequence[str]) -> None:
        """Start a new runtime state, and with it a session, with other options of the plugin or of parallelism."""
        from xfuser import xFuserArgs
        from xfuser.core.distributed import initialize_runtime_state

        model = self._runner.model
        model.engine_config, _ = xFuserArgs.from_runner_args(_parse(arguments)).create_config()
        initialize_runtime_state(model._get_runtime_state_pipeline(), model.engine_config)
        self._arguments = [*arguments]

    def run(self, inputs: dict[str, Any]) -> str | None:
        """Run the pipeline and return the SHA-256 of the final latents; None on ranks that decode nothing.

        Args:
            inputs: inputs that replace those of the arguments, such as `height`.
        """
        self.latents = None
        self._runner.run(self._runner.preprocess_args({**_parse(self._arguments), **inputs}))
        if self.latents is None:
            return None
        content = self.latents.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(content).hexdigest()

    def _keep_latents(self, latents: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor]:
        self.latents = latents
        return (latents[:, :3],)


def _parse(arguments: Sequence[str]) -> dict[str, Any]:
    from xfuser.config import FlexibleArgumentParser, xFuserArgs

    return vars(xFuserArgs.add_runner_args(FlexibleArgumentParser()).parse_args([*arguments]))


def init_rank(rank: int, world_size: int) -> None:
    """Initialize xDiT on this rank; the process group exists already."""
    from xfuser.core.distributed import init_distributed_environment

    init_distributed_environment(rank=rank, world_size=world_size, local_rank=rank)
