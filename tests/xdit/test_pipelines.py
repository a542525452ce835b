"""Whole pipelines of xDiT's runner: exact mode is bit-identical to stock, and a lossy mode codes every step."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import hub
from tests import pipefusion_over_gloo, ranks
from tests.quick import slow_but
from tests.small_pipelines import wan
from tests.xdit.families import FAMILIES
from xfuser_cocodiff.xdit.patching.patch import PatchSet

pytestmark = pytest.mark.usefixtures("hub")

HOME = Path(os.environ["HF_HOME"])
STEPS = 3
SIZE = ["--height", "128", "--width", "128", "--num_inference_steps", str(STEPS), "--seed", "3"]
CAT = ["--prompt", "a photo of a cat"]
GUIDED = [*CAT, "--negative_prompt", "old coins"]
PICTURE = str(HOME / hub.INPUT_IMAGE)
EDITED = ["--height", "256", "--width", "256", "--input_images", PICTURE]
VIDEO = [*GUIDED, "--num_frames", "9"]
# The text is divisible by every degree here, except SD3.5's 333 tokens and Qwen-Image's prompts.
PAPER = {
    "FLUX.1-dev": [*CAT, "--max_sequence_length", "32"],
    "FLUX.2-dev": [*CAT, "--max_sequence_length", "48"],
    "SD3.5": CAT,
    "Qwen-Image": [*GUIDED, "--guidance_scale", "4"],
}
MODELS = {
    **PAPER,
    "FLUX.1-Kontext-dev": [*CAT, *EDITED, "--max_sequence_length", "32"],
    "Qwen-Image-Edit": [*GUIDED, *EDITED],
    "FLUX.2-klein-4B": CAT,
    "Lumina2": GUIDED,
    "Wan2.1-T2V": VIDEO,
    "Wan2.2-T2V": VIDEO,
    "Hunyuanvideo-1.5": [*VIDEO, "--task", "t2v"],
    "Wan2.1-I2V": [*VIDEO, "--input_images", PICTURE],
    "Wan2.2-TI2V": [*VIDEO, "--task", "i2v", "--input_images", PICTURE],
    "Wan2.1-VACE-1.3B": [*VIDEO, "--input_images", PICTURE, PICTURE],
}
ELSEWHERE = ("FLUX.1-dev", "FLUX.2-dev", "SD3.5")
"""Models with a degree or a dtype of their own, or with CFG parallelism."""
ONLY_IN_TESTS = {
    "Wan2.1-I2V": ("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", lambda: wan.image_to_video(has_encoder=True)),
    "Wan2.2-TI2V": ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", lambda: wan.image_to_video(expands=True)),
    "Wan2.1-VACE-1.3B": ("Wan-AI/Wan2.1-VACE-1.3B-diffusers", wan.vace),
}
"""Repositories of models that only tests have, and functions that build them."""
TOPOLOGIES = {2: ["flat", "2x1"], 4: ["flat", "2x2"], 8: ["flat", "2x2x2"]}


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
    run.inputs["prompt"] = CAT[1]  # the runner passes a list, which Wan VACE's pipeline rejects
    stock = run()
    assert used_axes() == set()
    assert torch.isfinite(stock).all()
    for head_groups, topology in enumerate(topologies, 1):
        run.use_plugin(topology, head_groups)
        assert torch.equal(run(), stock), f"{topology} differs from stock"
        assert v_first(arguments[1])
        sizes = run.runner.model.engine_config.parallel_config.sp_config.cocodiff.topology.axes
        assert used_axes() == {axis.name for axis in sizes if axis.size > 1}
    run.use_plugin(None)
    assert torch.equal(run(), stock), "stock differs after the plugin was used"
    assert used_axes() == set()
    check_coded(run, topologies[-1], 8 * dtype.itemsize)


def check_coded(run: Run, topology: str, value_bits: int) -> None:
    """Check that all steps are coded, and keyframes in 8 bits: one of each expert."""
    from xfuser_cocodiff.xdit.session.session import active

    pipe = run.runner.model.pipe
    del pipe.scheduler.__dict__["step"]  # a step of the instance would hide the patched one
    run.use_mode("balanced", topology, schedule="bits=4")
    run()
    reports = active().runtime.reports
    bits = [value_bits * report.sent_bytes / report.exact_bytes for report in reports]
    assert all(report.error > 0 for report in reports)
    keyframes = 2 if getattr(pipe, "transformer_2", None) else 1
    assert sum(8 < each < 9.6 for each in bits) == keyframes
    assert sum(4 < each < 6.4 for each in bits) == STEPS - keyframes == len(bits) - keyframes


@pytest.mark.parametrize(
    ("model", "degree", "dtype"),
    slow_but(
        [("Qwen-Image", 2, torch.float32)],
        [
            ("FLUX.1-dev", 8, torch.float32),
            ("FLUX.2-dev", 4, torch.bfloat16),
            *((model, 2, torch.float32) for model in MODELS if model not in ELSEWHERE),
        ],
    ),
)
def test_latents_equal_stock(model: str, degree: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if model in ONLY_IN_TESTS:
        repository, build = ONLY_IN_TESTS[model]
        small = hub.SmallModel(repository, lambda folder: build().save_pretrained(folder), takes_image=True)
        monkeypatch.setitem(hub.REGISTRY, model, small)
    hub.write_cache(HOME, [model])
    arguments = ["--model", model, "--ulysses_degree", str(degree), *SIZE, *MODELS[model]]
    ranks.run(compare, degree, degree, arguments, TOPOLOGIES[degree], dtype)


@pytest.mark.slow  # its process groups are quick in integration/test_config_fields
def test_cfg_parallel_equals_stock() -> None:
    arguments = ["--model", "SD3.5", "--ulysses_degree", "2", *SIZE, *CAT, "--use_cfg_parallel"]
    ranks.run(compare, 4, 4, arguments, TOPOLOGIES[2], torch.float32)


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


@pytest.mark.slow  # the start of such a session is quick in integration/test_config_fields
def test_pipefusion_equals_stock() -> None:
    """Two stages, each with its own Ulysses group. Stages keep K and V of patches that are not sent in a step."""
    more = ["--pipefusion_parallel_degree", "2", "--num_inference_steps", "5"]
    arguments = ["--model", "FLUX.1-dev", "--ulysses_degree", "2", *SIZE, *MODELS["FLUX.1-dev"], *more]
    ranks.run(compare_stages, 4, 4, arguments, "gpu=2")
