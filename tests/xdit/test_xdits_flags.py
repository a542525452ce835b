"""xDiT's own flags together with --use_cocodiff: bit-identical to stock for those that docs/compatibility.md lists.

Flags that change the process groups are in test_pipelines, step caches in test_approximation, FP8 and balanced heads in
attention/test_stock_usp, compilation in test_compile.
"""

import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from tests.xdit.test_pipelines import MODELS, SIZE, Run, used_axes

pytestmark = pytest.mark.usefixtures("hub")

FLAGS = [
    "--use_parallel_vae",
    "--use_vae_channels_last_format --enable_slicing --enable_tiling --batch_size 2",
    "--warmup_calls 1 --num_iterations 2 --profile",
    "--attention_backend sdpa_math",
    "--use_spargeattn_head_balance",
]


def compare(rank: int, flags: str) -> None:
    arguments = ["--model", "FLUX.1-dev", "--ulysses_degree", "2", *SIZE, *MODELS["FLUX.1-dev"], *flags.split()]
    run = Run(rank, 2, arguments)
    run.use_plugin(None)
    stock = run()
    assert used_axes() == set()
    run.use_plugin("gpu=2")
    assert torch.equal(run(), stock)
    assert used_axes() == {"gpu"}


@pytest.mark.parametrize("flags", slow_but(FLAGS[:1], FLAGS))
def test_flag_with_the_plugin_equals_stock(flags: str) -> None:
    ranks.run(compare, 2, flags)
