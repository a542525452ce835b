"""Options that are not valid, on ranks: the same line on each, before any collective.

The values are those of tests/xdit/settings/test_bad_options.py.
"""

import os
from unittest import mock

import pytest
import torch.distributed as dist

from tests import ranks
from tests.xdit.integration.test_config_fields import parse
from tests.xdit.settings.test_bad_options import BAD


def arguments_of(name: str, value: str) -> list[str]:
    mode = [] if name == "mode" else ["--cocodiff_mode", "fast"]
    return [*mode, f"--cocodiff_{name}={value}"]


def errors_of(rank: int, cases: list[tuple[str, str]]) -> list[str]:
    """Return the error of each case on a rank on which every collective fails."""
    collectives = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "new_group")
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = []
    with mock.patch.multiple(dist, **dict.fromkeys(collectives, None)):
        for case in cases:
            with pytest.raises(ValueError) as raised:
                parse(["--ulysses_degree", "4", "--use_cocodiff", *arguments_of(*case)], False).create_config()
            found.append(str(raised.value))
    return found


def test_every_rank_raises_the_same_error_before_any_collective() -> None:
    cases = [(name, values[-1]) for name, values in BAD.items()]
    first, *others = ranks.run(errors_of, 4, cases)
    assert others == [first] * 3
    for (name, _), error in zip(cases, first, strict=True):
        assert error.startswith(f"--cocodiff_{name}: "), error
        assert len(error.splitlines()) == 1
