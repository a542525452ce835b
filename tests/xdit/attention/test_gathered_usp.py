"""USP with gathered K and V in a layer, on real ranks, against attention on one rank and stock: heads and tokens that
are not divisible, grouped heads, text, masks and backends."""

import os
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import bare_runtime
from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.attention import eager_attention
from xfuser_cocodiff.xdit.session import startup
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap

TOKENS, TEXT, DIM, STEPS = 24, 10, 8, 4
"""With so many tokens, attention with text has whole blocks of 32 queries, and its bits do not depend on their number:
PyTorch's attention on CPUs rounds the rest of a block by its size."""


@dataclass(frozen=True)
class Case:
    """A call of USP."""

    heads: int = 8
    kv_heads: int = 8
    joint: str | None = None
    """Strategy by which replicated text is joined."""
    mask: tuple[int, ...] | None = None
    """Shape of a mask, whose last size is the number of keys."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Other arguments of USP."""
    backend: str | None = None
    """Backend that the call names; attention is computed by PyTorch's all the same."""
    topology: str = "2x2"
    gathers: bool = True
    """Whether K and V can be gathered."""
    is_quantized: bool = False
    """Whether the backend quantizes, so that they are not gathered in exact."""


class Attention(nn.Module):
    """Attention over USP."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.options: dict[str, Any] = {}
        self.to_q = nn.Linear(16, case.heads * DIM)
        self.to_k, self.to_v = nn.Linear(16, case.kv_heads * DIM), nn.Linear(16, case.kv_heads * DIM)

    def project(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """Return Q, K and V, (B, H, S, D)."""
        modules = self.to_q, self.to_k, self.to_v
        return [module(hidden_states).unflatten(-1, (-1, DIM)).transpose(1, 2) for module in modules]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        from xfuser.model_executor.layers import usp

        value = self.project(hidden_states)
        return usp.USP(*value, **self.options)


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.attn = Attention(case)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.attn(hidden_states)


class Transformer(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(case)])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](hidden_states)


def whole(seed: int, *shape: int) -> torch.Tensor:
    """Return noise, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments_of(case: Case) -> dict[str, Any]:
    """Return the arguments of USP besides Q, K and V."""
    options = dict(case.options)
    if case.joint:
        heads = {"joint_query": case.heads, "joint_key": case.kv_heads, "joint_value": case.kv_heads}
        options |= {name: whole(9 + index, 2, heads[name], TEXT, DIM) for index, name in enumerate(heads)}
        options["joint_strategy"] = case.joint
    if case.heads > case.kv_heads:
        options["kv_head_repeat"] = case.heads // case.kv_heads
    if case.mask:
        options["attention_kwargs"] = {"attn_mask": whole(7, *case.mask) < 1}
    return options


