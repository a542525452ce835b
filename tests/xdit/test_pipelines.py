"""Whole pipelines of the four paper models, run by xDiT's own runner: exact mode is bit-identical to stock."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import pipefusion_over_gloo, ranks
from tests.quick import slow_but
from tests.xdit.families import FAMILIES
from xfuser_cocodiff.xdit.patching.patch import PatchSet

pytestmark = pytest.mark.usefixtures("hub")

TOPOLOGIES = {2: ["flat", "2x1"], 4: ["flat", "2x2"], 6: ["flat", "3x2"], 8: ["flat", "2x2x2"], 12: ["flat", "2x3x2"]}
SIZE = ["--height", "128", "--width", "128", "--num_inference_steps", "3", "--seed", "3"]
# The text is divisible by every degree here, except SD3.5's 333 tokens and Qwen-Image's prompts.
MODELS = {
    "FLUX.1-dev": ["--max_sequence_length", "32", "--prompt", "a photo of a cat"],
    "FLUX.2-dev": ["--max_sequence_length", "48", "--prompt", "a photo of a cat"],
    "SD3.5": ["--prompt", "a photo of a cat"],
    "Qwen-Image": ["--prompt", "a photo of a cat", "--guidance_scale", "4", "--negative_prompt", "old coins"],
}


class Run:
    """Runner of xDiT on this rank, as the xdit command sets it up, but in fp32: processors without bf16 instructions
    take three times as long in bf16."""

    def __init__(self, rank: int, world_size: int, arguments: list[str], dtype: torch.dtype = torch.float32) -> None:
        from xfuser.config import FlexibleArgumentParser, xFuserArgs
        from xfuser.core.distributed import init_distributed_environment
        from xfuser.runner import xFuserModelRunner

        init_distributed_environment(rank=rank, world_size=world_size)
        values = vars(xFuserArgs.add_runner_args(FlexibleArgumentParser()).parse_args(arguments))
        self.runner = xFuserModelRunner(values)
        self.inputs = self.runner.preprocess_args(values)
        self.runner.initialize(self.inputs)
        if dtype != torch.bfloat16:  # the dtype in which xDiT loads it
            self.runner.model.pipe.to(dtype)
        self.latents: torch.Tensor | None = None
        # The picture is not needed, and decoding takes as long as denoising.
        self.runner.model.pipe.vae.decode = lambda latents, **_: (latents[:, :3],)
        scheduler = self.runner.model.pipe.scheduler
        object.__setattr__(scheduler, "step", self._keep(scheduler.step))

    def _keep(self, step: Callable) -> Callable:
        def keeping(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            self.latents = output[0] if isinstance(output, tuple) else output.prev_sample
            return output

        return keeping

    def use_plugin(self, topology: str | None, head_groups: int = 1) -> None:
        """Run in exact mode with V-First from now on, or as stock if `topology` is None."""
        from xfuser_cocodiff.engine.topology.plans import Plan
        from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap

        parsed = self._topology(topology) if topology else None
        overlap = Overlap(v_first=True, head_groups=head_groups)
        self._use_config(parsed and CocoDiffConfig(topology=parsed, plan=Plan.hierarchical(parsed), overlap=overlap))

    def use_mode(self, mode: str, topology: str = "2x2", **options: Any) -> None:
        """Run in a mode from now on. Lossy modes need the `step` of the scheduler's class, which the plugin patches."""
        from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

        options = {"slow_axes": ("node",), **options}
        self._use_config(CocoDiffConfig(topology=self._topology(topology), mode=mode, **options))

    def _topology(self, text: str) -> Any:
        from xfuser_cocodiff.engine.topology.topology import Topology

        return Topology.parse(text, self.runner.model.engine_config.parallel_config.ulysses_degree)

    def _use_config(self, config: Any) -> None:
        from xfuser.core.distributed import initialize_runtime_state

        model = self.runner.model
        model.engine_config.parallel_config.sp_config.cocodiff = config
        initialize_runtime_state(model._get_runtime_state_pipeline(), model.engine_config)

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Run the pipeline and return its final latents."""
        self.runner.run({**self.inputs, **inputs})
        return self.latents.clone()


def used_axes() -> set[str]:
    """Return the axes along which the plugin has communicated since the last call."""
    from xfuser_cocodiff.xdit.session.session import active

    axes = set(active().traffic.calls)
    active().traffic.reset()
    return axes


def v_first(model: str) -> bool:
    """Return whether any layer has its schedules; assert that V goes first in each, from the projections that the table
    of families names."""
    from xfuser_cocodiff.xdit.session.session import active

    known = [signature for signature in active().layers.signatures if signature.candidates]
    assert all(signature.ready for signature in known), [signature.status for signature in known]
    [family] = (family for family in FAMILIES if model in family.small_models)
    assert {path for signature in known for path in signature.structure.recipe.paths} == {*family.v_first}
    return bool(known)


def compare(rank: int, world_size: int, arguments: list[str], topologies: list[str], dtype: torch.dtype) -> None:
    run = Run(rank, world_size, arguments, dtype)
    stock = run()
    assert used_axes() == set()
    assert torch.isfinite(stock).all()
    assert stock.dtype == dtype or stock.dtype == torch.float32
    for head_groups, topology in enumerate(topologies, 1):
        run.use_plugin(topology, head_groups)
        assert torch.equal(run(), stock), f"{topology} differs from stock"
        assert v_first(arguments[1])
        sizes = run.runner.model.engine_config.parallel_config.sp_config.cocodiff.topology.axes
        assert used_axes() == {axis.name for axis in sizes if axis.size > 1}
    run.use_plugin(None)
    assert torch.equal(run(), stock), "stock differs after the plugin was used"
    assert used_axes() == set()


def check(model: str, degree: int, *more: str, world_size: int | None = None, dtype: Any = torch.float32) -> None:
    arguments = ["--model", model, "--ulysses_degree", str(degree), *SIZE, *MODELS[model], *more]
    world_size = world_size or degree
    ranks.run(compare, world_size, world_size, arguments, TOPOLOGIES[degree], dtype)


@pytest.mark.parametrize(
    ("model", "degree"),
    slow_but(
        # FLUX.1 is compared by batches, FLUX.2 in bf16, and SD3.5 with CFG parallelism.
        [("Qwen-Image", 2)],
        [("FLUX.1-dev", 4), ("FLUX.2-dev", 2), ("SD3.5", 4), ("Qwen-Image", 2), *((model, 8) for model in MODELS)],
    ),
)
def test_latents_equal_stock(model: str, degree: int) -> None:
    check(model, degree)


@pytest.mark.slow  # test_transformers has bf16
@pytest.mark.parametrize("model", MODELS)
def test_bf16_latents_equal_stock(model: str) -> None:
    check(model, 4, dtype=torch.bfloat16)


@pytest.mark.slow  # its process groups are quick in integration/test_config_fields
@pytest.mark.parametrize("degree", [2, 4])
def test_cfg_parallel_equals_stock(degree: int) -> None:
    check("SD3.5", degree, "--use_cfg_parallel", world_size=2 * degree)


def compare_stages(rank: int, world_size: int, arguments: list[str], topology: str) -> None:
    PatchSet(pipefusion_over_gloo.patches(), "xfuser").install()
    run = Run(rank, world_size, arguments, torch.bfloat16)  # the dtype that stages expect to receive
    run.use_plugin(None)
    run.runner.run(run.inputs)
    stock, run.latents = run.latents, None
    assert used_axes() == set()
    for head_groups in (1, 2):
        run.use_plugin(topology, head_groups)
        run.runner.run(run.inputs)
        assert (stock is None) == (run.latents is None)  # only the last stage has them
        assert stock is None or torch.equal(run.latents, stock)
        assert used_axes() == {axis.partition("=")[0] for axis in topology.split(",")}


@pytest.mark.slow  # eight ranks; the start of such a session is quick in integration/test_config_fields
@pytest.mark.parametrize(
    ("model", "degree", "topology"),
    [("FLUX.1-dev", 4, "node=2,gpu=2"), ("SD3.5", 2, "gpu=2")],  # all patches as long as a patch and the text
)
def test_pipefusion_equals_stock(model: str, degree: int, topology: str) -> None:
    """Two stages, each with its own Ulysses group. Stages keep K and V of patches that are not sent in a step."""
    more = ["--pipefusion_parallel_degree", "2", "--num_inference_steps", "5"]
    arguments = ["--model", model, "--ulysses_degree", str(degree), *SIZE, *MODELS[model], *more]
    ranks.run(compare_stages, 2 * degree, 2 * degree, arguments, topology)
