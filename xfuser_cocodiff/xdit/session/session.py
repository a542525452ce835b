"""What one engine of xDiT has of the plugin. It lies on xDiT's runtime state, and ends with it: what one engine knows,
counts and holds, another one in the same process never sees."""

import zlib
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule, ScheduleCandidates
from xfuser_cocodiff.engine.attention.reshard import pad_heads, start_seq_to_heads
from xfuser_cocodiff.engine.attention.ring_attention import Ring
from xfuser_cocodiff.engine.autotune.plan_selection import CommSetup
from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label, Traffic
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.compression.virtual_ranks import VirtualRanks
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig, Overlap
from xfuser_cocodiff.engine.settings.options import AUTO, EXACT
from xfuser_cocodiff.engine.topology import devices as devices
from xfuser_cocodiff.xdit.layers.layer import Layer
from xfuser_cocodiff.xdit.layers.layer_call import TracedCall
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature
from xfuser_cocodiff.xdit.layers.layers import Layers
from xfuser_cocodiff.xdit.layers.root_module import BaseLayer
from xfuser_cocodiff.xdit.patching.log import info_once, warn_once
from xfuser_cocodiff.xdit.platforms.platform import compute_device, is_captured
from xfuser_cocodiff.xdit.session import graph_order, replicated_text
from xfuser_cocodiff.xdit.session.runs import Runs
from xfuser_cocodiff.xdit.session.schedule_trials import Trials


