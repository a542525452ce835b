"""xDiT's own pipeline of a model on one rank, for what virtual ranks can show."""

import inspect
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.compression.runtime import StepReport
from xfuser_cocodiff.engine.compression.virtual_ranks import VirtualRanks
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.xdit.session.session import active


class SingleRankPipeline:
    """A pipeline, loaded and wrapped as the xdit command does it.

    Args:
        model: its name in xDiT's registry.
        dtype: of its weights and activations.
    """

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        from xfuser.config import FlexibleArgumentParser, xFuserArgs
        from xfuser.runner import xFuserModelRunner

        init_single_rank()
        arguments = ["--model", model, *_task(model)]
        values = vars(xFuserArgs.add_runner_args(FlexibleArgumentParser()).parse_args(arguments))
        self._runner = xFuserModelRunner(values)
        self._runner.initialize(self._runner.preprocess_args({**values, "prompt": [""]}))
        self.pipe: Any = self._runner.model.pipe
        self.pipe.to(dtype)
        self.pipe.set_progress_bar_config(disable=True)
        if self.makes_videos:
            self.pipe.vae.enable_slicing()  # one by one: HunyuanVideo 1.5's decodes no batch of videos

    def configure(self, config: CocoDiffConfig | None, virtual_ranks: type[VirtualRanks] | None = None) -> None:
        """Go on by these settings, whose ranks are virtual; without any as stock xDiT.

        Args:
            config: the settings.
            virtual_ranks: what stands in the place of these ranks.
        """
        from xfuser.core.distributed import initialize_runtime_state

        model = self._runner.model
        model.engine_config.parallel_config.sp_config.cocodiff = config
        initialize_runtime_state(model._get_runtime_state_pipeline(), model.engine_config)
        runtime = active().runtime
        if virtual_ranks and runtime and runtime.virtual:
            runtime.virtual = virtual_ranks(runtime.virtual.topology, runtime.virtual.slow_axes)

    def accepts_argument(self, argument: str) -> bool:
        """Whether the pipeline has an argument of this name."""
        return argument in inspect.signature(self.pipe.__call__).parameters

    @property
    def makes_videos(self) -> bool:
        """Whether it makes videos."""
        return self.accepts_argument("num_frames")

    def __call__(self, prompts: list[str], steps: int, text_tokens: int, **more: Any) -> Any:
        """Run the pipeline and return its output.

        Args:
            prompts: one for each picture or video.
            steps: of denoising.
            text_tokens: that the transformer is given, where the pipeline lets one choose.
            more: arguments of the pipeline.
        """
        from xfuser.core.distributed import get_runtime_state

        if not self.makes_videos:  # of which xDiT keeps no such state
            get_runtime_state().set_input_parameters(
                batch_size=len(prompts), num_inference_steps=steps, max_condition_sequence_length=text_tokens
            )
        if self.accepts_argument("max_sequence_length"):
            more["max_sequence_length"] = text_tokens
        return self.pipe(prompt=prompts, num_inference_steps=steps, **more)

    @property
    def reports(self) -> list[StepReport]:
        """What codecs did at each step of the last run."""
        runtime = active().runtime
        return runtime.reports if runtime else []


def _task(model: str) -> list[str]:
    """To make something from text alone, where xDiT asks what a model is to do."""
    from xfuser.runner import MODEL_REGISTRY

    known = MODEL_REGISTRY[model].settings.valid_tasks if model in MODEL_REGISTRY else []
    return [f"--task={task}" for task in known if task.startswith("t2v")][:1]


def init_single_rank() -> None:
    """Make this process a world of its own, which needs no place to meet: xDiT's usual port is the same for all."""
    from xfuser import envs
    from xfuser.core.distributed import init_distributed_environment

    if not dist.is_initialized():
        dist.init_process_group(envs.get_torch_distributed_backend(), store=dist.HashStore(), rank=0, world_size=1)
    init_distributed_environment(rank=0, world_size=1)
