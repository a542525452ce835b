"""The plugin's options in xDiT's parsers and arguments, and its settings in xDiT's parallel config."""

import argparse
import dataclasses
import functools
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.settings import ignored_options
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig, check_variables, resolve
from xfuser_cocodiff.engine.settings.options import OPTIONS
from xfuser_cocodiff.engine.settings.ring_placement import SequenceRanks
from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.integration.agreement import by_rank, check_all, gather_proposals, raise_on_all_ranks
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import platform
from xfuser_cocodiff.xdit.session import usp_versions

_ARGS = "xfuser.config.args"


def patches(activate: Callable[[], None]) -> list[Patch]:
    """Rows that bring the options into xDiT.

    Args:
        ask: called where settings ask for the plugin.
    """
    with_settings = functools.partial(_with_settings, activate)
    return [
        Patch(_ARGS, "xFuserArgs.add_cli_args", "flags of the example scripts", _with_flags, ("parser",)),
        Patch(_ARGS, "xFuserArgs.add_runner_args", "flags of the xdit command", _with_flags, ("parser",)),
        Patch(_ARGS, "xFuserArgs.__init__", "the options become fields", _with_fields),
        Patch(_ARGS, "xFuserArgs.__dataclass_fields__", "both from_*_args go by the fields", _more_fields),
        Patch(_ARGS, "xFuserArgs.create_config", "settings reach the parallel config", with_settings, ("self",)),
        Patch(
            "xfuser.core.distributed.runtime_state",
            "RuntimeState._check_distributed_env",
            "ranks that were is_enabled nothing hear of it where all of them check_all",
            _meeting,
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
            # Choices are checked with the settings, where the error names every source alike and is the same on all
            # ranks; a store_true flag defaults to False, the others to None, so that variables can fill in.
            kind: dict[str, Any] = (
                {"action": "store_true"} if option.default is False else {"type": str, "default": None}
            )
            metavar: dict[str, Any] = {"metavar": "{" + ",".join(option.choices) + "}"} if option.choices else {}
            group.add_argument(option.flag, help=option.help, **kind, **metavar)
        return parser

    return staticmethod(add_args)


def _with_fields(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for option in OPTIONS:
            setattr(self, option.field, kwargs.pop(option.field, option.default))
        original(self, *args, **kwargs)

    return __init__


def _more_fields(original: dict[str, dataclasses.Field]) -> dict[str, dataclasses.Field]:
    extra = dataclasses.make_dataclass(
        "Options", [(option.field, Any, dataclasses.field(default=option.default)) for option in OPTIONS]
    )
    return {**original, **{field.name: field for field in dataclasses.fields(extra)}}


def _with_settings(activate: Callable[[], None], original: Callable) -> Callable:
    @functools.wraps(original)
    def create_config(self: Any) -> tuple[Any, Any]:
        engine_config, input_config = original(self)
        sequence = engine_config.parallel_config.sp_config
        sequence.cocodiff = settings(vars(self), sequence.ulysses_degree, sequence.ring_degree, activate)
        return engine_config, input_config

    return create_config


def _meeting(original: Callable) -> Callable:
    @functools.wraps(original)
    def _check_distributed_env(self: Any, parallel_config: Any) -> None:
        from xfuser.core.distributed import model_parallel_is_initialized

        if not model_parallel_is_initialized():
            check_all(getattr(parallel_config.sp_config, "cocodiff", None) is not None)
        original(self, parallel_config)

    return _check_distributed_env


def settings(
    values: dict[str, Any], degree: int, ring_degree: int = 1, activate: Callable[[], None] = lambda: None
) -> CocoDiffConfig | None:
    """The settings that all ranks share; None when the plugin is not asked for, in which case no rank is waited for.

    Args:
        values: xDiT's arguments, in which the fields of OPTIONS are read.
        degree: Ulysses degree.
        ring_degree: Ring degree.
        ask: called where the plugin is asked for; an error in it ends all ranks.

    Raises:
        ValueError: bad flags or variables, on every rank alike, also when only one rank has them.
    """
    device_type = platform.compute_device().type

    def detected(size: int) -> Topology:
        return launcher.detect(size, os.environ, platform.device_name())

    def mine(topology: Callable[[int], Topology] = detected) -> CocoDiffConfig | None:
        check_variables(os.environ)
        ranks = SequenceRanks(degree, topology(degree), ring_degree, topology(degree * ring_degree))
        return resolve(values, os.environ, ranks, device_type)

    def proposal() -> dict:
        if config := mine():
            activate()
        return _as_json(config, device_type)

    # Flags are the same on all ranks, but variables and what the launcher says need not be.
    proposals = gather_proposals(proposal)
    if _only_detection_differs(proposals):
        warn_once("ranks detect different topologies, so the all-to-all is flat; set --cocodiff_topology")
        mine = functools.partial(mine, Topology.flat)
        proposals = gather_proposals(proposal)
    config = mine()
    if len({proposal["kernels"] for proposal in proposals}) > 1 and all(one["any_kernels"] for one in proposals):
        without = [rank for rank, proposal in enumerate(proposals) if proposal["kernels"] == kernels.TORCH]
        best = next(one["kernels"] for one in proposals if one["kernels"] != kernels.TORCH)
        warn_once(
            f"ranks {without} cannot run {best.capitalize()} kernels, so all ranks use PyTorch's, which are slower; "
            f"--cocodiff_kernels {best} shows the reason"
        )
        config = replace(config, kernels=kernels.TORCH)
        proposals = [{**proposal, "kernels": kernels.TORCH} for proposal in proposals]
    if differences := _differences(proposals):
        raise_on_all_ranks(f"CoCoDiff's options differ between ranks: {differences}")
    for warning in ignored_options.warnings(values, os.environ, config, ring_degree):
        warn_once(warning)
    return config


def _only_detection_differs(proposals: list[dict]) -> bool:
    # A plan in words reads differently on another topology, so only whether one was given can be compared; where no
    # mode and no slow axes are given, these go by the topology; and kernels are another matter.
    machine = ("topology", "ring_topology")
    hidden = dict.fromkeys((*machine, "mode", "slow_axes", "kernels"), "")
    known = [{**one, **hidden, "plan": one["plan"] is not None} for one in proposals]
    same_machine = len({tuple(proposal[name] for name in machine) for proposal in proposals}) <= 1
    return not same_machine and known[0]["detected"] and all(other == known[0] for other in known)


def _differences(proposals: list[dict]) -> str:
    """Options in which ranks differ, with the value of each rank."""
    # Where a value comes from matters only as far as it makes another value.
    names = {
        **{option.field.removeprefix("cocodiff_"): option.flag for option in OPTIONS},
        "plan": "--cocodiff_a2a",
        "ring_topology": "--cocodiff_topology",
        "synchronous": "CCL_OP_SYNC",
        "usp": "xfuser's USP",
    }
    by_name = {name: [proposal[name] for proposal in proposals] for name in (proposals[0] if proposals else ())}
    return ", ".join(
        f"{names[name]}: {by_rank(['not given' if value is None else repr(value) for value in found])}"
        for name, found in by_name.items()
        if name in names and any(value != found[0] for value in found)
    )


_PLAIN = ("mode", "ring", "timeout", "detected", "schedule", "max_error", "memory_budget", "synchronous")


def _as_json(config: CocoDiffConfig | None, device_type: str) -> dict:
    """What ranks compare of their settings; nothing where there are none."""
    if config is None:
        return {}
    profile = config.profile and json.dumps(config.profile.to_json(), sort_keys=True)
    return {
        "topology": str(config.topology),
        "ring_topology": config.ring_topology and str(config.ring_topology),
        "plan": config.plan and str(config.plan),
        "profile": profile and f"contents {zlib.crc32(profile.encode()):08x}",
        **{name: getattr(config, name) for name in _PLAIN},
        **vars(config.overlap),
        "slow_axes": ",".join(config.slow_axes),
        "virtual": config.virtual and f"{'ring:' * config.virtual_ring}{config.virtual}",
        "kernels": kernels.resolved(config.kernels, device_type),  # which a node may not be able to build
        "any_kernels": config.kernels == kernels.AUTO,
        "usp": usp_versions.digest(),
    }