def reference(case: Case, attention: Attention, hidden_states: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return what a rank must get, by attention on the whole tensors."""
    tensors, options = attention.project(hidden_states), attention.options
    if case.joint:
        text = [options[name] for name in ("joint_query", "joint_key", "joint_value")]
        pairs = zip(tensors, text, strict=True)
        tensors = [torch.cat(pair if case.joint == "rear" else pair[::-1], 2) for pair in pairs]
    query, *kv = tensors
    key, value = (each.repeat_interleave(case.heads // case.kv_heads, 1) for each in kv)
    mask = options.get("attention_kwargs", {}).get("attn_mask")
    is_causal = options.get("is_causal", False)
    output = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
    if not case.joint:
        return output.chunk(world, 2)[rank]
    if case.joint == "front":
        return torch.cat([output[:, :, :TEXT], output[:, :, TEXT:].chunk(world, 2)[rank]], 2)
    return torch.cat([output[:, :, :TOKENS].chunk(world, 2)[rank], output[:, :, TOKENS:]], 2)


class Run:
    """Steps of one layer on one rank.

    Args:
        rank: number of the rank.
        case: the call of USP.
    """

    def __init__(self, rank: int, case: Case) -> None:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # not used: the ranks have a store already
        self.group = bare_runtime.start()
        bare_runtime.init_runtime_state(8, TEXT)
        torch.manual_seed(0)
        self.case, self.transformer = case, Transformer(case)
        self.attention = self.transformer.blocks[0].attn
        self.attention.options = arguments_of(case)
        if case.backend:
            self._name_backend(case.backend)
        self._rank, world = rank, self.group.size()
        self.inputs = [whole(step, 2, TOKENS, 16) for step in range(STEPS)]
        self.expected = [self.attention_of(each) for each in self.inputs]
        self.shards = [each.chunk(world, 1)[rank] for each in self.inputs]
        self.gathered: list[list[int]] = []
        """Heads of the tensors that were gathered, by message."""
        self.lines: list[str] = []
        """INFO lines of the last run."""

    def attention_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what this rank must get for all tokens, by attention on one rank."""
        return reference(self.case, self.attention, hidden_states, self._rank, self.group.size())

    def _name_backend(self, name: str) -> None:
        """Let the call name a backend, which runs on no CPU."""
        from xfuser.core.distributed.attention_backend import AttentionBackendType
        from xfuser.model_executor.layers import usp

        self.attention.options["backend"] = AttentionBackendType[name]
        function = usp._get_attention_function(backend=AttentionBackendType.SDPA)
        usp._get_attention_function = lambda backend=None: function

    def session(
        self,
        mode: str,
        plan: str | None,
        slow_axes: tuple[str, ...] = ("node",),
        schedule: str = "bits=8",
        groups: int | None = None,
    ) -> Session:
        """Return a session, and run with it from now on."""
        topology = Topology.parse(self.case.topology, self.group.size())
        slow_axes = () if mode == "exact" else slow_axes
        config = CocoDiffConfig(
            topology=topology,
            mode=mode,
            schedule=None if mode == "exact" else schedule,
            plan=plan and Plan.parse(plan, topology),
            slow_axes=slow_axes,
            overlap=Overlap(v_first=True, head_groups=groups),
        )
        session = startup.create_session(self.group, config)
        bare_runtime.use_session(session)
        return session

    @torch.no_grad()
    def steps(self, session: Session) -> list[torch.Tensor]:
        """Return the outputs of a declared run."""
        self.gathered.clear()
        self.lines.clear()
        gathered, outputs = UlyssesAttention._gathered, []
        noting = lambda call, tensors, *given: (  # noqa: E731
            self.gathered.append([tensor.shape[1] for tensor in tensors]) or gathered(call, tensors, *given)
        )
        log = mock.patch.object(eager_attention, "info_once", self.lines.append)
        with mock.patch.object(UlyssesAttention, "_gathered", noting), log:
            session.begin_run(STEPS)
            for shard in self.shards:
                outputs.append(self.transformer(shard))
                session.end_step()
        return outputs

    def error(self, outputs: list[torch.Tensor]) -> float:
        """Return the maximum difference from attention on one rank."""
        pairs = zip(outputs, self.expected, strict=True)
        return max((output - expected).abs().max().item() for output, expected in pairs)


def run_both(rank: int, case: Case) -> dict[str, tuple[float, list[list[int]], bool]]:
    """Return for exact with a plan and for balanced by its rule: the error, heads in gathered messages, and whether
    all outputs equal those of all-to-alls by heads."""
    run, found = Run(rank, case), {}
    by_heads = run.steps(run.session("exact", "hierarchical"))
    assert not run.gathered
    forced = "hierarchical:node=kv" if case.topology.startswith("node=") else "hierarchical:gpu,node=kv"
    for mode, plan in (("exact", forced), ("balanced", None)):
        session = run.session(mode, plan)
        run.steps(session)  # in which the layer is detected and verified
        # Only where a plan asks for a gather.
        assert ["not gathered" in line for line in run.lines] == [True] * (
            plan is not None and (not case.gathers or case.is_quantized)
        )
        outputs = run.steps(session)
        same = all(map(torch.equal, outputs, by_heads))
        found[mode] = run.error(outputs), list(run.gathered), same
    return found


CASES = {
    "divisible": Case(),
    "two heads on four nodes, by heads padded to four": Case(2, 2, topology="node=4"),
    "grouped heads": Case(12, 4),
    "three grouped heads": Case(6, 3),
    "text in front": Case(joint="front"),
    "text behind, six heads": Case(6, 6, joint="rear"),
    "mask of keys": Case(mask=(2, 1, 1, TOKENS)),
    "per-query mask": Case(mask=(TOKENS, TOKENS), gathers=False),
    "causal": Case(options={"is_causal": True}, gathers=False),
    "quantizing backend": Case(backend="SAGE", is_quantized=True),
    "sparse backend": Case(backend="FLEX_BLOCK_ATTN", gathers=False),
    "two ranks": Case(3, 3, topology="node=2"),
}
QUICK = ["text behind, six heads", "sparse backend", "two ranks"]


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_gathered_attention_equals_attention_on_one_rank(name: str) -> None:
    case = CASES[name]
    topology = Topology.parse(case.topology)
    world, fast = topology.size, topology.size // topology.axes[0].size
    padded = -(-case.kv_heads // fast) * fast
    for found in ranks.run(run_both, world, case):
        for mode, (error, gathered, is_same) in found.items():
            assert error < (1e-6 if mode == "exact" else 0.05), mode
            assert is_same == (mode == "exact"), mode
            gathers = case.gathers and not (case.is_quantized and mode == "exact")
            assert bool(gathered) == gathers, mode
            # V first, then Q and K, with no more heads than the fast ranks need.
            messages = [[padded], [padded * case.heads // case.kv_heads, padded]] * STEPS
            assert gathered == (messages if gathers else []), mode


def mask_from_third_step(rank: int) -> list[tuple[str, bool, float, int]]:
    """Return for each mode whether outputs equal those of all-to-alls by heads, the error, and the steps that gather,
    where attention has a mask that differs between queries from the third step on."""
    case, found = Case(topology="node=2"), []
    run = Run(rank, case)
    run.transformer.register_forward_pre_hook(lambda *_: run.attention.options.update(options.pop()))
    mask = {"attention_kwargs": {"attn_mask": whole(7, TOKENS, TOKENS) < 1}}
    steps = [{"attention_kwargs": None}] * 2 + [mask] * (STEPS - 2)
    options = steps[::-1]
    by_heads = run.steps(run.session("exact", "hierarchical"))
    for mode in ("exact", "balanced"):
        session = run.session(mode, "hierarchical:node=kv")
        options = [{"attention_kwargs": None}] * STEPS
        run.steps(session)  # in which the layer is detected and verified
        options = steps[::-1]
        outputs = run.steps(session)
        error = max((output - each).abs().max().item() for output, each in zip(outputs, by_heads, strict=True))
        found.append((mode, all(map(torch.equal, outputs, by_heads)), error, len(run.gathered)))
    return found


def test_mask_that_differs_between_queries_later_leads_to_heads() -> None:
    for exact, balanced in ranks.run(mask_from_third_step, 2):
        assert exact == ("exact", True, 0.0, 2 * 2 + 1)  # V of the third step has left when its mask is seen
        assert 0 < balanced[2] < 0.05 and balanced[3] == exact[3]


def gather_along_all_axes(rank: int) -> list[tuple[float, list[list[int]]]]:
    """Return the errors of exact and balanced with a plan that gathers along all axes, and heads in messages."""
    run, found = Run(rank, Case(3, 3)), []
    for mode in ("exact", "balanced"):
        session = run.session(mode, "hierarchical:gpu+node=kv", ("node", "gpu"))
        run.steps(session)
        found.append((run.error(run.steps(session)), list(run.gathered)))
    return found


def test_k_and_v_are_gathered_along_all_axes() -> None:
    for exact, balanced in ranks.run(gather_along_all_axes, 4):
        assert exact[0] < 1e-6 < balanced[0] < 0.05
        assert exact[1] == balanced[1] == [[3], [3, 3]] * STEPS  # each rank attends with all heads, and none is padded
