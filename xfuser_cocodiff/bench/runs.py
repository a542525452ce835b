"""The runs that the figures of the README and of docs/ come from: commands, each of which leaves a record."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A command that leaves a record."""

    name: str
    command: tuple[str, ...]
    """Of `cocodiff`, but for what it is to write, and where."""
    minutes: float
    """That it takes on two cores, about."""
    cluster: tuple[str, ...] = ()
    """Arguments of the emulated cluster that it needs; none where it needs none."""
    compared: tuple[str, ...] = ()
    """What `cocodiff compare` is to run."""
    draws: bool = False
    """Whether it leaves a picture too."""

    def arguments(self, folder: Path) -> list[str]:
        """The whole command line."""
        on = [sys.executable, "-m", "xfuser_cocodiff.emulation.cluster", *self.cluster, "--"] if self.cluster else []
        wanted = ["--json", str(self.record(folder)), *(["--plot", str(self.picture(folder))] if self.draws else [])]
        compared = ["--out", str(folder / self.name), "--", *self.compared] if self.compared else []
        return [*on, sys.executable, "-m", "xfuser_cocodiff.cli", *self.command, *wanted, *compared]

    def record(self, folder: Path) -> Path:
        """Where its record is."""
        return folder / f"{self.name}.json"

    def picture(self, folder: Path) -> Path:
        """Where its picture is."""
        return folder / f"{self.name}.png"

    def is_done(self, folder: Path) -> bool:
        """Whether all that it leaves is there."""
        return self.record(folder).exists() and (not self.draws or self.picture(folder).exists())

    @property
    def loads_models(self) -> bool:
        """Whether it needs those of :data:`MODELS`."""
        return "--model" in self.compared or self.command[0] == "quality"


PICTURES, _ = MODELS = ("FLUX.1-dev", "Wan2.1-T2V")
"""Small ones that are trained, the second for videos."""
STEPS = (50, 20, 8, 4)
DEGREES = (24, 96, 1536)
CLUSTERS = {
    "aurora": "12 tiles a node",
    "dgx-h100": "8 GPUs a node, a card of 400 Gbit/s each",
    "ethernet": "8 GPUs a node, one card of 100 Gbit/s",
}
"""On paper, and what they are."""
RING_DEGREES = (16, 32)

_AURORA = ("--preset", "aurora")
_FIVE = ("bench", "model", "--repeats", "5")
_MODEL = (*_FIVE, "--shape", "low-resolution")
_ALL_MODES = "exact,balanced,fast,paper"
SPEED = tuple(
    Run(f"speed-{share}", (*_MODEL, "--share", str(share), "--mode", modes), minutes, (*_AURORA, *scale))
    for share, modes, minutes, scale in (
        (0.65, _ALL_MODES, 7, ()),
        (0.8, _ALL_MODES, 9, ()),
        (0.91, _ALL_MODES, 17, ()),
        # The paper's mode alone would take as long again, and looking for such links from fast ones too.
        (0.94, "exact,balanced,fast", 27, ("--scale", "0.15")),
    )
)
RESOLUTION = Run(
    "resolution",
    (*_FIVE, "--shape", "high-resolution", "--share", "0.65,0.8", "--mode", "exact,balanced,fast"),
    52,
    _AURORA,
)
EQUAL = Run("equal", (*_MODEL, "--share", "0.2,0.5", "--mode", "exact,balanced"), 6, ("--preset", "flat"))
OVERLAPS = {
    "together": "@v_first=off@head_groups=1",
    "V first": "@v_first=on@head_groups=1",
    "V first, 2 head groups": "@v_first=on@head_groups=2",
    "what `auto` took": "",
}
"""What is fixed of a mode, by what it is called."""
_OVERLAPPED = ",".join(
    f"{mode}/flat*{fixed}"
    for mode in ("exact", "balanced")
    for fixed in OVERLAPS.values()
    if mode == "exact" or "groups=2" not in fixed
)
WORTH = Run("worth", (*_MODEL, "--share", "0.8", "--mode", _OVERLAPPED), 6, _AURORA)
_EXACT_AND_CODED = ("--share", "0.5,0.65,0.8", "--mode", "exact,balanced")
RINGS = {2: "4 x 2", 4: "2 x 4", 8: "1 x 8"}
RING = tuple(Run(f"ring-{ring}", (*_MODEL, "--ring", str(ring), *_EXACT_AND_CODED), 10, _AURORA) for ring in RINGS)
COMPILED = Run(
    "compiled",
    (*_MODEL, "--compile", *_EXACT_AND_CODED),
    13,
    ("--preset", "ethernet", "--topology", "node=2,gpu=2"),
)
SMALL = Run(
    "small",
    ("bench", "a2a", "--sizes", "4KB,24KB,96KB", "--repeats", "5"),
    4,
    (*_AURORA, "--topology", "node=2,gpu=6,tile=2"),
)
_TRAINED = (
    *("--model", PICTURES, "--height", "256", "--width", "256", "--num_inference_steps", "28", "--seed", "1"),
    *("--prompt", "a photo of a cat", "--max_sequence_length", "32", "--ulysses_degree", "8"),
    # Nothing is known of the machine, and the first run is the first one.
    *("--cocodiff_topology", "2x2x2", "--cocodiff_cache", "off", "--warmup_calls", "0"),
)
FIRST = tuple(
    Run(
        f"first-{scale}",
        ("compare", "--emulate", "aurora", "--scale", str(scale), "--modes", "exact,balanced,fast", "--repeats", "3"),
        minutes,
        compared=_TRAINED,
    )
    for scale, minutes in ((1, 6), (0.25, 12))
)
QUALITY = {
    (model, steps): Run(
        f"quality-{model}-{steps}",
        ("quality", "--model", model, "--steps", str(steps), *(["--no_inpainting"] if steps < max(STEPS) else [])),
        0.04 * steps * (4 if model == PICTURES and steps == max(STEPS) else 2),
    )
    for model in MODELS
    for steps in STEPS
}
KERNELS = Run("kernels", ("bench", "kernels", "--repeats", "5"), 5)
FRONTIER = Run("frontier", ("quality", "--model", PICTURES, "--sweep", "--no_inpainting"), 15, draws=True)
_OF_A_RING = ("balanced", "fast", "balanced@bits=1.6;bits_o=1.6", "balanced@bits=1;bits_o=1")
"""Modes and codes; nothing else travels in a ring than K and V."""
RING_QUALITY = tuple(
    Run(
        f"quality-{name}",
        ("quality", "--model", PICTURES, "--mode", ",".join(_OF_A_RING), "--virtual", virtual, "--no_inpainting"),
        6,
    )
    for name, virtual in (("in-a-ring", "ring:2x2"), ("beside-rings", "2x2"))
)


def _plan(name: str, model: str, cluster: str, degree: int, mode: str) -> Run:
    asked = ("--model", model, "--resolution", "2304", "--degree", str(degree), "--cluster", cluster, "--mode", mode)
    return Run(f"{name}-{cluster}-{degree}-{mode}", ("plan", *asked), 0.2)


RANKS = tuple(_plan("ranks", "qwen-image", cluster, degree, "balanced") for cluster in CLUSTERS for degree in DEGREES)
RINGS_ON_PAPER = tuple(
    _plan("rings", "flux1", "ethernet", degree, mode) for degree in RING_DEGREES for mode in ("exact", "balanced")
)
