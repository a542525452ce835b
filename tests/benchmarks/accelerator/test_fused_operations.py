"""Tests that emulated accelerators run attention and RMSNorm as one kernel, and blocks as the simulator predicts.

Each runs in a process of its own, because PyTorch keeps the device type of an emulated accelerator.
"""

import pytest
import torch
from torch.nn import functional

from benchmarks.accelerator.program import KERNEL_SECONDS, LAUNCHES
from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff.tools.accelerator.accelerators import ACCELERATORS, Accelerator
from xfuser_cocodiff.tools.simulation.layers import IMAGE, JOINT, ROW, TEXT
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS

FLUX = WORKLOADS["flux.1-dev"]
H100 = ACCELERATORS["h100-sxm"]


def fused(rank: int) -> list[tuple[torch.Size, float, float, bool]]:
    """Return shape, launches and kernel seconds of attention and RMSNorm, and whether they are as ever on the CPU."""
    from benchmarks.accelerator.device import EmulatedAccelerator

    with EmulatedAccelerator(H100) as emulator:
        query, key = (zeros(emulator.device, 1, 24, tokens, 128) for tokens in (512, 2048))
        given, weight = zeros(emulator.device, 4096, 24, 128), zeros(emulator.device, 128)
        own = torch.ones(1, 1, 4, 8)
        calls = (
            (lambda: functional.scaled_dot_product_attention(query, key=key, value=key), (own, own, own)),
            (lambda: functional.rms_norm(given, (128,), weight, 1e-6), None),
        )
        found = []
        for call, on_cpu in calls:
            emulator.begin_step()
            output, totals = call(), emulator.end_step().totals
            same = functional.scaled_dot_product_attention(*on_cpu) if on_cpu else functional.rms_norm(own, (8,))
            found.append((output.shape, totals[LAUNCHES], totals[KERNEL_SECONDS], torch.allclose(same, own)))
    return found


def test_attention_and_rms_norm_are_one_kernel() -> None:
    [[attention, norm]] = ranks.run(fused, 1)
    seconds = pytest.approx(4 * 24 * 512 * 2048 * 128 / H100.attention_flops)
    assert attention == ((1, 24, 512, 128), 1, seconds, True)
    assert norm[:2] == ((4096, 24, 128), 1) and norm[3]
    assert norm[2] == pytest.approx(2 * 2 * 4096 * 24 * 128 / H100.bytes_per_second, rel=0.05)


def run_blocks(rank: int, accelerator: Accelerator, sizes: list[tuple[int, int]]) -> dict:
    """Return kernel seconds and launches of FLUX.1's blocks at full width."""
    from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock

    from benchmarks.accelerator.device import EmulatedAccelerator

    torch.set_default_dtype(torch.bfloat16)
    results = {}
    with EmulatedAccelerator(accelerator) as emulator, torch.no_grad(), torch.device(emulator.device):
        for kind, block in (("double", FluxTransformerBlock), ("single", FluxSingleTransformerBlock)):
            module = block(FLUX.width, FLUX.heads, FLUX.head_dim)
            for image, text in sizes:
                angles = zeros(emulator.device, image + text, FLUX.head_dim, dtype=torch.float32)
                streams = [zeros(emulator.device, 1, tokens, FLUX.width) for tokens in (image, text)]
                modulation = zeros(emulator.device, 1, FLUX.width)
                emulator.begin_step()
                module(*streams, modulation, (angles, angles))
                program = emulator.end_step()
                results[kind, image, text] = program.totals[KERNEL_SECONDS], program.totals[LAUNCHES]
    return results


@pytest.mark.parametrize(
    "accelerator", slow_but([H100], [H100, ACCELERATORS["max-1550-tile"]]), ids=lambda each: each.name
)
def test_blocks_of_full_width_take_what_the_simulator_predicts(accelerator: Accelerator) -> None:
    [measured] = ranks.run(run_blocks, 1, accelerator, [(4096, 512), (512, 64)])
    kinds = {kind.name: kind for kind in FLUX.kinds}
    for (name, image, text), (seconds, launches) in measured.items():
        counts = {IMAGE: image, TEXT: text, JOINT: image + text, ROW: 1}
        predicted = sum(work.seconds(counts, FLUX.width, accelerator) for work in kinds[name].parts)
        attention = FLUX.attention_flops(image + text, image + text, FLUX.heads)
        assert seconds == pytest.approx(predicted + attention / accelerator.attention_flops, rel=0.03)
        assert launches == kinds[name].kernels


def zeros(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)
