"""Options in xDiT's own parsers, agreement of all ranks on a config, and errors that all ranks raise."""

import argparse
import copy
import dataclasses
import json
import os
import pickle
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests import ranks
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.integration import agreement


def parse(arguments: list[str], runner: bool) -> object:
    """Return the arguments that xDiT's example scripts (`add_cli_args`) or its `xdit` command parse."""
    from xfuser.config import FlexibleArgumentParser, xFuserArgs

    add = xFuserArgs.add_runner_args if runner else xFuserArgs.add_cli_args
    parsed = add(FlexibleArgumentParser()).parse_args(["--model", "tiny", *arguments])
    return xFuserArgs.from_runner_args(vars(parsed)) if runner else xFuserArgs.from_cli_args(parsed)


@pytest.mark.parametrize("runner", [False, True], ids=["script", "xdit"])
@pytest.mark.parametrize("dash", ["_", "-"])
def test_flags_may_have_dashes_or_underscores(runner: bool, dash: str) -> None:
    flags = ["--use_cocodiff", "--cocodiff_topology=2x2", "--cocodiff_a2a", "flat", "--cocodiff_mode", "exact"]
    args = parse([flag.replace("_", dash) for flag in flags], runner)
    assert args.use_cocodiff is True
    assert (args.cocodiff_topology, args.cocodiff_a2a, args.cocodiff_mode) == ("2x2", "flat", "exact")


ULYSSES_4 = ["--ulysses_degree", "4", "--use_cocodiff"]


def config_of(rank: int, arguments: list[str], environments: list[dict[str, str]]) -> str:
    os.environ.update(environments[rank % len(environments)])
    engine_config, _ = parse(arguments, False).create_config()
    config = engine_config.parallel_config.sp_config.cocodiff
    return "none" if config is None else f"{config.topology}|{config.plan}|{config.mode}"


def errors_in_turn(rank: int, arguments: list[str], cases: list[list[dict[str, str]]]) -> list[ValueError]:
    """Return the error of each case, each with its own variables on every rank."""
    found = []
    for environments in cases:
        with mock.patch.dict(os.environ), pytest.raises(ValueError) as raised:
            config_of(rank, arguments, environments)
        found.append(raised.value)
    return found


def configs_in_turn(rank: int, cases: list[tuple]) -> list[str]:
    """Return the config of each case, each with its own variables."""
    found = []
    for arguments, environment, _ in cases:
        with mock.patch.dict(os.environ):
            found.append(config_of(rank, ["--ulysses_degree", "4", *arguments], [environment]))
    return found


def test_config_is_the_same_on_every_rank() -> None:
    cases = [
        ([], {}, "none"),
        (["--use_cocodiff"], {}, "flat|None|exact"),
        (["--use_cocodiff", "--cocodiff_topology", "2x2"], {}, "node=2,gpu=2|None|balanced"),
        (
            ["--use_cocodiff", "--cocodiff_topology", "2x2"],
            {"LOCAL_WORLD_SIZE": "4"},
            "node=2,gpu=2|None|exact",
        ),
        (["--use_cocodiff"], {"LOCAL_WORLD_SIZE": "2"}, "node=2,gpu=2|None|balanced"),
        ([], {"COCODIFF_ENABLE": "1", "COCODIFF_TOPOLOGY": "4"}, "node=4|None|balanced"),
    ]
    expected = [expected for *_, expected in cases]
    assert ranks.run(configs_in_turn, 4, cases) == [expected] * 4


def copied_configs(rank: int) -> list[bool]:
    """Return whether copies of xDiT's config have the plugin's config."""
    engine_config, _ = parse(["--ulysses_degree", "2", "--use_cocodiff"], False).create_config()
    sequence = engine_config.parallel_config.sp_config
    copies = (
        *(dataclasses.replace(sequence), dataclasses.replace(sequence, ring_degree=2), copy.copy(sequence)),
        *(copy.deepcopy(sequence), pickle.loads(pickle.dumps(sequence))),
    )
    return [each.cocodiff == sequence.cocodiff is not None for each in copies]