@dataclass(eq=False)
class Session:
    """The plugin in one engine; by itself, one that leaves everything to stock xDiT."""

    config: CocoDiffConfig | None = None
    mesh: Mesh | None = None
    """None where stock xDiT's exchanges run, and where one rank stands for many."""
    comm_setup: CommSetup | None = None
    """What the mesh goes by."""
    runtime: CodecRuntime | None = None
    """What codecs know of the run under way; None where nothing is to be approximated."""
    lossless_reason: str | None = None
    """Why nothing is to be approximated although a mode that does was asked for."""
    ring: Ring | None = None
    """The ranks that K and V go round; None where xDiT's ring runs, or there is none."""
    ring_setup: CommSetup | None = None
    """What the ring goes by."""
    uses_stock_usp: bool = False
    """Whether xDiT's USP runs as it is, since it is not the one that is known here."""
    model: str = ""
    """The class of its transformer."""
    padding: int = 0
    """Tokens at the end of the sequence, in the call that is under way, which are there to make it divide."""
    overlap: Overlap = field(default_factory=Overlap)
    """What is fixed of how exchanges overlap with computation."""
    layers: Layers = field(init=False)
    """The attention layers that are followed."""
    runs: Runs = field(init=False)
    """The runs that were declared, or are recognised."""
    traffic: Traffic = field(init=False)
    """What exchanges moved, stock's too where somebody watches them."""
    traced_call: TracedCall | None = field(init=False, default=None)
    """The call of a layer that a graph has begun and not ended."""
    trials: Trials | None = field(init=False, default=None)
    """What is tried of schedules; None without a mesh."""
    _has_told_of_text: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.runs = Runs(lambda: self.runtime, self._new_step, self.all_agree, self._run_begins, self._step_ends)
        self.layers = Layers(
            self._follows, self.send_value, self.all_agree, info_once, self._counts, self.runs.before_call
        )
        self.traffic = self.mesh.traffic if self.mesh else Traffic()
        # Found here, since PyTorch cannot trace what is cached.
        self._sends_directly = (
            self.mesh is not None and devices.capabilities(self.mesh.stages.device.type).supports_direct_sends
        )
        if self.mesh:
            self.comm_setup = self.comm_setup or CommSetup(self.mesh, None)
            self.trials = Trials(self._schedules, self._mean, self.all_agree, compute_device(), self.keep)

    @property
    def virtual(self) -> VirtualRanks | None:
        """The ranks that this one stands for; None where it stands for itself."""
        return self.runtime.virtual if self.runtime else None

    @property
    def uses_custom_ops(self) -> bool:
        """Whether a graph calls the exchanges of eager mode. What approximates is nothing else, and on a CPU they are
        the faster ones; elsewhere exact exchanges are such as PyTorch traces, which CUDA graphs hold."""
        return self.runtime is not None or self._sends_directly

    def mesh_of(self, schedule: OverlapSchedule) -> Mesh:
        """The mesh by which a schedule has its exchanges."""
        return (self.comm_setup.flat_mesh or self.mesh) if schedule.flat else self.mesh

    def sends_v_first(self, value: torch.Tensor) -> bool:
        """Whether V goes first in a graph that calls none of them."""
        wanted = self.overlap.v_first
        return self.mesh.policy.sends_early_in_graph(value.numel() * value.element_size()) if wanted is None else wanted

    def select_kernels(self) -> None:
        """Have what is below engines do as this one is set."""
        kernels.use(self.config.kernels if self.config else AUTO)

    def close(self) -> None:
        """Leave modules as they were, and drop what is held of a run."""
        self.abandon_traced_call()
        self.layers.clear()
        self.runs.clear()
        graph_order.restore()

    def _schedules(self) -> list[ScheduleCandidates]:
        return [signature.candidates for signature in self.layers.signatures if signature.candidates]

    def cached_schedule(self, signature: LayerSignature) -> OverlapSchedule | None:
        """What an earlier process has found fastest for a kind of layer, where nothing is fixed; the same on every
        rank."""
        if self.comm_setup.cache is None or self.overlap != Overlap():
            return None
        found = self.comm_setup.cache.schedules.get(self._name(signature))
        return found if found and (signature.ready or not found.v_first) else None

    def _name(self, signature: LayerSignature) -> str:
        """Of a kind, with what its schedule depends on beside the layer."""
        config, mode = self.config, EXACT
        if self.runtime:
            mode = f"{config.mode} {config.schedule or ''} {','.join(config.slow_axes)}"
        return f"{mode} {config.plan or AUTO} {signature.key}"

    def keep(self) -> None:
        """Something was found: keep it for the next process. One rank of each group does."""
        if self.comm_setup.cache is None:
            return
        signatures = [
            signature for signature in self.layers.signatures if signature.candidates and signature.candidates.chosen
        ]
        if self.overlap == Overlap():
            self.comm_setup.cache.schedules |= {
                self._name(signature): signature.candidates.chosen for signature in signatures
            }
        found = [self.comm_setup.cache, self.ring_setup.cache if self.ring_setup else None]
        try:
            for known in found:
                if known:
                    known.save()
        except OSError as error:
            warn_once(f"tuning results cannot be cached: {error}; choose another folder with --cocodiff_cache")

    def _counts(self) -> bool:
        return self is active() and not torch.compiler.is_compiling()

    def _new_step(self) -> None:
        self.abandon_traced_call()
        self.layers.end_step()

    def _run_begins(self, total: int | None) -> None:
        self.layers.begin_run()
        if self.trials:
            self.trials.begin_run()

    def _step_ends(self) -> None:
        if self.mesh and not self._has_told_of_text:
            self._has_told_of_text = replicated_text.warn_if_replicated(self.model)
        if self.trials and self._counts() and not is_captured():
            self.trials.end_step()

    def _follows(self) -> bool:
        return self.mesh is not None and not self.uses_stock_usp and self.mesh.topology.size > 1 and self._counts()

    def all_agree(self, value: object) -> bool:
        """Whether all ranks that share a sequence pass the same; one that stands for many has nobody to ask."""
        if self.mesh is None:
            return True
        number = zlib.crc32(repr(value).encode())
        least, negated = self.all_reduce([number, -number], "min")
        return least == -negated

    def all_reduce(self, values: list[float], operation: str) -> list[float]:
        """As the function of this name, within the time that an exchange may take."""
        return all_reduce(values, operation, self.config.timeout if self.config else None)

    def _mean(self, values: list[float]) -> list[float]:
        *sums, ranks = self.all_reduce([*values, 1.0], "sum")
        return [value / ranks for value in sums]

    # What travels.

    def begin_traced_call(self, call: TracedCall) -> None:
        """Begin a call in a graph."""
        self.abandon_traced_call()
        self.traced_call = call
        if call.layer:
            call.layer.call = call

    def end_traced_call(self) -> torch.Tensor:
        """End it; return O."""
        call = self.traced_call
        result = call.all_to_alls.wait_output()
        call.end()
        self.abandon_traced_call()  # which would hold O
        return result

    def abandon_traced_call(self) -> None:
        """Bring to its end what an error has left under way: peers take part in it."""
        call, self.traced_call = self.traced_call, None
        if call:
            if call.layer:
                call.layer.call = None
            call.all_to_alls.drain()

    def layer_codecs(self, layer: BaseLayer | None, sizes: LayerSizes) -> LayerCodecs | None:
        """How the exchanges of a layer's Ulysses group are encoded in this call; all ranks find the same."""

        def found() -> LayerCodecs | None:
            return self.runtime.layer_codecs(layer.name, id(layer), layer.branch, sizes, id(layer.root))

        if not self._codes(layer):
            return None
        if layer.call is None:  # its first call ever, which is not followed yet
            return found()
        if layer.call.layer_codecs is None:
            layer.call.layer_codecs = found()
        return layer.call.layer_codecs

    def ring_codecs(self, layer: BaseLayer | None, sizes: LayerSizes) -> LayerCodecs | None:
        """The same of a layer's ring."""
        if not self._codes(layer):
            return None
        return self.runtime.ring_codecs(layer.name, id(layer), layer.branch, sizes, id(layer.root))

    def _codes(self, layer: BaseLayer | None) -> bool:
        """Whether a layer is to be encoded in this call."""
        if self.runtime is None or layer is None or layer.root.run is None or layer.is_repeated:
            return False
        if is_captured():
            self.runtime.disable(
                "a CUDA graph is captured, which would repeat the codecs of one step; leave CUDA graphs out"
            )
            return False
        return True

    def send_value(self, value: torch.Tensor, layer: Layer) -> Handle:
        """Start the exchange of a layer's V, or of its first part where the call has several."""
        self.select_kernels()
        head_group = HeadGroup(0, layer.call.schedule.groups)
        value = pad_heads(value, self.mesh.topology.size)
        return start_seq_to_heads(
            [value], self.mesh, Label("v", layer.name), head_group, self.layer_codecs(layer, layer.call.signature.sizes)
        )


