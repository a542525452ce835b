"""Codecs of a layer at one step and coded tensors, for tests that need no runtime; a reporter for those of runs."""

from collections.abc import Mapping
from typing import Any

import torch

from xfuser_cocodiff.engine.codec import coded_tensor
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.coded_tensor import CodedTensor
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout, AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.compression.step_codecs import StepCodecs
from xfuser_cocodiff.engine.compression.step_errors import StepErrors, TensorError
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.coding_cost import CodingCost
from xfuser_cocodiff.xdit.session.run_report import LoggingReporter

_OF_STEP = ("keyframe_codec", "is_keyframe", "is_joint", "keeps_references", "has_exact_references")


def layer_codecs(
    partition: AxisPartition | None,
    codecs: Mapping[str, Codec],
    link_states: dict,
    stats: CodecStats | None = None,
    step: int = 0,
    **how: Any,
) -> LayerCodecs:
    """Return the codecs of a layer, with errors of its own unless they are given.

    Args:
        partition: slow and fast axes.
        codecs: codec of each tensor.
        link_states: link states of the layer.
        stats: statistics; new ones when not given.
        step: number of the step.
        how: other fields of StepCodecs and LayerCodecs.
    """
    of_step = StepCodecs(codecs=codecs, number=step, **{name: how.pop(name) for name in _OF_STEP if name in how})
    return LayerCodecs(partition, of_step, link_states, stats or CodecStats(), how.pop("errors", StepErrors()), **how)


def encode(*tensors: CodedTensor) -> torch.Tensor:
    """Encode tensors and return the energies of the lossy ones, float32 (number of them, 2)."""
    energies = torch.empty(sum(not tensor.codec.is_exact for tensor in tensors), 2)
    coded_tensor.encode(tensors, energies)
    return energies


def add_errors(layer_codecs: LayerCodecs, *energies: tuple[float, float], name: str = "v") -> None:
    """Add errors of a tensor as a collective would, by the energies of each."""
    errors = [TensorError(name, layer_codecs.layer, layer_codecs.counts_errors) for _ in energies]
    layer_codecs.errors.add(errors, devices.CPU).copy_(torch.tensor(energies))


def two_nodes(device_type: str = "cpu", coding_cost: CodingCost | None = None) -> AxisLayout:
    """Return two coordinates on a slow axis, `node`, whose messages are on a type of device."""
    is_asynchronous = devices.capabilities(device_type).is_asynchronous
    return AxisLayout(2, 1, coding_cost=coding_cost, slow_axis_names=("node",), is_asynchronous=is_asynchronous)


def reporter(logged: list[str], mode: str = "balanced") -> LoggingReporter:
    """Return a reporter of runs on :func:`two_nodes` that adds all of its messages to a list."""
    reporter = LoggingReporter(mode, None, [two_nodes()])
    reporter.info = reporter.warn = logged.append
    return reporter
