"""What a coded layer launches, and the bytes that it moves, counted on a mock device."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch

from tests import coded_layers, ranks
from tests.mock_device import HAS_BACKENDS, MockDevice
from tests.mock_meshes import GATHERED, SLOW, TOPOLOGY, device, make_tables, mesh_of, partition_of
from tests.quick import covering, slow_but
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.codec.codec import EXACT, Codec, message_layout
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.send_buffer import SendBuffer
from xfuser_cocodiff.engine.compression.step_errors import StepErrors
from xfuser_cocodiff.engine.topology.topology import Topology

pytestmark = pytest.mark.skipif(not HAS_BACKENDS, reason="needs a PyTorch that supports devices written in Python")

MAX_LAUNCHES = 12
"""Operations of a coded layer besides its kernels; small ones are dominated by their launch."""
SMALL = (1, 8, 8, 16)
FLUX = (1, 24, 4608 // 4, 128)
"""Values of FLUX.1-dev at 1024 pixels on one of four ranks."""


def calls_of(
    slow: str,
    v_first: bool,
    codecs_of_steps: Sequence[Mapping[str, Codec]],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    topology: Topology = TOPOLOGY,
    is_joint: bool = False,
    has_exact_references: bool = False,
) -> list[tuple[Counter[str], Counter[str]]]:
    """Return the launches and the moved bytes of each call of a layer, by operation.

    A step has one call, or with `is_joint` one for each of two branches of guidance.
    """
    found = []
    with MockDevice() as mock_device, mock_device.by_triton():
        make_tables()
        mesh, partition = partition_of(slow, False, topology)
        query, key, value = (torch.empty(shape, dtype=dtype, device=device()) for _ in range(3))
        leading: dict = {}
        following: dict = {}
        branches = [(leading, None), (following, leading)][: 2 if is_joint else 1]
        for (step, codecs_of), (link_states, leader) in itertools.product(enumerate(codecs_of_steps), branches):
            how = {"gathers_kv": slow == GATHERED, "has_exact_references": has_exact_references}
            how |= {"is_joint": is_joint, "leader": leader, "keeps_values": is_joint and leader is None}
            layer_codecs = coded_layers.layer_codecs(partition, codecs_of, link_states, step=step, **how)
            counted = mock_device.launched, mock_device.moved
            for each in counted:
                each.clear()
            ulysses = UlyssesAttention(mesh, layer_codecs=layer_codecs, gather=partition if slow == GATHERED else None)
            if v_first:
                ulysses.start_value(value)
            ulysses.run(query, key, value, lambda query, *_: query)
            found.append(tuple(map(Counter, counted)))
    return found


def kernels_and_others(counted: Counter[str]) -> tuple[int, int]:
    """Return what a counter has of Triton kernels, and of other operations."""
    kernels = sum(count for name, count in counted.items() if name.endswith("_kernel"))
    return kernels, counted.total() - kernels


def coded_step(rank: int, slow: str, v_first: bool, *sizes: object) -> list[tuple[int, int]]:
    """Return the launches and the moved bytes of a step whose tensors are all coded."""
    keyframe, coded = (dict.fromkeys("qkvo", each) for each in (Codec(8, is_keyframe=True), Codec(2, predicts=True)))
    counted = calls_of(slow, v_first, [keyframe, *[coded] * 3], *sizes)[-1]
    return list(map(kernels_and_others, counted))


CASES = [*covering(itertools.product(SLOW, (False, True)), 2)]


@pytest.mark.parametrize(
    ("slow", "v_first"),
    slow_but([("node", True), (GATHERED, False)], CASES),
)
def test_coded_layer_has_few_launches(slow: str, v_first: bool) -> None:
    [((kernels, others), _)] = ranks.run(coded_step, 1, slow, v_first, SMALL, torch.float32)
    # One launch encodes a message, and one decodes it: Q, K and V together, or V first, and O unless only K and V are
    # coded.
    assert kernels == 2 * (1 + v_first + (slow != GATHERED))
    assert others <= MAX_LAUNCHES


def lossless_step(rank: int, slow: str) -> tuple[int, int]:
    """Return the launches of a step whose tensors are sent losslessly, such as O in mode `paper`."""
    codecs_of = [dict.fromkeys("qkvo", EXACT)] * 2
    counted, _ = calls_of(slow, False, codecs_of, SMALL, torch.float32, has_exact_references=True)[-1]
    return kernels_and_others(counted)


def test_lossless_layer_has_few_launches() -> None:
    [(kernels, others)] = ranks.run(lossless_step, 1, "node")
    assert kernels == 0  # PyTorch copies to and from messages, and stores references as they are
    assert others <= 2 * MAX_LAUNCHES


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


def allocated_by_step(rank: int, slow: str, is_coded: bool, steps: int) -> list[Counter[str]]:
    """Return the bytes that each step of a layer allocates on the device, by operation; attention allocates nothing."""
    keyframe, coded = (dict.fromkeys("qkvo", each) for each in (Codec(8, is_keyframe=True), Codec(2, predicts=True)))
    found, link_states, errors, send_buffer = [], {}, StepErrors(), SendBuffer()
    with MockDevice() as mock_device, mock_device.by_triton():
        make_tables()
        mesh, partition = partition_of(slow, False)
        query, key, value = (torch.empty(FLUX, dtype=torch.bfloat16, device=device()) for _ in range(3))
        for step in range(steps):
            codecs_of, layer_codecs = coded if step else keyframe, None
            if is_coded:
                how = {"errors": errors, "send_buffer": send_buffer, "gathers_kv": slow == GATHERED}
                layer_codecs = coded_layers.layer_codecs(partition, codecs_of, link_states, step=step, **how)
            mock_device.allocated.clear()
            gather = partition if slow == GATHERED else None
            ulysses = UlyssesAttention(mesh, layer_codecs=layer_codecs, gather=gather)
            ulysses.run(query, key, value, lambda query, *_: query)
            found.append(Counter(mock_device.allocated))
            errors.start_readout()
    return found


@pytest.mark.parametrize("slow", SLOW)
def test_coded_steps_allocate_what_they_receive_and_return(slow: str) -> None:
    """From the third step on, no payload, reference, gain, sum or energy: their memory is used again."""
    codec, size, (batch, heads, tokens, dim) = Codec(2, predicts=True), math.prod(FLUX) * torch.bfloat16.itemsize, FLUX
    links, shape = {
        "node": (1, (1, 2 * batch, heads // 4, tokens, dim)),
        "all": (3, (3, batch, heads // 4, tokens, dim)),
        GATHERED: (1, (1, batch, heads // 2, 2 * tokens, dim)),
    }[slow]
    messages = ["vk"] if slow == GATHERED else ["vqk", "o"]
    layouts = [message_layout(tuple((name, codec, shape) for name in names), torch.bfloat16) for names in messages]
    arrived = (links + 1) * sum(layout.nbytes for layout in layouts)
    expected = {
        # Q, K, V and O as they are returned, and packed and received along the fast axis: O is packed by a copy.
        "node": {"new_empty": (4 + 1) * size, "stack": 3 * size, "empty": 4 * size + arrived},
        # The plan has two stages, and each sends a copy of what it got.
        "all": {"new_empty": 4 * size, "contiguous": 2 * arrived, "empty": 2 * arrived},
        # K and V of both nodes are returned twice: by node, and in the order of tokens.
        GATHERED: {"new_empty": (2 * 4 + 1) * size, "stack": 3 * size, "empty": 4 * size + arrived},
    }[slow]
    [(_, _, *later)] = ranks.run(allocated_by_step, 1, slow, True, 6)
    assert [{name.split(".")[1]: size for name, size in each.items()} for each in later] == [expected] * 4
    if slow != "all":  # lossless, the form along the fast axis is the same, and messages of all axes are received whole
        [[lossless]] = ranks.run(allocated_by_step, 1, slow, False, 1)
        assert lossless["aten.new_empty.default"] == expected["new_empty"]
        assert lossless["aten.empty.memory_format"] == 8 * size


MAX_GRID = 2**31 - 1, 65_535, 65_535
"""CUDA's limits of a grid."""
VIDEO = "HunyuanVideo, 129 frames"
TOKENS = {VIDEO: 33 * 45 * 80 + 256, "Wan, 81 frames": 21 * 45 * 80}
"""Tokens at 720p; a token covers four frames of 16 x 16 pixels."""


