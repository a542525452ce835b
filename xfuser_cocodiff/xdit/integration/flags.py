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

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression.message import WIRE_FORMAT
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.integration.agreement import by_rank, check_all, gather_proposals, raise_on_all_ranks
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import detected_topology, platform
from xfuser_cocodiff.xdit.session import usp_versions
from xfuser_cocodiff.xdit.settings import ignored_options
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig
from xfuser_cocodiff.xdit.settings.options import OPTIONS, REMOVED_OPTIONS
from xfuser_cocodiff.xdit.settings.resolve import is_enabled, resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks
from xfuser_cocodiff.xdit.settings.variables import check_variables

_ARGS = "xfuser.config.args"


def patches(activate: Callable[[], list[str]]) -> list[Patch]:
    """Return the patches that add the options to xDiT.

    Args:
        activate: called when a config enables the plugin; returns the features that are off.
    """
    with_config = functools.partial(_with_config, activate)
    return [
        Patch(_ARGS, "xFuserArgs.add_cli_args", "flags of the example scripts", _with_flags, ("parser",)),
        Patch(_ARGS, "xFuserArgs.add_runner_args", "flags of the xdit command", _with_flags, ("parser",)),
        Patch(_ARGS, "xFuserArgs.__init__", "options as fields", _with_fields),
        Patch(_ARGS, "xFuserArgs.__dataclass_fields__", "from_cli_args and from_runner_args read fields", _more_fields),
        Patch(_ARGS, "xFuserArgs.create_config", "the config in xDiT's parallel config", with_config, ("self",)),
        Patch(
            "xfuser.core.distributed.runtime_state",
            "RuntimeState._check_distributed_env",
            "an error where the plugin is enabled on some ranks only",
            _with_check,
            ("self", "parallel_config"),
        ),
    ]


def _with_flags(original: staticmethod) -> staticmethod:
    build = original.__func__

    @functools.wraps(build)
    def add_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = build(parser)
        group = parser.add_argument_group("CoCoDiff Options")
        for option in OPTIONS:
            # Choices are checked in the config, whose errors name flags and variables and are the same on all ranks.
            # A store_true flag defaults to False, the others to None, so that variables take effect.
            kind: dict[str, Any] = (
                {"action": "store_true"} if option.default is False else {"type": str, "default": None}
            )
            metavar: dict[str, Any] = {"metavar": "{" + ",".join(option.choices) + "}"} if option.choices else {}
            group.add_argument(option.flag, help=option.help, **kind, **metavar)
        for option in REMOVED_OPTIONS:
            group.add_argument(option.flag, help=argparse.SUPPRESS)
        return parser

    return staticmethod(add_args)


