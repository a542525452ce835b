"""Text that does not divide among ranks, of which xDiT gives all to each of them."""

from unittest import mock

import pytest
import torch

from tests import ranks
from tests.xdit.attention.test_overlap import start, use_config
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.launching import bare_runtime
from xfuser_cocodiff.xdit.session import replicated_text
from xfuser_cocodiff.xdit.session import session as session_module

FLUX = "xFuserFlux1Transformer2DWrapper"


def said(rank: int, text_tokens: int, model: str) -> list[list[str]]:
    """Of text, by each of two sessions in two steps."""
    group, _, step = start(rank, 3, text_tokens)
    found = []
    for _ in range(2):
        notes: list[str] = []
        session = session_module.Session(mesh=Mesh.over(group, Topology.flat(2)), model=model)
        bare_runtime.use_session(session)
        session.runs.begin(3)
        with mock.patch.object(replicated_text, "info_once", notes.append):
            for _ in range(2):
                step()
                session.runs.end_step()
        found.append(notes)
    return found


@pytest.mark.parametrize(
    ("text_tokens", "model", "is_said"), [(63, FLUX, True), (64, FLUX, False), (63, "xFuserSanaTransformer2D", False)]
)
def test_text_that_does_not_divide_is_told_of_once_by_each_engine(text_tokens: int, model: str, is_said: bool) -> None:
    for by_engine in ranks.run(said, 2, text_tokens, model):
        for notes in by_engine:
            assert len(notes) == is_said
            if is_said:
                assert "not divisible by the 2 ranks" in notes[0] and "--max_sequence_length" in notes[0]


def steps_with_stocks_bits(rank: int) -> list[bool]:
    """Whether they have them; from the fifth step on each rank has another text."""
    group, transformer, step = start(rank, 3, 61)
    is_other = [False]
    transformer.context_embedder.register_forward_hook(lambda _, __, text: text + 0.1 * rank * is_other[0])

    def steps() -> list[torch.Tensor]:
        found = []
        for number in range(8):
            is_other[0] = number >= 4
            found.append(step())
        return found

    expected = steps()
    use_config(group, CocoDiffConfig(topology=Topology.flat(2)))
    return [torch.equal(*pair) for pair in zip(steps(), expected, strict=True)]


def test_replicated_text_is_never_taken_for_that_of_other_ranks() -> None:
    for is_equal in ranks.run(steps_with_stocks_bits, 2):
        assert all(is_equal)