def test_config_survives_in_copies_of_xdits() -> None:
    assert ranks.run(copied_configs, 2) == [[True] * 5] * 2


def start_session(rank: int, arguments: list[str], environments: list[dict[str, str]]) -> str:
    """Make a config and then process groups, as a script does."""
    from types import SimpleNamespace

    from xfuser.core.distributed import init_distributed_environment, initialize_runtime_state

    os.environ.update(environments[rank % len(environments)])
    init_distributed_environment(rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    engine_config, _ = parse(arguments, runner=False).create_config()
    transformer = SimpleNamespace(config=SimpleNamespace(num_attention_heads=8))
    initialize_runtime_state(SimpleNamespace(transformer=transformer), engine_config)
    return "started"


def start_without_config(rank: int, arguments: list[str]) -> tuple[list[str], str]:
    """Make process groups as a program without xDiT's pipelines does, and then follow the hint that is logged.

    Returns:
        The warnings, and the topology of the session in the end.
    """
    from types import SimpleNamespace

    from xfuser import xFuserArgs
    from xfuser.core.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        initialize_runtime_state,
    )

    from xfuser_cocodiff.xdit.integration import activation
    from xfuser_cocodiff.xdit.session.session import active

    warned: list[str] = []
    sys.argv, activation.warn_once = ["program.py", *arguments], warned.append
    init_distributed_environment(rank=rank, world_size=2)
    initialize_model_parallel(sequence_parallel_degree=2, ulysses_degree=2)
    engine_config, _ = xFuserArgs(model="", ulysses_degree=2, use_cocodiff=bool(arguments)).create_config()
    transformer = SimpleNamespace(config=SimpleNamespace(num_attention_heads=8))
    initialize_runtime_state(SimpleNamespace(transformer=transformer), engine_config)
    return warned, str(active().mesh and active().mesh.topology)


def test_a_program_that_makes_no_config_is_told_that_the_plugin_is_not_active() -> None:
    for warned, topology in ranks.run(start_without_config, 2, ["--use-cocodiff"]):
        [message] = warned
        assert "is not active" in message and "create_config()` and `initialize_runtime_state(" in message
        assert topology == "flat"


def assert_all_raise(results: list, *words: str) -> None:
    """Assert that all ranks raised the same ValueError with these words."""
    assert all(isinstance(result, ValueError) for result in results), results
    assert len({str(result) for result in results}) == 1
    for word in words:
        assert word in str(results[0])


ENABLED, BAD = {"COCODIFF_ENABLE": "1"}, {"COCODIFF_ENABLE": "1", "COCODIFF_A2A": "ring"}


@pytest.mark.parametrize(
    ("environments", "words", "hosted"),
    [
        ([BAD], ["COCODIFF_A2A: 'ring' is not valid", "'hierarchical'"], False),
        ([{}, {}, BAD], ["on rank 2: COCODIFF_A2A: 'ring'"], True),
        ([ENABLED, {}, {}], ["--use_cocodiff: rank 0: given; ranks 1, 2: not given"], True),
        ([{}, ENABLED, ENABLED], ["--use_cocodiff: rank 0: not given; ranks 1, 2: given"], False),
    ],
)
def test_error_of_one_rank_is_raised_on_all(environments: list, words: list[str], hosted: bool) -> None:
    arguments = ["--ulysses_degree", "3"]
    assert_all_raise(ranks.outcomes(start_session, 3, arguments, environments, store_on_rank_0=hosted), *words)


def config_on_rank_0(rank: int, is_enabled: bool) -> str:

    agreement.TIMEOUT = None  # a rank that waits fails
    if rank == 0:
        return config_of(rank, ["--ulysses_degree", "2"], [ENABLED if is_enabled else {}])
    return "elsewhere"


def test_rank_without_the_plugin_waits_for_no_other() -> None:
    assert ranks.run(config_on_rank_0, 2, False) == ["none", "elsewhere"]
    assert isinstance(ranks.outcomes(config_on_rank_0, 2, True)[0], TypeError)