def _with_fields(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for option in (*OPTIONS, *REMOVED_OPTIONS):
            setattr(self, option.field, kwargs.pop(option.field, option.default))
        original(self, *args, **kwargs)

    return __init__


def _more_fields(original: dict[str, dataclasses.Field]) -> dict[str, dataclasses.Field]:
    extra = dataclasses.make_dataclass(
        "Options",
        [(each.field, Any, dataclasses.field(default=each.default)) for each in (*OPTIONS, *REMOVED_OPTIONS)],
    )
    return {**original, **{field.name: field for field in dataclasses.fields(extra)}}


def _with_config(activate: Callable[[], list[str]], original: Callable) -> Callable:
    @functools.wraps(original)
    def create_config(self: Any) -> tuple[Any, Any]:
        engine_config, input_config = original(self)
        sequence = engine_config.parallel_config.sp_config
        sequence.cocodiff = agree_on_config(vars(self), sequence.ulysses_degree, sequence.ring_degree, activate)
        return engine_config, input_config

    return create_config


def _with_check(original: Callable) -> Callable:
    @functools.wraps(original)
    def _check_distributed_env(self: Any, parallel_config: Any) -> None:
        from xfuser.core.distributed import model_parallel_is_initialized

        if not model_parallel_is_initialized():
            check_all(getattr(parallel_config.sp_config, "cocodiff", None) is not None)
        original(self, parallel_config)

    return _check_distributed_env


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

    def detect(size: int) -> Topology:
        return detected_topology.detect_topology(size, os.environ)

    def make_config(topology: Callable[[int], Topology]) -> CocoDiffConfig | None:
        check_variables(os.environ)
        if not is_enabled(values, os.environ):
            return None
        ranks = SequenceRanks(degree, topology(degree), ring_degree, topology(degree * ring_degree))
        return resolve(values, os.environ, ranks, device_type)

    def propose(topology: Callable[[int], Topology]) -> dict:
        config = make_config(topology)
        return {**_as_json(config, device_type), "off": ", ".join(activate())} if config else {}

    # Flags are the same on all ranks, but variables and what the launcher reports may differ.
    topology, proposals = detect, gather_proposals(functools.partial(propose, detect))
    if _only_detection_differs(proposals):
        warn_once("ranks detect different topologies, so the all-to-all is flat; set --cocodiff_topology")
        topology, proposals = Topology.flat, gather_proposals(functools.partial(propose, Topology.flat))
    config = make_config(topology)
    if len({proposal["kernels"] for proposal in proposals}) > 1 and all(one["any_kernels"] for one in proposals):
        config, proposals = replace(config, kernels=kernels.TORCH), _with_torch_kernels(proposals)
    if differences := _differences(proposals):
        raise_on_all_ranks(f"CoCoDiff's options differ between ranks: {differences}")
    for warning in ignored_options.warnings(values, os.environ, config):
        warn_once(warning)
    return config


def _with_torch_kernels(proposals: list[dict]) -> list[dict]:
    without = [rank for rank, proposal in enumerate(proposals) if proposal["kernels"] == kernels.TORCH]
    best = next(proposal["kernels"] for proposal in proposals if proposal["kernels"] != kernels.TORCH)
    warn_once(
        f"ranks {without} cannot run {best.capitalize()} kernels, so all ranks use PyTorch's, which are slower; "
        f"--cocodiff_kernels {best} shows the reason"
    )
    return [{**proposal, "kernels": kernels.TORCH} for proposal in proposals]


def _only_detection_differs(proposals: list[dict]) -> bool:
    # The same plan text reads differently on another topology, so only its presence can be compared. The default mode
    # and the default slow axes depend on the topology. Kernels are compared separately.
    topologies = ("topology", "ring_topology")
    hidden = dict.fromkeys((*topologies, "mode", "slow_axes", "kernels"), "")
    rest = [{**proposal, **hidden, "plan": proposal["plan"] is not None} for proposal in proposals]
    is_same_topology = len({tuple(proposal[name] for name in topologies) for proposal in proposals}) <= 1
    return not is_same_topology and rest[0]["detected"] and all(other == rest[0] for other in rest)


def _differences(proposals: list[dict]) -> str:
    """Format the options that differ between ranks, with the value of each rank."""
    # `detected` is left out: where a topology comes from matters only if the topologies differ too.
    names = {
        **{option.field.removeprefix("cocodiff_"): option.flag for option in OPTIONS},
        "plan": "--cocodiff_a2a",
        "ring_topology": "--cocodiff_topology",
        "synchronous": "CCL_OP_SYNC",
        "usp": "xfuser's USP",
        "off": "what is off with this xfuser",
        "wire_format": "the format of CoCoDiff's messages (another version)",
    }
    by_name = {name: [proposal[name] for proposal in proposals] for name in (proposals[0] if proposals else ())}
    return ", ".join(
        f"{names[name]}: {by_rank(['not given' if value is None else repr(value) for value in all_values])}"
        for name, all_values in by_name.items()
        if name in names and any(value != all_values[0] for value in all_values)
    )


_UNCHANGED = (
    "mode",
    "ring",
    "timeout",
    "detected",
    "schedule",
    "memory_budget",
    "synchronous",
)
"""Fields of the config that are JSON values already."""


def _as_json(config: CocoDiffConfig, device_type: str) -> dict:
    """Return the part of a config that ranks compare, as JSON values."""
    profile = config.profile and json.dumps(config.profile.to_json(), sort_keys=True)
    return {
        "topology": str(config.topology),
        "ring_topology": config.ring_topology and str(config.ring_topology),
        "plan": config.plan and str(config.plan),
        "profile": profile and f"contents {zlib.crc32(profile.encode()):08x}",
        **{name: getattr(config, name) for name in _UNCHANGED},
        **vars(config.overlap),
        "slow_axes": ",".join(config.slow_axes),
        "virtual": config.virtual and f"{'ring:' * config.virtual_ring}{config.virtual}",
        "kernels": kernels.resolve(config.kernels, device_type),  # may differ between nodes
        "any_kernels": config.kernels == kernels.AUTO,
        "usp": usp_versions.digest(),
        "wire_format": WIRE_FORMAT,
    }
