"""The recorder on schedulers and pictures, without ranks; whole recorded runs are in test_compare and test_scripts."""

import copy
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from tqdm import tqdm

from xfuser_cocodiff.lab.comparison import recorder
from xfuser_cocodiff.lab.comparison.image_grid import strip
from xfuser_cocodiff.lab.comparison.tracer import Tracer
from xfuser_cocodiff.xdit.run_tracking import run_tracker, stock_traffic
from xfuser_cocodiff.xdit.run_tracking.run_tracker import RunTracker
from xfuser_cocodiff.xdit.session.session import Session


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recorder.Recorder:
    """A recorder."""
    monkeypatch.setattr(recorder, "_engine", lambda: {"degree": 1, "topology": None, "device": "CPU"})
    no_memory = SimpleNamespace(reset_peak_memory_stats=lambda: None, max_memory_allocated=lambda: 0)
    monkeypatch.setattr(recorder, "_memory", lambda: no_memory)
    return recorder.Recorder(tmp_path)


def denoise(scheduler: FlowMatchEulerDiscreteScheduler, latents: torch.Tensor) -> torch.Tensor:
    for timestep in scheduler.timesteps:
        latents = scheduler.step(torch.ones_like(latents), timestep, latents, return_dict=False)[0]
    return latents


@pytest.mark.usefixtures("uninstalled")
def test_only_the_pipelines_own_scheduler_ends_steps(
    watched: recorder.Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session()
    for module in (recorder, run_tracker):
        monkeypatch.setattr(module, "active", lambda: session)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    clock, pipeline = RunTracker([watched]), SimpleNamespace(scheduler=scheduler)
    progress_bar = clock._track_bar(lambda owner, total: tqdm(total=total, disable=True))
    for _ in range(2):  # the second run copies a scheduler that has been watched, as LTX-2 does for its audio
        progress_bar(pipeline, None, 3)
        scheduler.set_timesteps(3)
        other = copy.deepcopy(scheduler)
        torch.testing.assert_close(denoise(other, torch.zeros(4)), torch.full((4,), -1.0))
        assert scheduler.step_index is None
        torch.testing.assert_close(denoise(scheduler, torch.full((4,), 5.0)), torch.full((4,), 4.0))
        watched.end_run()
    clock.close()
    assert [len(run["steps"]) for run in watched.runs] == [3, 3]
    assert watched.runs[0]["latents_sha256"] == watched.runs[1]["latents_sha256"]


SHADES = (0.2, 0.6, 1.0)
RED = [Image.new("RGB", (4, 2), (round(255 * shade), 0, 0)) for shade in SHADES]
ARRAY = torch.stack([torch.stack([torch.full((2, 4), value) for value in (shade, 0, 0)]) for shade in SHADES])


@pytest.mark.parametrize(
    ("output", "shades"),
    [
        (RED, SHADES),
        (RED[2:], SHADES[2:]),
        ([RED, RED[::-1]], SHADES),
        ([[shown for shown in RED for _ in range(8)]], [SHADES[number // 8] for number in range(1, 24, 3)]),
        (ARRAY, SHADES),
        (ARRAY[None].numpy().transpose(0, 1, 3, 4, 2), SHADES),
    ],
    ids=["images", "an image", "videos", "a long video", "tensor", "video array"],
)
def test_all_pictures_are_kept_side_by_side_and_frames_from_all_of_a_video(output: object, shades: list[float]) -> None:
    shown = strip(output).convert("RGB")
    assert shown.size == (4 * len(shades), 2)
    seen = [shown.getpixel((4 * number, 1)) for number in range(len(shades))]
    assert seen == [(round(255 * shade), 0, 0) for shade in shades]
    assert strip(torch.zeros(1, 16, 8, 8)) is strip([]) is None  # latents, or nothing


@pytest.mark.parametrize(
    ("mode", "sent", "because", "expected"),
    [
        (None, None, None, (None, "stock xDiT")),
        ("exact", None, None, (None, "mode exact")),
        ("balanced", None, "no slow axis", (0.0, "no slow axis")),
        ("balanced", (20, 100), None, (0.2, None)),
        ("balanced", (0, 0), None, (0.0, "no denoising steps detected")),
    ],
)
def test_what_was_coded_is_recorded(mode: str | None, sent: tuple | None, because: str | None, expected: tuple) -> None:
    config = mode and SimpleNamespace(mode=mode, kernels="torch")
    reports = sent and [SimpleNamespace(sent_bytes=sent[0] / 2, exact_bytes=sent[1] / 2)] * 2
    runtime = reports and SimpleNamespace(reports=reports, inactive_reason=None)
    found = recorder._coded(Session(config, runtime=runtime, lossless_reason=because))
    assert (found["coded_fraction"], found["coded_reason"] and found["coded_reason"].partition(";")[0]) == expected


def test_a_run_without_latents_is_left_out(watched: recorder.Recorder) -> None:
    watched.begin_run(2)
    watched.end_step(None)
    watched.end_run()
    assert not watched._complete()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"COCODIFF_RECORD=.*file is not valid: .*; valid is a folder"):
        recorder.Recorder(tmp_path / "file").begin_run(1)


@pytest.mark.parametrize("total", [4, None])
def test_the_last_steps_are_traced(watched: recorder.Recorder, tmp_path: Path, total: int | None) -> None:
    watched._tracer = Tracer(tmp_path / "trace0.json.gz")
    for _ in range(2):
        watched.begin_run(total)
        for step in range(4):
            with torch.autograd.profiler.record_function(f"step {step}"):
                watched.end_step(torch.zeros(3))
        with torch.autograd.profiler.record_function("decoding"):
            watched.end_run()
    events = json.loads(gzip.decompress((tmp_path / "trace0.json.gz").read_bytes()))["traceEvents"]
    found = {event["name"] for event in events if event["name"].startswith(("step", "decoding"))}
    # Where the end is not known beforehand, the first step is left out and the rest is traced.
    assert found == ({"step 2", "step 3"} if total else {"step 1", "step 2", "step 3", "decoding"})


def test_what_stocks_ring_sends_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    session, tensors = Session(), [torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4)]
    monkeypatch.setattr(stock_traffic, "active", lambda: session)
    monkeypatch.setattr("xfuser.core.distributed.get_ring_parallel_world_size", lambda: 4)
    attend = stock_traffic.watch_ring(lambda function, query, key, value, dropout_p: (query, dropout_p))
    assert attend(None, *tensors, dropout_p=0.5) == (tensors[0], 0.5)
    assert dict(session.traffic.sent_bytes) == {"ring": 3 * 2 * 2 * 6 * 4 * 4}
