"""What travels from one decode round to the next through SGLang's batches.

The V2 schema relays one thing per request: the bonus token, which has no KV yet. Under overlap scheduling the
tokens travel through SGLang's ``FutureMap`` and only ``future_indices`` follows the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor


@dataclass
class TruncState(SpecInput):
    """Newest token of every request in the batch."""

    bonus_tokens: Tensor  # int64 [bs]
    new_seq_lens: Tensor  # int64 [bs]: committed KV length, the bonus token excluded
    future_indices: Tensor | None = None

    # Read by SGLang's relay and attention backends; this algorithm has none of it.
    topk_p: ClassVar[Tensor | None] = None
    topk_index: ClassVar[Tensor | None] = None
    hidden_states: ClassVar[Tensor | None] = None
    dsa_topk_indices: ClassVar[Tensor | None] = None
    kv_indptr: ClassVar[Tensor | None] = None
    kv_indices: ClassVar[Tensor | None] = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.UNO_STATE)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep the requests at ``new_indices``."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: TruncState) -> None:
        """Append the requests of another batch."""
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat((self.future_indices, other.future_indices))
            return
        self.bonus_tokens = torch.cat((self.bonus_tokens, other.bonus_tokens))
        self.new_seq_lens = torch.cat((self.new_seq_lens, other.new_seq_lens))
