"""Codecs of the calls of a session's layers: which calls are encoded, and the self-check of their references."""

from collections.abc import Sequence

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.engine.compression.reference_check import ReferenceCheck
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.xdit.layers.root_module import BaseLayer
from xfuser_cocodiff.xdit.platforms.platform import is_captured


class CallCodecs:
    """Codecs of the calls of layers, the same on all ranks.

    Args:
        runtime: state of the codecs; None where all communication is lossless.
        is_ring: whether virtual ranks form a ring, in which only K and V are sent.
    """

    def __init__(self, runtime: CodecRuntime | None, is_ring: bool = False) -> None:
        self._runtime, self._is_ring = runtime, is_ring
        self.reference_check: ReferenceCheck | None = None
        """Self-check that is due after the first encoded step; None once it is done, and where there is none."""
        self._ranks: Sequence[int] = ()
        self._ring_ranks: Sequence[int] = ()

    def check_later(self, check: ReferenceCheck, ranks: Sequence[int], ring_ranks: Sequence[int]) -> None:
        """Have references checked after the first step that is encoded.

        Args:
            check: the self-check.
            ranks: global ranks of the Ulysses group.
            ring_ranks: global ranks of the ring.
        """
        self.reference_check, self._ranks, self._ring_ranks = check, ranks, ring_ranks

    def end_step(self) -> None:
        """Check references if that is due. All ranks must call this."""
        if self.reference_check and self.reference_check.is_due:
            check, self.reference_check = self.reference_check, None
            check.check()

    def of_layer(self, layer: BaseLayer | None, sizes: LayerSizes, gathers_kv: bool = False) -> LayerCodecs | None:
        """Return the codecs of a layer's Ulysses group in this call; None where it is lossless.

        Args:
            layer: None where its module is unknown.
            sizes: of the layer's tensors on this rank.
            gathers_kv: whether the layer gathers K and V.
        """
        if not self._is_encoded(layer):
            return None
        call = layer.call
        if call is not None and call.layer_codecs is not None:
            return call.layer_codecs
        if self._is_ring:
            return self.of_ring(layer, sizes)
        codecs = self._runtime.layer_codecs(self._coded_call(layer, sizes, gathers_kv))
        if self.reference_check:
            self.reference_check.note(layer.name, codecs, self._ranks)
        if call is not None and codecs is not None:  # virtual ranks make no call
            call.use_codecs(codecs, self.num_head_groups(call.schedule, codecs))
        return codecs

    def by_heads(self, layer: BaseLayer, sizes: LayerSizes) -> LayerCodecs | None:
        """Return the codecs of a layer that has gathered K and V and cannot any more; see :meth:`of_layer`."""
        self._runtime.store.drop(id(layer), layer.branch)
        layer.call.layer_codecs = None
        return self.of_layer(layer, sizes)

    def of_ring(self, layer: BaseLayer | None, sizes: LayerSizes) -> LayerCodecs | None:
        """Return the codecs of a layer's ring in this call; see :meth:`of_layer`."""
        if not self._is_encoded(layer):
            return None
        codecs = self._runtime.ring_codecs(self._coded_call(layer, sizes))
        if self.reference_check:
            self.reference_check.note(layer.name, codecs, self._ring_ranks)
        return codecs

    def num_head_groups(self, schedule: OverlapSchedule, layer_codecs: LayerCodecs | None) -> int:
        """Return the number of head groups of a call by a schedule.

        In a lossy mode, only layers that gather K and V have several.
        """
        if self._runtime is not None and not (layer_codecs and layer_codecs.gathers_kv):
            return 1
        return schedule.groups

    @staticmethod
    def _coded_call(layer: BaseLayer, sizes: LayerSizes, gathers_kv: bool = False) -> CodedCall:
        root = layer.root
        return CodedCall(layer.name, id(layer), layer.branch, sizes, id(root), gathers_kv)

    def _is_encoded(self, layer: BaseLayer | None) -> bool:
        """Return whether a layer is encoded in this call."""
        if self._runtime is None or layer is None or layer.root.run is None or layer.is_repeated:
            return False
        if is_captured():
            self._runtime.inactive_reason = (
                "a CUDA graph is captured, which would repeat the codecs of one step; leave CUDA graphs out"
            )
            return False
        return True
