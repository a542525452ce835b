"""Installation and removal of the plugin, in a new interpreter if that depends on the import order."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import xfuser_cocodiff
from tests import ranks
from xfuser_cocodiff import autoload
from xfuser_cocodiff.tools.reporting import environment
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching.patch import Patch, PatchSet


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def answer(code: str, **environment: str) -> object:
    """Run code and read the JSON that it prints last."""
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_torch_only_adds_a_finder_and_codecs_load_no_compiler() -> None:
    loaded, watching, compilers = answer("""
        import json, sys, torch
        ours = sorted(name for name in sys.modules if name.startswith("xfuser"))
        watching = [type(finder).__name__ for finder in sys.meta_path].count("XDiTWatch")
        import xfuser_cocodiff.engine.codec.coded_tensor, xfuser_cocodiff.engine.attention.reshard
        compilers = {"xfuser_cocodiff.engine.codec.triton_kernels"}
        print(json.dumps([ours, watching, sorted(compilers & {*sys.modules})]))
    """)
    assert loaded == ["xfuser_cocodiff", "xfuser_cocodiff.autoload"]
    assert watching == 1
    assert compilers == []  # a CPU needs no Triton, so importing the plugin must not require it


def reinstall(rank: int) -> tuple[bool, list[str], list[str]]:
    """Return whether stock runs once the plugin is uninstalled, what changes with it, and what stays changed."""
    import xfuser.model_executor.layers.usp as usp

    from tests.xdit.integration.snapshot import everything
    from xfuser_cocodiff.xdit.patching import log
    from xfuser_cocodiff.xdit.session import graph_passes

    xfuser_cocodiff.uninstall()
    is_stock = "site-packages" in usp._ft_c_input_all_to_all.__code__.co_filename
    before = everything()
    assert xfuser_cocodiff.install()
    activation.activate()
    assert graph_passes.overlap_collectives()
    log.warn_once("a message")
    during = everything()
    xfuser_cocodiff.uninstall()
    after = everything()
    return is_stock, *([key for key in before if found[key] != before[key]] for found in (during, after))


def test_uninstall_restores_all_that_install_replaces() -> None:
    [(is_stock, changed, left)] = ranks.run(reinstall, 1)
    assert is_stock and not left
    assert len(changed) > 20 and {"logging", "inductor"} <= {*changed}


@pytest.mark.parametrize("version", ["0.6.9", "0.8.0", "1.0"])
def test_unsupported_version_prevents_installation(
    version: str, uninstalled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(activation, "warn_once", warned.append)
    monkeypatch.setattr(activation, "xdit_version", lambda: version)
    assert not xfuser_cocodiff.install()
    [warning] = warned
    assert f"xfuser {version} is not supported" in warning and "<0.8" in warning


def test_error_in_a_nested_import_removes_all_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_host.py").write_text("import inner_host\ndef function(): return 'original'\n")
    (tmp_path / "inner_host.py").write_text("def function(): return 'original'\n")
    monkeypatch.syspath_prepend(tmp_path)
    patches = [
        Patch("outer_host", "function", "", lambda original: lambda: "replaced"),
        Patch("inner_host", "function", "", lambda original: 1 / 0),
    ]
    patch_set = PatchSet(patches, "outer_host")
    patch_set.install()
    import outer_host

    assert outer_host.function() == outer_host.inner_host.function() == "original"
    assert patch_set.is_removed
    assert patch_set not in sys.meta_path


def test_patch_checks_parameters() -> None:
    patch = Patch("xfuser.model_executor.layers.usp", "_ft_c_input_all_to_all", "", lambda x: x, ("tensor",))
    with pytest.raises(RuntimeError, match=r"takes \(x\), expected \(tensor\)"):
        PatchSet([patch], "xfuser").activate()


@pytest.mark.parametrize(("disable", "decided", "installs"), [("", False, 1), ("1", False, 0), ("", True, 0)])
def test_entry_point_of_xdit(monkeypatch: pytest.MonkeyPatch, disable: str, decided: bool, installs: int) -> None:
    installed: list[bool] = []
    monkeypatch.setenv("COCODIFF_DISABLE", disable)
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(autoload, "_decided", decided)  # by PyTorch's entry point, install() or uninstall()
    monkeypatch.setattr(autoload, "_install", lambda: installed.append(True))
    autoload.plug_in()
    autoload.plug_in()
    autoload.watch()  # installing imports torch
    assert len(installed) == installs
    assert sys.meta_path == []


def test_patches_fit_the_installed_xdit() -> None:
    assert {state["state"] for state in environment.patch_states()} <= {"applied", "ready", "used"}
