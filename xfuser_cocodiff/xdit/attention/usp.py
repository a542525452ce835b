"""xDiT's USP over exchanges that overlap: V first, and heads in groups."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from xfuser_cocodiff.attention.reshard import HEADS
from xfuser_cocodiff.attention.schedule import GROUP_COUNTS, Schedule, Trial
from xfuser_cocodiff.attention.ulysses import Attend, ulysses_attention
from xfuser_cocodiff.codec.memory import Share
from xfuser_cocodiff.exchange.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.exchange.lane import Handle
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.machine import device as devices
from xfuser_cocodiff.xdit.attention.segments import segments
from xfuser_cocodiff.xdit.engine.engine import Engine, active, reduced
from xfuser_cocodiff.xdit.layers.kind import Kind
from xfuser_cocodiff.xdit.patching.log import note
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platform.platform import compute_device

_MODULE = "xfuser.model_executor.layers.usp"
_PARAMETERS = (
    *("query", "key", "value", "dropout_p", "is_causal", "joint_query", "joint_key", "joint_value", "joint_strategy"),
    *("attn_layer", "combine_qkv_a2a", "backend", "attention_kwargs", "head_balance_layer", "kv_head_repeat"),
)


def patches() -> list[Patch]:
    """The row that puts the attention in place."""
    return [Patch(_MODULE, "USP", "V goes first, heads go in groups", _usp, _PARAMETERS)]


@dataclass(frozen=True)
class _Given:
    """What USP was called with, beside Q, K and V."""

    dropout_p: float = 0.0
    is_causal: bool = False
    joint_query: torch.Tensor | None = None
    joint_key: torch.Tensor | None = None
    joint_value: torch.Tensor | None = None
    joint_strategy: str | None = None
    attn_layer: Any = None
    combine_qkv_a2a: bool | None = None
    backend: Any = None
    attention_kwargs: dict | None = None
    head_balance_layer: Any = None
    kv_head_repeat: int = 1


def _usp(original: Callable) -> Callable:
    @functools.wraps(original)
    def USP(  # noqa: N802 (xDiT's name)
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        engine = active()
        if torch.compiler.is_compiling() or (engine.mesh is None and engine.virtual is None):
            return original(query, key, value, *args, **kwargs)
        engine.enter()
        given = _Given(*args, **kwargs)
        if engine.mesh is None:
            return _virtually(original, query, key, value, given, engine)
        layer = engine.layers.current
        if layer is None:
            engine.layers.discover()
        under_way = layer.value_under_way(value) if layer else None
        if not _ours(query, key, value, given, engine.mesh):
            if under_way:
                under_way.abandon()
            return original(query, key, value, *args, **kwargs)
        return _attention(query, key, value, under_way, given, engine)

    return USP


def _virtually(
    original: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: _Given, engine: Engine
) -> torch.Tensor:
    """Attention of one rank, with what codecs would leave of its tensors among many."""
    engine.layers.discover()
    virtual, layer = engine.virtual, engine.layers.running()
    layer_codecs = None
    if layer and not given.joint_strategy:
        layer.meet()
        parts = segments(layer.root.transformer, layer.root.shapes, query.shape[2])
        layer_codecs = engine.layer_codecs(layer, _share(query, key, value, part=virtual.share_of(query.shape, parts)))
    if layer_codecs is None:
        return original(query, key, value, **vars(given))
    query, key, value = virtual.send("qkv", [query, key, value], parts, layer_codecs)
    attended = original(query, key, value, **vars(given))
    return virtual.send("o", [attended], parts, layer_codecs)[0]


def _ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: _Given, mesh: Mesh) -> bool:
    """Whether this call is one that is understood here; by what is the same on every rank."""
    from xfuser.model_executor.layers import usp

    tensors = [query, key, value]
    if given.joint_strategy:
        tensors.append(given.joint_query)
    return (
        all(tensor.ndim == 4 and tensor.dtype == query.dtype for tensor in tensors)
        and all(tensor.shape[HEADS] % mesh.topology.size == 0 for tensor in tensors)
        and given.joint_strategy in (None, "front", "rear")
        and not usp._ulysses_extra_inputs(given.attention_kwargs, query)
    )


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, under_way: Handle | None, given: _Given, engine: Engine
) -> torch.Tensor:
    from xfuser.model_executor.layers import usp

    mesh, layer = engine.mesh, engine.layers.current
    kind = layer.call.kind if layer else None
    share = _share(query, key, value, given.joint_query)
    if kind:
        kind.share = share
    layer_codecs = engine.layer_codecs(layer or engine.layers.running(), share)
    try:
        usp._validate_gqa_params(query, key, value, given.kv_head_repeat, given.joint_strategy)
        if given.joint_strategy:
            query = usp._concat_joint_tensor(query, given.joint_query, given.joint_strategy, dim=2)
        attend = _attend(given)
    except BaseException:
        if under_way:
            under_way.abandon()
        raise
    name, groups = (layer.name, layer.call.schedule.groups) if layer else ("", 1)
    if not (kind and kind.trial is None and (kind.ready or kind.refusal)):
        return ulysses_attention(query, key, value, attend, mesh, groups, name, under_way, layer_codecs)
    cached = usp._has_kv_cache(given.attn_layer)  # which holds all heads of the layer
    heads = [tensor.shape[HEADS] // mesh.topology.size for tensor in (query, key)]
    comparing = _Comparing(attend, [] if cached else _counts_in_question(engine, kind, heads))
    result = ulysses_attention(query, key, value, comparing, mesh, 1, name, under_way, layer_codecs)
    sizes = value.nbytes, query.nbytes + key.nbytes + value.nbytes
    _settle(kind, engine, comparing, lambda: mesh.policy.ahead(*sizes))
    return result


def _attend(given: _Given) -> Attend:
    """Attention as USP has it between its exchanges."""
    from xfuser.core.distributed import get_ring_parallel_world_size
    from xfuser.model_executor.layers import usp

    function = usp._get_attention_function(backend=given.backend)
    ring = get_ring_parallel_world_size()
    joint = usp._preprocess_joint_tensors(given.joint_key, given.joint_value) if given.joint_strategy else (None, None)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup) -> torch.Tensor:
        if usp._has_kv_cache(given.attn_layer):
            key, value = usp._update_and_get_kv_cache(key, value, given.attn_layer)
        key, value = usp._trim_trailing_kv_padding(key, value, given.attention_kwargs)
        if given.kv_head_repeat > 1:
            key, value = usp._repeat_kv_heads(key, value, given.kv_head_repeat)
        options = {
            "dropout_p": given.dropout_p,
            "is_causal": given.is_causal,
            "attention_kwargs": given.attention_kwargs,
            "joint_attn_kwargs": given.joint_strategy
            and {
                "joint_key": head_group.of(joint[0], HEADS),
                "joint_value": head_group.of(joint[1], HEADS),
                "joint_strategy": given.joint_strategy,
                "step": 0,
                "total_steps": ring,
            },
        }
        if ring > 1:
            return usp.ring_attn(function, query, key, value, **options)
        return function(query, key, value, **options)[0]

    return attend


def _counts_in_question(engine: Engine, kind: Kind, heads: list[int]) -> list[int]:
    """Numbers of head groups that may be used if they change no bit; by what is the same on every rank."""
    wanted = engine.overlap.head_groups
    if engine.runtime or (wanted is None and devices.of(compute_device().type).queues):
        return []
    counts = GROUP_COUNTS[1:] if wanted is None else [wanted] if wanted > 1 else []
    known = engine.known_schedule(kind)
    # What an earlier process found fastest, it may have found with another kind of attention.
    return [n for n in counts if all(number % n == 0 for number in heads) and (known is None or n == known.groups)]


class _Comparing:
    """Attention that also finds out by which numbers of groups its heads can be cut without changing a bit of it.

    Args:
        attend: the attention.
        counts: the numbers of groups.
    """

    def __init__(self, attend: Attend, counts: list[int]) -> None:
        self._attend = attend
        self.same = dict.fromkeys(counts, False)
        """Whether no bit changes, on this rank, by number of groups."""
        self.seconds = 0.0
        """That comparing took."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup
    ) -> torch.Tensor:
        result, began = self._attend(query, key, value, ALL_HEADS), time.perf_counter()
        for count in self.same:
            head_groups = [HeadGroup(index, count) for index in range(count)]
            cut = [
                self._attend(*(head_group.of(each, HEADS) for each in (query, key, value)), head_group)
                for head_group in head_groups
            ]
            self.same[count] = torch.equal(torch.cat(cut, HEADS), result)
        self.seconds += time.perf_counter() - began
        return result


