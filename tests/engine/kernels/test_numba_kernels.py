"""Numba's kernels: threads, the compile cache, and arguments that do not fit each other."""

import subprocess
import sys

import pytest
import torch

from tests.engine.kernels.case import FIRST, HAS_GPU, SECOND, Case
from xfuser_cocodiff.engine.compression.codec import Codec
from xfuser_cocodiff.engine.kernels import numba_kernels, numba_loops, quantize
from xfuser_cocodiff.engine.kernels.rows import GAIN_BYTES, ActiveTokens, Prediction

pytestmark = pytest.mark.skipif(HAS_GPU, reason="the values are on the GPU, and Numba's kernels are for CPUs")


@pytest.mark.parametrize(("bits", "active"), [(2, 5), (1.6, None), (1.6, 7), (2.7, 11)])
def test_threads_compute_the_same_as_one_thread(
    monkeypatch: pytest.MonkeyPatch, bits: float, active: int | None
) -> None:
    """Also where a byte has rows of two heads."""
    case, found, count = Case(torch.float32, SECOND, tokens=12), [], active
    monkeypatch.setattr(numba_kernels, "_VALUES_PER_THREAD", 16)
    for threads in (1, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        how = case.prediction(0.5), bits, case.active(count)
        payload, encoded = case.encoded(numba_kernels, *how)
        reference = numba_kernels.decode(payload, *how, case.target, case.local_slots)
        scores = numba_kernels.scores(case.values, how[0], case.local_slots)
        found.append([payload, *encoded, reference, case.target.clone(), scores])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow  # all other tests have a cache folder
def test_numba_compiles_without_a_cache_folder() -> None:
    """Compile as in a container with a read-only file system."""
    code = (
        "import numba.core.caching as c; c.CacheImpl._locator_classes = [];"
        "from xfuser_cocodiff.engine.kernels import numba_kernels, numba_loops; numba_kernels.prepare();"
        "assert not numba_loops.encode.stats.cache_path"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_references_of_another_shape_or_type_are_refused() -> None:
    """Refuse them before the loops, which see addresses only."""
    case = Case(torch.float32, None)
    payload = torch.zeros(3, Codec(2).payload_bytes(case.reference.shape, torch.float32), dtype=torch.uint8)
    for prediction in (
        Prediction(case.reference[:, :, :, :5].contiguous()),
        Prediction(case.reference, case.previous.to(torch.bfloat16), torch.zeros(3, dtype=torch.uint8)),
        Prediction(case.reference.transpose(2, 3).contiguous().transpose(2, 3)),
    ):
        with pytest.raises(ValueError, match="references of"):
            numba_kernels.encode(case.values, prediction, 2, None, payload, None)
        with pytest.raises(ValueError, match="references of"):
            numba_kernels.decode(payload, prediction, 2, None, case.target, None)
        with pytest.raises(ValueError, match="references of"):
            numba_kernels.scores(case.values, prediction, None)
    links, _, heads, _, dim = case.reference.shape
    prediction = Prediction(case.reference, channel_scales=torch.ones(links, dim, heads).transpose(1, 2))
    with pytest.raises(ValueError, match="scales of channels of"):
        numba_kernels.encode(case.values, prediction, 2, None, payload, None)


def test_payloads_and_active_tokens_of_another_size_are_refused() -> None:
    """Refuse them, so that nothing is accessed out of bounds."""
    case = Case(torch.float32, SECOND)
    full, selected = (Codec(2, share).payload_bytes(case.reference.shape, torch.float32) for share in (1.0, 5 / 11))
    other_tokens = ActiveTokens(torch.ones(2, 2, 16, dtype=torch.uint8), 10, 5)
    for size, active, sends_gain, match in (
        (selected, None, False, f"3 slots take {full} contiguous bytes"),  # as if a selection were lost
        (full, case.active(5), False, f"3 slots take {selected} contiguous bytes"),
        (full, None, True, f"3 slots take {full + GAIN_BYTES} contiguous bytes"),
        (selected, other_tokens, False, r"active tokens of \(2, 2, 10\); the values have \(2, 2, 11\)"),
    ):
        payload = torch.zeros(3, size, dtype=torch.uint8)
        with pytest.raises(ValueError, match=match):
            numba_kernels.encode(case.values, case.prediction(0.5), 2, active, payload, SECOND, sends_gain)
        with pytest.raises(ValueError, match=match):
            numba_kernels.decode(payload, case.prediction(0.5), 2, active, case.target, SECOND, sends_gain)


def test_results_do_not_depend_on_the_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    case, found = Case(torch.float32, FIRST), []
    for dtype in (torch.float32, torch.bfloat16):
        for table in (quantize.scale_table, quantize._int8_tables, quantize._weights, quantize._digits):
            table.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            payload, encoded = case.encoded(numba_kernels, case.prediction(0.5), 2, None)
            found.append([payload, *encoded, numba_kernels.scores(case.values, case.prediction(0.5), FIRST)])
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_base_compiles_nothing_anew() -> None:
    """The loops that were compiled before a run serve all bases, of whole weights too."""
    numba_kernels.prepare()
    case, loops = Case(torch.float32, SECOND), (numba_loops.encode, numba_loops.decode, numba_loops.score)
    before = [len(loop.signatures) for loop in loops]
    for weight in (1, 1.25):
        base, prediction = case.base(weight), case.prediction(0.5)
        payload, _ = case.encoded(numba_kernels, prediction, 2, None, base=base)
        numba_kernels.decode(payload, prediction, 2, None, case.target, SECOND, False, base)
        numba_kernels.scores(case.values, prediction, SECOND, base)
    assert [len(loop.signatures) for loop in loops] == before
