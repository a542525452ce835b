"""CoCoDiff for xDiT: Ulysses all-to-alls along the machine's topology, as a plugin of xfuser.

Importing this package has no effect. :func:`install` patches xDiT, :func:`uninstall` takes every patch back; both work
before and after xDiT is imported. :func:`run` is for samplers that show their steps to no diffusers pipeline.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xfuser_cocodiff.xdit.run_tracking.run_tracker import Sampling

__version__ = "0.2.0"

__all__ = ["__version__", "install", "run", "uninstall"]


def install() -> bool:
    """Patch xDiT now, or as soon as it is imported.

    Returns:
        Whether the plugin is in place; False, after one warning, where xDiT is missing or not a supported version.
    """
    from xfuser_cocodiff.engine.settings.options import RECORD_VARIABLE
    from xfuser_cocodiff.xdit.integration import activation

    folder = os.environ.get(RECORD_VARIABLE)
    if not folder:
        return activation.install()
    from xfuser_cocodiff.lab.comparison.recorder import Recorder

    recorder = Recorder(Path(folder))
    return activation.install([recorder], recorder.patches())


def uninstall() -> None:
    """Give every patched site of xDiT its original back."""
    from xfuser_cocodiff.xdit.integration import activation

    activation.uninstall()


def run(steps: int | None = None) -> "Sampling":
    """Declare a run of a sampler that uses no diffusers pipeline, so that modes can code it::

        with xfuser_cocodiff.run(steps=50) as run:
            for time, next_time in zip(times, times[1:]):
                latents = latents + (next_time - time) * transformer(latents, timestep=time, ...)[0]
                run.step()

    `run.step()` ends a step, and takes its latents where `cocodiff compare` is to see them. Calls of the transformer
    within a step are branches of guidance. Leaving the block ends the run, also by an exception, and drops all that is
    held of it; so does reaching `steps`. Every rank must do the same. Without the plugin in use nothing happens.

    Of runs inside each other, also those of diffusers pipelines, the innermost is encoded. A transformer that an outer
    one has called already, and the outer one itself while the inner one is open, travel exactly.

    Args:
        steps: of the run. None where that is not known: then a mode goes by its settings for many steps, and what
            changes over a run does so over the first 50.

    Raises:
        ValueError: `steps` is no whole number from 1.
    """
    from xfuser_cocodiff.xdit.integration import activation

    return activation.run(steps)
