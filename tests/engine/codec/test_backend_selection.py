"""Selection of a kernel backend by choice, device and what is installed."""

from pathlib import Path

import pytest

from xfuser_cocodiff.engine.codec import kernels


@pytest.mark.parametrize(("can_build", "expected"), [(True, "triton"), (False, "torch")])
def test_auto_selects_a_backend_that_is_available(
    monkeypatch: pytest.MonkeyPatch, can_build: bool, expected: str
) -> None:
    """Triton on accelerators with a compiler for its launchers, else PyTorch."""
    monkeypatch.setattr(kernels, "_can_build", lambda: can_build)
    found = [kernels.resolve(kernels.AUTO, device) for device in ("cpu", "cuda", "xpu")]
    assert found == ["torch", expected, expected]
    monkeypatch.setattr(kernels, "_is_installed", lambda: False)
    assert {kernels.resolve(kernels.AUTO, device) for device in ("cpu", "cuda", "xpu")} == {"torch"}
    with pytest.raises(ValueError, match="'triton' is not available: it is not installed"):
        kernels.resolve(kernels.TRITON, "cuda")
    assert kernels.resolve(kernels.TORCH, "cuda") == "torch"


@pytest.mark.parametrize(
    ("compiler", "header", "expected"), [("cc1", True, True), ("", True, False), ("cc1", False, False)]
)
def test_triton_needs_a_compiler_and_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, header: bool, expected: bool
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernels.sysconfig, "get_path", lambda name: str(tmp_path))
    if header:
        (tmp_path / "Python.h").touch()
    assert kernels._can_build.__wrapped__() is expected
