"""Options that are not valid: one line that begins with the flag or variable, and never another error.

The cases by hand are also given to xDiT's parsers and to ranks, in tests/xdit/integration/test_bad_options.py.
"""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig
from xfuser_cocodiff.xdit.settings.option import Option
from xfuser_cocodiff.xdit.settings.options import OPTIONS, REMOVED_OPTIONS
from xfuser_cocodiff.xdit.settings.resolve import resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks
from xfuser_cocodiff.xdit.settings.variables import check_variables

LONG = "9" * 5000
BAD = {
    "topology": (
        *("", "2x3", "0x4", "-2x2", "2x", "node=", "node=2", "node=2,node=2", "rack=4", "flat=4", "auto", "²x²"),
        *(LONG, "2x2\nx"),
    ),
    "ring": ("auto", "Outer"),
    "a2a": (
        *("", "ring", "flat:node", "hierarchical:node", "hierarchical:gpu,gpu", "hierarchical:node=kv,gpu"),
        *("hierarchical:node/4,gpu", "flat*", "Flat"),
    ),
    "profile": ("", "/nowhere/profile.json", "/", "x" * 5000),
    "timeout": ("", "0", "-1", "nan", "inf", "1e18", "10s", LONG),
    "v_first": ("true", "On"),
    "head_groups": ("", "0", "-1", "1.5", LONG),
    "mode": ("lossy", "Exact", "balanced,fast"),
    "schedule": (
        *("", "bits", "bits=", "bits=3", "bits=nan", "bits=4->2", "bits=2,error=0.1", "bites=4", "bits=2,bits=4"),
        *("warmup=-1", "warmup=1.5", "predictor=2", "joint=0.5", "exact=blocks.0", "@/nowhere.json", "error=2"),
        *(f"warmup={LONG}", "=", "bits=4,"),
    ),
    "slow_axes": ("tile", "gpu", "node,", "auto,node"),
    "error": ("", "0", "1.5", "nan", "2 %"),
    "virtual": ("2x2", "ring:2x2", "nonsense"),
    "memory_budget": ("", "0", "-2", "nan", "lots", "2GiB", "1e400"),
    "kernels": ("cuda", "Torch"),
    "cache": (__file__, "x" * 5000),
}
"""Values of each option that are not valid on four ranks in two nodes of two, with a mode that has a schedule."""
RANKS = SequenceRanks(4, Topology.parse("2x2"))
SHARED = {"use_cocodiff": True, "cocodiff_mode": "fast"}


def config_of(values: dict[str, Any], variables: dict[str, str] | None = None) -> CocoDiffConfig | None:
    return resolve(values, variables or {}, RANKS, "cpu")


def assert_names(error: ValueError, source: str) -> None:
    """Assert that an error is one line that begins with a flag or variable."""
    text = str(error)
    assert text.startswith((f"{source}: ", f"{source}=")), text
    assert len(text.splitlines()) == 1, text
    assert len(text) > len(source) + 10, text


def flat_list(cases: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(name, value) for name, values in cases.items() for value in values]


def test_bad_values_name_the_flag_or_variable() -> None:
    for name, value in flat_list(BAD):
        with pytest.raises(ValueError) as caught:
            print(name, config_of({**SHARED, f"cocodiff_{name}": value}))
        assert_names(caught.value, f"--cocodiff_{name}")
        if value:  # an empty variable is not given
            other = {key: SHARED[key] for key in SHARED if key != f"cocodiff_{name}"}
            with pytest.raises(ValueError) as caught:
                config_of(other, {f"COCODIFF_{name.upper()}": value})
            assert_names(caught.value, f"COCODIFF_{name.upper()}")


REMOVED_VALUES = [(option.field, *removed) for option in OPTIONS for removed in option.removed.items()]


@pytest.mark.parametrize(("field", "value", "successor"), REMOVED_VALUES)
def test_removed_values_say_what_holds_instead(field: str, value: str, successor: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--{field}: {value!r} was removed: {successor}")):
        config_of({**SHARED, field: value})
    assert resolve({field: value}, {}, RANKS, "cpu") is None


@pytest.mark.parametrize("option", REMOVED_OPTIONS, ids=lambda option: option.field)
def test_removed_options_say_what_holds_instead(option: Option) -> None:
    for values, variables, source in (
        ({option.field: "1"}, {}, option.flag),
        ({}, {option.variable: "1"}, option.variable),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{source}: the option was removed: {option.help}")):
            config_of({**SHARED, **values}, variables)
        assert resolve(values, variables, RANKS, "cpu") is None


@pytest.mark.parametrize("variable", ["COCODIFF_RECORD", "COCODIFF_LOG_LEVEL"])
def test_bad_variables_of_records_and_logs(variable: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_variables({variable: "x" * 5000})
    assert_names(caught.value, variable)


WORDS = st.lists(
    st.sampled_from([*"=,:x+*/;@ \n\0٣", "node", "gpu", "kv", "bits", "0", "1.6", "-1", "1e308", "nan", "²"])
)
"""Words, marks and numbers of the options' notations."""
FLAGS = [option.field for option in OPTIONS if option.default is not False]


@settings(derandomize=True, max_examples=100)
@given(st.dictionaries(st.sampled_from(FLAGS), WORDS.map("".join), min_size=1, max_size=2))
def test_any_text_is_a_config_or_names_an_option(values: dict[str, str]) -> None:
    try:
        assert config_of({**SHARED, **values}) is not None
    except ValueError as error:
        assert str(error).startswith("--cocodiff_"), error
        assert len(str(error).splitlines()) == 1, error
