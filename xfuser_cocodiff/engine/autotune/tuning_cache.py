"""Cache of tuning results between processes: the link profile, and the overlap schedule of each layer signature.

A file belongs to one machine, as the ranks of a group see it together. Other hosts, devices, links or versions have
another file, and are tuned separately.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.comm.rank_results import gather_results
from xfuser_cocodiff.engine.topology import json_file
from xfuser_cocodiff.engine.topology.link_profile import Profile

_SCHEMA = 11


@dataclass
class TuningCache:
    """Tuning results of one machine."""

    machine: dict[str, Any]
    """Description of the machine as JSON values: versions, topology, and the host and device of each rank."""
    profile: Profile | None = None
    """Link profile, once measured."""
    schedules: dict[str, OverlapSchedule] = field(default_factory=dict)
    """Chosen schedules by layer signature."""
    folder: Path | None = None
    """Folder that this rank writes to; None if it does not write."""

    def to_json(self) -> dict[str, Any]:
        """Return the cache as JSON values; the inverse of :meth:`from_json`."""
        return {
            "schema": _SCHEMA,
            "machine": self.machine,
            "profile": self.profile and self.profile.to_json(),
            "schedules": {signature: list(schedule) for signature, schedule in self.schedules.items()},
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TuningCache":
        """Build a cache from the values of :meth:`to_json`.

        Raises:
            ValueError: the values are not those of a tuning cache of this schema.
        """
        try:
            if values["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {values['schema']}, not {_SCHEMA}")
            profile = values["profile"] and Profile.from_json(values["profile"])
            if profile and str(profile.topology) != values["machine"].get("topology", str(profile.topology)):
                raise ValueError(f"its profile has the topology {profile.topology}, not that of its machine")
            schedules = {
                signature: OverlapSchedule(
                    bool(v_first), int(groups), bool(overlaps_mlp), bool(stock), bool(gathers_kv)
                )
                for signature, (v_first, groups, overlaps_mlp, stock, gathers_kv) in values["schedules"].items()
            }
            return cls(dict(values["machine"]), profile, schedules)
        except (AttributeError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not a tuning cache: {type(error).__name__} {error}") from None

    def file(self, folder: Path) -> Path:
        """Return the cache file of this machine in a folder."""
        digest = hashlib.sha256(json.dumps(self.machine, sort_keys=True).encode()).hexdigest()[:16]
        return folder / f"{digest}.json"

    def save(self) -> None:
        """Write the cache file atomically, if this rank has a folder.

        Raises:
            OSError: the file cannot be written.
        """
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            json_file.replace(self.file(self.folder), json.dumps(self.to_json(), indent=1))


def load(file: Path) -> TuningCache | None:
    """Return the cache of a file; None if there is no such file or it cannot be read, and tuning starts over."""
    try:
        return TuningCache.from_json(json_file.read(file, follow_link=False))
    except (OSError, ValueError):
        return None


def load_shared(
    group: dist.ProcessGroup, common: dict[str, Any], own: dict[str, Any], folder: Path | None
) -> TuningCache:
    """Return the tuning cache of the machine that a group runs on.

    Every rank of the group must call this and gets the contents of rank 0's file, since folders of other hosts may
    differ.

    Args:
        group: the ranks that are tuned together.
        common: description of the machine that is the same on all ranks: versions, settings, the Ulysses "degree".
        own: description of this rank as JSON values: its host and its device.
        folder: where rank 0 reads its file and saves new results; not used by other ranks.
    """
    is_first = group.rank() == 0
    empty = TuningCache({**common, "ranks": gather_results(lambda: own, group, "tuning cache")})

    def read() -> dict[str, Any] | None:
        saved = load(empty.file(folder)) if is_first and folder else None
        return saved.to_json() if saved and saved.machine == empty.machine else None

    contents = gather_results(read, group, "tuning cache")[0]
    cache = TuningCache.from_json(contents) if contents else empty
    cache.folder = folder if is_first else None
    return cache
