"""`cocodiff bench all`: the commands behind the figures of README and docs/; each leaves a record and its table."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xfuser_cocodiff.lab.comparison import launch

PICTURES, VIDEOS = "FLUX.1-dev", "Wan2.1-T2V"
"""Small models that are trained."""


@dataclass(frozen=True)
class Run:
    """A command that leaves a record."""

    name: str
    command: str
    """Of `cocodiff`, but for the record that it is to write."""
    cluster: str = ""
    """Arguments of the emulated cluster that it runs on, if any."""
    compared: str = ""
    """What `cocodiff compare` is to run."""

    def arguments(self, folder: Path) -> list[str]:
        """Return the whole command line."""
        on = [sys.executable, "-m", "xfuser_cocodiff.lab.emulation.cluster", *self.cluster.split(), "--"]
        compared = ["--out", str(folder / self.name), "--", *self.compared.split()]
        return [
            *(on if self.cluster else []),
            *(sys.executable, "-m", "xfuser_cocodiff.cli", *self.command.split(), "--json", str(self.record(folder))),
            *(["--plot", str(folder / f"{self.name}.png")] if "--sweep" in self.command else []),
            *(compared if self.compared else []),
        ]

    def record(self, folder: Path) -> Path:
        """Return where its record is."""
        return folder / f"{self.name}.json"


_LOW = "bench model --shape low-resolution"
_TRAINED = (
    f"--model {PICTURES} --height 256 --width 256 --num_inference_steps 28 --seed 1 --prompt cat "
    "--max_sequence_length 32 --ulysses_degree 8 --cocodiff_topology 2x2x2 --cocodiff_cache off --warmup_calls 0"
)
"""Nothing is known of the machine, and the first run is the first one."""
_RING_CODES = "balanced,fast,balanced@bits=1.6;bits_o=1.6,balanced@bits=1;bits_o=1"

RUNS = (
    Run("speed", f"{_LOW} --scale 2.4,1,0.45,0.15 --mode exact,balanced,fast,paper", "--preset aurora"),
    *(
        Run(
            f"first-{scale}",
            f"compare --emulate aurora --scale {scale} --modes exact,balanced,fast --repeats 3",
            compared=_TRAINED,
        )
        for scale in (1, 0.25)
    ),
    *(
        Run(f"quality-{model}-{steps}", f"quality --model {model} --steps {steps}{' --no_inpainting' * (steps < 50)}")
        for model in (PICTURES, VIDEOS)
        for steps in (50, 20, 8, 4)
    ),
    Run(
        "resolution",
        "bench model --shape high-resolution --scale 1.1,0.48 --mode exact,balanced,fast",
        "--preset aurora",
    ),
    Run("equal", f"{_LOW} --scale 4,1 --mode exact", "--preset flat"),
    Run(
        "overlap",
        f"{_LOW} --scale 1 --mode "
        + ",".join(
            f"{mode}{fixed}"
            for mode in ("exact", "balanced")
            for fixed in ("@v_first=off@head_groups=1", "@v_first=on@head_groups=1", "")
        ),
        "--preset aurora",
    ),
    *(
        Run(f"ring-{ring}", f"{_LOW} --ring {ring} --scale 4,2,1 --mode exact,balanced", "--preset aurora")
        for ring in (2, 4, 8)
    ),
    *(
        Run(f"quality-{name}", f"quality --model {PICTURES} --mode {_RING_CODES} --virtual {virtual} --no_inpainting")
        for name, virtual in (("in-a-ring", "ring:2x2"), ("beside-rings", "2x2"))
    ),
    Run(
        "compiled", f"{_LOW} --compile --scale 4,2,1 --mode exact,balanced", "--preset ethernet --topology node=2,gpu=2"
    ),
    Run("a2a", "bench a2a", "--preset aurora"),
    Run("kernels", "bench kernels"),
    Run("frontier", f"quality --model {PICTURES} --sweep --no_inpainting"),
)


def chosen(text: str | None) -> list[Run]:
    """Return runs by their names, as 'speed,kernels'; all of them where none is given.

    Raises:
        ValueError: an unknown name.
    """
    known = {run.name: run for run in RUNS}
    names = text.split(",") if text else list(known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {unknown[0]!r} is not known; valid are {', '.join(known)}")
    return [known[name] for name in names]


def make(runs: Sequence[Run], folder: Path) -> list[Run]:
    """Make the records that are not there yet, and return the runs that failed; what they print lies beside."""
    from xfuser_cocodiff.lab.models.hub import write_cache

    folder.mkdir(parents=True, exist_ok=True)
    models = {"HF_HOME": str(folder / "models"), "HF_HUB_OFFLINE": "1"}
    if any("--model" in run.command + run.compared for run in runs):
        write_cache(folder / "models", (PICTURES, VIDEOS))
    failed = []
    for run in runs:
        output = folder / f"{run.name}.txt"
        if not run.record(folder).exists():
            print(f"{run.name}: cocodiff {run.command}", flush=True)
            alone = {} if run.cluster else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            status = _status(run.arguments(folder), {**os.environ, **models, **alone}, output)
            if status or not run.record(folder).exists():
                failed.append(run)
                continue
        print(f"{run.name}:\n\n{output.read_text()}", flush=True)
    return failed


def _status(command: Sequence[str], environment: Mapping[str, str], output: Path) -> int:
    """Run a command to its end, which comes with ours, and return its exit status."""
    with launch.exit_on_sigterm(), output.open("w") as out, output.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=log, start_new_session=True)
        try:
            return process.wait()
        finally:  # a cluster takes its network down
            launch.stop(process)
