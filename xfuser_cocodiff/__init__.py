"""CoCoDiff for xDiT: Ulysses all-to-alls along the machine's topology, as a plugin of xfuser.

Importing this package has no effect. :func:`install` patches xDiT, :func:`uninstall` removes all patches; both work
before and after xDiT is imported. :func:`run` declares a run of a sampler that uses no diffusers pipeline.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xfuser_cocodiff.xdit.run_tracking.run_tracker import Sampling

__version__ = "0.3.0"

__all__ = ["__version__", "install", "run", "uninstall"]


def install() -> bool:
    """Patch xDiT now, or as soon as it is imported.

    Returns:
        Whether the plugin is installed; False, after one warning, if xDiT is missing or its version is not supported.
    """
    from xfuser_cocodiff.xdit.integration import activation
    from xfuser_cocodiff.xdit.platforms import platform
    from xfuser_cocodiff.xdit.settings.variables import RECORD_VARIABLE

    listeners, patches = [], []
    if not platform.has_accelerator():
        from xfuser_cocodiff.tools.launching import cpu_host

        patches += cpu_host.patches()
    if folder := os.environ.get(RECORD_VARIABLE):
        from xfuser_cocodiff.tools.comparison.recorder import Recorder

        listeners.append(recorder := Recorder(Path(folder)))
        patches += recorder.patches()
    return activation.install(listeners, patches)


def uninstall() -> None:
    """Restore every patched symbol of xDiT."""
    from xfuser_cocodiff.xdit.integration import activation

    activation.uninstall()


def run(steps: int | None = None) -> "Sampling":
    """Declare a run of a sampler that uses no diffusers pipeline, so that lossy modes can compress it::

        with xfuser_cocodiff.run(steps=50) as run:
            for time, next_time in zip(times, times[1:]):
                latents = latents + (next_time - time) * transformer(latents, timestep=time, ...)[0]
                run.step()

    `run.step()` ends a step; it takes the latents for `cocodiff compare`. Calls of the transformer within a step are
    guidance branches. Leaving the block, also by an exception, ends the run and drops its link references; so does
    reaching `steps`. All ranks must do the same. Without the plugin nothing happens.

    While several runs are open, also those of diffusers pipelines, all of them are lossless.

    Args:
        steps: number of denoising steps. None if it is unknown: then mode `paper` assumes 50, and link references
            get half of the free memory.

    Raises:
        ValueError: `steps` is not an integer of at least 1.
    """
    from xfuser_cocodiff.xdit.integration import activation

    return activation.run(steps)
