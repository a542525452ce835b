"""Messages are logged once per session and by level, and the logger is restored; each test in its own process."""

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
        ("os.environ['COCODIFF_LOG_LEVEL'] = 'Warning'", "", ["act", "act"]),
        ("os.environ['COCODIFF_LOG_LEVEL'] = 'error'", "", []),
        ("os.environ['COCODIFF_LOG_LEVEL'] = 'debug'; logging.basicConfig()", "", ONCE),
        ("os.environ['COCODIFF_LOG_LEVEL'] = 'loud'", "", ONCE),
    ],
    ids=[
        *("unconfigured", "rank 1", "configured", "configured later", "warnings only", "errors only"),
        *("variable: warning", "variable: error", "variable: debug, configured", "variable: not valid"),
    ],
)
def test_message_is_logged_once_per_session_by_level(before: str, after: str, seen: list[str]) -> None:
    code = SAY.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "cocodiff: " in line]
    assert [line.partition("cocodiff: ")[2] for line in lines] == seen
