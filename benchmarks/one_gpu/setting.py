"""Where facts are measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
"""JSON values."""


@dataclass(frozen=True)
class Setting:
    """Where facts are measured."""

    folder: Path
    """Folder of the results."""
    device: torch.device
    """The GPU, or what stands for it in a dry run."""
    is_dry_run: bool = False
    """Whether sizes are toy sizes."""

    def pick(self, real: Any, toy: Any) -> Any:
        """Return one of two sizes."""
        return toy if self.is_dry_run else real
