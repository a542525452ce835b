"""`cocodiff compare --emulate`: the cluster of a command, options that are not valid, and ranks on a cluster."""

import gzip
import json
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from xfuser_cocodiff import cli
from xfuser_cocodiff.lab.comparison import compare, emulate
from xfuser_cocodiff.lab.comparison.emulate import EmulationOptions
from xfuser_cocodiff.lab.emulation.presets import PRESETS

FLUX = ["--model", "FLUX.1-dev", "--ulysses_degree"]


def unavailable_because() -> str | None:
    """Return why this machine cannot emulate a cluster; None if it can."""
    try:
        emulate.check_available(emulate.cluster_for(EmulationOptions("ethernet"), [*FLUX, "2"]))
    except ValueError as error:
        return str(error)
    return None


reason = unavailable_because()
needs_namespaces = pytest.mark.skipif(reason is not None, reason=reason or "")


@pytest.mark.parametrize(
    ("preset", "arguments", "topology"),
    [
        ("aurora", [*FLUX, "8"], "node=2,gpu=2,tile=2"),
        ("ethernet", [*FLUX, "8"], "node=2,gpu=4"),
        ("ethernet", [*FLUX, "4"], "node=2,gpu=2"),
        ("sockets", [*FLUX, "2"], "node=2"),
        ("flat", [*FLUX, "6"], "flat=6"),
        ("aurora", [*FLUX, "8", "--cocodiff_topology", "4x2"], "4x2"),
        # The topology of a Ulysses group is not that of all ranks.
        ("aurora", [*FLUX, "4", "--ring_degree", "2", "--cocodiff-topology=2x2"], "node=2,gpu=2,tile=2"),
        ("aurora", [*FLUX, "2", "--data_parallel_degree", "3"], "node=2,gpu=3"),
    ],
)
def test_topology_is_that_of_command_preset_or_two_nodes(preset: str, arguments: list[str], topology: str) -> None:
    assert emulate.topology_for(preset, arguments) == topology
    with pytest.raises(ValueError, match="3 ranks are not divisible by two nodes; give --topology"):
        emulate.topology_for("sockets", [*FLUX, "3"])


def test_cluster_has_the_requested_topology_and_rates() -> None:
    built = emulate.cluster_for(EmulationOptions("ethernet", "node=2,gpu=2", "0.5"), [*FLUX, "4"])
    assert str(built.topology) == "node=2,gpu=2"
    for axis, gigabytes in PRESETS["ethernet"].gigabytes.items():
        if axis != "tile":
            assert built.rate(axis) == pytest.approx(gigabytes * 8000 * 1e-4 * 0.5)
    line = shlex.split(emulate.launcher(built))
    assert line[:3] == [sys.executable, "-m", "xfuser_cocodiff.lab.emulation.cluster"]
    assert line[3:] == ["--preset=ethernet", "--topology=node=2,gpu=2", "--scale=0.5", "--"]
    assert emulate.describe(built)["nodes"] == 2


