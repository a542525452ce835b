"""Whole pipelines of the four paper models, run by xDiT's own runner: the plugin's latents are stock's, bit for bit."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff.lab.models.families import FAMILIES

pytestmark = pytest.mark.usefixtures("hub")

TOPOLOGIES = {2: ["flat", "2x1"], 4: ["flat", "2x2"], 6: ["flat", "3x2"], 8: ["flat", "2x2x2"], 12: ["flat", "2x3x2"]}
SIZE = ["--height", "128", "--width", "128", "--num_inference_steps", "3", "--seed", "3"]
# Text that divides by every degree here, and SD3.5's 333 tokens and Qwen-Image's prompts, which do not.
MODELS = {
    "FLUX.1-dev": ["--max_sequence_length", "32", "--prompt", "a photo of a cat"],
    "FLUX.2-dev": ["--max_sequence_length", "48", "--prompt", "a photo of a cat"],
    "SD3.5": ["--prompt", "a photo of a cat"],
    "Qwen-Image": ["--prompt", "a photo of a cat", "--guidance_scale", "4", "--negative_prompt", "old coins"],
}


class Run:
    """xDiT's runner on this rank, as the xdit command sets it up, but in fp32: processors that know no bf16 take three
    times as long with it."""

    def __init__(self, rank: int, world_size: int, arguments: list[str], dtype: torch.dtype = torch.float32) -> None:
        from xfuser.config import FlexibleArgumentParser, xFuserArgs
        from xfuser.core.distributed import init_distributed_environment
        from xfuser.runner import xFuserModelRunner

        init_distributed_environment(rank=rank, world_size=world_size)
        values = vars(xFuserArgs.add_runner_args(FlexibleArgumentParser()).parse_args(arguments))
        self.runner = xFuserModelRunner(values)
        self.inputs = self.runner.preprocess_args(values)
        self.runner.initialize(self.inputs)
        if dtype != torch.bfloat16:  # in which xDiT loads it
            self.runner.model.pipe.to(dtype)
        self.latents: torch.Tensor | None = None
        # Nobody looks at the picture, which takes as long as the latents.
        self.runner.model.pipe.vae.decode = lambda latents, **_: (latents[:, :3],)
        scheduler = self.runner.model.pipe.scheduler
        object.__setattr__(scheduler, "step", self._keep(scheduler.step))

    def _keep(self, step: Callable) -> Callable:
        def keeping(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            self.latents = output[0] if isinstance(output, tuple) else output.prev_sample
            return output

        return keeping

    def use(self, topology: str | None, head_groups: int = 1) -> None:
        """Go on with the plugin, V first, or without it."""
        from xfuser_cocodiff.engine.settings.config import CocoDiffConfig, Overlap
        from xfuser_cocodiff.engine.topology.plans import Plan

        given = self._topology(topology) if topology else None
        overlap = Overlap(v_first=True, head_groups=head_groups)
        self._go_on(given and CocoDiffConfig(topology=given, plan=Plan.hierarchical(given), overlap=overlap))

    def by(self, mode: str, topology: str = "2x2", **options: Any) -> None:
        """Go on in a mode. Whatever approximates needs `step` of the scheduler's class, where the plugin sees it."""
        from xfuser_cocodiff.engine.settings.config import CocoDiffConfig

        options = {"slow_axes": ("node",), **options}
        self._go_on(CocoDiffConfig(topology=self._topology(topology), mode=mode, **options))

    def _topology(self, text: str) -> Any:
        from xfuser_cocodiff.engine.topology.topology import Topology

        return Topology.parse(text, self.runner.model.engine_config.parallel_config.ulysses_degree)

    def _go_on(self, config: Any) -> None:
        from xfuser.core.distributed import initialize_runtime_state

        model = self.runner.model
        model.engine_config.parallel_config.sp_config.cocodiff = config
        initialize_runtime_state(model._get_runtime_state_pipeline(), model.engine_config)

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Run the pipeline and return its final latents."""
        self.runner.run({**self.inputs, **inputs})
        return self.latents.clone()


def moved() -> set[str]:
    """Axes along which the plugin moved anything since last asked."""
    from xfuser_cocodiff.xdit.session.session import active

    axes = set(active().traffic.calls)
    active().traffic.reset()
    return axes


def v_first(model: str) -> bool:
    """Whether V goes first in every layer that was called often enough to tell, from where the table of families says,
    and there are such layers."""
    from xfuser_cocodiff.xdit.session.session import active

    known = [signature for signature in active().layers.signatures if signature.candidates]
    assert all(signature.ready for signature in known), [signature.status for signature in known]
    [family] = (family for family in FAMILIES if model in family.small)
    assert {path for signature in known for path in signature.recipe.paths} == {*family.v_first}
    return bool(known)


def compare(rank: int, world_size: int, arguments: list[str], topologies: list[str], dtype: torch.dtype) -> None:
    run = Run(rank, world_size, arguments, dtype)
    stock = run()
    assert moved() == set()
    assert torch.isfinite(stock).all()
    assert stock.dtype == dtype or stock.dtype == torch.float32
    for head_groups, topology in enumerate(topologies, 1):
        run.use(topology, head_groups)
        assert torch.equal(run(), stock), f"{topology} differs from stock"
        assert v_first(arguments[1])
        sizes = run.runner.model.engine_config.parallel_config.sp_config.cocodiff.topology.axes
        assert moved() == {axis.name for axis in sizes if axis.size > 1}
    run.use(None)
    assert torch.equal(run(), stock), "stock differs after the plugin was in use"
    assert moved() == set()


def check(model: str, degree: int, *more: str, world_size: int | None = None, dtype: Any = torch.float32) -> None:
    arguments = ["--model", model, "--ulysses_degree", str(degree), *SIZE, *MODELS[model], *more]
    world_size = world_size or degree
    ranks.run(compare, world_size, world_size, arguments, TOPOLOGIES[degree], dtype)


@pytest.mark.parametrize(
    ("model", "degree"),
    slow_but(
        # SD3.5's are compared where its two guidances are parted.
        [("FLUX.1-dev", 4), ("Qwen-Image", 2)],
        itertools.product(MODELS, [2, 4, 8]),
    ),
)
def test_latents_equal_stock(model: str, degree: int) -> None:
    check(model, degree)


@pytest.mark.slow  # test_transformers has three ranks, and eight
@pytest.mark.parametrize("degree", [6, 12])
def test_degrees_that_are_no_powers_of_two(degree: int) -> None:
    check("Qwen-Image", degree, "--height", "192", "--width", "192")


@pytest.mark.parametrize("model", slow_but(["FLUX.2-dev"], MODELS))
def test_bf16(model: str) -> None:
    check(model, 4, dtype=torch.bfloat16)


@pytest.mark.parametrize("model", slow_but(["FLUX.1-dev"], MODELS))
def test_batch_of_three(model: str) -> None:
    negative = ["--negative_prompt", "coins"] if model == "Qwen-Image" else []
    check(model, 2, "--prompt", "a cat", "the surface of the moon", "cell bodies", *negative)


@pytest.mark.parametrize("degree", slow_but([2], [2, 4]))
def test_cfg_parallel(degree: int) -> None:
    check("SD3.5", degree, "--use_cfg_parallel", world_size=2 * degree)


def compare_stages(rank: int, world_size: int, arguments: list[str], topology: str) -> None:
    run = Run(rank, world_size, arguments, torch.bfloat16)  # which stages are told to receive
    run.use(None)
    run.runner.run(run.inputs)
    stock, run.latents = run.latents, None
    assert moved() == set()
    for head_groups in (1, 2):
        run.use(topology, head_groups)
        run.runner.run(run.inputs)
        assert (stock is None) == (run.latents is None)  # only the last stage has them
        assert stock is None or torch.equal(run.latents, stock)
        assert moved() == {axis.partition("=")[0] for axis in topology.split(",")}


@pytest.mark.parametrize(
    ("model", "degree", "topology"),
    slow_but(
        [("FLUX.1-dev", 2, "gpu=2")],
        [(model, *each) for model in ("FLUX.1-dev", "SD3.5") for each in ((2, "gpu=2"), (4, "node=2,gpu=2"))],
    ),
)
def test_pipefusion(model: str, degree: int, topology: str) -> None:
    """Two stages, each with a Ulysses group of its own. Stages keep K and V of patches that did not come this time."""
    more = ["--pipefusion_parallel_degree", "2", "--num_inference_steps", "5"]
    arguments = ["--model", model, "--ulysses_degree", str(degree), *SIZE, *MODELS[model], *more]
    ranks.run(compare_stages, 2 * degree, 2 * degree, arguments, topology)


@pytest.mark.slow  # groups beside it are quick
def test_data_parallel() -> None:
    check("FLUX.1-dev", 2, "--data_parallel_degree", "2", "--prompt", "a cat", "a rocket", world_size=4)


def sizes_and_models(rank: int, world_size: int) -> None:
    """Two models in one process, each run twice in a row and then at another size."""
    runs = {}
    for model, arguments in list(MODELS.items())[::3]:
        arguments = ["--model", model, "--ulysses_degree", str(world_size), *SIZE, *arguments]
        runs[model] = Run(rank, world_size, arguments)
    sizes = [{}, {}, {"height": 192, "width": 128}]
    for run in runs.values():
        run.use(None)
        stock = [run(**size) for size in sizes]
        run.use("2x2")
        for size, expected in zip(sizes, stock, strict=True):
            assert torch.equal(run(**size), expected)
        assert moved() == {"node", "gpu"}


def test_two_models_two_runs_another_size() -> None:
    ranks.run(sizes_and_models, 4, 4)
