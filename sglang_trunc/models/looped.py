"""What every looped model is to SGLang and to the engine: prelude, one recurrence, readout.

A looped model is served in two ways from the same three functions:

* plainly, through ``forward``: SGLang's prefill and decode, all recurrences of all rows one after the
  other, attention through one ``RadixAttention`` per (step, layer);
* by the engine, which calls ``embed``, ``recur`` and ``readout`` itself, with an ``attend`` of its own that
  addresses rows at any step (``engine.lanes``).

The step is an argument of ``attend``'s maker, never a state of the model. KV layers are numbered by
``layer_ids.LoopShape`` alone; ``start_layer``/``end_layer`` tell SGLang how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sglang_trunc.models.layer_ids import LoopShape, Part
from sglang_trunc.models.ops import Ops, RopeTable, TorchOps


class LoopState(NamedTuple):
    """Rows on their way through the loop."""

    hidden: Tensor  # model dtype [n, d]: the state that the recurrence maps
    injected: Tensor | None  # model dtype [n, d]: prelude output that Raven adds at every step; None for Ouro


class AttentionSite:
    """One physical layer's attention: where it is, and SGLang's attention modules for each of its KV layers."""

    def __init__(self, part: Part, index: int, layer_ids: list[int], radix: nn.ModuleList):
        self.part = part  # "prelude", "core" or "coda"
        self.index = index  # within its part
        self.layer_ids = layer_ids  # one per step for the core, else one
        self.radix = radix


Attend = Callable[[AttentionSite, Tensor, Tensor, Tensor], Tensor]
"""``attend(site, q [n, Hq*D], k [n, Hkv*D], v [n, Hkv*D]) -> [n, Hq*D]``: stores K/V, then attends."""


@runtime_checkable
class Riders(Protocol):
    """What runs further rows along with a prefill (``engine.warm_start``); a batch's ``spec_info`` may be one."""

    def recur(self, model: LoopedCausalLM, step: int, state: LoopState, positions: Tensor, attend: Attend) -> LoopState:
        """One recurrence in the place of ``model.recur(state, positions, attend)``."""


class Norm(nn.Module):
    """The weight of one RMS norm; the arithmetic is in ``Ops``."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps


class Attention(nn.Module):
    """Projections and rotation around one ``AttentionSite``.

    ``names``: attribute names of the fused and the output projection, as the checkpoint has them.
    """

    def __init__(self, config, shape: LoopShape, part: Part, index: int, rope: RopeTable, names: tuple[str, str]):
        super().__init__()
        tp = get_parallel().tp_size
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if heads % tp or (kv_heads % tp and tp % kv_heads):
            raise ValueError(
                f"--tp-size {tp} does not divide num_attention_heads {heads} and num_key_value_heads {kv_heads}."
            )
        self.q_size = heads // tp * head_dim
        self.kv_size = max(1, kv_heads // tp) * head_dim
        self.rope = rope
        self.names = names
        qkv = QKVParallelLinear(config.hidden_size, head_dim, heads, kv_heads, bias=False)
        out = RowParallelLinear(heads * head_dim, config.hidden_size, bias=False)
        self.add_module(names[0], qkv)
        self.add_module(names[1], out)
        ids = shape.layer_ids(part, index)
        self.attn = nn.ModuleList(
            RadixAttention(
                self.q_size // head_dim,
                head_dim,
                head_dim**-0.5,
                num_kv_heads=self.kv_size // head_dim,
                layer_id=layer_id,
            )
            for layer_id in ids
        )
        self.site = AttentionSite(part, index, ids, self.attn)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, ops: Ops) -> Tensor:
        qkv, _ = getattr(self, self.names[0])(x)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.adjust(q, k, ops)
        q, k = ops.rope(q, k, positions, self.rope)
        out, _ = getattr(self, self.names[1])(attend(self.site, q, k, v))
        return out

    def adjust(self, q: Tensor, k: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """Hook before the rotation: biases or norms of q and k."""
        return q, k


class GatedMLP(nn.Module):
    """``down(silu(gate) * up)``; ``names`` as in ``Attention``."""

    def __init__(self, config, names: tuple[str, str]):
        super().__init__()
        self.names = names
        inner = config.intermediate_size
        self.add_module(names[0], MergedColumnParallelLinear(config.hidden_size, [inner] * 2, bias=False))
        self.add_module(names[1], RowParallelLinear(inner, config.hidden_size, bias=False))

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        gate_up, _ = getattr(self, self.names[0])(x)
        out, _ = getattr(self, self.names[1])(ops.silu_mul(gate_up))
        return out


class LoopedCausalLM(nn.Module):
    """Base of the served looped models; a subclass gives ``embed``, ``recur``, ``readout`` and ``lm_head``."""

    shape: LoopShape
    lm_head: Any  # SGLang's ParallelLMHead, or the embedding where the two are tied
    injects = False  # True: ``LoopState.injected`` is a tensor

    def __init__(self, config, shape: LoopShape):
        super().__init__()
        if get_parallel().pp_size != 1:
            raise ValueError(f"--pp-size {get_parallel().pp_size} is not supported for looped models; use 1.")
        config.check()  # overrides are assigned one by one; the rules between fields are checked here
        self.config = config
        self.shape = shape
        self.start_layer = 0
        self.end_layer = shape.num_kv_layers
        self.ops: Ops = TorchOps()
        self.logits_processor = LogitsProcessor(config)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding module; the same object as ``lm_head`` where the two are tied."""
        raise NotImplementedError

    def embed(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> LoopState:
        """Embedding and prelude of ``n`` rows: the state before step 0."""
        raise NotImplementedError

    def recur(self, state: LoopState, positions: Tensor, attend: Attend) -> LoopState:
        """One recurrence: every core layer once."""
        raise NotImplementedError

    def readout(self, state: LoopState, positions: Tensor, attend: Attend) -> Tensor:
        """Coda and final norm: the rows that the LM head takes, ``[n, d]``."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Full-vocabulary logits of readout rows: float32 ``[n, vocab_size]``, one tensor-parallel rank only.

        The same products as SGLang's ``LogitsProcessor._compute_lm_head`` on the plain path.
        """
        method = self.lm_head.quant_method
        if getattr(method, "packs_lm_head", False):
            raw = method.apply(self.lm_head, hidden)
        else:
            raw = torch.matmul(hidden, self.lm_head.weight.T)
        return raw[:, : self.config.vocab_size].float()

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, **_):
        """SGLang's entry: plain prefill or decode of all rows through every recurrence."""
        if input_embeds is not None:
            raise ValueError("input_embeds is not supported for looped models; send text or input_ids.")

        def attend_at(step: int) -> Attend:
            def attend(site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return site.radix[step if site.part == "core" else 0](q, k, v, forward_batch)

            return attend

        riders = forward_batch.spec_info if isinstance(forward_batch.spec_info, Riders) else None
        state = self.embed(input_ids, positions, attend_at(0))
        for step in range(self.shape.recurrences):
            if riders is None:
                state = self.recur(state, positions, attend_at(step))
            else:
                state = riders.recur(self, step, state, positions, attend_at(step))
        hidden = self.readout(state, positions, attend_at(0))
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)
