"""Emulated accelerators run blocks as the simulator predicts, attention and RMSNorm as one kernel each.

Each runs in a process of its own, because PyTorch keeps the device type of an emulated accelerator.
"""

import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff.tools.accelerator.accelerators import ACCELERATORS, Accelerator
from xfuser_cocodiff.tools.simulation.layers import IMAGE, JOINT, ROW, TEXT
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS

FLUX = WORKLOADS["flux.1-dev"]
H100 = ACCELERATORS["h100-sxm"]


def run_blocks(rank: int, accelerator: Accelerator, sizes: list[tuple[int, int]]) -> dict:
    """Return kernel seconds of FLUX.1's blocks at full width."""
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
                results[kind, image, text] = sum(program.kernels)
    return results


@pytest.mark.parametrize(
    "accelerator", slow_but([H100], [H100, ACCELERATORS["max-1550-tile"]]), ids=lambda each: each.name
)
def test_blocks_of_full_width_take_what_the_simulator_predicts(accelerator: Accelerator) -> None:
    [measured] = ranks.run(run_blocks, 1, accelerator, [(4096, 512), (512, 64)])
    kinds = {kind.name: kind for kind in FLUX.kinds}
    for (name, image, text), seconds in measured.items():
        counts = {IMAGE: image, TEXT: text, JOINT: image + text, ROW: 1}
        predicted = sum(work.seconds(counts, FLUX.width, accelerator) for work in kinds[name].parts)
        attention = FLUX.attention_flops(image + text, image + text, FLUX.heads)
        assert seconds == pytest.approx(predicted + attention / accelerator.attention_flops, rel=0.03)


def zeros(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)
