"""How xDiT shards the heads and tokens of a model, what it does where they do not divide, and what to do about that.

Read in the source of xfuser 0.7.0: its transformer wrappers and its runtime state. Heads are not padded there for these
models; the plugin pads them, see :mod:`prediction`.
"""

from dataclasses import dataclass

from xfuser_cocodiff.lab.simulation.workloads import PIXELS_PER_TOKEN, Workload

PADS, FAILS, ROWS, WHOLE, JOINT = "pads", "fails", "rows", "whole", "joint"


@dataclass(frozen=True)
class Rule:
    """What xDiT does with the tokens of a model."""

    image: str
    """Tokens that do not divide: PADS them with zeros, which attention then sees, or FAILS, where the plugin pads them;
    ROWS: rows of tokens must divide, and it fails where they do not."""
    text: str
    """The same; WHOLE: every rank has all text, and attention sees it once for each of them; JOINT: every rank has it,
    and attention sees it once."""


RULES = {
    "flux.1-dev": Rule(FAILS, WHOLE),
    "flux.2-dev": Rule(PADS, FAILS),
    "sd3.5-large": Rule(ROWS, JOINT),
    "qwen-image": Rule(PADS, PADS),
}


@dataclass(frozen=True)
class Shard:
    """What one of the ranks that share a sequence has of it, in tokens of one call."""

    image: int
    text: int
    """Of Q and O."""
    key_text: int
    """Of K and V."""
    attended: int
    """Tokens that each one attends."""
    remarks: tuple[str, ...] = ()
    """What xDiT does where tokens do not divide."""
    problem: str | None = None
    """Why xDiT cannot run this."""

    @property
    def queries(self) -> int:
        """Tokens of Q and O."""
        return self.image + self.text

    @property
    def keys(self) -> int:
        """Tokens of K and V."""
        return self.image + self.key_text

    def of(self, name: str) -> int:
        """Tokens of one of q, k, v and o."""
        return self.queries if name in "qo" else self.keys


def shard(workload: Workload, resolution: int, degree: int) -> Shard:
    """Part the tokens of a model among `degree` ranks.

    Args:
        workload: one with a rule.
        resolution: pixels on a side.
        degree: Ulysses degree times Ring degree.
    """
    rule, side = RULES[workload.name], resolution // PIXELS_PER_TOKEN
    tokens, text = side**2, workload.text_tokens
    image, key_text = -(-tokens // degree), -(-text // degree)
    query_text, attended = key_text, (image + key_text) * degree
    remarks, problems = [], []
    if not _divides(workload, resolution, degree):
        what = f"{side} rows of image tokens" if rule.image == ROWS else f"{tokens} image tokens"
        if rule.image == PADS:
            remarks.append(f"{what} are padded to {image * degree}, and attention sees the padding")
        elif rule.image == FAILS:
            remarks.append(
                f"{what} do not divide by {degree}: xDiT fails, and the plugin pads them, unseen by attention"
            )
        else:
            near = " and ".join(f"{other} px" for other in _near(workload, resolution, degree))
            problems.append(f"{what} do not divide by {degree}, and xDiT fails; {near} would do")
    if text % degree:
        what, shorter = f"{text} text tokens", f"--max_sequence_length {text // degree * degree}"
        if rule.text == FAILS:
            problems.append(f"{what} do not divide by {degree}, and xDiT fails; {shorter} would do")
        elif rule.text == PADS:
            remarks.append(f"{what} are padded to {key_text * degree}, and attention sees the padding")
        else:
            every_rank = f"{what} do not divide by {degree}: every rank has all of them, attention sees them"
            query_text = text
            if rule.text == WHOLE:
                remarks.append(f"{every_rank} {degree} times; {shorter} would share them")
                key_text, attended = text, (image + text) * degree
            else:
                remarks.append(f"{every_rank} once")
                key_text, attended = 0, image * degree + text
    return Shard(image, query_text, key_text, attended, tuple(remarks), problems[0] if problems else None)


def _near(workload: Workload, resolution: int, degree: int) -> list[int]:
    """The next smaller and larger resolutions at which image tokens divide."""
    found = []
    for step in (-PIXELS_PER_TOKEN, PIXELS_PER_TOKEN):
        other = resolution + step
        while other > 0 and not _divides(workload, other, degree):
            other += step
        found += [other] if other > 0 else []
    return found


def _divides(workload: Workload, resolution: int, degree: int) -> bool:
    side = resolution // PIXELS_PER_TOKEN
    return (side if RULES[workload.name].image == ROWS else side**2) % degree == 0


def ulysses_degrees(heads: int, degree: int) -> list[int]:
    """Ulysses degrees that `degree` ranks may have: those that divide both it and the heads."""
    return [count for count in range(1, degree + 1) if degree % count == 0 and heads % count == 0]
