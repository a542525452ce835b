"""The patch series in patches/: it applies to the release, xDiT runs with it alone, and the plugin then patches less.

Tests of the patched xDiT run in a new interpreter, with the patched copy first on its path.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import ranks

ROOT = Path(__file__).parent.parent
SERIES = sorted((ROOT / "patches").glob("*.patch"))

pytestmark = pytest.mark.skipif(importlib.metadata.version("xfuser") != "0.7.0", reason="the series is for 0.7.0")


def git(folder: Path, *arguments: str) -> None:
    """Run git in a folder, isolated from repositories of its parents."""
    who = {f"GIT_{role}_{part}": "test" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    environment = {**os.environ, **who, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(["git", "-C", folder, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def register(folder: Path, name: str, groups: dict[str, list[str]]) -> None:
    """Register entry points for interpreters that have the folder on their path."""
    metadata = folder / f"{name}-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    lines = [line for group, points in groups.items() for line in (f"[{group}]", *points)]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def declared_entry_points() -> dict[str, list[str]]:
    """Return the entry points of setup.py."""
    keywords = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.keyword)]
    return ast.literal_eval(next(node.value for node in keywords if node.arg == "entry_points"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the patched xDiT, the plugin's entry points, and those of a broken plugin."""
    folder = tmp_path_factory.mktemp("site")
    release = importlib.util.find_spec("xfuser").submodule_search_locations[0]
    shutil.copytree(release, folder / "xfuser", ignore=shutil.ignore_patterns("__pycache__"))
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "release"], ["am", "-q", *map(str, SERIES)]):
        git(folder, *arguments)
    register(folder, "xfuser_cocodiff", declared_entry_points())
    register(folder, "broken", {"xfuser.plugins": ["broken=no_such_module:gone"]})
    return folder


