"""Requests of a soak test: what is drawn from a seed, its arguments and inputs, and what came of it."""

import random
from dataclasses import dataclass
from typing import Any

MODELS = ("FLUX.1-dev", "Wan2.1-T2V", "SD3.5")
MODES = ("exact", "balanced", "fast", "paper")
"""Modes that are drawn."""
SIZES = ((64, 64), (128, 64), (96, 96))
PROMPTS = ("a photo of a cat", "a red house on a hill", "old coins")


@dataclass(frozen=True)
class Request:
    """One request to an engine, and the options of the plugin that it runs with."""

    model: str
    mode: str
    plan: str
    """Plan of the all-to-all: flat or hierarchical."""
    v_first: str
    height: int
    width: int
    steps: int
    guidance: float
    prompts: tuple[str, ...]
    seed: int
    head_groups: int | None = None
    """Number of head groups; None leaves it to the autotuner."""
    schedule: str | None = None
    """Changes to the schedule of the mode."""

    @property
    def is_lossy(self) -> bool:
        """Whether its mode is lossy."""
        return self.mode != "exact"

    @property
    def inputs(self) -> dict[str, Any]:
        """Inputs of xDiT's runner."""
        return {
            "prompt": [*self.prompts],
            "height": self.height,
            "width": self.width,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "seed": self.seed,
        }

    def model_arguments(self, ranks: int) -> list[str]:
        """Return the arguments of stock xDiT that load the model."""
        more = {"FLUX.1-dev": ["--max_sequence_length", "32"], "Wan2.1-T2V": ["--num_frames", "5"]}
        size = ["--height", str(self.height), "--width", str(self.width), "--num_inference_steps", str(self.steps)]
        model = ["--model", self.model, "--ulysses_degree", str(ranks), "--prompt", *self.prompts]
        return [*model, *size, *more.get(self.model, [])]

    def plugin_arguments(self, ranks: int) -> list[str]:
        """Return the options of the plugin; half of the ranks are on each of two emulated nodes."""
        schedule = ["--cocodiff_schedule", self.schedule] if self.schedule else []
        topology = f"node=2,gpu={ranks // 2}"
        return [
            *("--use_cocodiff", "--cocodiff_topology", topology, "--cocodiff_a2a", self.plan),
            *("--cocodiff_mode", self.mode, "--cocodiff_v_first", self.v_first),
            *("--cocodiff_head_groups", str(self.head_groups) if self.head_groups else "auto"),
            *schedule,
        ]


@dataclass
class Outcome:
    """What came of a request on one rank."""

    digest: str | None = None
    """SHA-256 of the latents; None on ranks that do not decode, and after an error."""
    error: str | None = None
    """Class and message of the exception; None if the request returned."""
    resources: dict[str, int] | None = None
    """What the process holds after it; None if it hangs or has ended."""


def draw(generator: random.Random) -> Request:
    """Draw a request."""
    model, mode = generator.choice(MODELS), generator.choice(MODES)
    height, width = generator.choice(SIZES)
    prompts = generator.sample(PROMPTS, 2 if model == "FLUX.1-dev" and generator.random() < 0.25 else 1)
    return Request(
        model,
        mode,
        plan=generator.choice(("flat", "hierarchical")),
        v_first=generator.choice(("on", "off")),
        height=height,
        width=width,
        steps=generator.choice((2, 3, 5)),
        guidance=generator.choice((1.0, 3.5)),
        prompts=tuple(prompts),
        seed=generator.randrange(1000),
        head_groups=generator.choice((1, 2)) if mode == "exact" else 1,
        schedule=generator.choice((None, "first=exact", "bits=4", "error=0.05")) if mode == "balanced" else None,
    )
