"""The figures of the README and of docs/: the tables and pictures that runs become, and how they get into documents.

A run leaves a record in a folder. One that is there is not made again, so that what was broken off goes on. Figures are
made of the records that there are, and put into the documents where these have marks for them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xfuser_cocodiff.bench import markdown, runs
from xfuser_cocodiff.bench.runs import MODELS, Record, Run
from xfuser_cocodiff.comparison import launch
from xfuser_cocodiff.models.hub import write_cache
from xfuser_cocodiff.reporting.progress import Teller


@dataclass(frozen=True)
class Figure:
    """A table of a document, or a picture that it shows."""

    name: str
    document: str
    """From the top of the checkout; or the file of the picture."""
    runs: tuple[Run, ...]
    lines: Callable[[Sequence[Record]], list[str]] | None = None
    """The table that records become; a picture is as its run has drawn it."""

    def is_there(self, folder: Path) -> bool:
        """Whether all of its runs are done."""
        return all(run.is_done(folder) for run in self.runs)

    def text(self, folder: Path) -> str:
        """The table, or where the picture is, once its runs are done."""
        if self.lines is None:
            return "\n".join(str(run.picture(folder)) for run in self.runs)
        return "\n".join(self.lines([json.loads(run.record(folder).read_text()) for run in self.runs]))

    def put_into(self, checkout: Path, folder: Path) -> None:
        """Put it where the document has the old one.

        Raises:
            OSError: that cannot be read or written.
            ValueError: the document has no such marks, or several.
        """
        if self.lines is None:
            shutil.copyfile(self.runs[0].picture(folder), checkout / self.document)
        else:
            put_into(checkout / self.document, self.name, self.text(folder))


FIGURES = (
    Figure("speed", "README.md", runs.SPEED, markdown.speed),
    Figure("first", "README.md", runs.FIRST, markdown.first),
    Figure(
        "modes",
        "README.md",
        tuple(runs.QUALITY[model, steps] for steps in (50, 8) for model in MODELS),
        markdown.modes,
    ),
    Figure("resolution", "docs/overlap.md", (runs.RESOLUTION,), markdown.speed),
    Figure("equal", "docs/overlap.md", (runs.EQUAL,), markdown.speed),
    Figure("worth", "docs/overlap.md", (runs.WORTH,), markdown.worth),
    Figure("small", "docs/plans.md", (runs.SMALL,), markdown.small),
    Figure("ring", "docs/ring.md", runs.RING, markdown.ring),
    Figure("ring-quality", "docs/ring.md", runs.RING_QUALITY, markdown.ring_quality),
    Figure("rings-on-paper", "docs/ring.md", runs.RINGS_ON_PAPER, markdown.rings_on_paper),
    Figure("compiled", "docs/compiled_graphs.md", (runs.COMPILED,), markdown.compiled),
    Figure("quality", "docs/codecs.md", tuple(runs.QUALITY.values()), markdown.quality),
    Figure("kernels", "docs/codecs.md", (runs.KERNELS,), markdown.kernels),
    Figure("host-calls", "docs/codecs.md", (runs.KERNELS,), markdown.host_calls),
    Figure("frontier", "docs/frontier.png", (runs.FRONTIER,)),
    Figure("held", "docs/scale.md", (*runs.SPEED, runs.RESOLUTION), markdown.held),
    Figure("ranks", "docs/scale.md", runs.RANKS, markdown.ranks),
)


def chosen(text: str | None) -> list[Figure]:
    """Figures by their names, as 'speed,ring'; all of them where none is given.

    Raises:
        ValueError: an unknown name.
    """
    known = {figure.name: figure for figure in FIGURES}
    names = text.split(",") if text else list(known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {unknown[0]!r} is not known; valid are {', '.join(known)}")
    return [known[name] for name in names]


def missing(figures: Sequence[Figure], folder: Path) -> list[Run]:
    """Runs that are not done yet, each once."""
    return [run for run in dict.fromkeys(run for figure in figures for run in figure.runs) if not run.is_done(folder)]


def make(figures: Sequence[Figure], folder: Path) -> list[Run]:
    """Make the records that are not there yet, and return the runs that failed; their output is beside the records.

    Args:
        figures: whose runs.
        folder: of the records.
    """
    folder.mkdir(parents=True, exist_ok=True)
    to_do = missing(figures, folder)
    told = Teller(sys.stderr)
    told.foresee({run.name: (1, 60 * run.minutes) for run in to_do})
    models = {"HF_HOME": str(folder / "models"), "HF_HUB_OFFLINE": "1"}
    if any(run.loads_models for run in to_do):
        write_cache(folder / "models", MODELS)
    failed = []
    for run in to_do:
        told.begin(run.name, run.name)
        alone = {} if run.cluster else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **alone, **(models if run.loads_models else {})}
        if _status(run.arguments(folder), environment, folder / f"{run.name}.log") or not run.is_done(folder):
            failed.append(run)
        told.advance()
    told.end()
    return failed


def _status(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Run a command to its end, which comes with ours, and return its exit status."""
    with launch.stopped_by_sigterm(), log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait()
        finally:  # a cluster takes its network down
            launch.stop(process)


def put_into(document: Path, name: str, text: str) -> None:
    """Put another table between the marks of a name in a document.

    Raises:
        OSError: it cannot be read or written.
        ValueError: it has no such marks, or several.
    """
    begin, end = f"<!-- figure: {name} -->\n", "\n<!-- end of figure -->"
    pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
    changed, count = pattern.subn(lambda found: f"{found[1]}\n{text}\n{found[2]}", document.read_text())
    if count != 1:
        raise ValueError(f"it has {count} places for the figure {name!r}, in place of one")
    document.write_text(changed)
