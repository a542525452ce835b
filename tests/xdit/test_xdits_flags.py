"""xDiT's own flags beside --use_cocodiff, of those that docs/xdit_flags.md says work: stock's bits.

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


def run(rank: int, flags: str) -> None:
    arguments = ["--model", "FLUX.1-dev", "--ulysses_degree", "2", *SIZE, *MODELS["FLUX.1-dev"], *flags.split()]
    run = Run(rank, 2, arguments)
    run.use(None)
    stock = run()
    assert moved() == set()
    run.use("gpu=2")
    assert torch.equal(run(), stock)
    assert moved() == {"gpu"}


@pytest.mark.parametrize("flags", slow_but(WORKS[:1], WORKS))
def test_beside_the_plugin_it_has_stocks_bits(flags: str) -> None:
    ranks.run(run, 2, flags)
