"""Materialized tensors are on the device, with the dtypes that `from_pretrained` gives them."""

import torch
from torch import nn

from benchmarks.full_size.transformer import materialize


class Layer(nn.Module):
    """A layer with every kind of tensor."""

    _keep_in_fp32_modules = ("norm",)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 3), nn.LayerNorm(3)
        self.register_buffer("saved", torch.zeros(4))
        self.register_buffer("computed", torch.zeros(5, dtype=torch.float64), persistent=False)
        self.register_buffer("positions", torch.zeros(6, dtype=torch.int64))
        self.plain = torch.zeros(7, dtype=torch.complex64)


def test_dtypes_and_devices() -> None:
    with torch.device("meta"):
        layer = Layer()
    materialize(layer, torch.device("cpu"), torch.bfloat16)
    tensors = layer.state_dict() | {"computed": layer.computed, "plain": layer.plain}
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "linear.weight": (torch.bfloat16, (3, 2)),
        "linear.bias": (torch.bfloat16, (3,)),
        "norm.weight": (torch.float32, (3,)),
        "norm.bias": (torch.float32, (3,)),
        "saved": (torch.bfloat16, (4,)),
        "computed": (torch.float64, (5,)),
        "positions": (torch.int64, (6,)),
        "plain": (torch.complex64, (7,)),
    }
    assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
    assert not any(weight.requires_grad for weight in layer.parameters())
