"""State of the plugin for one xDiT engine.

It is an attribute of xDiT's runtime state, and ends with it: sessions of one process share nothing.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from xfuser_cocodiff.engine.attention.reshard import pad_heads
from xfuser_cocodiff.engine.attention.ring_attention import Ring
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.autotune.comm_setup import CommSetup
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Traffic
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.planner import SentSizes
from xfuser_cocodiff.xdit.layers.layer import Layer
from xfuser_cocodiff.xdit.layers.layers import Layers
from xfuser_cocodiff.xdit.layers.root_module import RootModule
from xfuser_cocodiff.xdit.layers.schedule_candidates import ScheduleCandidates
from xfuser_cocodiff.xdit.patching import host, patch
from xfuser_cocodiff.xdit.platforms.platform import compute_device, is_captured
from xfuser_cocodiff.xdit.session import graph_passes, reductions
from xfuser_cocodiff.xdit.session.call_codecs import CallCodecs
from xfuser_cocodiff.xdit.session.runs import Run, Runs
from xfuser_cocodiff.xdit.session.schedule_tuner import ScheduleTuner, State
from xfuser_cocodiff.xdit.session.tuning_results import TuningResults
from xfuser_cocodiff.xdit.session.virtual_group import VirtualGroup
from xfuser_cocodiff.xdit.settings.config import AUTO, CocoDiffConfig, Overlap


@dataclass(eq=False)
class Session:
    """State of the plugin for one xDiT engine; the default leaves all communication to stock xDiT."""

    config: CocoDiffConfig | None = None
    mesh: Mesh | None = None
    """Mesh of the Ulysses group; None where stock's all-to-all runs, and with virtual ranks."""
    comm_setup: CommSetup | None = None
    """Plans, link profile and tuning cache of :attr:`mesh`."""
    runtime: CodecRuntime | None = None
    """State of the codecs; None where all communication is lossless."""
    virtual_group: VirtualGroup | None = None
    """Virtual ranks of this one; None where it communicates with others."""
    lossless_reason: str | None = None
    """Reason why communication is lossless although a lossy mode is set."""
    ring: Ring | None = None
    """Ring over which the plugin passes K and V; None where xDiT's ring runs, or none."""
    ring_setup: CommSetup | None = None
    """Plans, link profile and tuning cache of :attr:`ring`."""
    origin: tuple[Any, CocoDiffConfig | None] = (None, None)
    """xDiT's config and the plugin's that the session was started with."""
    layers: Layers = field(init=False)
    """Attention layers."""
    codecs: CallCodecs = field(init=False)
    """Codecs of the layers' calls."""
    runs: Runs = field(init=False)
    """Runs of pipelines and samplers."""
    traffic: Traffic = field(init=False)
    """Statistics of the communication, also of stock's while it is recorded."""
    schedule_tuner: ScheduleTuner | None = field(init=False, default=None)
    """Autotuner of overlap schedules; None without a mesh."""
    tuning_results: TuningResults | None = field(init=False, default=None)
    """Results of autotuners in the tuning cache; None without a mesh."""

    def __post_init__(self) -> None:
        self.runs = Runs(self.runtime)
        self.codecs = CallCodecs(self.runtime, self.virtual_group is not None and self.virtual_group.is_ring)
        self.layers = Layers(self, self.overlap.v_first is not False)
        self._sizes: set[int] = set()
        """Sizes of the inputs of transformers so far: layers of another size are tuned apart."""
        self.traffic = self.mesh.traffic if self.mesh else Traffic()
        if self.mesh:
            self.comm_setup = self.comm_setup or CommSetup(self.mesh, None)
            setups = [setup for setup in (self.comm_setup, self.ring_setup) if setup]
            self.tuning_results = TuningResults(self.config, self.runtime is not None, setups)
            mean = functools.partial(reductions.mean, timeout=self.config.timeout)
            self.schedule_tuner = ScheduleTuner(
                self._candidates, mean, self.all_agree, compute_device(), self.save_tuning
            )

    @property
    def overlap(self) -> Overlap:
        """Overlap options that are set; the others are tuned."""
        return self.config.overlap if self.config else Overlap()

    @property
    def may_run_stock(self) -> bool:
        """Whether stock's attention may run where nothing else is faster: without options for the plugin's
        all-to-alls."""
        config = self.config
        return not (config is None or config.plan or config.timeout or self.overlap != Overlap())

    @property
    def gather(self) -> AxisPartition | None:
        """Partition whose slow side is the axes along which layers may gather K and V; None where all axes reshard by
        heads, and beside a ring."""
        return self.comm_setup.gather if self.comm_setup else None

    def gathers_kv(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Return whether coded layers gather K and V along the slow axes: where a plan says so, else by the planner's
        rule. The same on all ranks.

        Args:
            query: Q of a rank, shape (B, H, S/P, D).
            key: K, perhaps with fewer heads or another number of tokens.
        """
        (_, heads, tokens, _), (_, kv_heads, kv_tokens, _) = query.shape, key.shape
        if self.runtime is None or heads % kv_heads:
            return False
        layout = self.virtual_group.gather_layout if self.virtual_group else self.gather
        if layout is None:
            return False
        sizes = SentSizes.of(heads, kv_heads, layout.num_slow, layout.num_fast, tokens, kv_tokens)
        return self.config.plan is not None or planner.gathers_kv(layout.num_slow, sizes)

    def head_degree(self, gathers_kv: bool) -> int:
        """Return the number of ranks over which a layer's heads are divided."""
        return self.gather.num_fast if gathers_kv else self.mesh.topology.size

    def sends_v_first(self, value: torch.Tensor) -> bool:
        """Return whether V goes first in a graph."""
        wanted = self.overlap.v_first
        return self.mesh.policy.sends_early_in_graph(value.numel() * value.element_size()) if wanted is None else wanted

    def select_kernels(self) -> None:
        """Select the kernels that the config names, which are global to the process."""
        kernels.use(self.config.kernels if self.config else AUTO)

    def close(self) -> None:
        """Restore all modules, end all runs and the comm stream's thread, and restore Inductor's settings."""
        self._set_stock(False)
        self.layers.clear()
        self.runs.clear()
        if self.mesh:
            self.mesh.comm_stream.close()
        graph_passes.restore()

    def was_just_started(self, engine_config: Any, config: CocoDiffConfig | None) -> bool:
        """Return whether the session was started with these very configs, and no layer or run has used it since."""
        is_same = config is not None and self.origin[0] is engine_config and self.origin[1] is config
        return is_same and not (self.layers.signatures or self.runs.newest or self.traffic.calls)

    def all_agree(self, value: object) -> bool:
        """Return whether all ranks that share a sequence pass the same value; always true with virtual ranks."""
        return self.mesh is None or reductions.all_agree(value, self.config.timeout)

    # Tuning.

    def _candidates(self) -> list[ScheduleCandidates]:
        of_signatures = [signature.candidates for signature in self.layers.signatures if signature.candidates]
        return list(dict.fromkeys([*self.layers.signatures.candidates.values(), *of_signatures]))

    def save_tuning(self) -> None:
        """Save all tuning results for the next process."""
        self.tuning_results.save(self.layers.signatures)

    @property
    def is_tuned(self) -> bool:
        """Whether overlap schedules are chosen, so that later steps run as this one."""
        return self.layers_run_stock or self.schedule_tuner is None or self.schedule_tuner.state is State.CHOSEN

    # Runs and steps.

    @property
    def layers_run_stock(self) -> bool:
        """Whether stock runs in all layers, without any code of the plugin: nothing else is faster."""
        return patch.host_runs_in_layers()

    def counts_calls(self) -> bool:
        """Return whether calls of transformers count: in the active session, and not while tracing."""
        return self is active() and not torch.compiler.is_compiling()

    def overlaps(self) -> bool:
        """Return whether communication may overlap with computation at the moment."""
        return self.mesh is not None and self.mesh.topology.size > 1 and self.counts_calls()

    def before_call(self, root: RootModule, args: tuple, kwargs: dict[str, Any]) -> None:
        """Set the run of a transformer's call, and whether the plugin acts in its layers, the same on all ranks."""
        self.runs.before_call(root)
        tensors = filter(torch.is_tensor, (*args, *kwargs.values()))
        size = sum(each.numel() for each in tensors).bit_length()
        may_run_stock = self.runs.only and self.runtime is None and size in self._sizes
        candidates = self._candidates() if may_run_stock else []
        self._sizes.add(size)
        self._set_stock(bool(candidates) and all(each.runs_stock for each in candidates))

    def _set_stock(self, runs_stock: bool) -> None:
        """Let stock run in all layers, or the plugin again.

        While stock runs, a transformer that is called for the first time is not noticed. It runs stock, too, which is
        the choice for layers of the same signatures, as of Wan 2.2's second expert.
        """
        if runs_stock != self.layers_run_stock:
            patch.switch_layers(not runs_stock)
            if runs_stock:
                self.layers.unwrap_layers()

    def begin_run(self, total: int | None = None, owner: Any = None) -> Run:
        """Begin a run; see :meth:`Runs.begin`.

        Args:
            total: number of steps, if it is known.
            owner: object that ends the steps.
        """
        self.layers.end_step()
        # An interrupt may have ended the last run after different calls on each rank.
        if self.runtime is None and not self.all_agree((sorted(self._sizes), self.layers_run_stock)):
            self._sizes.clear()
            self._set_stock(False)
        if self.runs.begin(run := Run(total or None, owner)):
            self._begin_tuning()
        return run

    def end_step(self, run: Run | None = None) -> None:
        """End a step of an open run, the newest when not given, and the run if that was its last step."""
        run = run or self.runs.newest
        if run not in self.runs.open:
            return
        self.layers.end_step()
        if self.runs.end_step(run):
            self.codecs.end_step()
            if self.schedule_tuner and self.counts_calls() and not is_captured():
                self.schedule_tuner.end_step()
        if run.is_over:
            self.end_run(run, is_complete=True)

    def end_run(self, run: Run | None = None, is_complete: bool = False) -> None:
        """End an open run, the newest when not given; see :meth:`Runs.end`."""
        self.layers.end_step()
        if self.runs.end(run or self.runs.newest, is_complete):
            self._begin_tuning()

    def _begin_tuning(self) -> None:
        if self.schedule_tuner:
            self.schedule_tuner.begin_run()

    def start_value(self, value: torch.Tensor, layer: Layer) -> Handle:
        """Start the all-to-all of a layer's V, or of its first head group where the call has several."""
        self.select_kernels()
        schedule, signature = layer.call.schedule, layer.call.signature
        codecs = self.codecs.of_layer(layer, signature.sizes, signature.gathers_kv)
        gathers_kv = codecs.gathers_kv if codecs else schedule.gathers_kv
        value, gather = pad_heads(value, self.head_degree(gathers_kv)), self.gather if gathers_kv else None
        groups = self.codecs.num_head_groups(schedule, codecs)
        return UlyssesAttention(self.mesh, groups, layer.name, None, codecs, gather).start_value(value)


_STOCK = Session()
"""Session while xDiT has no runtime state: all communication is stock's."""


def deactivate() -> None:
    """Remove the session from xDiT's runtime state, whose communication is stock's from then on."""
    state = host.runtime_state()
    if state is not None:
        state.cocodiff = None


def active() -> Session:
    """Return the session of xDiT's runtime state; one that leaves all to stock where there is none."""
    return getattr(host.runtime_state(), "cocodiff", None) or _STOCK