def config_twice_on_rank_0(rank: int) -> str:
    from xfuser.core.distributed import init_distributed_environment

    init_distributed_environment(rank=rank, world_size=2)  # a round of all ranks too
    for _ in range(2 if rank == 0 else 1):
        config_of(rank, ["--ulysses_degree", "2"], [ENABLED])
    return start_session(rank, ["--ulysses_degree", "2"], [ENABLED])


def test_more_configs_on_one_rank_are_an_error_on_all() -> None:
    """Rank 0 makes a third config while rank 1 makes process groups."""
    assert_all_raise(
        ranks.outcomes(config_twice_on_rank_0, 2),
        "equally often",
        "rank 0: makes a config; rank 1: makes process groups",
    )


def config_with_a_compiler_on_rank_0(rank: int, choice: str) -> str:
    """Return the kernels of the config where rank 1 has no compiler."""
    from xfuser_cocodiff.engine.codec import kernels
    from xfuser_cocodiff.xdit.integration import config_fields

    config_fields.platform.compute_device = lambda: argparse.Namespace(type="cuda")
    kernels._can_build = lambda: rank != 1
    return config_fields.agree_on_config({"use_cocodiff": True, "cocodiff_kernels": choice}, 2).kernels


def test_kernels_that_one_rank_cannot_build_are_an_error_on_all_if_they_are_named() -> None:
    assert ranks.run(config_with_a_compiler_on_rank_0, 2, "auto") == ["auto"] * 2
    results = ranks.outcomes(config_with_a_compiler_on_rank_0, 2, "triton")
    assert_all_raise(results, "on rank 1: --cocodiff_kernels: 'triton' is not available: it needs a C compiler")


def check_on_rank_0(rank: int) -> str:
    from datetime import timedelta

    agreement.DISABLED_RANK_TIMEOUT = timedelta(seconds=1)
    if rank == 0:  # rank 1 lacks the plugin
        agreement.check_all(is_enabled=False)
    return "continued"


def test_rank_without_the_plugin_continues_if_others_do_not_report() -> None:
    assert ranks.run(check_on_rank_0, 2) == ["continued"] * 2


def test_options_that_differ_between_ranks_are_an_error_on_all(tmp_path: Path) -> None:
    environments = [{"COCODIFF_A2A": "flat"}, {"COCODIFF_A2A": "hierarchical"}]
    arguments = ["--ulysses_degree", "2", "--use_cocodiff", "--cocodiff_topology", "2x1x1"]
    topology, profiles = Topology.parse("2x1x1", 2), []
    for bandwidth in (1e9, 2e9):
        links = tuple(AxisLink(axis.name, 1e-5, bandwidth) for axis in topology.axes)
        profiles.append(tmp_path / f"{bandwidth}.json")
        profiles[-1].write_text(json.dumps({"profile": Profile(topology, links, 1e-5, 1e9, 1e9).to_json()}))
    values = {
        "A2A": ("flat", "hierarchical:node=kv"),
        "PROFILE": tuple(map(str, profiles)),
        "SCHEDULE": ("bits=4", "bits=2"),
        "SLOW_AXES": ("node", "gpu"),
        "MEMORY_BUDGET": ("1", "2"),
        "HEAD_GROUPS": ("1", "2"),
        "RING": ("outer", "inner"),
    }
    cases = [[{"COCODIFF_MODE": "fast", f"COCODIFF_{name}": value} for value in pair] for name, pair in values.items()]
    for name, *results in zip(values, *ranks.run(errors_in_turn, 2, arguments, cases), strict=True):
        flag = f"--cocodiff_{name.lower()}"
        assert_all_raise(results, f"differ between ranks: {flag}: rank 0: ", "; rank 1: ")
        assert str(results[0]).count("--cocodiff_") == 1
    results = ranks.outcomes(config_of, 4, [*ULYSSES_4, "--cocodiff_topology", "2x2"], environments)
    plans = "ranks 0, 2: 'flat'; ranks 1, 3: 'hierarchical:"
    assert_all_raise(results, f"--cocodiff_a2a: {plans}")


