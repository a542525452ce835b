"""Files that others may have written: every reader refuses what is too large, no file, or not JSON, in one error."""

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from xfuser_cocodiff.engine.autotune import tuning_cache
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.topology.link_profile import Profile


def of_profile(file: Path) -> None:
    Profile.read(file)


def of_cache(file: Path) -> None:
    if tuning_cache.load(file) is None:  # tuning starts over
        raise ValueError


def deep(file: Path) -> None:
    file.write_text("[" * 200_000)


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def pipe(file: Path) -> None:
    os.mkfifo(file)  # nobody writes to it


def numbers(file: Path) -> None:
    """Integers beyond any float, and a number of ranks for which no list of them fits in memory."""
    big = "9" * 400
    profile = {"topology": "node=2", "ranks": 2, "links": [], "contention": 1}
    profile |= {name: 1 for name in ("launch_seconds", "copy_bytes_per_second", "codec_bytes_per_second")}
    cache = {"schema": 10, "machine": {}, "profile": profile, "schedules": {"a": [True, 0, False, False, False]}}
    text = json.dumps({**cache, **profile})
    file.write_text(text.replace('"launch_seconds": 1', f'"launch_seconds": {big}').replace(" 0,", f" {big},"))


@pytest.mark.parametrize("damage", [deep, endless, pipe, numbers])
@pytest.mark.parametrize("read", [of_profile, of_cache])
def test_damaged_files_are_one_error(tmp_path: Path, read: Callable, damage: Callable) -> None:
    file = tmp_path / "file.json"
    damage(file)
    with pytest.raises(ValueError):
        read(file)


def test_a_cache_is_not_written_through_a_link(tmp_path: Path) -> None:
    saved = TuningCache({"torch": "1"}, folder=tmp_path / "cache")
    saved.folder.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("of another program")
    saved.file(saved.folder).symlink_to(outside)
    saved.save()
    assert outside.read_text() == "of another program"
    assert tuning_cache.load(saved.file(saved.folder)) == TuningCache({"torch": "1"})


def test_a_full_disk_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    saved = TuningCache({"torch": "1"}, folder=tmp_path)
    saved.save()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # a write fails in the middle
        with pytest.raises(OSError):
            saved.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [file.name for file in tmp_path.iterdir()] == [saved.file(tmp_path).name]
    assert tuning_cache.load(saved.file(tmp_path)) == TuningCache({"torch": "1"})
