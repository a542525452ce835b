"""Records of subcommands: a file is replaced as a whole."""

import argparse
import json
import os
from pathlib import Path

import pytest

from xfuser_cocodiff.cli.output import write_json


def options(file: Path) -> argparse.Namespace:
    """Return options with --json."""
    return argparse.Namespace(json=file, command="cocodiff env")


def test_an_interrupted_record_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "record.json"
    write_json(options(file), {"cells": [1]})
    write_text = Path.write_text

    def write_half(path: Path, text: str) -> int:
        write_text(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "write_text", write_half)
        write_json(options(file), {"cells": [1, 2]})
    assert json.loads(file.read_text()) == {"cells": [1], "command": "cocodiff env"}
    write_json(options(file), {"cells": [1, 2, 3]})
    assert json.loads(file.read_text())["cells"] == [1, 2, 3]
    assert list(file.parent.iterdir()) == [file]


def test_a_record_is_written_to_a_pipe(tmp_path: Path) -> None:
    """As to /dev/stdout."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(options(pipe), {"cells": []})
    assert json.loads(os.read(reader, 1000))["cells"] == []
    os.close(reader)
    assert pipe.is_fifo()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as error:
        write_json(options(tmp_path / "file/record.json"), {})
    assert error.value.code == 2 and f"--json {tmp_path}/file/record.json: " in capsys.readouterr().err
