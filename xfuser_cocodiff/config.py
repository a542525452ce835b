"""What the user asked for: flags and environment become one frozen, validated record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xfuser_cocodiff.topology import NOTATION, Topology

A2A_ALGORITHMS = ("auto", "flat", "hierarchical")
MODES = ("exact",)
RECORD_VARIABLE = "COCODIFF_RECORD"
"""Environment variable: folder in which every rank leaves a record of its runs, for `cocodiff compare`."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Option:
    """One option of the plugin: a flag of xDiT's parsers, a field of its arguments and an environment variable."""

    field: str
    variable: str
    default: Any
    help: str
    choices: tuple[str, ...] | None = None

    @property
    def flag(self) -> str:
        return f"--{self.field}"


OPTIONS = (
    Option("use_cocodiff", "COCODIFF_ENABLE", False, "Run Ulysses attention over CoCoDiff's exchanges."),
    Option(
        "cocodiff_topology",
        "COCODIFF_TOPOLOGY",
        None,
        f"Topology of a Ulysses group: {NOTATION}. Detected from the launcher when not given.",
    ),
    Option(
        "cocodiff_a2a",
        "COCODIFF_A2A",
        None,
        "All-to-all: flat is one collective, hierarchical one per axis; auto (the default) is hierarchical where the "
        "topology has more than one level.",
        A2A_ALGORITHMS,
    ),
    Option(
        "cocodiff_mode",
        "COCODIFF_MODE",
        None,
        "What may travel: exact (the default) equals stock xDiT bit for bit.",
        MODES,
    ),
)


@dataclass(frozen=True, kw_only=True)
class CocoDiffConfig:
    """The plugin's settings for one engine, the same on every rank."""

    topology: Topology
    """Levels of every Ulysses group."""

    a2a: str = "auto"
    """One of A2A_ALGORITHMS."""

    mode: str = "exact"
    """One of MODES."""

    detected: bool = False
    """Whether the topology was read from the launcher rather than given."""

    def __post_init__(self) -> None:
        _check_choice("cocodiff_a2a", self.a2a, A2A_ALGORITHMS)
        _check_choice("cocodiff_mode", self.mode, MODES)

    @property
    def effective_topology(self) -> Topology:
        """The topology along which the all-to-all runs."""
        hierarchical = self.a2a == "hierarchical" or (self.a2a == "auto" and self.topology.levels > 1)
        return self.topology if hierarchical else Topology.flat(self.topology.size)


def resolve(
    values: Mapping[str, Any], environment: Mapping[str, str], degree: int, detected: Topology
) -> CocoDiffConfig | None:
    """Combine flags and environment variables; flags win.

    Args:
        values: option fields as parsed; None or False means not given.
        environment: process environment, read for the COCODIFF_ variables of OPTIONS.
        degree: Ulysses degree.
        detected: topology to use when none is given.

    Returns:
        The settings, or None when the plugin is not asked for.

    Raises:
        ValueError: names the flag or variable, its value and what is valid.
    """
    chosen = {option.field: _choose(option, values, environment) for option in OPTIONS}
    use, source = chosen["use_cocodiff"]
    if not _as_bool(use, source):
        return None
    text, source = chosen["cocodiff_topology"]
    topology = detected
    if text is not None:
        try:
            topology = Topology.parse(text, degree)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    settings = {}
    for name in ("a2a", "mode"):
        value, source = chosen[f"cocodiff_{name}"]
        if value is not None:
            _check_choice(source, value, {"a2a": A2A_ALGORITHMS, "mode": MODES}[name])
            settings[name] = value
    return CocoDiffConfig(topology=topology, detected=text is None, **settings)


def _choose(option: Option, values: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[Any, str]:
    """The option's value and the name under which the user gave it."""
    value = values.get(option.field)
    if value not in (None, False):
        return value, option.flag
    if environment.get(option.variable):
        return environment[option.variable], option.variable
    return option.default, option.flag


def _as_bool(value: Any, source: str) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(f"{source}={value!r} is not valid; valid are {', '.join(_TRUE)} and {', '.join(_FALSE[:-1])}")
    return text in _TRUE


def _check_choice(source: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{source}: {value!r} is not valid; valid are {', '.join(choices)}")
