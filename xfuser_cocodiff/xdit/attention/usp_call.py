"""One call of xDiT's USP: what it may be divided into, and the attention between its all-to-alls.

Sizes in shapes: P ranks of a Ulysses group, B batch, H heads, h heads of a head group, S sequence, D head dim.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from xfuser_cocodiff.engine.attention.reshard import HEADS, pad_heads
from xfuser_cocodiff.engine.attention.ring_attention import Ring, ring_attention
from xfuser_cocodiff.engine.attention.ulysses import Attend
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.xdit.attention import all_to_all
from xfuser_cocodiff.xdit.attention.eager_attention import AttentionCall, AttentionInputs
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.session.session import Session

_SPARSE = "SPAR", "VSA", "BLOCK"
"""Parts of the names of xDiT's backends that select keys by blocks of the whole sequence's queries."""
_UNQUANTIZED = (
    *("SDPA", "SDPA_MATH", "SDPA_EFFICIENT", "SDPA_FLASH", "FLASH", "CUDNN", "FLASH_3", "FLASH_4"),
    *("AITER", "AITER_BF16", "AITER_FLYDSL", "NPU"),
)
"""xDiT's backends that compute with the values as they are, and attend to all keys."""


@dataclass(frozen=True)
class USPCall(AttentionCall):
    """A call of USP. All but the values of tensors is the same on every rank."""

    original: Callable[..., torch.Tensor]
    """xDiT's USP."""
    session: Session
    """The active session."""
    # The parameters of USP, in its order.
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
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

    def compute_by_xdit(self) -> torch.Tensor:
        """Compute it by xDiT's USP."""
        return self.original(
            **{name: value for name, value in vars(self).items() if name not in ("original", "session")}
        )

    # What xDiT and this module can do with it.

    def is_supported(self) -> bool:
        """Return whether this module can compute the call; xDiT computes others, over the plugin's all-to-all."""
        tensors = [self.query, self.key, self.value, *([self.joint_query] if self.joint_strategy else ())]
        degree = self.session.mesh.topology.size
        can_pad = self.query.shape[HEADS] % self.key.shape[HEADS] == 0  # heads of Q together with those of K and V
        return (
            all(tensor.ndim == 4 and tensor.dtype == self.query.dtype for tensor in tensors)
            and (can_pad or all(tensor.shape[HEADS] % degree == 0 for tensor in tensors))
            and self.joint_strategy in (None, "front", "rear")
            and not host.usp()._ulysses_extra_inputs(self.attention_kwargs, self.query)
            and not self._communicates_in_fp8()
            and not self._balances_heads()
        )

    def _communicates_in_fp8(self) -> bool:
        """Return whether xDiT communicates in FP8 in this call.

        The codecs of a lossy mode replace that once xDiT has measured the scales in a lossless run of its own.
        """
        state = host.runtime_state().fp8_comms
        module = self.head_balance_layer if self.attn_layer is None else self.attn_layer
        if state is None or module is None or self.joint_strategy:
            return False
        if self.session.runtime is None:
            return True
        model = state.get_model_state(getattr(module, "fp8_comms_owner", None))
        return model is not None and not model.synced

    def _balances_heads(self) -> bool:
        """Return whether xDiT moves heads between ranks at each step to balance sparse attention."""
        state, runtime = host.runtime_state(), self.session.runtime
        backend = state.attention_backend if self.backend is None else self.backend
        balances = (
            state.runtime_config.use_spargeattn_head_balance
            and backend in host.usp()._HEAD_BALANCE_BACKENDS
            and getattr(self.head_balance_layer, "head_perm", None) is not None
            and self.joint_strategy is None
        )
        if balances and runtime:
            runtime.inactive_reason = (
                "--use_spargeattn_head_balance moves heads between ranks at each step; leave it out to compress"
            )
        return balances

    @property
    def stock(self) -> Callable[[], torch.Tensor] | None:
        """Computes the call as stock xDiT does; None where stock does not support it."""
        return self._stock if self.session.may_run_stock and not self._needs_padding(self._degree) else None

    def _stock(self) -> torch.Tensor:
        with all_to_all.stock():
            return self.compute_by_xdit()

    @property
    def can_split_heads(self) -> bool:
        """Whether attention may be computed for some of the heads at a time, if it is bit-identical."""
        # xDiT keeps K and V of all heads at once. In a lossless mode, a backend that quantizes would scale parts apart.
        is_exact = host.backend_name(self.backend) in _UNQUANTIZED
        return not self._keeps_kv() and (self.session.runtime is not None or is_exact)

    @property
    def can_gather(self) -> bool:
        """Whether attention may have fewer queries than keys: neither a mask nor the selection of keys in sparse
        attention depends on the index of a query."""
        mask = (self.attention_kwargs or {}).get("attn_mask")
        is_general = mask is not None and not (isinstance(mask, torch.Tensor) and set(mask.shape[-3:-1]) <= {1})
        is_sparse = any(word in host.backend_name(self.backend) for word in _SPARSE)
        return self.can_split_heads and not (self.is_causal or is_general or is_sparse)

    @property
    def gathers_coded(self) -> bool:
        """Whether K and V are gathered if this call is encoded."""
        return self.can_gather and self.session.gathers_kv(self.query, self.key)

    def _keeps_kv(self) -> bool:
        """Return whether xDiT keeps K and V of the layer for PipeFusion. With one patch it would copy and never read
        them."""
        return host.usp()._has_kv_cache(self.attn_layer) and host.has_patches()

    # Its tensors and its attention.

    @property
    def _degree(self) -> int:
        return self.session.mesh.topology.size

    def _needs_padding(self, degree: int) -> bool:
        return any(tensor.shape[HEADS] % degree for tensor in (self.query, self.key))

    def padded(self, degree: int) -> "USPCall":
        """Return the call with heads zero-padded to a multiple of the ranks that share them. K and V may have fewer
        heads, each for several of Q."""
        if not self._needs_padding(degree):
            return self
        of_query = degree * (self.query.shape[HEADS] // self.key.shape[HEADS])
        multiples = {"query": of_query, "key": degree, "value": degree}
        names = [*multiples, *(f"joint_{name}" for name in multiples if getattr(self, f"joint_{name}") is not None)]
        padded = {name: pad_heads(getattr(self, name), multiples[name.removeprefix("joint_")]) for name in names}
        return replace(self, **padded)

    def inputs(self, gather: AxisPartition | None, with_ring: bool = True) -> AttentionInputs:
        """Return what attention needs, with heads zero-padded where the ranks that share them do not divide them.

        Args:
            gather: axes along which K and V are gathered; None to divide the heads over all ranks.
            with_ring: whether the plugin passes K and V along a ring; xDiT does when not.
        """
        call = self.padded(gather.num_fast if gather else self._degree)
        query = call.query
        if gather is None:  # else heads need not be divisible by the Ulysses degree
            host.usp()._validate_gqa_params(query, call.key, call.value, call.kv_head_repeat, call.joint_strategy)
        if call.joint_strategy:
            query = host.usp()._concat_joint_tensor(query, call.joint_query, call.joint_strategy, dim=2)
        ring = self.session.ring if with_ring and not self.is_causal else None
        return AttentionInputs((query, call.key, call.value), functools.partial(call._attention, gather, ring))

    def _attention(
        self, gather: AxisPartition | None, ring: Ring | None, ring_codecs: LayerCodecs | None, layer: str
    ) -> Attend:
        """Return the attention that USP computes between its all-to-alls.

        Args:
            gather: axes along which K and V are gathered; None where heads are divided over all ranks.
            ring: ranks of a ring, over which K and V move along the topology; None leaves a ring to xDiT.
            ring_codecs: codecs of K and V in the ring; None where it is lossless.
            layer: name of the layer.
        """
        function = host.usp()._get_attention_function(backend=self.backend)
        ring_degree, joint = host.ring_degree(), self._joint(gather)

        def repeat_heads(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return host.usp()._repeat_kv_heads(key, value, self.kv_head_repeat)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup) -> torch.Tensor:
            if self._keeps_kv():
                key, value = host.usp()._update_and_get_kv_cache(key, value, self.attn_layer)
            key, value = host.usp()._trim_trailing_kv_padding(key, value, self.attention_kwargs)
            options = functools.partial(self._function_options, joint, head_group, ring_degree)

            def attend_block(
                query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: int, _: int
            ) -> tuple[torch.Tensor, torch.Tensor]:
                output, lse, *_ = function(query, *repeat_heads(key, value), **options(step))
                return output, lse

            if ring:
                return ring_attention(query, key, value, attend_block, ring, layer, head_group, ring_codecs)
            if ring_degree > 1:
                return host.usp().ring_attn(function, query, *repeat_heads(key, value), **options(0))
            return function(query, *repeat_heads(key, value), **options(0))[0]

        return attend

    def _joint(self, gather: AxisPartition | None) -> tuple[Any, Any]:
        """Return joint K and V of the heads that this rank attends to; None without any."""
        if not self.joint_strategy:
            return None, None
        if gather is None:
            return host.usp()._preprocess_joint_tensors(self.joint_key, self.joint_value)
        own_heads = HeadGroup(gather.fast_index, gather.num_fast)
        return own_heads.of(self.joint_key, HEADS), own_heads.of(self.joint_value, HEADS)

    def _function_options(
        self, joint: tuple[Any, Any], head_group: HeadGroup, ring_degree: int, step: int
    ) -> dict[str, Any]:
        """Return the keyword arguments of xDiT's attention function at one step of a ring."""
        key, value = joint
        return {
            "dropout_p": self.dropout_p,
            "is_causal": self.is_causal,
            "attention_kwargs": self.attention_kwargs,
            "joint_attn_kwargs": self.joint_strategy
            and {
                "joint_key": head_group.of(key, HEADS),
                "joint_value": head_group.of(value, HEADS),
                "joint_strategy": self.joint_strategy,
                "step": step,
                "total_steps": ring_degree,
            },
        }
