"""The recorder with schedulers and images on one process; test_compare has recorded runs of a command."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from xfuser_cocodiff.engine.compression.step_report import StepReport
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison import recorder
from xfuser_cocodiff.tools.comparison.image_grid import image_grid
from xfuser_cocodiff.tools.launching import stock_traffic
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig


@pytest.fixture
def active_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recorder.Recorder:
    """Return a recorder without memory statistics."""
    monkeypatch.setattr(recorder, "_settings", lambda: {"degree": 1, "topology": None, "device": "CPU"})
    no_memory = SimpleNamespace(reset_peak_memory_stats=lambda: None, max_memory_allocated=lambda: 0)
    monkeypatch.setattr(recorder, "_memory", lambda: no_memory)
    return recorder.Recorder(tmp_path)


@pytest.mark.parametrize(
    ("total", "count", "timed"), [(8, 8, [3, 7]), (4, 4, [3]), (2, 2, [1]), (1, 1, [0]), (None, 6, [1, 5])]
)
def test_communication_is_timed_in_few_steps(
    total: int | None,
    count: int,
    timed: list[int],
    active_recorder: recorder.Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other steps run as without a recorder, which times their communication."""
    session, seen = Session(), []
    monkeypatch.setattr(recorder, "active", lambda: session)
    active_recorder.begin_run(total)
    for _ in range(count):
        seen.append(session.traffic.timer is not None)
        session.traffic.count_bytes("flat", 2, 10)
        active_recorder.end_step(torch.zeros(1))
    active_recorder.end_run()
    steps = active_recorder.runs[0]["steps"]
    assert [number for number, each in enumerate(seen) if each] == timed
    assert [step["is_timed"] for step in steps] == seen
    assert all(step["sent_bytes"] == {"flat": 10} and step["seconds"] > 0 for step in steps)


SHADES = (0.2, 0.6, 1.0)
RED = [Image.new("RGB", (4, 2), (round(255 * shade), 0, 0)) for shade in SHADES]
ARRAY = torch.stack([torch.stack([torch.full((2, 4), value) for value in (shade, 0, 0)]) for shade in SHADES])


@pytest.mark.parametrize(
    ("output", "shades"),
    [
        (RED, SHADES),
        ([RED, RED[::-1]], SHADES),
        ([[image for image in RED for _ in range(8)]], [SHADES[number // 8] for number in range(1, 24, 3)]),
        (ARRAY, SHADES),
        (ARRAY[None].numpy().transpose(0, 1, 3, 4, 2), SHADES),
    ],
    ids=["images", "videos", "a long video", "tensor", "video array"],
)
def test_image_grid_has_all_images_or_evenly_spaced_frames(output: object, shades: list[float]) -> None:
    grid = image_grid(output).convert("RGB")
    assert grid.size == (4 * len(shades), 2)
    colors = [grid.getpixel((4 * number, 1)) for number in range(len(shades))]
    assert colors == [(round(255 * shade), 0, 0) for shade in shades]
    assert image_grid(torch.zeros(1, 16, 8, 8)) is image_grid([]) is None  # latents or no image


def test_errors_are_recorded_without_those_of_every_tensor(
    active_recorder: recorder.Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keyframe, later = (
        StepReport(step, {"a": 0.04}, tensor_errors, {}, bits, 40 - 30 * step, 100, 0, 0, not step, 7, 0, ("a",))
        for step, (bits, tensor_errors) in enumerate([(None, {"k": [0.01] * 2}), (2, {"k": [0.02] * 2, "v": [0.08]})])
    )
    runtime = SimpleNamespace(reports=[keyframe, later], yardsticks={"fp8": 0.026, "fp4": 0.095}, value_bytes=2)
    session = Session(CocoDiffConfig(topology=Topology.flat(2), mode="balanced", kernels="torch"), runtime=runtime)
    monkeypatch.setattr(recorder, "active", lambda: session)
    active_recorder.begin_run(2)
    for _ in range(2):
        active_recorder.end_step(torch.zeros(1))
    active_recorder.end_run()
    [run] = json.loads((tmp_path / "rank0.json").read_text())["runs"]
    assert run["mean_error"] == pytest.approx((2 * 0.01 + 2 * 0.02 + 0.08) / 5)
    assert run["error"] == {"k": pytest.approx(0.015), "v": pytest.approx(0.08)}
    assert run["bits"] == pytest.approx(16 * 50 / 200)
    assert run["yardsticks"] == {"fp8": 0.026, "fp4": 0.095}
    assert [(step["bits"], step["error"]) for step in run["codecs"]] == [(None, 0.01), (2, pytest.approx(0.04))]
    assert {"sent_bytes", "exact_bytes", "errors"} <= run["codecs"][0].keys()
    assert not {"tensor_errors", "yardstick_errors"} & run["codecs"][0].keys()


def test_file_instead_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"COCODIFF_RECORD=.*file is not valid: .*; valid is a folder"):
        recorder.Recorder(tmp_path / "file").begin_run(1)


def test_bytes_of_stock_ring_attention_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    session, tensors = Session(), [torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4)]
    monkeypatch.setattr(stock_traffic, "active", lambda: session)
    monkeypatch.setattr("xfuser.core.distributed.get_ring_parallel_world_size", lambda: 4)
    attend = stock_traffic.watch_ring(lambda function, query, key, value, dropout_p: (query, dropout_p))
    assert attend(None, *tensors, dropout_p=0.5) == (tensors[0], 0.5)
    assert dict(session.traffic.sent_bytes) == {"ring": 3 * 2 * 2 * 6 * 4 * 4}