def config_of_another_version(rank: int) -> str:
    """Return the config where one rank has a version with other messages."""
    from xfuser_cocodiff.xdit.integration import config_fields

    config_fields.WIRE_FORMAT += rank
    return config_of(rank, ["--ulysses_degree", "2", "--use_cocodiff"], [{}])


def test_ranks_with_other_message_formats_are_an_error_on_all() -> None:
    results = ranks.outcomes(config_of_another_version, 2)
    said = "differ between ranks: the format of CoCoDiff's messages (another version): rank 0: "
    assert_all_raise(results, said, "; rank 1: ")


def test_ranks_that_detect_different_topologies_are_told_to_set_one() -> None:
    results = ranks.outcomes(config_of, 4, ULYSSES_4, [{"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "4"}])
    assert_all_raise(results, "--cocodiff_topology: ranks 0, 2: 'node=2,gpu=2'", "; set --cocodiff_topology where")


def state_after(rank: int, values: dict) -> tuple[str, list[str]]:
    """Return the topology after initialize_runtime_state, and the messages of the plugin."""
    import logging

    from xfuser import xFuserArgs
    from xfuser.core.distributed import get_runtime_state, initialize_runtime_state
    from xfuser.core.distributed.parallel_state import init_distributed_environment
    from xfuser.core.distributed.runtime_state import RuntimeState

    from xfuser_cocodiff.xdit.session.session import active

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("xfuser_cocodiff").addHandler(handler)
    # xDiT refuses ring attention with every backend that a CPU has; which groups there are is another matter.
    RuntimeState._check_if_backend_compatible_with_current_configuration = lambda *_: None
    init_distributed_environment(rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    logging.getLogger("xfuser_cocodiff").setLevel(logging.INFO)
    for _ in range(2):  # a second session in the same process logs again
        config = xFuserArgs(model="tiny", use_cocodiff=True, **values).create_config()[0]
        transformer = torch.nn.Identity()
        transformer.config = argparse.Namespace(num_attention_heads=8)
        initialize_runtime_state(argparse.Namespace(transformer=transformer), config)
    assert get_runtime_state().parallel_config.sp_config.cocodiff is not None
    mesh = active().mesh
    return str(mesh.topology) if mesh else "stock", warnings


LOSSLESS, NO_SLOW_AXIS = "lossless: bit-identical to stock", "mode 'fast' has no effect and the run is lossless"


@pytest.mark.parametrize(
    ("world", "values", "expected", "words"),
    [
        (1, {}, "stock", ["no effect with --ulysses_degree 1"]),
        (2, {}, "flat", ["on: topology flat, plan auto", LOSSLESS]),
        (
            *(2, {"cocodiff_topology": "node=2", "cocodiff_mode": "fast"}, "node=2"),
            ["lossy: mode 'fast' compresses communication on node (topology node=2): K and V gathered along node, "],
        ),
        (2, {"cocodiff_mode": "fast"}, "flat", ["no slow axis in the topology flat", NO_SLOW_AXIS]),
        (
            *(4, {"ring_degree": 2, "cocodiff_topology": "2x2", "cocodiff_mode": "fast"}, "gpu=2"),
            ["lossy: mode 'fast' compresses communication on node of the ring (topology gpu=2, ring outer node=2)"],
        ),
        (
            *(4, {"pipefusion_parallel_degree": 2, "cocodiff_mode": "fast"}, "flat"),
            [LOSSLESS, "mode 'fast' has no effect with PipeFusion"],
        ),
    ],
)
def test_start_is_logged_once_per_session(world: int, values: dict, expected: str, words: list[str]) -> None:
    degree = world // values.get("ring_degree", 1) // values.get("pipefusion_parallel_degree", 1)
    results = ranks.run(state_after, world, {"ulysses_degree": degree, **values})
    assert [mesh for mesh, _ in results] == [expected] * world
    said = results[0][1]
    for word in words:
        assert [word in line for line in said].count(True) == 2
    assert all(said == [] for _, said in results[1:])  # rank 0 logs for all
