"""Triton's kernels, run by its interpreter, and Numba's against those in plain PyTorch: the same bits.

On a machine with a GPU the same tests run on it.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.quick import in_turn, pairwise, slow_but
from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.compression.codecs import Codec
from xfuser_cocodiff.engine.kernels import torch_kernels
from xfuser_cocodiff.engine.kernels.quantize import GRIDS, tokens_per_row
from xfuser_cocodiff.engine.kernels.rows import TOLD, ActiveTokens, Encoded, Prediction, away, put_away
from xfuser_cocodiff.lab.bench import kernels as bench
from xfuser_cocodiff.lab.simulation.workloads import Workload

HAS_GPU = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
DEVICE = torch.accelerator.current_accelerator() if HAS_GPU else torch.device("cpu")


@pytest.fixture(scope="module")
def triton_kernels():
    """Triton's kernels, interpreted where there is no GPU (see conftest)."""
    if not HAS_GPU:
        from triton.runtime import interpreter

        interpreter._convert_float = rounding(interpreter._convert_float)
    from xfuser_cocodiff.engine.kernels import triton_kernels as kernels_of_triton

    return kernels_of_triton


@pytest.fixture(scope="module", params=[kernels.TRITON, kernels.NUMBA])
def one_pass(request: pytest.FixtureRequest):
    """Either set that reads and writes each tensor once."""
    if request.param == kernels.TRITON:
        return request.getfixturevalue("triton_kernels")
    if HAS_GPU:
        pytest.skip("values of these tests are on the GPU, and Numba's kernels are for CPUs")
    from xfuser_cocodiff.engine.kernels import numba_kernels

    return numba_kernels


