"""An option of the plugin, and how flags and variables set it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig


class InvalidTextError(ValueError):
    """Error of a parser whose text is none of the option's valid values, which the message will name."""


class Ignored(NamedTuple):
    """Reason for which options have no effect."""

    reason: str
    """The reason, after "no effect"."""
    holds: Callable[[CocoDiffConfig], bool]
    """Returns whether it holds."""


@dataclass(frozen=True)
class Option:
    """Option of the plugin: a flag of xDiT's parsers, a field of its arguments and an environment variable."""

    field: str
    """Name of the field in xDiT's arguments."""
    help: str
    """Help text of the flag."""
    parse: Callable[..., Any] = str
    """Returns the value of a text, which is one of `choices` if there are any."""
    values: str = ""
    """Valid values in words, or a link to their notation, for documentation and errors."""
    choices: tuple[str, ...] = ()
    """Valid values, if these are few."""
    is_switch: bool = False
    """Whether the flag has no value."""
    is_preference: bool = False
    """Whether it may stay set where the plugin is not enabled."""
    ignored: Ignored | None = None
    """Reason for which it may have no effect."""
    removed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Values that the version before this one had, and what holds instead."""
    variable: str = ""
    """Environment variable; that of the field's name by default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "variable", self.variable or self.field.upper())
        object.__setattr__(self, "values", self.values or ", ".join(self.choices))

    @property
    def flag(self) -> str:
        """Flag of the command line."""
        return f"--{self.field}"

    @property
    def default(self) -> Any:
        """Value of the field if the flag is not given, which lets the variable take effect."""
        return False if self.is_switch else None


class GivenOption(NamedTuple):
    """Option that the user set."""

    option: Option
    """The option."""
    text: str
    """Its value as given."""
    source: str
    """Flag or variable that sets it."""


class GivenOptions(dict[str, GivenOption]):
    """Options that the user set, by field."""

    def parse(self, field: str, *context: Any) -> Any:
        """Return the value of an option; None if it is not given.

        Args:
            field: the option.
            context: other arguments of its parser: what the value depends on.

        Raises:
            ValueError: it is not valid; names the flag or variable, the value and the valid set.
        """
        if field not in self:
            return None
        option, text, _ = self[field]
        with self.named(field):
            if text in option.removed:
                raise ValueError(f"{text!r} was removed: {option.removed[text]}")
            try:
                if option.choices and text not in option.choices:
                    raise InvalidTextError
                return option.parse(text, *context)
            except InvalidTextError:
                raise ValueError(f"{text!r} is not valid; valid are {option.values}") from None

    @contextlib.contextmanager
    def named(self, *fields: str) -> Iterator[None]:
        """Name options in an error that is raised inside."""
        try:
            yield
        except ValueError as error:
            sources = [self[field].source if field in self else f"--{field}" for field in fields]
            raise ValueError(f"{' with '.join(sources)}: {error}") from None


def given_options(
    options: tuple[Option, ...], values: Mapping[str, Any], environment: Mapping[str, str]
) -> GivenOptions:
    """Return the options that the user set; flags take precedence over variables.

    Args:
        options: all options.
        values: fields as parsed; None or False means not given.
        environment: environment variables.
    """
    given = GivenOptions()
    for option in options:
        if values.get(option.field) not in (None, False):
            given[option.field] = GivenOption(option, str(values[option.field]), option.flag)
        elif text := environment.get(option.variable):
            given[option.field] = GivenOption(option, text, option.variable)
    return given
