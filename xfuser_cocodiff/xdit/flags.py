"""The plugin's options in xDiT's parsers and arguments, and its settings in xDiT's parallel config."""

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

from xfuser_cocodiff import kernels, launcher
from xfuser_cocodiff.config import CocoDiffConfig, resolve
from xfuser_cocodiff.options import OPTIONS
from xfuser_cocodiff.placement import Ranks
from xfuser_cocodiff.topology import Topology
from xfuser_cocodiff.xdit import platform
from xfuser_cocodiff.xdit.agreement import agree
from xfuser_cocodiff.xdit.log import note
from xfuser_cocodiff.xdit.patch import Patch

_ARGS = "xfuser.config.args"


def patches() -> list[Patch]:
    """Rows that bring the options into xDiT."""
    return [
        Patch(_ARGS, "xFuserArgs.add_cli_args", "flags of the example scripts", _with_flags, ("parser",)),
        Patch(_ARGS, "xFuserArgs.add_runner_args", "flags of the xdit command", _with_flags, ("parser",)),
        Patch(_ARGS, "xFuserArgs.__init__", "the options become fields", _with_fields),
        Patch(_ARGS, "xFuserArgs.__dataclass_fields__", "both from_*_args go by the fields", _more_fields),
        Patch(_ARGS, "xFuserArgs.create_config", "settings reach the parallel config", _with_settings, ("self",)),
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
            kind = {"action": "store_true"} if option.default is False else {"type": str, "default": None}
            metavar = {"metavar": "{" + ",".join(option.choices) + "}"} if option.choices else {}
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
    return {**original, **extra.__dataclass_fields__}


def _with_settings(original: Callable) -> Callable:
    @functools.wraps(original)
    def create_config(self: Any) -> tuple[Any, Any]:
        engine_config, input_config = original(self)
        sequence = engine_config.parallel_config.sp_config
        sequence.cocodiff = settings(vars(self), sequence.ulysses_degree, sequence.ring_degree)
        return engine_config, input_config

    return create_config


def settings(values: dict[str, Any], degree: int, ring_degree: int = 1) -> CocoDiffConfig | None:
    """The settings that all ranks share; None when the plugin is not asked for.

    Args:
        values: xDiT's arguments, in which the fields of OPTIONS are read.
        degree: Ulysses degree.
        ring_degree: Ring degree.

    Raises:
        ValueError: bad flags or variables, on every rank alike, also when only one rank has them.
    """

    def detected(size: int) -> Topology:
        return launcher.detect(size, os.environ, platform.device_name())

    def mine(topology: Callable[[int], Topology] = detected) -> CocoDiffConfig | None:
        ranks = Ranks(degree, topology(degree), ring_degree, topology(degree * ring_degree))
        return resolve(values, os.environ, ranks)

    # Flags are the same on all ranks, but variables and what the launcher says need not be. A rank that is told
    # nothing takes part too: only so can it learn that another one was.
    proposals = agree(lambda: _as_json(mine()))
    if _only_detection_differs(proposals):
        note("ranks see different machines, so the all-to-all stays flat; --cocodiff_topology would change that")
        mine = functools.partial(mine, Topology.flat)
        proposals = agree(lambda: _as_json(mine()))
    if all(proposal == proposals[0] for proposal in proposals):
        return mine()
    rank = next(rank for rank, proposal in enumerate(proposals) if proposal != proposals[0])
    raise ValueError(
        f"CoCoDiff's options differ between ranks: rank 0 has {proposals[0] or 'none'}, "
        f"rank {rank} has {proposals[rank] or 'none'}"
    )


def _only_detection_differs(proposals: list[dict]) -> bool:
    # A plan in words reads differently on another topology, so only whether one was given can be compared; and where no
    # mode is given, it goes by the topology.
    hidden = {"topology": "", "mode": ""}
    first, *others = ({**one, **hidden, "plan": one.get("plan") is not None} for one in proposals)
    same_machine = len({proposal.get("topology") for proposal in proposals}) == 1
    return first.get("detected", False) and not same_machine and all(other == first for other in others)


_PLAIN = ("mode", "ring", "timeout", "detected", "schedule", "max_error", "memory_budget", "synchronous")


def _as_json(config: CocoDiffConfig | None) -> dict:
    if config is None:
        return {}
    plain = {name: getattr(config, name) for name in _PLAIN}
    plain["overlap"] = vars(config.overlap)
    plain["slow_axes"] = config.slow_axes and list(config.slow_axes)
    plain["virtual"] = config.virtual and str(config.virtual)
    plain["kernels"] = kernels.resolved(config.kernels, platform.compute_device().type)  # Triton may be absent
    profile = config.profile and config.profile.to_json()
    return {"topology": str(config.topology), "plan": config.plan and str(config.plan), "profile": profile, **plain}
