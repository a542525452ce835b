"""Provides the number of tokens per rank of each model, and how xDiT handles tokens that are not divisible.

The rules follow the source of xfuser 0.7.0, its transformer wrappers and its runtime state. xDiT does not pad the heads
of these models; the plugin does, see :mod:`step_time`.
"""

from dataclasses import dataclass

from xfuser_cocodiff.lab.simulation.workloads import PIXELS_PER_TOKEN, Workload

PADDED, UNSUPPORTED, ROWS, WHOLE = "padded", "unsupported", "rows", "whole"
REPLICATED, JOINT = "replicated", "joint"


@dataclass(frozen=True)
class ShardingRule:
    """How xDiT handles the tokens of a model that are not divisible by the degree."""

    image: str
    """For image tokens: PADDED with zeros that attention does not mask; UNSUPPORTED by xDiT, but padded by the plugin;
    ROWS, where xDiT fails unless the number of token rows is divisible; or WHOLE, where it fails unless their number
    is."""
    text: str
    """For text tokens: PADDED or UNSUPPORTED; REPLICATED on every rank, where attention sees one copy per rank; or
    JOINT, replicated on every rank, where attention sees one copy."""


RULES = {
    "flux.1-dev": ShardingRule(UNSUPPORTED, REPLICATED),
    "flux.2-dev": ShardingRule(PADDED, UNSUPPORTED),
    "sd3.5-large": ShardingRule(ROWS, JOINT),
    "qwen-image": ShardingRule(PADDED, PADDED),
    "hunyuanvideo": ShardingRule(WHOLE, JOINT),
    "wan2.1-14b": ShardingRule(PADDED, PADDED),  # text is not in the sequence
}


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
        workload: model with an entry in :data:`RULES`.
        resolution: pixels per side, or rows of a video.
        degree: Ulysses degree times ring degree.
    """
    rule = RULES[workload.name]
    image, text = -(-workload.image_tokens(resolution) // degree), workload.text_tokens
    key_text = query_text = -(-text // degree)
    attended = (image + key_text) * degree
    if text % degree and rule.text == REPLICATED:
        query_text = key_text = text
        attended = (image + text) * degree
    elif text % degree and rule.text == JOINT:
        query_text, key_text = text, 0
        attended = image * degree + text
    notes = [
        (_image_note(workload, resolution, degree), rule.image in (ROWS, WHOLE)),
        (_text_note(workload, degree), rule.text == UNSUPPORTED),
    ]
    remarks = tuple(note for note, is_problem in notes if note and not is_problem)
    problem = next((note for note, is_problem in notes if note and is_problem), None)
    return TokenShard(image, query_text, key_text, attended, remarks, problem)


def _image_note(workload: Workload, resolution: int, degree: int) -> str | None:
    """Return how xDiT handles the image tokens, or None if they are divisible."""
    rule, tokens = RULES[workload.name].image, workload.image_tokens(resolution)
    if _is_divisible(workload, resolution, degree):
        return None
    if rule == PADDED:
        return _padding_note(f"{tokens} image tokens", -(-tokens // degree) * degree)
    if rule == UNSUPPORTED:
        return f"{tokens} image tokens are not divisible by {degree}: xDiT fails; the plugin zero-pads and masks them"
    valid = " or ".join(f"{other} px" for other in _nearest_resolutions(workload, resolution, degree))
    indivisible = f"{resolution // PIXELS_PER_TOKEN} rows of image" if rule == ROWS else f"{tokens} image"
    return f"{indivisible} tokens are not divisible by {degree}: xDiT fails; use {valid}"


def _text_note(workload: Workload, degree: int) -> str | None:
    """Return how xDiT handles the text tokens, or None if they are divisible."""
    rule, tokens = RULES[workload.name].text, workload.text_tokens
    if tokens % degree == 0:
        return None
    if rule == PADDED:
        return _padding_note(f"{tokens} text tokens", -(-tokens // degree) * degree)
    reason = f"{tokens} text tokens are not divisible by {degree}"
    divisible = f"--max_sequence_length {max(tokens // degree, 1) * degree}"
    if rule == UNSUPPORTED:
        return f"{reason}: xDiT fails; use {divisible}"
    if rule == REPLICATED:
        copies = f"replicated on every rank, and attention sees {degree} copies"
        return f"{reason}: {copies}; use {divisible} to shard them"
    return f"{reason}: replicated on every rank, and attention sees one copy"


def _padding_note(tokens: str, padded: int) -> str:
    return f"{tokens} are zero-padded to {padded}; attention does not mask the padding"


def _nearest_resolutions(workload: Workload, resolution: int, degree: int) -> list[int]:
    """Return the next smaller and the next larger resolution with divisible image tokens."""
    resolutions = []
    for step in (-PIXELS_PER_TOKEN, PIXELS_PER_TOKEN):
        other = resolution + step
        while other > 0 and not _is_divisible(workload, other, degree):
            other += step
        resolutions += [other] if other > 0 else []
    return resolutions


def _is_divisible(workload: Workload, resolution: int, degree: int) -> bool:
    in_rows = RULES[workload.name].image == ROWS
    return (resolution // PIXELS_PER_TOKEN if in_rows else workload.image_tokens(resolution)) % degree == 0


def ulysses_degrees(heads: int, degree: int) -> list[int]:
    """Return the Ulysses degrees that divide both the number of ranks and the number of heads."""
    return [count for count in range(1, degree + 1) if degree % count == 0 and heads % count == 0]
