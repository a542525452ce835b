"""What is said of text that ranks do not share."""

import os
from unittest import mock

import pytest

from tests import ranks

FLUX = "xFuserFlux1Transformer2DWrapper"


def said(rank: int, text_tokens: int, model: str) -> list[str]:
    """In a step of a FLUX transformer."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "0"  # not used: the ranks have met
    from xfuser_cocodiff.bench import transformer
    from xfuser_cocodiff.exchange.mesh import Mesh
    from xfuser_cocodiff.machine.topology import Topology
    from xfuser_cocodiff.xdit.engine import engine as engines
    from xfuser_cocodiff.xdit.engine import text
    from xfuser_cocodiff.xdit.launching import world

    group, notes = world.start(), []
    with (
        mock.patch.object(transformer, "text_tokens", lambda _: text_tokens),
        mock.patch.object(text, "note", notes.append),
    ):
        step = transformer.step(transformer.Shape(128, 3, 64, 8))
        engine = engines.Engine(mesh=Mesh.over(group, Topology.flat(2)), model=model)
        world.use(engine)
        engine.runs.begin(3)
        step()
        engine.runs.end_step()
    return [each for each in notes if "text" in each]


@pytest.mark.parametrize(
    ("text_tokens", "model", "is_said"), [(63, FLUX, True), (64, FLUX, False), (63, "xFuserSanaTransformer2D", False)]
)
def test_text_that_does_not_divide_is_told_of(text_tokens: int, model: str, is_said: bool) -> None:
    for notes in ranks.run(said, 2, text_tokens, model):
        assert len(notes) == is_said
        if is_said:
            assert "do not divide by the 2 ranks" in notes[0] and "--max_sequence_length" in notes[0]
