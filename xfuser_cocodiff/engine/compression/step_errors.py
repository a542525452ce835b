"""Errors of a step's tensors: their energies on the device, and on their way to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xfuser_cocodiff.engine.codec.memory import lasting
from xfuser_cocodiff.engine.topology import devices

_ROWS = 256
"""Rows of a chunk of memory."""
_ALIGNED_ROWS = 2
"""Kernels are compiled for memory that is aligned to 16 bytes, which two rows have."""


@dataclass(eq=False, slots=True)
class TensorError:
    """The error of one tensor in one step."""

    name: str
    """Letter of the tensor, or name of a yardstick."""
    layer: str = ""
    """Name of the layer."""
    is_counted: bool = True
    """Whether rate control counts it."""
    leader: "TensorError | None" = None
    """Error of the values to which a difference was coded, which adds to that of the difference."""
    error_energy: float = 0.0
    """Sum of squared errors, once read; not finite if the values were not."""
    value_energy: float = 0.0
    """Sum of squared values, once read."""


class StepErrors:
    """Energies of the tensors that a step has sent so far. Memory is used again in the next step."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._chunk, self._row = 0, 0
        self._places: list[tuple[int, int]] = []
        self._errors: list[TensorError] = []

    def add(self, errors: Sequence[TensorError], device: torch.device) -> torch.Tensor:
        """Return memory for the energies of some tensors, float32 (number of tensors, 2), to be written.

        Args:
            errors: the tensors; a leading branch before those that follow it.
            device: where their values are.
        """
        if not errors:
            return torch.empty(0, 2, device=device)
        if self._row + len(errors) > _ROWS:
            self._chunk, self._row = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            self._chunks.append(lasting((_ROWS, 2), torch.float32, device))
        first, self._row = self._row, self._row + len(errors)
        self._places += [(self._chunk, row) for row in range(first, self._row)]
        self._errors += errors
        self._row += -self._row % _ALIGNED_ROWS
        return self._chunks[self._chunk][first : first + len(errors)]

    def start_readout(self) -> "ErrorReadout":
        """Start to copy the energies of this step to the host, and begin the next step."""
        used = self._chunks[: self._chunk + 1] if self._places else []
        readout = ErrorReadout(used, self._places, self._errors)
        self._chunk, self._row, self._places, self._errors = 0, 0, [], []
        return readout


class ErrorReadout:
    """Copy of energies to the host; on an accelerator it is queued behind the caller's stream.

    Args:
        chunks: the energies, float32 (rows, 2) each.
        places: chunk and row of each tensor.
        errors: the tensors.
    """

    def __init__(
        self, chunks: Sequence[torch.Tensor], places: Sequence[tuple[int, int]], errors: Sequence[TensorError]
    ) -> None:
        self._places, self._errors = places, errors
        self._copied: torch.Event | None = None
        self._chunks = [chunk.clone() if chunk.device.type == "cpu" else _to_pinned(chunk) for chunk in chunks]
        if chunks and devices.capabilities(chunks[0].device.type).is_asynchronous:
            self._copied = torch.accelerator.current_stream(chunks[0].device).record_event()

    def read(self) -> Sequence[TensorError]:
        """Return the errors with their energies, once these have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        energies = [chunk.tolist() for chunk in self._chunks]
        for error, (chunk, row) in zip(self._errors, self._places, strict=True):
            error.error_energy, error.value_energy = energies[chunk][row]
            if error.leader:  # both errors are independent
                error.error_energy += error.leader.error_energy
        return self._errors


def _to_pinned(chunk: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory: the host would wait for a copy into any other."""
    pinned = torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True)
    return pinned.copy_(chunk, non_blocking=True)