def all_reduce(values: list[float], operation: str, timeout: float | None = None) -> list[float]:
    """Numbers reduced by 'sum', 'min' or 'max' over all ranks that share a sequence: in a ring, Ulysses groups must
    decide alike too. All of these ranks must call this.

    It goes by xDiT's group for values of the host, which is gloo's: no device is waited for, and an exchange that is
    under way is not in its way.

    Args:
        values: of this rank.
        operation: how they are reduced.
        timeout: seconds that it may take; torch's default when not given, as xDiT's group has it.

    Raises:
        LostRankError: a rank is gone or does not answer.
    """
    from xfuser.core.distributed import get_sp_group

    group, patience = get_sp_group().cpu_group, timedelta(seconds=timeout) if timeout else default_pg_timeout
    found = torch.tensor(values, dtype=torch.float64)
    with failure_detection.report_failed_ranks(group, "agreement"):
        dist.all_reduce(found, _OPERATIONS[operation], group=group, async_op=True).wait(patience)
    return found.tolist()


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


HEAD_GROUPS_IGNORED = "--cocodiff_head_groups has no effect in compiled graphs; leave it out, or --use_torch_compile"
"""Warning of a setting that graphs leave out."""
_NONE = Session()
"""In force while xDiT has no runtime state."""


def deactivate() -> None:
    """Have the runtime state in force run without an engine's settings: its exchanges are stock's."""
    from xfuser.core.distributed.runtime_state import _RUNTIME

    if _RUNTIME is not None:
        _RUNTIME.cocodiff = None


def active() -> Session:
    """The engine of the runtime state in force."""
    from xfuser.core.distributed.runtime_state import _RUNTIME

    return getattr(_RUNTIME, "cocodiff", None) or _NONE
