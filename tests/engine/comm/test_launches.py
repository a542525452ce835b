"""What a coded layer launches, and the bytes that it moves, counted on a mock device."""

import math
from collections import Counter

import pytest
import torch

from tests import coded_layers, ranks
from tests.mock_device import HAS_BACKENDS, MockDevice
from tests.mock_meshes import GATHERED, SLOW, device, make_tables, partition_of
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.codec.codec import Codec

pytestmark = pytest.mark.skipif(not HAS_BACKENDS, reason="needs a PyTorch that supports devices written in Python")

MAX_LAUNCHES = 12
"""Operations of a coded layer besides its kernels; small ones are dominated by their launch."""
SMALL = (1, 8, 8, 16)
FLUX = (1, 24, 4608 // 4, 128)
"""Values of FLUX.1-dev at 1024 pixels on one of four ranks."""


def kernels_and_others(counted: Counter[str]) -> tuple[int, int]:
    """Return what a counter has of Triton kernels, and of other operations."""
    kernels = sum(count for name, count in counted.items() if name.endswith("_kernel"))
    return kernels, counted.total() - kernels


def coded_step(rank: int, slow: str, v_first: bool, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the launches and the moved bytes of a step of a layer whose tensors are all coded."""
    keyframe, coded = (dict.fromkeys("qkvo", each) for each in (Codec(8, is_keyframe=True), Codec(2, predicts=True)))
    with MockDevice() as mock_device, mock_device.by_triton():
        make_tables()
        mesh, partition = partition_of(slow, False)
        query, key, value = (torch.empty(shape, dtype=torch.bfloat16, device=device()) for _ in range(3))
        link_states: dict = {}
        counted = mock_device.launched, mock_device.moved
        for step, codecs_of in enumerate([keyframe, *[coded] * 3]):
            how = {"step": step, "gathers_kv": slow == GATHERED}
            layer_codecs = coded_layers.layer_codecs(partition, codecs_of, link_states, **how)
            for each in counted:
                each.clear()
            ulysses = UlyssesAttention(mesh, layer_codecs=layer_codecs, gather=partition if slow == GATHERED else None)
            if v_first:
                ulysses.start_value(value)
            ulysses.run(query, key, value, lambda query, *_: query)
    return list(map(kernels_and_others, counted))


@pytest.mark.parametrize(("slow", "v_first"), [("node", True), (GATHERED, False)])
def test_coded_layer_has_few_launches(slow: str, v_first: bool) -> None:
    [((kernels, others), _)] = ranks.run(coded_step, 1, slow, v_first, SMALL)
    # One launch encodes a message, and one decodes it: Q, K and V together, or V first, and O unless only K and V are
    # coded.
    assert kernels == 2 * (1 + v_first + (slow != GATHERED))
    assert others <= MAX_LAUNCHES


OTHER_BYTES = {"node": 12, "all": 2, GATHERED: 20}
"""Sizes of a tensor that operations besides the kernels read and write: packing and unpacking of what is not coded."""


@pytest.mark.parametrize("slow", SLOW)
def test_coded_layer_moves_few_bytes(slow: str) -> None:
    """Each end reads values or payload and two references, and writes one, and payload or values. References take a
    byte a value, half of what values take."""
    [(_, (kernels, others))] = ranks.run(coded_step, 1, slow, False, FLUX)
    size = math.prod(FLUX) * torch.bfloat16.itemsize
    remote, tensors = (size, 2) if slow == GATHERED else (size // 2, 4)
    remote = size * 3 // 4 if slow == "all" else remote
    least = tensors * remote * (2 * (1 + 3 / 2) + 2 * 2 / 16)
    assert least <= kernels <= 1.1 * least
    assert others <= 1.01 * OTHER_BYTES[slow] * size