def test_topology_is_added_if_a_ulysses_group_spans_all_ranks() -> None:
    all_ranks, ring = [*FLUX, "4"], [*FLUX, "2", "--ring_degree", "2"]
    for arguments, added in ((all_ranks, ["--cocodiff_topology=node=2,gpu=2"]), (ring, [])):
        built = emulate.cluster_for(EmulationOptions("sockets"), arguments)
        assert emulate.with_topology(arguments, built) == [*arguments, *added]
    given = [*all_ranks, "--cocodiff_topology", "4"]
    assert emulate.with_topology(given, emulate.cluster_for(EmulationOptions("sockets"), given)) == given


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--emulate mars", "--emulate 'mars' is not known; valid are aurora, sockets, ethernet, flat"),
        ("--emulate sockets --scale fast", "--scale 'fast' is not valid; valid are numbers above 0"),
        ("--emulate sockets --scale 1e9", "valid are 0.1 to 10000"),
        ("--emulate sockets --topology 2x3", "'2x3' has 6 ranks, but the command after -- starts 4; valid are"),
        ("--emulate sockets --topology rack=4", "--topology: topology 'rack=4' has the unknown axis"),
        ("--emulate sockets --topology flat", "--topology: 'flat' lacks the number of ranks"),
        ("--emulate flat --topology 2x2 --launcher mpiexec", "--launcher and --emulate are mutually exclusive"),
        ("--scale 2", "--scale 2 needs --emulate"),
        ("--topology 2x2", "--topology 2x2 needs --emulate"),
    ],
)
def test_invalid_options_are_reported_before_any_launch(
    options: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    assert cli.main(["compare", *options.split(), "--", *FLUX, "4"]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_tools_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["compare", "--emulate", "sockets", "--", *FLUX, "2"]) == 2
    printed = capsys.readouterr().err
    assert printed == "cocodiff: --emulate sockets: an emulated cluster needs ip and tc of the package iproute2\n"
    assert not list(tmp_path.iterdir())


SCRIPT = """
    import json, os, pathlib, socket, sys
    from xfuser_cocodiff.lab.emulation import links
    rank, cluster = int(os.environ["RANK"]), links.from_environment()
    folder = pathlib.Path(os.environ["COCODIFF_RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind((cluster.addresses[rank], 0))  # an address of this rank only
    topology = None
    if "--use_cocodiff" in sys.argv:
        topology = next(word.partition("=")[2] for word in sys.argv if word.startswith("--cocodiff_topology="))
    step = {"seconds": 0.1, "a2a_seconds": {"flat": 0.01}, "sent_bytes": {"flat": 30}}
    run = {"total_steps": 1, "steps": [step], "peak_memory_bytes": 5, "latents_sha256": "same"}
    device = ",".join([str(cluster.rate("node")), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]])
    engine = {"rank": rank, "degree": cluster.size, "topology": topology, "device": device}
    (folder / f"rank{rank}.json").write_text(json.dumps({**engine, "runs": [run]}))
"""


@needs_namespaces
def test_all_variants_run_on_the_cluster(tmp_path: Path) -> None:
    script, out = tmp_path / "example.py", tmp_path / "out"
    script.write_text(textwrap.dedent(SCRIPT))
    line = f"compare --out {out} --repeats 1 --emulate ethernet --scale 0.5 --modes exact,fast -- {script}"
    assert cli.main([*line.split(), "--ulysses_degree", "4"]) == 0
    record = json.loads((out / "report.json").read_text())
    assert record["cluster"]["topology"] == "node=2,gpu=2"
    assert record["cluster"]["rates"] == pytest.approx({"node": 1.25, "gpu": 40})
    stock, _, fast = record["runs"]
    assert [run["topology"] for run in record["runs"]] == [None, "node=2,gpu=2", "node=2,gpu=2"]
    for run in record["runs"]:
        assert run["device"] == "1.25,,0"
        assert "-m xfuser_cocodiff.lab.emulation.cluster --preset=ethernet" in run["command"]
    assert "--cocodiff" not in stock["command"] and "--cocodiff_mode=fast" in fast["command"]
    ranks = [json.loads((out / f"records/exact-1/rank{rank}.json").read_text()) for rank in range(4)]
    assert [rank["device"].rpartition(",")[2] for rank in ranks] == ["0", "1", "0", "1"]


@pytest.mark.slow  # the parts have tests of their own
@needs_namespaces
@pytest.mark.usefixtures("hub")
def test_xdit_command_on_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode exact is bit-identical to stock, and mode balanced compresses the messages between nodes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    line = "--model FLUX.1-dev --ulysses_degree 2 --height 64 --width 64 --num_inference_steps 3 --prompt cat"
    line += " --max_sequence_length 32 --seed 1 --warmup_calls 0 --cocodiff_slow_axes node --cocodiff_v_first on"
    options = compare.CompareOptions(
        1, modes=("exact", "balanced"), traced=True, emulation=EmulationOptions("ethernet")
    )
    stock, exact, balanced = compare.compare(line.split(), tmp_path, Console(quiet=True), options)["runs"]
    assert exact["latents"]["bit_equal"] and exact["topology"] == "node=2"
    # Q, K, V and O of 6 blocks: 64 + 32 tokens of 8 heads of 16 values, a quarter of which goes to the other rank.
    assert stock["bytes"] == {"flat": 6 * 4 * 96 * 128 * 2 // 4}
    assert exact["bytes"] == {"node": stock["bytes"]["flat"]}
    assert not balanced["latents"]["bit_equal"] and balanced["image"]["psnr_db"] > 25
    assert balanced["bytes"]["node"] < 0.7 * exact["bytes"]["node"]
    exchanges = {"cocodiff.v.exchange", "cocodiff.o.exchange"}
    for variant, names in ((stock, {"cocodiff.flat"}), (exact, {"cocodiff.node", *exchanges})):
        for rank in range(2):
            file = (tmp_path / variant["trace"]).with_name(f"trace{rank}.json.gz")
            events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
            assert names <= {event["name"] for event in events if event["ph"] == "X"}
