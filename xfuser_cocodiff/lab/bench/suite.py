"""`cocodiff bench all`: the commands that produce the figures of README and docs/, each with a record and a table."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xfuser_cocodiff.lab.comparison import launch

PICTURES, GUIDED_PICTURES, VIDEOS = TRAINED = "FLUX.1-dev", "SD3.5", "Wan2.1-T2V"
"""Small trained models."""
FRONTIER = "frontier"
"""Name of the run that measures the PSNR of all variants, and beginning of those that compare methods."""
_STEPS = (50, 20, 8, 4)


@dataclass(frozen=True)
class BenchRun:
    """A benchmark command and its record."""

    name: str
    command: str
    """Arguments of `cocodiff`, without `--json`."""
    cluster: str = ""
    """Arguments of the emulated cluster; empty without one."""
    compared: str = ""
    """Arguments of xDiT behind `cocodiff compare`; empty for other commands."""

    def arguments(self, folder: Path) -> list[str]:
        """Return the whole command line."""
        on = [sys.executable, "-m", "xfuser_cocodiff.lab.emulation.cluster", *self.cluster.split(), "--"]
        quality = folder / f"{FRONTIER}.json"
        compared = ["--out", str(folder / self.name), "--", *self.compared.split()]
        return [
            *(on if self.cluster else []),
            *(sys.executable, "-m", "xfuser_cocodiff.cli", *self.command.split(), "--json", str(self.record(folder))),
            *(["--plot", str(folder / f"{self.name}.png")] if "--sweep" in self.command or self.is_cluster else []),
            *(["--quality", str(quality)] if self.is_cluster and quality.exists() else []),
            *(compared if self.compared else []),
        ]

    @property
    def is_cluster(self) -> bool:
        """Whether it is `bench cluster`, which reads the PSNR of variants from the record of the frontier."""
        return self.command.startswith("bench cluster")

    def record(self, folder: Path) -> Path:
        """Return the path of the record."""
        return folder / f"{self.name}.json"


_LOW = "bench model --shape low-resolution"
_TRAINED = (
    f"--model {PICTURES} --height 256 --width 256 --num_inference_steps 28 --seed 1 --prompt cat "
    "--max_sequence_length 32 --ulysses_degree 8 --cocodiff_topology 2x2x2 --cocodiff_cache off --warmup_calls 0"
)
"""Without a tuning cache, so that every launch is a first run."""
_RING_CODES = "balanced,fast,balanced@bits=1.6;bits_o=1.6,balanced@bits=1;bits_o=1"
_BY_HEADS = "--a2a hierarchical"
"""Q, K, V and O in all-to-alls by heads, where lossy modes gather K and V by default."""
_PAPER_MODELS = "sd35,flux1,qwen-image,flux2"
_CLUSTERS = {
    **{
        f"aurora-{model}": f"--machine aurora --nodes 1 --model {model} --resolution 1536"
        for model in _PAPER_MODELS.split(",")
    },
    "aurora-2-nodes": "--machine aurora --nodes 2 --model sd35,flux1 --resolution 1536",
    "aurora-2-nodes-predicted": "--machine aurora --nodes 2 --model qwen-image,flux2 --resolution 1536 --predict",
    "aurora-predicted": f"--machine aurora --nodes 1,2 --model {_PAPER_MODELS} --resolution 768,2304 --predict",
    "aurora-4-nodes": "--machine aurora --nodes 4 --model sd35 --resolution 2304 --predict",
    "dgx-h100": "--machine dgx-h100 --nodes 1,2 --model flux1 --resolution 1024",
    "pcie": "--machine pcie --nodes 1 --model flux1 --resolution 1024,2048",
    "ethernet": "--machine ethernet-25,ethernet-100 --nodes 2 --model qwen-image,flux1 --resolution 1024",
    "arc-b60": "--machine arc-b60 --nodes 1 --model flux1 --resolution 1024",
    "videos": "--machine pcie --nodes 1 --model hunyuan --resolution 720",
    "videos-predicted": "--machine dgx-h100 --nodes 1 --model wan,hunyuan --resolution 720 --predict",
}
"""Options of `bench cluster`, by name: the paper's table on Aurora, some cells of each other machine, and the paper's
largest speedup. 16 cells are measured, which take 5 to 14 minutes each; the others are predicted, within seconds."""
_ALONE = "exact@v_first=off@head_groups=1"
"""The hierarchical all-to-all alone, without V-First and head groups."""
_PAPER_PARTS = f"{_ALONE},v-first,paper@v_first=off@head_groups=1,paper,exact,balanced"
_FLAT_MODELS = "flux1,qwen-image,flux2"
_PAPER_TABLE = {
    "aurora-paper": f"--model {_FLAT_MODELS} --resolution 768,1536,2304 --modes {_PAPER_PARTS}",
    "aurora-paper-sd35": f"--model sd35 --resolution 768,1536,2304 --modes best_stock,{_PAPER_PARTS}",
    "aurora-paper-batch": f"--model {_FLAT_MODELS} --resolution 1536 --batch 8 --modes {_PAPER_PARTS}",
}
"""Cells that are predicted for the paper's table, by name: flat Ulysses is the baseline, or best stock for SD3.5, whose
38 heads it cannot divide. The paper's means are over batches of 1 to 32."""

