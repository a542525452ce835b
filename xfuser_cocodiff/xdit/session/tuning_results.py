"""Tuning results of a session in the tuning cache, which later processes read."""

from collections.abc import Sequence

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.autotune.comm_setup import CommSetup
from xfuser_cocodiff.engine.compression.default_mode import EXACT
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature, LayerSignatures
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.settings.config import AUTO, CocoDiffConfig, Overlap


class TuningResults:
    """Overlap schedules, plans and link profiles in the tuning caches of a session.

    Args:
        config: the options.
        is_lossy: whether the codecs encode anything.
        setups: communication of the Ulysses group, and of the ring if there is one.
    """

    def __init__(self, config: CocoDiffConfig, is_lossy: bool, setups: Sequence[CommSetup]) -> None:
        self._setups, self._has_schedules = setups, config.overlap == Overlap()
        mode = EXACT
        if is_lossy:
            slow = (each.partition.slow.topology.axes if each.partition else () for each in setups)
            axes = (",".join(axis.name for axis in each) for each in slow)
            mode = f"{config.mode} {config.schedule or ''} {' '.join(axes)}"
        self._options = f"{mode} {config.plan or AUTO}"
        """Options that the schedules depend on."""

    def schedule_of(self, signature: LayerSignature) -> OverlapSchedule | None:
        """Return the schedule that an earlier process has chosen, the same on all ranks; None where there is none, or
        where an overlap option is set."""
        cache = self._setups[0].cache
        if cache is None or not self._has_schedules:
            return None
        schedule = cache.schedules.get(self._key(signature.key))
        return schedule if schedule and (signature.ready or not schedule.v_first) else None

    def save(self, signatures: LayerSignatures) -> None:
        """Save all tuning results for the next process; one rank of each group does."""
        if self._setups[0].cache is None:
            return
        if self._has_schedules:
            chosen = {self._key(key): each.chosen for key, each in signatures.candidates.items() if each.chosen}
            self._setups[0].cache.schedules |= chosen
        try:
            for setup in self._setups:
                if setup.cache:
                    setup.cache.save()
        except OSError as error:
            warn_once(f"tuning results cannot be cached: {error}; choose another folder with --cocodiff_cache")

    def _key(self, key: str) -> str:
        """Return the key of signatures' schedule in the tuning cache."""
        return f"{self._options} {key}"
