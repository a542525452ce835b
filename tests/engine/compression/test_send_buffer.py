"""The send buffer: one memory for all messages, which grows."""

import torch

from xfuser_cocodiff.engine.compression.send_buffer import SendBuffer
from xfuser_cocodiff.engine.topology.devices import CPU


def test_messages_use_the_same_memory_until_one_is_larger() -> None:
    buffer = SendBuffer()
    views = [buffer.view(shape, CPU) for shape in ((2, 64), (1, 32), (4, 32), (3, 64), (2, 64))]
    assert [view.shape for view in views] == [(2, 64), (1, 32), (4, 32), (3, 64), (2, 64)]
    assert all(view.dtype == torch.uint8 and view.is_contiguous() for view in views)
    first, *others = [view.data_ptr() for view in views]
    assert others[:2] == [first, first]
    assert others[2] == others[3] != first
