"""Pipeline of xDiT on one rank, to evaluate virtual ranks."""

import inspect
import sys
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig


class SingleRankPipeline:
    """Pipeline of a model, loaded and wrapped as by the xdit command.

    Args:
        model: name of the model in xDiT's registry.
        dtype: dtype of weights and activations.
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
        self.pipe.set_progress_bar_config(disable=not sys.stderr.isatty())
        self.makes_videos = self.accepts_argument("num_frames")
        """Whether the pipeline generates videos."""
        if self.makes_videos:
            self.pipe.vae.enable_slicing()  # HunyuanVideo 1.5's autoencoder decodes one video at a time

    def configure(self, config: CocoDiffConfig | None) -> None:
        """Run the pipeline with a config of virtual ranks from now on; None runs stock xDiT."""
        from xfuser.core.distributed import initialize_runtime_state

        model = self._runner.model
        model.engine_config.parallel_config.sp_config.cocodiff = config
        initialize_runtime_state(model._get_runtime_state_pipeline(), model.engine_config)

    def accepts_argument(self, argument: str) -> bool:
        """Return whether the pipeline has an argument of this name."""
        return argument in inspect.signature(self.pipe.__call__).parameters

    def __call__(self, prompts: list[str], steps: int, text_tokens: int, **more: Any) -> Any:
        """Run the pipeline and return its output.

        Args:
            prompts: one prompt per image or video.
            steps: number of denoising steps.
            text_tokens: number of text tokens, if the pipeline has an argument for it.
            more: further arguments of the pipeline.
        """
        from xfuser.core.distributed import get_runtime_state

        if not self.makes_videos:  # for videos xDiT has no such state
            get_runtime_state().set_input_parameters(
                batch_size=len(prompts), num_inference_steps=steps, max_condition_sequence_length=text_tokens
            )
        if self.accepts_argument("max_sequence_length"):
            more["max_sequence_length"] = text_tokens
        return self.pipe(prompt=prompts, num_inference_steps=steps, **more)


def _task(model: str) -> list[str]:
    """Return the argument for a text-to-video task, if xDiT needs a task for this model."""
    from xfuser.runner import MODEL_REGISTRY

    tasks = MODEL_REGISTRY[model].settings.valid_tasks if model in MODEL_REGISTRY else []
    return [f"--task={task}" for task in tasks if task.startswith("t2v")][:1]


def init_single_rank() -> None:
    """Initialize torch.distributed with this process alone, without a port: xDiT's default port is the same for all."""
    from xfuser import envs
    from xfuser.core.distributed import init_distributed_environment

    if not dist.is_initialized():
        dist.init_process_group(envs.get_torch_distributed_backend(), store=dist.HashStore(), rank=0, world_size=1)
    init_distributed_environment(rank=0, world_size=1)


def install_processors(pipeline: Any) -> None:
    """Install xDiT's attention processors, which it leaves out on a single rank in some models, such as SD3.5."""
    from xfuser.model_executor.layers import attention_processor as xdit

    processors = xdit.xFuserAttentionProcessorRegister._XFUSER_ATTENTION_PROCESSOR_MAPPING
    for transformer in (getattr(pipeline, name, None) for name in ("transformer", "transformer_2")):
        for module in transformer.modules() if transformer is not None else ():
            processor_class = processors.get(type(getattr(module, "processor", None)))
            if processor_class:
                module.processor = processor_class()
                module.processor.use_long_ctx_attn_kvcache = True  # keeps K and V out of PipeFusion's cache