def rounding(convert):
    """The interpreter cuts float32 off to bfloat16, where GPUs and PyTorch round to the nearest."""

    def converted(data: np.ndarray, source, target, mode) -> np.ndarray:
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        return torch.tensor(data.view(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    return converted


class Case:
    """Values, and what both ends hold, for P places of which some may be the rank's own."""

    def __init__(
        self, dtype: torch.dtype, here: range | None, places: int = 3, dim: int = 16, tokens: int = 11
    ) -> None:
        generator = torch.Generator().manual_seed(dim + tokens)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

        self.here, links = here, places - len(here or ())
        # Tokens outside of heads: as they lie in the tensors that models pass.
        self.values = draw(places, 2, tokens, 3, dim).transpose(2, 3)
        self.held = draw(links, 2, 3, tokens, dim)
        self.before = self.held + (0.1 * draw(*self.held.shape)).to(dtype)
        self.values.copy_(self.values.float() * 0.1 + self._at_places(self.held))
        self.target = torch.zeros(places, 2, tokens, 3, dim, dtype=dtype, device=DEVICE).transpose(2, 3)

    def _at_places(self, held: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(self.values.shape, dtype=held.dtype, device=DEVICE)
        put_away(whole, held, self.here)
        return whole.float()

    def known(self, predictor: float = 0.0) -> Prediction:
        """With another share of the last change for each link; 0 extrapolates nothing."""
        shares = (32 * predictor / (1 + torch.arange(len(self.held), device=DEVICE))).to(torch.uint8)
        return Prediction(self.held, self.before if predictor else None, shares)

    def rows(self, bits: float | None, active: int | None = None) -> int:
        """That each have a scale, of a link."""
        _, groups, heads, tokens, dim = self.held.shape
        together = tokens_per_row(bits, dim, tokens, active is None) if bits else 1
        return groups * heads * (tokens if active is None else active) // together

    def active(self, count: int | None) -> ActiveTokens | None:
        if count is None:
            return None
        scores = torch.rand(*self.held.shape[:2], self.held.shape[3], generator=torch.Generator().manual_seed(1))
        mask = torch.zeros(scores.shape, dtype=torch.uint8).scatter_(-1, scores.topk(count, -1).indices, 1)
        return ActiveTokens(mask.to(DEVICE), scores.shape[-1], count)

    def encoded(self, kernel, *how: object, values: torch.Tensor | None = None, tells: bool = False) -> "Pair":
        """A payload among other bytes, which are not written, and what else came of values."""
        values, (_, bits, active) = self.values if values is None else values, how
        codec = Codec(bits, 1.0 if active is None else active.count / active.tokens)
        size = codec.payload_bytes(self.held.shape, values.dtype) + (TOLD if tells else 0)
        wide = torch.full((len(values), -(-size // 8) * 8 + 16), 0xA5, dtype=torch.uint8, device=DEVICE)
        encoded = kernel.encode(values, *how, wide[:, 8 : 8 + size], self.here, tells)
        assert (wide[:, :8] == 0xA5).all() and (wide[:, 8 + size :] == 0xA5).all()
        assert all((wide[place] == 0xA5).all() for place in self.here or ())
        return wide[:, 8 : 8 + size], encoded


Pair = tuple[torch.Tensor, Encoded]


def same_but_for_scales(case: Case, ours: Pair, theirs: Pair, rows: int, bits: int | None) -> None:
    """Scales may fall to either side of a boundary, once in a thousand rows; all else is equal, bit for bit."""
    payloads = [away(payload, case.here) for payload, _ in (ours, theirs)]
    if bits is None:
        assert torch.equal(*payloads) and torch.equal(ours[1].held, theirs[1].held)
        return
    scales = [payload[:, payload.shape[1] - rows :].int() for payload in payloads]
    assert (scales[0] - scales[1]).abs().max() <= 1
    assert (scales[0] != scales[1]).sum() <= 1 + scales[0].numel() // 1000
    alike = scales[0] == scales[1]
    levels = [payload[:, : payload.shape[1] - rows].unflatten(1, (rows, -1)) for payload in payloads]
    assert torch.equal(levels[0][alike], levels[1][alike])
    if alike.all():
        torch.testing.assert_close(ours[1].held, theirs[1].held, rtol=0, atol=0, equal_nan=True)


DTYPES = torch.float32, torch.bfloat16, torch.float16
FIRST, SECOND, MIDDLE = range(1), range(1, 2), range(1, 3)
HERE = None, FIRST, SECOND, MIDDLE


@pytest.mark.parametrize(
    ("dtype", "here", "bits", "active", "predictor", "tells"),
    pairwise(itertools.product(DTYPES, HERE, (None, *GRIDS), (None, 5), (0.0, 0.5), (False, True))),
    ids=str,
)
def test_coding_equals_the_reference(one_pass, dtype, here, bits, active, predictor, tells) -> None:
    case = Case(dtype, here, places=3 + (here == MIDDLE))
    is_exact = bits is None and active is None
    tells = tells and not is_exact
    known = None if is_exact else case.known(predictor), bits, case.active(active)
    ours, theirs = (case.encoded(kernel, *known, tells=tells) for kernel in (one_pass, torch_kernels))
    cut = (slice(None), slice(None, -TOLD if tells else None))
    same_but_for_scales(case, (ours[0][cut], ours[1]), (theirs[0][cut], theirs[1]), case.rows(bits, active), bits)
    payload, encoded = ours
    told = known[0]
    if tells:  # and the receiver goes by what is told, not by shares of its own
        assert torch.equal(away(payload, here)[:, -TOLD], told.shares)
        assert torch.equal(away(theirs[0], here)[:, -TOLD], told.shares)
        told = told._replace(shares=torch.full_like(told.shares, 3))
    known = told, *known[1:]
    if predictor and (bits or active):
        assert (encoded.again.int() - theirs[1].again.int()).abs().max() <= 1  # sums, in another order
    if bits or active:
        torch.testing.assert_close(encoded.lacking, theirs[1].lacking, rtol=1e-2 if bits else 1e-3, atol=1e-3)
        torch.testing.assert_close(encoded.wanted, theirs[1].wanted, rtol=1e-3, atol=0)
    else:
        assert encoded.lacking is encoded.wanted is theirs[1].lacking is None

    # What one has encoded both decode alike, and that is what the sender holds.
    found, landed = torch.zeros_like(case.target), torch.zeros_like(case.target)
    assert torch.equal(one_pass.decode(payload, *known, case.target, here, tells), encoded.held)
    assert torch.equal(torch_kernels.decode(payload, *known, found, here, tells), encoded.held)
    put_away(landed, encoded.held, here)
    assert torch.equal(case.target, landed) and torch.equal(found, landed)


@pytest.mark.parametrize(
    ("dim", "tokens", "bits"),
    slow_but(
        [(8, 8, 1.6), (24, 64, 2.7), (80, 1, 1.6), (128, 7, 2)],
        itertools.product([8, 24, 80, 128], [1, 7, 8, 64], [1.6, 2, 2.7]),
    ),
)
def test_any_head_dim_and_any_number_of_tokens(one_pass, dim, tokens, bits) -> None:
    case = Case(torch.float32, SECOND, dim=dim, tokens=tokens)
    known = case.known(0.5), bits, None
    ours, theirs = case.encoded(one_pass, *known), case.encoded(torch_kernels, *known)
    same_but_for_scales(case, ours, theirs, case.rows(bits), bits)
    assert torch.equal(one_pass.decode(ours[0], *known, case.target, SECOND), ours[1].held)
    found, wanted = (each.scores(case.values, known[0], SECOND) for each in (one_pass, torch_kernels))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bits", [None, 2])
def test_no_token_may_be_active(one_pass, bits) -> None:
    case = Case(torch.bfloat16, SECOND)
    known = case.known(0.5), bits, case.active(0)
    for kernel in (one_pass, torch_kernels):
        payload, encoded = case.encoded(kernel, *known)
        assert payload.numel() == 0 and torch.equal(encoded.held, torch_kernels.expected(known[0]))
        assert torch.equal(kernel.decode(payload, *known, case.target, SECOND), encoded.held)


def test_values_land_between_any_strides(one_pass) -> None:
    case = Case(torch.bfloat16, FIRST)
    known = case.known(0.5), 2, None
    payload, encoded = case.encoded(torch_kernels, *known)
    for kernel in (one_pass, torch_kernels):
        across = torch.zeros(case.target.transpose(3, 4).shape, dtype=torch.bfloat16, device=DEVICE).transpose(3, 4)
        kernel.decode(payload, *known, across, FIRST)
        assert torch.equal(across[1:], encoded.held) and not across[0].any()


@pytest.mark.parametrize(("bits", "bad"), in_turn([(8,), (2,), (1,)], [float("nan"), float("inf"), -float("inf")]))
def test_what_is_not_finite_spoils_its_row_alone_and_is_counted(one_pass, bad, bits) -> None:
    case = Case(torch.float32, None)
    case.values[1, 0, 2, 4, 3] = bad
    known = case.known(), bits, None
    ours, theirs = case.encoded(one_pass, *known), case.encoded(torch_kernels, *known)
    same_but_for_scales(case, ours, theirs, case.rows(bits), bits)
    assert not ours[1].lacking.isfinite()
    wrong = ~ours[1].held.isfinite().all(-1)
    assert wrong.sum() == 1 and wrong[1, 0, 2, 4]


@pytest.mark.parametrize(
    ("dtype", "here", "bad"),
    in_turn(
        itertools.product([torch.float32, torch.bfloat16], [None, FIRST]), [float("nan"), float("inf"), -float("inf")]
    ),
)
def test_what_is_sent_as_it_is_leaves_a_reference_that_is_finite(one_pass, bad, here, dtype) -> None:
    case = Case(dtype, here)
    case.values[1, 0, 2, 4, 3] = bad
    wanted = away(case.values, here).nan_to_num(0.0, 0.0, 0.0)
    for kernel in (one_pass, torch_kernels):
        payload, encoded = case.encoded(kernel, None, None, None)
        assert torch.equal(encoded.held, wanted)
        assert torch.equal(kernel.decode(payload, None, None, None, case.target, here), wanted)
        arrived = away(case.target, here)
        torch.testing.assert_close(arrived, away(case.values, here), rtol=0, atol=0, equal_nan=True)


def test_zeros_and_differences_too_small_for_a_scale(one_pass) -> None:
    case = Case(torch.float32, None)
    for values in (case.held.clone(), case.held + 1e-30):
        known = case.known(), 4, None
        ours, theirs = (case.encoded(kernel, *known, values=values) for kernel in (one_pass, torch_kernels))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1].held, case.held)


@pytest.mark.parametrize(("can_build", "expected"), [(True, "triton"), (False, "torch")])
def test_a_choice_that_is_none(monkeypatch: pytest.MonkeyPatch, can_build: bool, expected: str) -> None:
    """Triton, where there is a device for it, and a compiler for its launchers."""
    monkeypatch.setattr(kernels, "_can_build", lambda: can_build)
    found = [kernels.resolve(kernels.AUTO, device) for device in ("cpu", "cuda", "xpu")]
    assert found == ["numba", expected, expected]
    monkeypatch.setattr(kernels, "_has", lambda package: False)
    assert {kernels.resolve(kernels.AUTO, device) for device in ("cpu", "cuda", "xpu")} == {"torch"}
    for choice, device in (("numba", "cpu"), ("triton", "cuda")):
        with pytest.raises(ValueError, match=f"'{choice}' is not valid here, since it is not installed"):
            kernels.resolve(choice, device)
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match="'numba' is not valid here, since its kernels are for CPUs, and not for 'xpu'"
    ):
        kernels.resolve(kernels.NUMBA, "xpu")
    assert kernels.resolve(kernels.TORCH, "cuda") == "torch"


@pytest.mark.parametrize(
    ("compiler", "header", "expected"), [("cc1", True, True), ("", True, False), ("cc1", False, False)]
)
def test_what_triton_needs_to_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, header: bool, expected: bool
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernels.sysconfig, "get_path", lambda name: str(tmp_path))
    if header:
        (tmp_path / "Python.h").touch()
    assert kernels._can_build.__wrapped__() is expected


@pytest.mark.slow  # the interpreter runs the same kernels above
def test_kernels_compile_for_a_gpu_and_round_as_they_say(tmp_path: Path) -> None:
    """To machine code, by Triton's compiler and NVIDIA's assembler, which need no GPU.

    What encoder and decoder both compute must be rounded alike: no product and sum become one there. Divisions, which
    the encoder alone has, are made of such. Values are read and written 16 bytes at a time.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.engine.kernels.compile_kernels", "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["kernel"] for row in found} == {f"_{name}_kernel" for name in ("scores", "encode", "sums", "decode")}
    for row in found:
        assert "cubin" in row["products"]
        assert row["fused"] == 0 or row["kernel"] == "_encode_kernel"
        # Where columns have gaps, values are read one by one, and so are the few sums.
        assert (
            row["has_gaps"]
            or row["kernel"] == "_sums_kernel"
            or ("v4.b32" in row["widths"] and "b16" not in row["widths"])
        )


class Last:
    """The last program of a kernel's launch, with notes of where it reads and writes; no memory is touched."""

    def __init__(self, kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter

        self._kernel, self.seen, builder = kernel, {"read": [], "written": []}, interpreter.InterpreterBuilder

        def load(_, pointers, mask, *rest):
            kind = pointers.get_element_ty()
            self.seen["read"].append(pointers.data[mask.data])
            return interpreter.TensorHandle(np.zeros(pointers.data.shape, interpreter._get_np_dtype(kind)), kind)

        def store(_, pointers, value, mask, *rest):
            self.seen["written"].append(pointers.data[mask.data])

        monkeypatch.setattr(builder, "create_masked_load", load)
        monkeypatch.setattr(builder, "create_masked_store", store)
        monkeypatch.setattr(builder, "set_grid_idx", lambda self, *_: setattr(self, "grid_idx", (Last.number, 0, 0)))
        monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)

    def __getitem__(self, grid: tuple[int, ...]):
        Last.number = grid[0] - 1
        return self._kernel[(1,)]

    def touches_the_end_of(self, tensor: torch.Tensor, what: str) -> bool:
        """Whether the last byte of a tensor is in one of its values that were read, or written, and none behind it."""
        begin, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        places = np.concatenate(self.seen[what]).astype(np.int64) - begin
        inside = places[(places >= 0) & (places < size)]
        return len(inside) > 0 and inside.max() == size - tensor.itemsize


@pytest.mark.skipif(HAS_GPU, reason="looks at addresses by the interpreter, which is for machines without a GPU")
@pytest.mark.parametrize("bits", [8, None])
def test_places_are_found_beyond_32_bits(triton_kernels, monkeypatch: pytest.MonkeyPatch, bits: int | None) -> None:
    """In tensors of more than 2**31 values, of which memory is promised only."""
    shape = (1, 1, 17, 2**20 - 8, 128)
    values, target = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    tokens = shape[3]
    active = ActiveTokens(torch.ones(1, 1, tokens, dtype=torch.uint8), tokens, tokens)
    payload = torch.empty(1, Codec(bits).payload_bytes(shape, values.dtype), dtype=torch.uint8)
    assert values.numel() > 2**31 and payload.numel() > 2**31
    last = Last(triton_kernels._encode_kernel, monkeypatch)
    monkeypatch.setattr(triton_kernels, "_encode_kernel", last)
    # Levels of chosen tokens alone would lie at the beginning: all are sent here.
    known = Prediction(values) if bits else None
    held = triton_kernels.encode(values, known, bits, None, payload, None).held
    assert last.touches_the_end_of(values, "read") and last.touches_the_end_of(held, "written")
    assert last.touches_the_end_of(payload if bits else payload.view(torch.bfloat16), "written")
    last = Last(triton_kernels._decode_kernel, monkeypatch)
    monkeypatch.setattr(triton_kernels, "_decode_kernel", last)
    held = triton_kernels.decode(payload, Prediction(held) if bits else None, bits, None, target, None)
    assert last.touches_the_end_of(target, "written") and last.touches_the_end_of(held, "written")
    assert last.touches_the_end_of(payload if bits else payload.view(torch.bfloat16), "read")
    triton_kernels.decode(payload, Prediction(held), bits, active, target, None)
    assert last.touches_the_end_of(active.numbers, "read")


SMALL = Workload("small", 1, 8, 16, mlp_ratio=4, gated=False, text_tokens=8)


def test_the_bench_counts_what_kernels_read_and_write(monkeypatch: pytest.MonkeyPatch, capsys) -> None:

    monkeypatch.setitem(bench.WORKLOADS, "small", SMALL)
    monkeypatch.setattr(bench.benchmark, "Timer", Once)
    record = bench.measure(DEVICE, 4, 2, [("small", 64)])
    tensor = 24 * 8 * 16 * 2 // 4  # of a rank: 16 image tokens and 8 of text, 8 heads of 16, bf16
    away = tensor // 2
    payload = away // 2 // 8 * 2 + away // 2 // 32  # 2 bits a value, and a scale for two of a head's six tokens
    found = {row["kernel"]: row["bytes"] for row in record["rows"]}
    assert found["scores"] == 3 * away
    assert found["encode"] == found["decode"] == 4 * away + payload
    assert all(len(row["ratio_to_copy"]) == 2 for row in record["rows"])
    assert [(layer["mode"], len(layer["share"])) for layer in record["layers"]] == [("balanced", 2), ("fast", 2)]
    calls = [(calls["mode"], len(calls["seconds"])) for calls in record["host_calls"]]
    assert calls == [("exact", 2), ("balanced", 2), ("fast", 2)]
    bench.show(record)
    assert "take the host 1.00 ms (1.00 to 1.00) in mode balanced" in " ".join(capsys.readouterr().out.split())


class Once:
    """Stands in for PyTorch's timer, which takes its time."""

    def __init__(self, statement: str, globals: dict) -> None:
        self.call = globals["call"]

    def blocked_autorange(self, min_run_time: float) -> object:
        self.call()
        return type("Measurement", (), {"median": 1e-3})


def test_numba_s_kernels_in_threads_do_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_GPU:
        pytest.skip("values of these tests are on the GPU, and Numba's kernels are for CPUs")
    from xfuser_cocodiff.engine.kernels import numba_kernels

    case, found = Case(torch.float32, SECOND, tokens=12), []
    monkeypatch.setattr(numba_kernels, "_PAYS", 16)
    for threads in (1, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        known, active = case.known(0.5), case.active(5)
        payload, encoded = case.encoded(numba_kernels, known, 2, active)
        held = numba_kernels.decode(payload, known, 2, active, case.target, case.here)
        scores = numba_kernels.scores(case.values, known, case.here)
        found.append([payload, *encoded, held, case.target.clone(), scores])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow  # all other tests have such a folder
def test_without_a_folder_for_it_numba_compiles_anew() -> None:
    """As in a container whose files nobody may write."""
    code = (
        "import numba.core.caching as c; c.CacheImpl._locator_classes = [];"
        "from xfuser_cocodiff.engine.kernels import numba_kernels, numba_loops; numba_kernels.prepare();"
        "assert not numba_loops.encode.stats.cache_path"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_known_of_other_values_is_not_read() -> None:
    """Functions of Numba, which are given addresses, would not see it."""
    from xfuser_cocodiff.engine.kernels import numba_kernels

    case = Case(torch.float32, None)
    payload = torch.zeros(3, Codec(2).payload_bytes(case.held.shape, torch.float32), dtype=torch.uint8)
    for known in (
        Prediction(case.held[:, :, :, :5].contiguous()),
        Prediction(case.held, case.before.to(torch.bfloat16), torch.zeros(3, dtype=torch.uint8)),
        Prediction(case.held.transpose(2, 3).contiguous().transpose(2, 3)),
    ):
        with pytest.raises(ValueError, match="references of"):
            numba_kernels.encode(case.values, known, 2, None, payload, None)
        with pytest.raises(ValueError, match="references of"):
            numba_kernels.decode(payload, known, 2, None, case.target, None)
        with pytest.raises(ValueError, match="references of"):
            numba_kernels.scores(case.values, known, None)


def test_payloads_and_choices_of_another_size_are_refused() -> None:
    """Nothing is read, or written, beyond them."""
    from xfuser_cocodiff.engine.kernels import numba_kernels

    case = Case(torch.float32, SECOND)
    whole, chosen = (Codec(2, share).payload_bytes(case.held.shape, torch.float32) for share in (1.0, 5 / 11))
    of_others = ActiveTokens(torch.ones(2, 2, 16, dtype=torch.uint8), 10, 5)
    for size, active, tells, match in (
        (chosen, None, False, f"3 places have {whole} bytes"),  # as where a choice is lost
        (whole, case.active(5), False, f"3 places have {chosen} bytes"),
        (whole, None, True, f"3 places have {whole + TOLD} bytes"),
        (chosen, of_others, False, r"a choice among \(2, 2, 10\) tokens, where there are \(2, 2, 11\)"),
    ):
        payload = torch.zeros(3, size, dtype=torch.uint8)
        with pytest.raises(ValueError, match=match):
            numba_kernels.encode(case.values, case.known(0.5), 2, active, payload, SECOND, tells)
        with pytest.raises(ValueError, match=match):
            numba_kernels.decode(payload, case.known(0.5), 2, active, case.target, SECOND, tells)


def test_another_default_dtype_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from xfuser_cocodiff.engine.kernels import numba_kernels, quantize

    case, found = Case(torch.float32, FIRST), []
    for dtype in (torch.float32, torch.bfloat16):
        for table in (quantize.scale_table, quantize._maxima, quantize._weights, quantize._digits):
            table.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            payload, encoded = case.encoded(numba_kernels, case.known(0.5), 2, None)
            found.append([payload, *encoded, numba_kernels.scores(case.values, case.known(0.5), FIRST)])
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
