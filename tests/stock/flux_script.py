"""A script like xDiT's examples, without a word of the plugin; it saves its latents to --coco_path."""

import torch
from safetensors.torch import save_file
from xfuser import xFuserArgs, xFuserFluxPipeline
from xfuser.config import FlexibleArgumentParser
from xfuser.core.distributed import get_runtime_state, get_world_group


def main() -> None:
    parser = FlexibleArgumentParser(description="xFuser Arguments")
    args = xFuserArgs.add_cli_args(parser).parse_args()
    engine_config, input_config = xFuserArgs.from_cli_args(args).create_config()
    engine_config.runtime_config.dtype = torch.bfloat16
    local_rank = get_world_group().local_rank
    pipe = xFuserFluxPipeline.from_pretrained(
        pretrained_model_name_or_path=engine_config.model_config.model,
        engine_config=engine_config,
        torch_dtype=torch.bfloat16,
    )
    pipe = pipe.to(f"cuda:{local_rank}")
    pipe.prepare_run(input_config, steps=input_config.num_inference_steps)
    torch.cuda.reset_peak_memory_stats()
    output = pipe(
        height=input_config.height,
        width=input_config.width,
        prompt=input_config.prompt,
        num_inference_steps=input_config.num_inference_steps,
        output_type="latent",
        max_sequence_length=input_config.max_sequence_length,
        guidance_scale=input_config.guidance_scale,
        generator=torch.Generator(device="cuda").manual_seed(input_config.seed),
    )
    peak = torch.cuda.max_memory_allocated(device=f"cuda:{local_rank}")
    if pipe.is_dp_last_group():
        save_file({"latents": output.images.contiguous()}, args.coco_path)
        print(f"peak memory: {peak} bytes")
    get_runtime_state().destroy_distributed_env()


if __name__ == "__main__":
    main()
