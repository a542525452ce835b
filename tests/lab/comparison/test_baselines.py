"""Compression rules of other systems."""

import pytest
import torch

from tests.coded_layers import layer_codecs
from xfuser_cocodiff.engine.codec.codec import EXACT
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.comparison import baselines


@pytest.mark.parametrize("dim", [16, 128, 384])
def test_rotation_keeps_attention_scores_and_is_its_own_inverse(dim: int) -> None:
    query, key = torch.randn(2, 3, 7, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    query[:, 3] *= 50  # an outlier
    rotated = baselines.rotate(query), baselines.rotate(key)
    torch.testing.assert_close(rotated[0] @ rotated[1].mT, query @ key.mT)
    torch.testing.assert_close(baselines.rotate(rotated[0]), query)
    one = torch.zeros(1, dim, dtype=torch.float64)
    one[0, 0] = 1
    assert baselines.rotate(one).abs().max() == pytest.approx(min(dim, 128) ** -0.5)
    assert torch.equal(baselines.rotate(query[..., :12]), query[..., :12])  # there is no Hadamard matrix of this size


def test_fp8_keeps_three_bits_of_mantissa() -> None:
    ranks = baselines.Fp8(Topology.parse("2x2"), ("node",))
    stats = CodecStats()
    tensors = [torch.randn(1, 4, 64, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    received = ranks.transmit("qkv", tensors, [64], layer_codecs(None, dict.fromkeys("qkvo", EXACT), {}, stats))
    assert stats.sent_bytes * 4 == stats.exact_bytes == 3 * tensors[0].nbytes
    value, other = tensors[2], received[2]
    large = value.abs() > value.abs().max() / 64
    error = ((other - value) / value)[large].abs().max().item()
    assert 2**-6 < error <= 2**-4
    assert len(other.unique()) < 256
    for tensor, other in zip(tensors[:2], received[:2], strict=True):
        assert 1e-3 < (other - tensor).norm() / tensor.norm() < 2**-4


RULES = (baselines.Fp8, baselines.RowFp8, baselines.Fp4, baselines.Int8)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_errors_are_those_of_the_tensors_that_are_not_exact(rule: type[baselines.VirtualRanks]) -> None:
    sent = [torch.randn(1, 4, 64, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    codecs = layer_codecs(None, dict.fromkeys("qkvo", EXACT), {})
    received = dict(zip("qkv", rule(Topology.parse("2x2"), ("node",)).transmit("qkv", sent, [64], codecs), strict=True))
    exact = [name for name, values in zip("qkv", sent, strict=True) if torch.equal(received[name], values)]
    assert exact == (["k"] if rule is baselines.RowFp8 else [])
    errors = codecs.errors.start_readout().read()
    assert [found.name for found in errors] == [name for name in "qkv" if name not in exact]
    for found in errors:
        values = sent["qkv".index(found.name)]
        expected = (received[found.name] - values).square().sum() / values.square().sum()
        assert found.error_energy / found.value_energy == pytest.approx(expected.item(), rel=1e-5)