def grids(rank: int, tokens: int, heads: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the grids of all kernels of a layer at the smallest and the largest degree, with codecs and without."""
    launched, codec = [], Codec(2, predicts=True)
    degrees = [each for each in range(2, 25, 2) if heads % each == 0]
    for degree, batch in itertools.product((degrees[0], degrees[-1]), (1, 2)):
        names = {"node": 2, "gpu": degree // 2} if degree > 2 else {"node": 2}
        topology = Topology.named(**names)
        with MockDevice() as mock_device, mock_device.by_triton():
            make_tables()
            mesh = mesh_of("flat", False, topology)
            node = mesh_of("flat", False, Topology.named(node=2), mesh.comm_stream) if degree > 2 else mesh
            fast = mesh_of("flat", False, Topology.named(gpu=degree // 2), mesh.comm_stream) if degree > 2 else None
            partition = AxisPartition(2, degree // 2, 0, node, fast)
            query = torch.empty(batch, heads, -(-tokens // degree), 128, dtype=torch.bfloat16, device=device())
            link_states: dict = {}
            for codecs_of in (None, dict.fromkeys("qkvo", EXACT), dict.fromkeys("qkvo", codec)):
                layer_codecs = codecs_of and coded_layers.layer_codecs(partition, codecs_of, link_states)
                UlyssesAttention(mesh, layer_codecs=layer_codecs).run(query, query, query, lambda query, *_: query)
            launched += mock_device.grids
    return launched


@pytest.mark.slow  # no quick test has messages of this size
@pytest.mark.parametrize(("video", "heads"), [*itertools.product(TOKENS, [24, 40])])
def test_grids_of_long_videos_are_within_cuda_limits(video: str, heads: int) -> None:
    [launched] = ranks.run(grids, 1, TOKENS[video], heads)
    assert {name for name, _ in launched} == {f"{name}_kernel" for name in ("encode", "decode")}
    for name, grid in launched:
        assert all(0 < size <= most for size, most in zip(grid, MAX_GRID, strict=False)), (name, grid)