def _settle(kind: Kind, engine: Engine, comparing: _Comparing, ahead: Callable[[], bool]) -> None:
    """Settle which schedules a kind of layer may run by, once its heads were cut and compared. All ranks do it alike.

    Args:
        kind: of layer.
        engine: whose ranks agree.
        comparing: what this one has found.
        ahead: see :func:`_trial`.
    """
    began, counts, known = time.perf_counter(), list(comparing.same), engine.known_schedule(kind)
    same = reduced([float(same) for same in comparing.same.values()], "min") if counts else []
    equal = [count for count, is_same in zip(counts, same, strict=True) if is_same]
    kind.unequal = tuple(count for count in counts if count not in equal)
    if known and known.groups in (1, *equal):
        kind.trial = Trial([known])
    else:
        kind.trial = _trial(engine, kind.ready, equal, ahead)
    if counts:
        engine.trials.spend(comparing.seconds + time.perf_counter() - began)


def _trial(engine: Engine, v_first: bool, counts: list[int], ahead: Callable[[], bool]) -> Trial:
    """The schedules that a kind of layer may run by.

    Args:
        engine: whose ranks try them.
        v_first: whether V can go first.
        counts: numbers of head groups, beside 1, that change no bit.
        ahead: asked where it is not tried whether V is to go first; else Q, K and V are one message. All ranks get the
            same answer.
    """
    wanted = engine.overlap
    v_first = v_first and wanted.v_first is not False
    if engine.runtime:
        if wanted.head_groups not in (None, 1):
            note("heads stay in one group: in modes that approximate, references belong to whole tensors")
        counts = [1]
    elif wanted.head_groups is None:
        counts = [1, *counts]
    elif wanted.head_groups in (1, *counts):
        counts = [wanted.head_groups]
    else:
        note(f"heads stay in one group: {wanted.head_groups} groups do not divide them, or would change bits")
        counts = [1]
    schedules = [Schedule(v_first, count) for count in counts]
    if wanted.v_first is None and v_first:
        schedules.insert(0, Schedule(False, counts[0]))
    is_timed = not devices.of(compute_device().type).queues  # else the host does not see how long a layer takes
    if len(schedules) > 1 and not is_timed:
        schedules = [Schedule(v_first and (wanted.v_first is True or ahead()), counts[0])]
    return Trial(schedules)


def _share(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    joint_query: torch.Tensor | None = None,
    part: Fraction = Fraction(1),
) -> Share | None:
    """What a rank has of a layer, if codecs may approximate it: K and V of other tokens than Q's need not be those of
    the step before. A rank that stands for others has but a part of what it sees."""
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        return None
    queries = query.numel() + (0 if joint_query is None else joint_query.numel())
    values = 2 * queries + key.numel() + value.numel()  # O is of the shape of all queries
    return Share(int(values * part), int(value.numel() * part), value.shape[-1], value.element_size())
