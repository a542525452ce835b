"""Private names of host packages that the plugin uses, and known versions of USP."""

import ast
import importlib.util
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch

import xfuser_cocodiff
from tests import ranks
from tests.quick import slow
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching import symbol_lookup
from xfuser_cocodiff.xdit.platforms import platform
from xfuser_cocodiff.xdit.session import usp_versions

PACKAGE = Path(activation.__file__).parents[2]
HOSTS = ("xfuser", "yunchang", "torch", "diffusers", "transformers", "accelerate")
PYTHONS = ("_replace", "_exit", "_getframe")
"""Private names of Python itself."""
UNCHECKED = (
    *("_forward_hooks", "_forward_pre_hooks", "_diffusers_hook", "_hf_hook", "_orig_mod", "_version", "_modules"),
    "_make",  # of named tuples
    *("_call_impl", "_torchdynamo_disable", "_name"),
    *("_C", "_attention"),
    *("_templated_ring_attention", "_enable_compute_comm_overlap", "_get_runtime_state_pipeline"),
    *("_chunk_text_for_sp", "_init_sync_pipeline"),
    "_get_backend",
    *("_distributed_c10d", "_detect_dma_connectivity", "_autograd"),
    "_dispatch_has_kernel_for_dispatch_key",
)
"""Private names that no patch checks: attributes that no class declares; those of benchmark commands, on which no run
depends; of a group's backend, without which the default timeout of collectives holds; of the detection of NVLink,
without which it is taken to be there; and of that of flash attention on XPUs."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.Module) -> set[str]:
    """Return the private names in a file that it does not define itself."""
    own, found = set(PYTHONS), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and private(node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if of_self or isinstance(node.ctx, ast.Store) else found).add(node.attr)
        elif node in tree.body:
            pass  # an import of the file, without which the plugin is not installed
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in HOSTS:
            found |= {
                name for name in (*node.module.split("."), *(alias.name for alias in node.names)) if private(name)
            }
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("getattr", "hasattr"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and private(str(arg.value))}
    return found - own


def test_private_names_of_hosts_are_checked_by_patches() -> None:
    rows = activation.patch_table()
    known = {part for row in rows for part in (*row.module.split("."), *row.symbol.split("."))}
    known |= {
        *UNCHECKED,
        *usp_versions.ATTRIBUTES.values(),
        *usp_versions.HELPERS,
        *usp_versions.DIGESTS["0.7.0"],
        "_sdpa_all_to_all_single",
    }
    # No run depends on the tools in tools/, which say themselves what they lack.
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.relative_to(PACKAGE).parts[0] != "tools"]
    found = {
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in files
        for name in private_names(ast.parse(file.read_text())) - known
    }
    assert not found
    assert "_has_kv_cache" in known


USP = "def USP(x):\n    '''Attention.'''\n    return x  # as it is\n"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (USP, True),
        ('def USP( x ):\n    """Another docstring."""\n\n    return (x)\n', True),
        ("def USP(x):\n    return x\n", True),
        (USP.replace("return x", "return -x"), False),
        (USP.replace("(x)", "(x=None)"), False),
        (USP.replace("'''Attention.'''", "x += 1"), False),
    ],
)
def test_digest_ignores_comments_and_formatting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, same: bool
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    one, other = (f"{name}_{tmp_path.name}" for name in ("one", "other"))  # in this process there may be others
    for name, content in ((one, USP), (other, text)):
        (tmp_path / f"{name}.py").write_text(content)
    assert (symbol_lookup.source_digest(one, "USP") == symbol_lookup.source_digest(other, "USP")) is same
    assert symbol_lookup.source_digest(one, "ring_attn") is None


def use_xfuser(folder: str) -> None:
    """Import the xfuser of a folder, with the plugin."""
    xfuser_cocodiff.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "xfuser"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    symbol_lookup.source_digest.cache_clear()
    assert xfuser_cocodiff.install()


def compare_with_stock(rank: int, folder: str) -> tuple[bool, bool, list[str]]:
    """Return whether attention equals stock with the xfuser of a folder, whether the plugin's all-to-all ran, and the
    messages."""
    use_xfuser(folder)
    from xfuser.model_executor.layers import usp

    from benchmarks import bare_runtime
    from tests.xdit.attention import test_all_to_all
    from xfuser_cocodiff.xdit.session.session import Session, active

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("xfuser_cocodiff").addHandler(handler)
    test_all_to_all.start(rank)
    test_all_to_all.use("node=2", cocodiff_mode="fast")
    tensors = [test_all_to_all.random(i, 2, 4, 6, 8, dtype=torch.float32) for i in range(3)]
    session = active()
    session.begin_run(3)
    found = []
    for _ in range(3):
        found.append(usp.USP(*tensors))
        session.end_step()
    uses_plugin = bool(session.traffic.calls)
    bare_runtime.use_session(Session())
    stock = usp.USP(*tensors)
    return all(torch.equal(each, stock) for each in found), uses_plugin, messages


STEP = "    if combine_qkv_a2a is None:\n"


def other_xfuser(folder: Path, old: str, new: str, path: str = "model_executor/layers/usp.py") -> None:
    """Write a copy of xfuser with a text of one file replaced."""
    release = importlib.util.find_spec("xfuser").submodule_search_locations[0]
    shutil.copytree(release, folder / "xfuser", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "xfuser" / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (STEP, f"    query = query * 2\n{STEP}"),
        slow("    kv_head_repeat: int = 1,\n", "    kv_head_repeat: int = 1,\n    scale: float = 1.0,\n"),
        slow("_has_kv_cache", "_holds_kv_cache"),
        slow("_sdpa_all_to_all_single", "_exchanged"),
        # An all-to-all that also changes values.
        slow(".permute(2, 1, 0, 3, 4).reshape(b, h // world_size, -1, d)\n", None),
    ],
)
def test_unknown_usp_runs_unchanged_and_lossless(tmp_path: Path, old: str, new: str | None) -> None:
    other_xfuser(tmp_path, old, new or old.replace("\n", " * 2\n"))
    results = ranks.run(compare_with_stock, 2, str(tmp_path))
    expected = old != "_sdpa_all_to_all_single"  # which all four all-to-alls call
    assert [(same, uses_plugin) for same, uses_plugin, _ in results] == [(True, expected)] * 2
    [line] = results[0][2]
    assert "USP is unknown" in line and "install version 0.7.0" in line and "mode 'fast' has no effect" in line


def next_xfuser(folder: Path) -> None:
    """Write a copy of xfuser with what is known of its next version."""
    other_xfuser(folder, "ATTENTION_FUNCTION_REGISTRY", "FUNCTIONS", "core/distributed/attention_backend.py")
    attention, usp = folder / "xfuser/core/attention", folder / "xfuser/model_executor/layers/usp.py"
    attention.mkdir()
    (attention / "__init__.py").touch()
    (folder / "xfuser/core/distributed/attention_backend.py").rename(attention / "spec.py")
    (attention / "registry.py").write_text("from xfuser.core.attention.spec import FUNCTIONS\n")
    moved = {
        "xfuser.core.distributed.attention_backend": "xfuser.core.attention.spec",
        "xfuser.core.distributed import attention_backend as": "xfuser.core.attention import spec as",
    }
    for file in (folder / "xfuser").rglob("*.py"):
        text = file.read_text()
        for old, new in moved.items():
            text = text.replace(old, new)
        file.write_text(text)
    text, parameter = usp.read_text(), "        kv_head_repeat: int = 1,\n"
    for old, new in {
        "    ATTENTION_FUNCTION_REGISTRY,\n": "    FUNCTIONS,\n",
        "ATTENTION_FUNCTION_REGISTRY.get(": "FUNCTIONS.get(",
        "        return key, value\n": "        return key, value, None\n",
        "return key[:, :, :valid_kv_len], value[:, :, :valid_kv_len]\n": "return key, value, valid_kv_len\n",
        "key, value = _trim_trailing_kv_padding(": "key, value, _ = _trim_trailing_kv_padding(",
        parameter: f"{parameter}        attention_a2a_enabled=True,\n        attention_a2a_pending=None,\n",
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    usp.write_text(text)


def test_the_next_xfuser_runs_lossless_over_the_plugins_all_to_all(tmp_path: Path) -> None:
    next_xfuser(tmp_path)
    results = ranks.run(compare_with_stock, 2, str(tmp_path))
    assert [(same, uses_plugin) for same, uses_plugin, _ in results] == [(True, True)] * 2
    [line] = [line for line in results[0][2] if "install" in line]
    assert "USP is unknown" in line and "install version 0.7.0" in line and "mode 'fast' has no effect" in line


def test_few_names_of_xdit_turn_everything_off() -> None:
    """Without them the plugin could not be enabled; each other one costs its feature."""
    machine = platform.detect()
    of_machine = {row.name for row in platform.patches(machine)} if machine else set()
    required = {row.name for row in activation.patch_table() if row.feature is None} - of_machine
    arguments = ("add_cli_args", "add_runner_args", "__init__", "__dataclass_fields__", "create_config")
    read = ("get_runtime_state", "get_sp_group", "get_ring_parallel_world_size")
    read += ("model_parallel_is_initialized", "runtime_state_is_initialized")
    all_to_alls = ("_ft_c_input", "_ft_c_output", "_combined_qkv", "_combined_gqa_qkv")  # rows of known ones only
    assert {name for name in required if name.startswith(("xfuser", "yunchang", "diffusers"))} == {
        *(f"xfuser.config.args.xFuserArgs.{name}" for name in arguments),
        "xfuser.core.distributed.runtime_state.initialize_runtime_state",
        *(f"xfuser.core.distributed.{name}" for name in read),
        *(f"{usp_versions.MODULE}.{name}" for name in ("USP", *(f"{each}_all_to_all" for each in all_to_alls))),
        "yunchang.globals.PROCESS_GROUP",
    }


PADDING = "padding of heads that are not divisible"


def test_missing_name_costs_its_feature_only(tmp_path: Path) -> None:
    name = "_check_model_and_parallel_config"
    other_xfuser(tmp_path, name, f"{name}_now", "core/distributed/runtime_state.py")
    results = ranks.run(compare_with_stock, 2, str(tmp_path))
    assert [(same, uses_plugin) for same, uses_plugin, _ in results] == [(True, True)] * 2
    [line] = [message for message in results[0][2] if " is off: " in message]
    assert PADDING in line and name in line and "install a tested version of xfuser" in line


def configs_without_and_with_the_flag(rank: int, folder: str) -> list[str]:
    """Return what is said of a config without the flag, and the error with it."""
    use_xfuser(folder)
    from xfuser import xFuserArgs

    engine_config, _ = xFuserArgs(model="small", ulysses_degree=2).create_config()
    with pytest.raises(ValueError) as raised:
        xFuserArgs(model="small", ulysses_degree=2, use_cocodiff=True).create_config()
    return [str(engine_config.parallel_config.sp_config.cocodiff), str(raised.value)]


def test_missing_required_name_is_an_error_on_all_ranks_with_the_flag(tmp_path: Path) -> None:
    """It is detected at the start, though it is only used in a run."""
    name = "model_parallel_is_initialized"
    other_xfuser(tmp_path, f"    {name},\n", "", "core/distributed/__init__.py")
    error = f"xfuser.core.distributed.{name} does not exist; install a tested version of xfuser"
    results = ranks.run(configs_without_and_with_the_flag, 2, str(tmp_path))
    assert results == [["None", f"RuntimeError: {error}"]] * 2


def features_differ(rank: int) -> None:
    from xfuser import xFuserArgs

    if rank == 1:
        activation._installed.off[PADDING] = "xfuser.no_such_name does not exist"
    xFuserArgs(model="small", ulysses_degree=2, use_cocodiff=True).create_config()


def test_features_that_differ_between_ranks_are_an_error_on_all() -> None:
    [error] = {str(outcome) for outcome in ranks.outcomes(features_differ, 2)}
    assert f"what is off with this xfuser: rank 0: ''; rank 1: '{PADDING}'" in error


def test_installed_usp_is_known() -> None:
    assert usp_versions.is_known()
    assert activation.xdit_version() in usp_versions.DIGESTS
