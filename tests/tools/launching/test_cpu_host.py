"""xDiT on CPUs, which the plugin makes possible where PyTorch finds no accelerator."""

import subprocess
import sys

import torch

from tests import ranks
from xfuser_cocodiff.tools.launching import cpu_host


def test_it_is_loaded_where_there_is_no_accelerator_only() -> None:
    code = """
import sys, torch
device = torch.device(sys.argv[1]) if sys.argv[1:] else None
torch.accelerator.current_accelerator = lambda check_available=False: device
torch.accelerator.device_count = lambda: 8
import xfuser_cocodiff
assert xfuser_cocodiff.install()
print("xfuser_cocodiff.tools.launching.cpu_host" in sys.modules, "xfuser_cocodiff.tools" in sys.modules)
"""
    for arguments, expected in ((["cuda"], "False False"), ([], "True True")):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_generators_on_cuda_are_translated() -> None:
    real = torch.Generator if isinstance(torch.Generator, type(torch._C.Generator)) else torch._C.Generator
    generator_class = cpu_host.cpu_platform().generator(real)
    made = generator_class(device="cuda").manual_seed(3)
    expected = torch._C.Generator().manual_seed(3)
    assert torch.equal(torch.rand(4, generator=made), torch.rand(4, generator=expected))
    assert isinstance(expected, generator_class)


def attend_in_a_ring(rank: int) -> None:
    """Check xDiT's long-context attention in a ring of two ranks against attention over the whole sequence."""
    from tests.xdit.attention.test_ring import start

    start(rank, {}, world=2, ring=2)
    from xfuser.core.long_ctx_attention import xFuserLongContextAttention

    tensors = [torch.randn(2, 10, 4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    parts = [tensor.chunk(2, 1)[rank] for tensor in tensors]
    found = xFuserLongContextAttention()(None, *parts, softmax_scale=0.3)
    by_heads = (tensor.transpose(1, 2) for tensor in tensors)
    expected = torch.nn.functional.scaled_dot_product_attention(*by_heads, scale=0.3).transpose(1, 2)
    assert torch.allclose(found, expected.chunk(2, 1)[rank], atol=1e-5)


def test_long_context_attention_runs_in_a_ring() -> None:
    """Its blocks are merged by their log-sum-exp, which yunchang's PyTorch attention does not return."""
    ranks.run(attend_in_a_ring, 2)
