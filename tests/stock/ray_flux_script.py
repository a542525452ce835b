"""A script like xDiT's examples/ray/ray_flux_example.py, which is not part of its wheel.

It runs xDiT's Ray pipeline without a word of the plugin, and saves its picture to --coco_path.
"""

import os
import socket

import torch
from xfuser import xFuserArgs, xFuserFluxPipeline
from xfuser.config import FlexibleArgumentParser
from xfuser.ray.pipeline.pipeline_utils import RayDiffusionPipeline


def main() -> None:
    with socket.socket() as free:  # the example's port is fixed
        free.bind(("localhost", 0))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    parser = FlexibleArgumentParser(description="xFuser Arguments")
    args = xFuserArgs.add_cli_args(parser).parse_args()
    engine_config, input_config = xFuserArgs.from_cli_args(args).create_config()
    engine_config.runtime_config.dtype = torch.bfloat16
    pipe = RayDiffusionPipeline.from_pretrained(
        PipelineClass=xFuserFluxPipeline,
        pretrained_model_name_or_path=engine_config.model_config.model,
        engine_config=engine_config,
        torch_dtype=torch.bfloat16,
    )
    pipe.prepare_run(input_config)
    output = pipe(
        height=input_config.height,
        width=input_config.width,
        prompt=input_config.prompt,
        num_inference_steps=input_config.num_inference_steps,
        output_type=input_config.output_type,
        max_sequence_length=input_config.max_sequence_length,
        guidance_scale=0.0,
        generator=torch.Generator(device="cuda").manual_seed(input_config.seed),
    )
    next(images for images in output if images is not None)[0].save(args.coco_path)


if __name__ == "__main__":
    main()
