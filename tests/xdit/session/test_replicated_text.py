"""Text tokens that are not divisible by the number of ranks, and replicated by xDiT."""

import torch

from tests import ranks
from tests.xdit.attention.test_overlap import start, use_config
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig


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
