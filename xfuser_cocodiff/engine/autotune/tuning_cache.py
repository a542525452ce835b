"""What was found of a machine, kept for the next process: its links, and the schedule of each kind of layer. So only
the first run of a machine has to find out.

A file is of one machine, as the ranks of a group see it together: other hosts, devices, links or versions have another
file, and what is found then starts anew.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from xfuser_cocodiff.engine.attention.overlap_schedule import Schedule
from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.topology.link_profile import Profile

_SCHEMA = 4


@dataclass
class TuningCache:
    """What is known of one machine."""

    machine: dict[str, Any]
    """What it was found on, as JSON values: versions, topology and what each rank says of itself."""
    profile: Profile | None = None
    schedules: dict[str, Schedule] = field(default_factory=dict)
    """By kind of layer."""
    folder: Path | None = None
    """Where this rank keeps them; None where it does not."""

    def to_json(self) -> dict[str, Any]:
        """The inverse of :meth:`from_json`."""
        return {
            "schema": _SCHEMA,
            "machine": self.machine,
            "profile": self.profile and self.profile.to_json(),
            "schedules": {kind: list(schedule) for kind, schedule in self.schedules.items()},
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TuningCache":
        """Read what :meth:`to_json` made.

        Raises:
            ValueError: it is something else.
        """
        try:
            if values["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {values['schema']}, not {_SCHEMA}")
            profile = values["profile"] and Profile.from_json(values["profile"])
            schedules = {
                kind: Schedule(bool(v_first), int(groups), bool(beside), bool(flat))
                for kind, (v_first, groups, beside, flat) in values["schedules"].items()
            }
            return cls(dict(values["machine"]), profile, schedules)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not what was found of a machine: {type(error).__name__} {error}") from None

    def file(self, folder: Path) -> Path:
        """Where they are kept in a folder: another file for each machine."""
        digest = hashlib.sha256(json.dumps(self.machine, sort_keys=True).encode()).hexdigest()[:16]
        return folder / f"{digest}.json"

    def keep(self) -> None:
        """Write them down if this rank does, for a reader that sees the file whole or not at all.

        Raises:
            OSError: they cannot be written.
        """
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.file(self.folder)
            partial = file.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps(self.to_json(), indent=1))
            partial.replace(file)


def read(file: Path) -> TuningCache | None:
    """What a file keeps; None where there is none, or it cannot be read: then all is found anew."""
    try:
        return TuningCache.from_json(json.loads(file.read_text()))
    except (OSError, ValueError):
        return None


def shared(group: dist.ProcessGroup, common: dict[str, Any], own: dict[str, Any], folder: Path | None) -> TuningCache:
    """Return what is known of the machine that ranks are on. Each of a group must call this, and gets the same: what
    the first one has kept, since folders of other hosts may hold something else.

    Args:
        group: the ranks that try things with each other.
        common: what findings are of beside the ranks, the same on all: versions, settings, the Ulysses "degree".
        own: what this rank says of itself, as JSON values: its host, its device.
        folder: where the first rank looks, and keeps what is found from here on; others need not have the same.
    """

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * group.size()
        dist.all_gather_object(values, value, group=group)
        return values

    is_first = group.rank() == 0
    with failure_detection.report_failed_ranks(group, "findings"):
        fresh = TuningCache({**common, "ranks": gather(own)})
        kept = read(fresh.file(folder)) if is_first and folder else None
        found = gather(kept.to_json() if kept and kept.machine == fresh.machine else None)[0]
    known = TuningCache.from_json(found) if found else fresh
    known.folder = folder if is_first else None
    return known
