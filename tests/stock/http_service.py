"""A service like xDiT's entrypoints/launch.py, which is not part of its wheel: Ray actors with one rank each behind
FastAPI, without a word of the plugin.

In contrast to xDiT's, the warmup is small and ports are free. Answers have the picture and the memory of the workers.
"""

import argparse
import base64
import io
import os
from pathlib import Path

import ray
import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from xfuser import xFuserArgs, xFuserFluxPipeline


class GenerateRequest(BaseModel):
    prompt: str
    num_inference_steps: int
    seed: int
    height: int
    width: int


class ImageGenerator:
    def __init__(self, model: str, degree: int, rank: int, port: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(degree), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        args = xFuserArgs(
            model=model,
            height=128,  # no smaller than a request, as in xDiT
            width=128,
            num_inference_steps=2,
            max_sequence_length=32,
            warmup_steps=1,
            ulysses_degree=degree,
            dit_parallel_size=0,
        )
        engine_config, self.input_config = args.create_config()
        self.pipe = xFuserFluxPipeline.from_pretrained(
            pretrained_model_name_or_path=model, engine_config=engine_config, torch_dtype=torch.bfloat16
        ).to("cuda")
        self.pipe.prepare_run(self.input_config)

    def generate(self, request: GenerateRequest) -> tuple[str | None, int]:
        output = self.pipe(
            height=request.height,
            width=request.width,
            prompt=request.prompt,
            num_inference_steps=request.num_inference_steps,
            output_type="pil",
            generator=torch.Generator(device="cuda").manual_seed(request.seed),
            max_sequence_length=self.input_config.max_sequence_length,
        )
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if not self.pipe.is_dp_last_group():
            return None, pages * os.sysconf("SC_PAGE_SIZE")
        buffered = io.BytesIO()
        output.images[0].save(buffered, format="PNG")
        return base64.b64encode(buffered.getvalue()).decode(), pages * os.sysconf("SC_PAGE_SIZE")


app = FastAPI()


@app.post("/generate")
async def generate_image(request: GenerateRequest) -> dict:
    answers = ray.get([worker.generate.remote(request) for worker in workers])
    return {
        "output": next(picture for picture, _ in answers if picture is not None),
        "resident": [resident for _, resident in answers],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--ulysses_parallel_degree", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--master_port", type=int, required=True)
    args = parser.parse_args()
    ray.init()
    worker, degree = ray.remote(num_gpus=1)(ImageGenerator), args.ulysses_parallel_degree
    workers = [worker.remote(args.model_path, degree, rank, args.master_port) for rank in range(degree)]
    uvicorn.run(app, host="127.0.0.1", port=args.port)
