"""The choice of how a tensor is coded, in each state of its link and of its leader, on real links."""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from tests import coded_layers
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.coding_choice import Leader, Link, choose
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.message import Message

STEP, KEYFRAME = Codec(2, predicts=True), Codec(8, predicts=True, is_keyframe=True)
RESET = replace(KEYFRAME, predicts=False)
"""Keyframe that is not the previous reference of the next step."""
SHAPE = 2, 1, 2, 16, 64
"""Slots, groups, heads, tokens and head dim; the first slot is local."""
ALONE, NEXT, DIFFERENCE = (False, False), (False, True), (True, True)
"""Whether the difference to the leader is coded, and whether it is left as the reference of the next step."""
EXPECTED = {
    Link.BROKEN: [(RESET, None), (RESET, ALONE), (RESET, ALONE), (RESET, NEXT), (RESET, DIFFERENCE)],
    Link.EMPTY: [(KEYFRAME, None), (KEYFRAME, ALONE), (KEYFRAME, ALONE), (KEYFRAME, NEXT), (KEYFRAME, DIFFERENCE)],
    Link.VALUES: [(STEP, None), (STEP, ALONE), (STEP, ALONE), (STEP, NEXT), (STEP, DIFFERENCE)],
    Link.DIFFERENCE: [(KEYFRAME, None), (KEYFRAME, ALONE), (STEP, ALONE), (STEP, NEXT), (STEP, DIFFERENCE)],
}
"""Codec and joint coding by link, for the leaders none, lost, idle, sent and kept."""
CELLS = [*itertools.product(Link, Leader)]


class Sent(NamedTuple):
    """A tensor that was sent."""

    layer: LayerCodecs
    message: Message
    buffer: torch.Tensor
    values: torch.Tensor

    def arrive(self) -> torch.Tensor:
        """Return the values as the other end decodes them."""
        target = torch.empty_like(self.values)
        self.message.decode(self.buffer, [target], lambda buffer: buffer)
        return target[1:]


class Branches:
    """V of a leading branch and of one that follows it, both ends of whose link are in this process."""

    def __init__(self) -> None:
        self.leading, self.following = {}, {}

    def layer(self, step: int, is_following: bool, has_leader: bool = True, keeps_values: bool = True) -> LayerCodecs:
        """Return the codecs of a branch."""
        how = {"keyframe_codec": KEYFRAME, "is_joint": True, "step": step}
        how |= {"leader": self.leading if is_following and has_leader else None}
        how |= {"keeps_values": keeps_values and not is_following}
        return coded_layers.layer_codecs(None, {"v": STEP}, self.following if is_following else self.leading, **how)

    def send(self, step: int, is_following: bool, **how: bool) -> Sent:
        """Encode the tensor of a branch at a step."""
        layer = self.layer(step, is_following, **how)
        values = values_of(step, is_following)
        message = Message(Label("v"), [values], layer, range(1))
        return Sent(layer, message, message.encode(), values)

    def assert_equal_ends(self) -> None:
        """Compare the references of both ends."""
        for states in (self.leading, self.following):
            for state in states.values():
                assert state.sent.is_difference is state.received.is_difference
                assert len(state.sent.stored) == len(state.received.stored)
                assert all(map(torch.equal, state.sent.stored, state.received.stored))


def values_of(step: int, is_following: bool) -> torch.Tensor:
    """Return values that change a little from step to step and between branches."""
    first, drift, own = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    return first + 0.1 * step * drift + 0.3 * is_following * own


def bring(link: Link, leader: Leader) -> Branches:
    """Return branches in these states, before the following one sends in step 3."""
    branches = Branches()
    for step in (0, 1, 2):
        branches.send(step, False).arrive()
        if link is Link.VALUES:
            branches.send(step, True, has_leader=False).arrive()
        elif link is not Link.EMPTY:
            sent = branches.send(step, True)
            if link is Link.DIFFERENCE or step < 2:
                sent.arrive()
    if leader is Leader.LOST:
        branches.send(3, False)
    elif leader in (Leader.SENT, Leader.KEPT):
        branches.send(3, False, keeps_values=leader is Leader.KEPT).arrive()
    return branches


@pytest.mark.parametrize(("link", "leader"), CELLS, ids=lambda state: state.name)
def test_codec_and_joint_coding_follow_from_both_states(link: Link, leader: Leader) -> None:
    layer = bring(link, leader).layer(3, True, has_leader=leader is not Leader.NONE)
    codec, lead = choose(layer, "v", ALL_HEADS, (1, *SHAPE[1:]), torch.float32)
    found = codec, lead and (lead.is_coded, lead.is_kept)
    assert found == EXPECTED[link][[*Leader].index(leader)]
    if lead and lead.is_coded:
        assert torch.equal(lead.sent, values_of(3, False)[1:])


@pytest.mark.parametrize(("link", "leader"), CELLS, ids=lambda state: state.name)
def test_both_ends_agree_after_a_message_and_in_later_steps(link: Link, leader: Leader) -> None:
    branches = bring(link, leader)
    for step in (3, 4, 5):
        if step > 3:
            branches.send(step, False).arrive()
        has_leader = step > 3 or leader is not Leader.NONE
        sent = branches.send(step, True, has_leader=has_leader)
        error = sent.arrive() - sent.values[1:]
        assert 0 < error.norm() < 0.15 * sent.values[1:].norm()
        if step > 3 or leader is not Leader.LOST:
            branches.assert_equal_ends()
        state = branches.following["v", ALL_HEADS]
        assert not state.in_flight and all(map(torch.equal, state.sent.stored, state.received.stored))
    assert branches.following["v", ALL_HEADS].sent.is_difference
