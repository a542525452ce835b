"""Stage B: several ranks that share the GPU, against stock."""

from dataclasses import asdict

from xfuser_cocodiff.lab.one_gpu import rank_launch
from xfuser_cocodiff.lab.one_gpu.fact import Fact, Result, Setting


def transport(setting: Setting) -> Result:
    """Find out how ranks that share the GPU communicate."""
    if setting.is_dry_run:
        return setting.launch_ranks("transport", 2)
    return asdict(rank_launch.select(setting.folder))


def all_to_alls(setting: Setting) -> Result:
    """Compare the bits of every plan of the all-to-all with stock's, on 2 x 2 ranks."""
    return setting.launch_ranks("all_to_alls", 4)


def flux(setting: Setting) -> Result:
    """Compare steps of a full-width FLUX transformer with stock's, on 2 x 2 ranks."""
    return setting.launch_ranks("flux", 4)


def overlap(setting: Setting) -> Result:
    """Compare how much communication is hidden with and without high priority, on two ranks."""
    return {
        name: setting.launch_ranks("overlap", 2, has_priority=has_priority)
        for name, has_priority in (("with_priority", True), ("without_priority", False))
    }


FACTS = (
    Fact("transport", transport, 200),
    Fact("all_to_alls", all_to_alls, 120),
    Fact("flux", flux, 300),
    Fact("overlap", overlap, 150),
)
