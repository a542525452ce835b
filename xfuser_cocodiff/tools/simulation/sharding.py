"""Provides the number of tokens per rank of each model, and how xDiT handles tokens that are not divisible.

The rules follow the source of xfuser 0.7.0, its transformer wrappers and its runtime state. xDiT does not pad the heads
of these models; the plugin does, see :mod:`step_time`.
"""

from dataclasses import dataclass

from xfuser_cocodiff.tools.simulation.workloads import PIXELS_PER_TOKEN, Workload

PADDED, UNSUPPORTED, ROWS, WHOLE = "padded", "unsupported", "rows", "whole"
"""Rules of image tokens, and the first two also of text tokens: PADDED with zeros that attention does not mask;
UNSUPPORTED by xDiT; ROWS, where xDiT fails unless the number of token rows is
divisible; or WHOLE, where it fails unless their number is."""
REPLICATED, JOINT = "replicated", "joint"
"""Rules of text tokens: replicated on every rank, where attention sees one copy per rank, or one copy."""


@dataclass(frozen=True)
class TokenShard:
    """Tokens that one rank of a sequence-parallel group holds in one call of the model."""

    image: int
    """Image tokens."""
    text: int
    """Text tokens of Q and O."""
    key_text: int
    """Text tokens of K and V."""
    attended: int
    """Tokens that each query attends to."""
    remarks: tuple[str, ...] = ()
    """How xDiT handles tokens that are not divisible."""
    problem: str | None = None
    """Reason why xDiT cannot run this size; None if it can."""

    @property
    def queries(self) -> int:
        """Number of tokens of Q and O."""
        return self.image + self.text

    @property
    def keys(self) -> int:
        """Number of tokens of K and V."""
        return self.image + self.key_text

    def num_tokens(self, name: str) -> int:
        """Return the number of tokens of one of q, k, v and o."""
        return self.queries if name in "qo" else self.keys


def shard(workload: Workload, resolution: int, degree: int) -> TokenShard:
    """Return the tokens of one rank when `degree` ranks share the sequence of a model.

    Args:
        workload: the model.
        resolution: pixels per side, or rows of a video.
        degree: Ulysses degree times ring degree.
    """
    image, text = -(-workload.image_tokens(resolution) // degree), workload.text_tokens
    key_text = query_text = -(-text // degree)
    attended = (image + key_text) * degree
    if text % degree and workload.text_rule == REPLICATED:
        query_text = key_text = text
        attended = (image + text) * degree
    elif text % degree and workload.text_rule == JOINT:
        query_text, key_text = text, 0
        attended = image * degree + text
    notes = [
        (_image_note(workload, resolution, degree), workload.image_rule in (ROWS, WHOLE)),
        (_text_note(workload, degree), workload.text_rule == UNSUPPORTED),
    ]
    remarks = tuple(note for note, is_problem in notes if note and not is_problem)
    problem = next((note for note, is_problem in notes if note and is_problem), None)
    return TokenShard(image, query_text, key_text, attended, remarks, problem)


def _image_note(workload: Workload, resolution: int, degree: int) -> str | None:
    """Return how xDiT handles the image tokens, or None if they are divisible."""
    is_in_rows, tokens = workload.image_rule == ROWS, workload.image_tokens(resolution)
    counted = resolution // PIXELS_PER_TOKEN if is_in_rows else tokens
    if counted % degree == 0:
        return None
    if workload.image_rule == PADDED:
        return f"{tokens} image tokens are zero-padded to {-(-tokens // degree) * degree}; attention sees the padding"
    reason = f"{counted} {'rows of ' if is_in_rows else ''}image tokens are not divisible by {degree}: xDiT fails"
    return f"{reason}; use a --resolution that is a multiple of {PIXELS_PER_TOKEN * degree}"


def _text_note(workload: Workload, degree: int) -> str | None:
    """Return how xDiT handles the text tokens, or None if they are divisible."""
    tokens, rule = workload.text_tokens, workload.text_rule
    if tokens % degree == 0:
        return None
    reason, fewer = f"{tokens} text tokens are not divisible by {degree}", max(tokens // degree, 1) * degree
    return {
        PADDED: f"{tokens} text tokens are zero-padded to {-(-tokens // degree) * degree}; attention sees the padding",
        UNSUPPORTED: f"{reason}: xDiT fails; use --max_sequence_length {fewer}",
        REPLICATED: f"{reason}: replicated on every rank, and attention sees {degree} copies; use "
        f"--max_sequence_length {fewer} to shard them",
        JOINT: f"{reason}: replicated on every rank, and attention sees one copy",
    }[rule]


def ulysses_degrees(heads: int, degree: int) -> list[int]:
    """Return the Ulysses degrees that divide both the number of ranks and the number of heads."""
    return [count for count in range(1, degree + 1) if degree % count == 0 and heads % count == 0]