RUNS = (
    BenchRun("speed", f"{_LOW} --scale 2.4,1,0.45,0.15 --mode exact,balanced,fast,paper", "--preset aurora"),
    *(
        BenchRun(
            f"first-{scale}",
            f"compare --emulate aurora --scale {scale} --modes exact,balanced,fast --repeats 3",
            compared=_TRAINED,
        )
        for scale in (1, 0.25)
    ),
    *(
        BenchRun(
            f"quality-{model}-{steps}", f"quality --model {model} --steps {steps}{' --no_inpainting' * (steps < 50)}"
        )
        for model in (PICTURES, VIDEOS)
        for steps in _STEPS
    ),
    *(
        BenchRun(
            f"quality-by-heads-{model}-{steps}",
            f"quality --model {model} --steps {steps} --mode balanced,fast {_BY_HEADS} --no_inpainting",
        )
        for model in (PICTURES, VIDEOS)
        for steps in _STEPS
    ),
    BenchRun(
        "resolution",
        "bench model --shape high-resolution --scale 1.1,0.48 --mode exact,balanced,fast",
        "--preset aurora",
    ),
    BenchRun("equal", f"{_LOW} --scale 4,1 --mode exact", "--preset flat"),
    BenchRun(
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
        BenchRun(f"ring-{ring}", f"{_LOW} --ring {ring} --scale 4,2,1 --mode exact,balanced", "--preset aurora")
        for ring in (2, 4, 8)
    ),
    *(
        BenchRun(
            f"quality-{name}", f"quality --model {PICTURES} --mode {_RING_CODES} --virtual {virtual} --no_inpainting"
        )
        for name, virtual in (("in-a-ring", "ring:2x2"), ("beside-rings", f"2x2 {_BY_HEADS}"))
    ),
    BenchRun(
        "compiled", f"{_LOW} --compile --scale 4,2,1 --mode exact,balanced", "--preset ethernet --topology node=2,gpu=2"
    ),
    BenchRun("a2a", "bench a2a", "--preset aurora"),
    BenchRun("kernels", "bench kernels"),
    BenchRun(FRONTIER, f"quality --model {PICTURES} --sweep --no_inpainting"),
    *(
        BenchRun(
            f"{FRONTIER}-{model}-{name}{steps}",
            f"quality --model {model} --steps {steps} --seeds 8 --sweep methods --no_inpainting{scale}",
        )
        for model, name, scale in (
            (PICTURES, "", ""),
            (GUIDED_PICTURES, "", ""),
            (VIDEOS, "", ""),
            (VIDEOS, "unguided-", " --guidance_scale 1"),
        )
        for steps in _STEPS
    ),
    *(
        BenchRun(f"cluster-{name}", f"bench cluster {options} --modes default,{_ALONE} --repeats 3")
        for name, options in _CLUSTERS.items()
    ),
    *(
        BenchRun(
            f"cluster-{name}",
            f"bench cluster --machine aurora --nodes 1,2 {options} --predict --repeats 3",
        )
        for name, options in _PAPER_TABLE.items()
    ),
)


def select(text: str | None) -> list[BenchRun]:
    """Return runs by name, such as 'speed,kernels', or by the part before a dash, such as 'cluster'; all if None.

    Raises:
        ValueError: a name is not valid.
    """
    known = {run.name: run for run in RUNS}
    names = text.split(",") if text else list(known)
    chosen = {name: [run for run in RUNS if run.name == name or run.name.startswith(f"{name}-")] for name in names}
    if unknown := [name for name in names if not chosen[name]]:
        raise ValueError(f"--only {unknown[0]!r} is not valid; valid are {', '.join(known)}")
    return list({run.name: run for name in names for run in chosen[name]}.values())


def execute(runs: Sequence[BenchRun], folder: Path) -> list[BenchRun]:
    """Run the commands whose records are missing in `folder`, with their output beside; return the failed ones."""
    from xfuser_cocodiff.lab.models.hub import write_cache

    folder.mkdir(parents=True, exist_ok=True)
    models = {"HF_HOME": str(folder / "models"), "HF_HUB_OFFLINE": "1"}
    if any("--model" in run.command + run.compared and not run.is_cluster for run in runs):
        write_cache(folder / "models", TRAINED)
    failed = []
    for run in runs:
        output = folder / f"{run.name}.txt"
        if run.is_cluster or not run.record(folder).exists():  # it skips finished cells of a record itself
            print(f"{run.name}: cocodiff {run.command}", flush=True)
            cpu_only = {} if run.cluster else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            status = _status(run.arguments(folder), {**os.environ, **models, **cpu_only}, output)
            if status or not run.record(folder).exists():
                failed.append(run)
                continue
        print(f"{run.name}:\n\n{output.read_text()}", flush=True)
    return failed


def _status(command: Sequence[str], environment: Mapping[str, str], output: Path) -> int:
    """Run a command, stop it if this process is stopped, and return its exit status."""
    with launch.exit_on_sigterm(), output.open("w") as out, output.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=log, start_new_session=True)
        try:
            return process.wait()
        finally:  # so that an emulated cluster is torn down
            launch.stop(process)
