"""Messages are logged once per session and by level, and the logger is restored; each test in its own process."""

import os
from pathlib import Path

import pytest

from tests import ranks

SAY = """
import logging, os
from xfuser_cocodiff.xdit.patching import log
{before}
logger = logging.getLogger("xfuser_cocodiff")
level = logger.level
for _ in range(2):
    log.info_once("normal")
    log.warn_once("act")
    log.info_always("each")
log.begin_session()
log.warn_once("act")
log.info_once("late")
log.close()
assert not logger.handlers and logger.level == level
"""


def run(code: str, file: Path) -> None:
    """Run code in this process, whose standard error is a file from now on."""
    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), 2)
    exec(code, {})


IN_A_GROUP = """
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
dist.init_process_group("fake", store=dist.HashStore(), rank={rank}, world_size=2)
"""
"""Code that makes this process a rank of two, without the other one."""

SEEN = ["normal", "act", "each", "each", "act", "late"]


@pytest.mark.parametrize(
    ("before", "seen"),
    [
        ("", SEEN),
        (IN_A_GROUP.format(rank=1), []),  # Ray's workers inherit the variable
        ("os.environ['RANK'] = '1';" + IN_A_GROUP.format(rank=0), SEEN),
        ("logging.basicConfig()", ["act", "act"]),
        ("os.environ['COCODIFF_LOG_LEVEL'] = 'Warning'", ["act", "act"]),
        ("os.environ['COCODIFF_LOG_LEVEL'] = 'debug'; logging.basicConfig()", SEEN),
    ],
)
def test_message_is_logged_once_per_session_by_level(before: str, seen: list[str], tmp_path: Path) -> None:
    code, file = SAY.format(before=before), tmp_path / "stderr"
    process = ranks.context.Process(target=run, args=(code, file))
    process.start()
    process.join()
    assert process.exitcode == 0, file.read_text()
    lines = [line for line in file.read_text().splitlines() if "cocodiff: " in line]
    assert [line.partition("cocodiff: ")[2] for line in lines] == seen
