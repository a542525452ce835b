"""Text tokens that are not divisible by the number of ranks, and replicated by xDiT."""

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


def messages_of(rank: int, text_tokens: int, model: str) -> list[list[str]]:
    """Return the hints that each of two sessions logs in two steps."""
    group, _, step = start(rank, 3, text_tokens)
    found = []
    for _ in range(2):
        messages: list[str] = []
        session = session_module.Session(mesh=Mesh.over(group, Topology.flat(2)), model=model)
        bare_runtime.use_session(session)
        session.runs.begin(3)
        with mock.patch.object(replicated_text, "info_once", messages.append):
            for _ in range(2):
                step()
                session.runs.end_step()
        found.append(messages)
    return found


@pytest.mark.parametrize(
    ("text_tokens", "model", "is_logged"), [(63, FLUX, True), (64, FLUX, False), (63, "xFuserSanaTransformer2D", False)]
)
def test_replicated_text_is_logged_once_per_session(text_tokens: int, model: str, is_logged: bool) -> None:
    for by_session in ranks.run(messages_of, 2, text_tokens, model):
        for messages in by_session:
            assert len(messages) == is_logged
            if is_logged:
                assert "not divisible by the 2 ranks" in messages[0] and "--max_sequence_length" in messages[0]


def bit_identical_steps(rank: int) -> list[bool]:
    """Return for each step whether it is bit-identical to stock; from step 5 on each rank has another text."""
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


def test_replicated_text_is_never_replaced_by_another_ranks() -> None:
    for is_equal in ranks.run(bit_identical_steps, 2):
        assert all(is_equal)
