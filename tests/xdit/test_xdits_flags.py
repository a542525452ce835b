"""xDiT's own flags beside --use_cocodiff, as docs/xdit_flags.md has them: stock's bits, or stock's error.

Flags that change how ranks are grouped are in test_pipelines, step caches in test_approximation, FP8 and heads that
change places in attention/test_xdits_own, compilation in test_compile.
"""

import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from tests.xdit.test_pipelines import MODELS, SIZE, Run, moved

pytestmark = pytest.mark.usefixtures("hub")

WORKS = [
    "--use_parallel_vae",
    "--use_vae_channels_last_format",
    "--enable_slicing",
    "--enable_tiling",
    "--batch_size 2",
    "--warmup_calls 1",
    "--num_iterations 2",
    "--attention_backend sdpa_math",
    "--use_teacache",
    "--profile",
    "--use_spargeattn_head_balance",
]
STOCK_CANNOT = {
    "--fully_shard_degree 2": "not compiled with CUDA",
    "--fully_shard_degree 2 --memory_efficient_sharding": "not compiled with CUDA",
    "--memory_efficient_replicated_load": "not compiled with CUDA",
    "--enable_model_cpu_offload": "not compiled with CUDA",
    "--enable_sequential_cpu_offload": "not compiled with CUDA",
    "--enable_group_cpu_offload": "requires CUDA support",
    "--use_fp8_gemms": "TorchAO FP8 requires CUDA",
    "--use_fp8_comms": "requires an attention backend that supports pre-quantization",
    "--tensor_parallel_degree 2": "does not support tensor_parallel_degree",
}
"""On a CPU, or with FLUX.1, and what it says."""


def arguments(flags: str) -> list[str]:
    return ["--model", "FLUX.1-dev", "--ulysses_degree", "2", *SIZE, *MODELS["FLUX.1-dev"], *flags.split()]


def run(rank: int, world_size: int, flags: str) -> None:
    run = Run(rank, world_size, arguments(flags))
    run.use(None)
    stock = run()
    assert moved() == set()
    run.use("gpu=2")
    assert torch.equal(run(), stock)
    assert moved() == {"gpu"}


@pytest.mark.parametrize("flags", slow_but(WORKS[:1], WORKS))
def test_beside_the_plugin_it_has_stocks_bits(flags: str) -> None:
    ranks.run(run, 2, 2, flags)


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "said"), STOCK_CANNOT.items())
def test_stock_itself_cannot(flags: str, said: str) -> None:
    """When one of these can, the table has to say so."""
    world_size = 4 if "tensor" in flags else 2
    for result in ranks.outcomes(run, world_size, world_size, flags):
        assert isinstance(result, Exception)
        assert said in str(result), result
