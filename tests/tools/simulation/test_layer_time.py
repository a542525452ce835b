"""The time of a layer whose computation and messages are round numbers, against time lines drawn by hand."""

import pytest

from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator
from xfuser_cocodiff.tools.simulation.collectives import Message
from xfuser_cocodiff.tools.simulation.layer_time import Computation, Schedule, layer_time

ROUND = Accelerator("round", 1e9, 1e9, 1e9, 1e9, 0.0, launch_seconds=0.0, collective_host_seconds=0.0)
COMPUTED = Computation(query_key=2.0, parallel=0.0, attention=6.0, rest=1.0, host=0.0)


def message(seconds: float, codec_seconds: float = 0.0) -> Message:
    return Message(seconds, {}, 1, 1.0, codec_seconds=codec_seconds)


def device_seconds(schedule: Schedule) -> float:
    return layer_time(COMPUTED, schedule, Message(), 1, ROUND, overlaps=True).device


@pytest.mark.parametrize(
    ("v", "arrived"),
    [
        (message(1.5), 2.0),  # hidden
        (message(1.5, 0.5), 2.5),  # its codec takes the device, and delays Q and K
        (message(5.0, 0.5), 5.0),  # V arrives last in any case
    ],
)
def test_codecs_of_an_early_v_delay_what_hides_it(v: Message, arrived: float) -> None:
    schedule = Schedule({"v": v, "qk": message(3.0)}, message(1.0))
    assert device_seconds(schedule) == arrived + 3 + 6 + 1 + 1


def test_head_groups_hide_links_and_not_codecs() -> None:
    """The second group's inputs take 2 s, of which 0.5 s on the device, and arrive while the first attends in 3 s."""
    groups = Schedule({"qkv": message(2.0, 0.5)}, message(0.5), (message(2.0, 0.5),))
    assert device_seconds(groups) == 2 + 2 + (3 + 0.5) + 3 + 0.5 + 1
    one = Schedule({"qkv": message(4.0, 1.0)}, message(1.0))
    assert device_seconds(one) == 2 + 4 + 6 + 1 + 1
