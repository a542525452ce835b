"""What the user sees of messages, in processes of their own, and what is left of the logger."""

import subprocess
import sys

import pytest

SAY = """
import logging, os
from xfuser_cocodiff.xdit.patching import log
{before}
logger = logging.getLogger("xfuser_cocodiff")
level = logger.level
for _ in range(2):
    log.info_once("normal")
    log.warn_once("act")
log.begin_session()
log.warn_once("act")
{after}
log.info_once("late")
log.close()
assert not logger.handlers and logger.level == level
"""
ONCE = ["normal", "act", "act", "late"]


@pytest.mark.parametrize(
    ("before", "after", "seen"),
    [
        ("", "", ONCE),
        ("os.environ['RANK'] = '1'", "", []),
        ("logging.basicConfig(level=logging.INFO)", "", ONCE),
        ("", "logging.basicConfig(level=logging.INFO)", ONCE),
        ("logging.basicConfig()", "", ["act", "act"]),
        ("logging.getLogger('xfuser_cocodiff').setLevel(logging.ERROR)", "", []),
    ],
    ids=["unconfigured", "rank 1", "configured", "configured later", "warnings only", "errors only"],
)
def test_a_message_is_seen_once_per_engine(before: str, after: str, seen: list[str]) -> None:
    code = SAY.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "cocodiff: " in line]
    assert [line.partition("cocodiff: ")[2] for line in lines] == seen