def call_patched(site: Path, function: Callable, **environment: str) -> Any:
    """Call a function of this module in an interpreter with the patched xDiT; return its result and all output."""
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import json, tests.{Path(__file__).stem} as t; print(json.dumps(t.{function.__name__}()))",
        ],
        env={**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *printed, last = done.stdout.splitlines()
    return json.loads(last), "\n".join([*printed, done.stderr])


def create_groups(**degrees: int) -> None:
    """Create xDiT's process groups, once."""
    from xfuser.core.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )

    if not model_parallel_is_initialized():
        init_distributed_environment(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        initialize_model_parallel(**degrees)


def start(heads: int, **options: Any) -> None:
    """Create one Ulysses group of all ranks and a runtime state."""
    from types import SimpleNamespace

    from xfuser import xFuserArgs
    from xfuser.core.distributed import get_runtime_state, initialize_runtime_state

    world = int(os.environ["WORLD_SIZE"])
    create_groups(sequence_parallel_degree=world, ulysses_degree=world)
    transformer = SimpleNamespace(config=SimpleNamespace(num_attention_heads=heads))
    config = xFuserArgs(model="tiny", ulysses_degree=world, **options).create_config()[0]
    initialize_runtime_state(SimpleNamespace(transformer=transformer), config)
    get_runtime_state().max_condition_sequence_length = TEXT


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of a tensor."""
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm()).item()


def long_context_error(rank: int, ring: int) -> float:
    """Return the largest error of attention by yunchang: of StepVideo's, with and without a causal mask, and Sana's."""
    from xfuser.core.long_ctx_attention import xFuserLongContextAttention
    from xfuser.model_executor.layers.attention_processor import xFuserSanaLinearAttnProcessor2_0

    create_groups(sequence_parallel_degree=2, ulysses_degree=2 // ring, ring_degree=ring)
    whole = [noise(seed, 2, 10, 4, 8) for seed in range(3)]  # (batch, tokens, heads, dim)
    own = [tensor.chunk(2, dim=1)[rank] for tensor in whole]
    q, k, v = (tensor.transpose(1, 2) for tensor in whole)
    scores = q.relu() @ k.relu().mT
    sanas = xFuserSanaLinearAttnProcessor2_0().hybrid_seq_parallel_attn
    attend = torch.nn.functional.scaled_dot_product_attention
    outputs = [
        (xFuserLongContextAttention()(None, *own), attend(q, k, v)),
        (xFuserLongContextAttention()(None, *own, causal=True), attend(q, k, v, is_causal=True)),
        (sanas(None, *own).unflatten(-1, (4, 8)), scores @ v / scores.sum(-1, keepdim=True)),
    ]
    return max(relative_error(output, full.transpose(1, 2).chunk(2, dim=1)[rank]) for output, full in outputs)


TEXT = 4
"""Number of text tokens of FLUX.1."""
FLUX = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
FLUX |= {"joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6)}


def with_equal_weights(xdit: type, diffusers: type, sizes: dict[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return xDiT's transformer and that of diffusers, with the same weights."""
    torch.manual_seed(0)
    transformer, reference = xdit(**sizes).eval(), diffusers(**sizes).eval()
    reference.load_state_dict(transformer.state_dict())
    return transformer, reference


def flux(tokens: int) -> tuple[Callable[[], torch.Tensor], ...]:
    """Return functions that run FLUX.1 in xDiT, and in diffusers with the padding that xDiT adds."""
    from diffusers import FluxTransformer2DModel
    from xfuser.model_executor.models.transformers.transformer_flux import xFuserFlux1Transformer2DWrapper

    transformer, reference = with_equal_weights(xFuserFlux1Transformer2DWrapper, FluxTransformer2DModel, FLUX)
    text = {"encoder_hidden_states": noise(1, 1, TEXT, 16), "pooled_projections": noise(2, 1, 16)}
    inputs = {**text, "timestep": torch.ones(1), "txt_ids": torch.zeros(TEXT, 3), "return_dict": False}
    image, ids = noise(3, 1, tokens, 4), torch.arange(3.0 * tokens).view(tokens, 3)
    pad = tokens % 2
    padded = torch.nn.functional.pad(image, (0, 0, 0, pad)), torch.nn.functional.pad(ids, (0, 0, 0, pad))
    return (
        lambda: transformer(image, img_ids=ids, **inputs)[0],
        lambda: reference(padded[0], img_ids=padded[1], **inputs)[0][:, :tokens],
    )


@torch.no_grad()
def flux_error(rank: int) -> float:
    """Return the error of FLUX.1 with a number of tokens that is not divisible by the ranks."""
    start(heads=2)
    xdit, diffusers = flux(tokens=7)
    return relative_error(xdit(), diffusers())


QWEN = {"in_channels": 4, "out_channels": 1, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
QWEN |= {"joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6)}


def qwen(text: int, rows: int, lengths: tuple[int, int] | None) -> tuple[Callable[[], torch.Tensor], ...]:
    """Return functions that run Qwen-Image in xDiT and in diffusers, for two texts and images of 3 * `rows` tokens."""
    from diffusers import QwenImageTransformer2DModel
    from xfuser.model_executor.models.transformers.transformer_qwen import xFuserQwenImageTransformerWrapper

    inputs = {
        "hidden_states": noise(1, 2, 3 * rows, 4),
        "encoder_hidden_states": noise(2, 2, text, 16),
        "encoder_hidden_states_mask": lengths and torch.arange(text) < torch.tensor(lengths)[:, None],
        "timestep": torch.ones(2),
        "img_shapes": [[(1, rows, 3)]] * 2,
        "return_dict": False,
    }
    models = with_equal_weights(xFuserQwenImageTransformerWrapper, QwenImageTransformer2DModel, QWEN)
    return tuple(lambda model=model: model(**inputs)[0] for model in models)


@torch.no_grad()
def qwen_errors(rank: int) -> list[float]:
    """Return the errors of Qwen-Image: divisible text, other text, another image too, texts of different lengths."""
    start(heads=2)
    cases = ((6, 2, None), (5, 2, None), (5, 1, None), (6, 2, (6, 3)), (5, 1, (2, 5)))
    return [relative_error(xdit(), diffusers()) for xdit, diffusers in (qwen(*case) for case in cases)]


Z_IMAGE = {"in_channels": 4, "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
Z_IMAGE |= {"cap_feat_dim": 16, "axes_dims": [4, 6, 6]}


def reload_z_image(rank: int) -> list[bool]:
    """Return whether a saved and loaded Z-Image has the same sizes, and the same weights."""
    from diffusers import ZImageTransformer2DModel
    from xfuser.model_executor.models.transformers.transformer_z_image import xFuserZImageTransformer2DWrapper

    saved = ZImageTransformer2DModel(**Z_IMAGE)
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        loaded = xFuserZImageTransformer2DWrapper.from_pretrained(folder)
    weights = loaded.state_dict()
    return [
        all(loaded.config[name] == size for name, size in Z_IMAGE.items()),
        all(torch.equal(weights[name], weight) for name, weight in saved.state_dict().items()),
    ]


def without_plugin() -> dict[str, Any]:
    """Return results of xDiT without the plugin and without Triton."""
    sys.modules["triton"] = None
    import xfuser.runner  # the xdit command, which imports every model

    with mock.patch("torch.xpu.is_available", lambda: True):  # as on an XPU
        assert xfuser.envs.get_device(3) == torch.device("xpu", 3)
        assert (xfuser.envs.get_device_name(), xfuser.envs.get_torch_distributed_backend()) == ("xpu", "xccl")
        assert xfuser.envs.supports_usp() and xfuser.envs.device_module() is torch.xpu
    assert not any(name.startswith("xfuser_cocodiff") for name in sys.modules)
    return {
        "file": xfuser.__file__,
        "errors": [ranks.run(case, 2) for case in (flux_error, qwen_errors)],
        "without a ring": ranks.run(long_context_error, 2, 1),
        "in a ring": ranks.run(long_context_error, 2, 2),
        "Z-Image": ranks.run(reload_z_image, 1),
    }


@pytest.mark.slow  # copies xDiT and applies the series; quick tests use the release
def test_patched_xdit_pads_correctly_and_has_long_context_and_small_z_images(site: Path) -> None:
    results, _ = call_patched(site, without_plugin, XDIT_PLUGINS="")
    assert results["file"] == str(site / "xfuser" / "__init__.py")
    flux, qwen = results["errors"]
    assert max(*flux, *qwen[0], *qwen[1]) < 1e-5
    assert max(*results["without a ring"], *results["in a ring"]) < 1e-5
    assert results["Z-Image"] == [[True, True]]


def with_plugin() -> list:
    """Return the modules of xDiT at the time of the entry point, and the states of all patches."""
    from xfuser_cocodiff import autoload, install

    plug_in, before = autoload.plug_in, []

    def record() -> None:
        before.extend(name for name in sys.modules if name.partition(".")[0] == "xfuser")
        plug_in()

    autoload.plug_in = record
    importlib.import_module("xfuser.runner")
    from xfuser_cocodiff.tools.reporting import environment
    from xfuser_cocodiff.xdit.integration import activation

    installed = activation._installed
    plug_in()
    assert install() and activation._installed is installed
    return [before, {state["symbol"]: state["state"] for state in environment.patch_states()}]


@pytest.mark.slow  # needs the patched copy; test_activation tests the entry point quickly
def test_patched_xdit_loads_the_plugin_which_patches_less(site: Path) -> None:
    from xfuser_cocodiff.tools.launching import cpu_host
    from xfuser_cocodiff.tools.reporting import environment

    (before, states), printed = call_patched(site, with_plugin)
    assert set(before) == {"xfuser", "xfuser.compat", "xfuser.logger", "xfuser.plugins"}
    assert "Plugin broken (no_such_module:gone) failed" in printed
    superfluous = {site for site, state in states.items() if state == "not needed"}
    rows = [row for row in cpu_host.patches() if row.module.startswith("xfuser.")]
    assert superfluous == {row.name for row in rows if row.condition}
    assert superfluous and {state for site, state in states.items() if site not in superfluous} <= {
        "applied",
        "ready",
        "used",
    }
    assert not any(state["state"] == "not needed" for state in environment.patch_states())  # in the release
