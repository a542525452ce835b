"""Options of the plugin in xDiT's parsers and arguments, and its config in xDiT's parallel config."""

import argparse
import dataclasses
import functools
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from xfuser_cocodiff.engine.compression.message import WIRE_FORMAT
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.xdit.integration.agreement import by_rank, gather_proposals, raise_on_all_ranks
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import platform
from xfuser_cocodiff.xdit.session import usp_versions
from xfuser_cocodiff.xdit.settings import ignored_options
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig
from xfuser_cocodiff.xdit.settings.options import OPTIONS, REMOVED_OPTIONS
from xfuser_cocodiff.xdit.settings.resolve import is_enabled, resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks
from xfuser_cocodiff.xdit.settings.variables import check_variables

_ARGS = "xfuser.config.args"
_OPTIONS = (*OPTIONS, *REMOVED_OPTIONS)


def patches(activate: Callable[[], list[str]]) -> list[Patch]:
    """Return the patches that add the options to xDiT.

    Args:
        activate: called when a config enables the plugin; returns the features that are off.
    """
    with_config = functools.partial(_with_config, activate)
    of_config = _add_fields("xfuser.config.config", "SequenceParallelConfig", {host.CONFIG_FIELD: None})
    return [
        Patch(_ARGS, "xFuserArgs.add_cli_args", "flags of the example scripts", _with_flags, ("parser",)),
        Patch(_ARGS, "xFuserArgs.add_runner_args", "flags of the xdit command", _with_flags, ("parser",)),
        *_add_fields(_ARGS, "xFuserArgs", {option.field: option.default for option in _OPTIONS}),
        *(replace(row, feature="copies of the config by dataclasses.replace") for row in of_config),
        Patch(_ARGS, "xFuserArgs.create_config", "the config in xDiT's parallel config", with_config, ("self",)),
    ]


def _with_flags(original: staticmethod) -> staticmethod:
    build = original.__func__

    @functools.wraps(build)
    def add_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = build(parser)
        group = parser.add_argument_group("CoCoDiff Options")
        for option in OPTIONS:
            # Choices are checked in the config, whose errors name flags and variables and are the same on all ranks.
            kind: dict[str, Any] = {"action": "store_true"} if option.is_switch else {"type": str}
            metavar: dict[str, Any] = {"metavar": "{" + ",".join(option.choices) + "}"} if option.choices else {}
            group.add_argument(option.flag, help=option.help, **kind, **metavar)
        for option in REMOVED_OPTIONS:
            group.add_argument(option.flag, help=argparse.SUPPRESS)
        return parser

    return staticmethod(add_args)


def _add_fields(module: str, name: str, defaults: dict[str, Any]) -> list[Patch]:
    """Return the patches that declare fields of a dataclass, so that they survive `dataclasses.replace`."""
    declared = dataclasses.make_dataclass("_Declared", [(field, Any, value) for field, value in defaults.items()])
    fields = {field.name: field for field in dataclasses.fields(declared)}

    def with_fields(original: Callable) -> Callable:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            for field, default in defaults.items():
                setattr(self, field, kwargs.pop(field, default))
            original(self, *args, **kwargs)

        return __init__

    return [
        Patch(module, f"{name}.__init__", "values of the plugin's fields", with_fields),
        Patch(module, f"{name}.__dataclass_fields__", "the plugin's fields", lambda original: {**original, **fields}),
    ]


def _with_config(activate: Callable[[], list[str]], original: Callable) -> Callable:
    @functools.wraps(original)
    def create_config(self: Any) -> tuple[Any, Any]:
        engine_config, input_config = original(self)
        sequence = engine_config.parallel_config.sp_config
        sequence.cocodiff = agree_on_config(vars(self), sequence.ulysses_degree, sequence.ring_degree, activate)
        return engine_config, input_config

    return create_config


def agree_on_config(
    values: dict[str, Any], degree: int, ring_degree: int = 1, activate: Callable[[], list[str]] = list
) -> CocoDiffConfig | None:
    """Return the config on which all ranks agree; None if the plugin is disabled, without waiting for other ranks.

    Args:
        values: arguments of xDiT, with the fields of OPTIONS.
        degree: Ulysses degree.
        ring_degree: Ring degree.
        activate: called if the plugin is enabled; returns the features that are off. An exception from it ends all
            ranks.

    Raises:
        ValueError: an option is not valid on one rank, or differs between ranks; on every rank.
    """
    device_type = platform.compute_device().type

    def make_config() -> CocoDiffConfig:
        topology = platform.detect_topology(degree * ring_degree)
        return resolve(values, os.environ, SequenceRanks(degree, topology, ring_degree), device_type)

    # Flags are the same on all ranks, but variables and what the launcher reports may differ.
    def propose() -> dict[str, Any]:
        check_variables(os.environ)
        return _compared_options(make_config(), activate()) if is_enabled(values, os.environ) else {}

    proposals = gather_proposals(propose)
    _check_equal(proposals)
    config = make_config() if proposals else None
    for warning in ignored_options.warnings(values, os.environ, config):
        warn_once(warning)
    return config


_TOPOLOGIES = {"--cocodiff_topology", "the ring's --cocodiff_topology"}
_NAMES = {
    "plan": "--cocodiff_a2a",
    "ring_topology": "the ring's --cocodiff_topology",
    "ring_profile": "the ring's --cocodiff_profile",
    "virtual_ring": "the ring of --cocodiff_virtual",
    "synchronous": "CCL_OP_SYNC",
}
"""Names of fields of the config that are not those of an option."""
_OF_ONE_RANK = ("overlap", "cache")
"""Fields of the config that ranks do not compare."""


def _compared_options(config: CocoDiffConfig, features_off: list[str]) -> dict[str, str | None]:
    """Return what must be the same on all ranks, as texts by the names that users know."""
    fields = {name: value for name, value in vars(config).items() if name not in _OF_ONE_RANK}
    return {
        **{_NAMES.get(name, f"--cocodiff_{name}"): _text(value) for name, value in fields.items()},
        "--cocodiff_v_first": _text(config.overlap.v_first),
        "--cocodiff_head_groups": _text(config.overlap.head_groups),
        "xfuser's USP": usp_versions.digest(),
        "what is off with this xfuser": ", ".join(features_off),
        "the format of CoCoDiff's messages (another version)": str(WIRE_FORMAT),
    }


def _text(value: Any) -> str | None:
    if isinstance(value, Profile):
        return f"contents {zlib.crc32(json.dumps(value.to_json(), sort_keys=True).encode()):08x}"
    return None if value is None else ",".join(value) if isinstance(value, tuple) else str(value)


def _check_equal(proposals: list[dict]) -> None:
    """Check that all ranks have the same options.

    Raises:
        ValueError: they differ; names each option with the value of each rank, on every rank.
    """
    by_name = {name: [options.get(name) for options in proposals] for name in (proposals[0] if proposals else ())}
    differing = {name: values for name, values in by_name.items() if len(set(values)) > 1}
    if differing:
        named = {
            name: by_rank(["not given" if value is None else repr(value) for value in values])
            for name, values in differing.items()
        }
        hint = "; set --cocodiff_topology where ranks detect different ones" if _TOPOLOGIES & {*differing} else ""
        texts = ", ".join(f"{name}: {values}" for name, values in named.items())
        raise_on_all_ranks(f"CoCoDiff's options differ between ranks: {texts}{hint}")
