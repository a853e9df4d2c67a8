"""Examples for the sampler, row by row, and for a model's own KV pool."""

from __future__ import annotations

import types
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_trunc.core import noise, sampling
from sglang_trunc.core.sampling import SamplingRows
from tests.patches.run_examples import replaced

ROWS, VOCABULARY = 64, 300


def draw(logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Twin of ``multinomial_with_seed``, which is compiled and hashes in Triton; equal bit for bit (core.noise)."""
    return noise.perturbed_argmax(logprobs, seeds, positions).unsqueeze(1)


class Batch:
    """Rows without filters, and rows with them, beside each other or alone."""

    def __init__(self, min_p: bool = False):
        generator = torch.Generator().manual_seed(0)
        self.logits = 2 * torch.randn(ROWS, VOCABULARY, generator=generator)
        self.positions = torch.arange(ROWS) + 7
        self.seeds = torch.arange(ROWS) * 1000 + 1
        self.filtered = torch.arange(ROWS) % 2 == 1
        self.top_ks = torch.where(self.filtered, 40, TOP_K_ALL).int()
        self.top_ps = torch.where(self.filtered, 0.8, 1.0)
        self.min_ps = torch.where(self.filtered, 0.05, 0.0) if min_p else torch.zeros(ROWS)

    def stock(self, rows: torch.Tensor, **options: Any):
        """As ``Sampler._sample_from_probs`` draws: one way for all rows of the batch."""
        probs = torch.softmax(self.logits[rows], -1)
        with replaced(sampler, multinomial_with_seed=draw):
            if not self.filtered[rows].any():
                return sampler.sampling_from_probs_torch(probs, self.seeds[rows], self.positions[rows])
            return sampler.top_k_top_p_min_p_sampling_from_probs_torch(
                probs,
                self.top_ks[rows],
                self.top_ps[rows],
                self.min_ps[rows],
                bool((self.min_ps[rows] > 0).any()),
                self.seeds[rows],
                self.positions[rows],
                **options,
            )

    def ours(self, rows: torch.Tensor) -> torch.Tensor:
        """As ``engine.sampler.SeededSampler`` draws."""
        filtered = self.filtered[rows]
        asked = SamplingRows(
            temperatures=torch.ones(len(rows)),
            top_ks=self.top_ks[rows],
            top_ps=self.top_ps[rows],
            min_ps=self.min_ps[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
            greedy=torch.zeros(len(rows), dtype=torch.bool),
            filtered=filtered,
            all_greedy=False,
            any_filtered=bool(filtered.any()),
            any_open=not bool(filtered.all()),
        )
        return sampling.choose(self.logits[rows], asked).tokens

    def tokens(self, side: str, rows: torch.Tensor) -> list[int]:
        return (self.ours if side == "ours" else self.stock)(rows).tolist()


# --- seeded-sampling-by-row ---


def seeded_rows(side: str) -> dict[str, list[int]]:
    """Tokens of both kinds of rows, alone and beside the other kind."""
    batch = Batch()
    everyone = batch.tokens(side, torch.arange(ROWS))
    return {
        "open alone": batch.tokens(side, (~batch.filtered).nonzero().squeeze(1)),
        "open beside filtered": everyone[0::2],
        "filtered alone": batch.tokens(side, batch.filtered.nonzero().squeeze(1)),
        "filtered beside open": everyone[1::2],
    }


def seeded_min_p(side: str) -> list[int]:
    return Batch(min_p=True).tokens(side, torch.arange(ROWS))


def seeded_min_p_renormalised(side: str) -> list[int]:
    """The same with the law that min-p means, its weights renormalised: for stock what its comment asks for."""
    batch = Batch(min_p=True)
    values, ids = torch.softmax(batch.logits, -1).sort(-1, descending=True)
    before = values.cumsum(-1) - values
    cut = torch.arange(VOCABULARY) >= batch.top_ks.unsqueeze(1)
    cut |= (before > batch.top_ps.unsqueeze(1)) | (values < values[:, :1] * batch.min_ps.unsqueeze(1))
    kept = values.masked_fill(cut, 0.0).double()
    ranks = draw((kept / kept.sum(-1, keepdim=True)).log(), batch.seeds, batch.positions)
    tokens = ids.gather(1, ranks).squeeze(1)
    alone = draw(torch.softmax(batch.logits, -1).log(), batch.seeds, batch.positions).squeeze(1)
    return torch.where(batch.filtered, tokens, alone).tolist()


def captured_weights(side: str) -> list[bool]:
    """Under ``return_sampling_mask``: the token is among those captured, with its own weight; open rows lose none."""
    batch = Batch()
    tokens, weights, ids, chosen = batch.stock(torch.arange(ROWS), return_filtered_probs=True)
    probs = torch.softmax(batch.logits, -1)
    mine = probs.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
    complete = (weights[~batch.filtered] > 0).all()
    in_support = (weights * (ids == tokens.unsqueeze(1))).sum(-1)
    return [bool((chosen == mine).all()), bool((in_support == mine).all()), bool(complete)]


# --- model-kv-pool-class ---


class OwnPool(MHATokenToKVPool):
    """A looped model's."""


def pool_class(side: str, answer: Any = OwnPool, default: type = MHATokenToKVPool) -> str:
    """The class that the configurator would construct."""
    configurator = object.__new__(KVCacheConfigurator)
    configurator.model = types.SimpleNamespace(get_kv_pool_cls=lambda *, kind, base: answer if kind == "mha" else None)
    if side == "ours":
        from sglang_trunc.engine import kv_pool
        from sglang_trunc.models.layer_ids import LoopShape

        config = types.SimpleNamespace(loop_shape=LoopShape(0, 2, 0, 3))
        configurator.model_config = types.SimpleNamespace(hf_config=config)
        with replaced(kv_pool, branch_slots=lambda hf_config: 0):
            chosen = kv_pool.resolve_pool_class(
                KVCacheConfigurator._resolve_kv_pool_class, configurator, kind="mha", default=default
            )
        assert issubclass(chosen, kv_pool.LoopedKVPool)
        return "OwnPool"
    return configurator._resolve_kv_pool_class(kind="mha", default=default).__name__


def pool_class_by_default(side: str) -> list[str]:
    """A model that has no opinion, one without the method, and another kind of pool."""
    without = object.__new__(KVCacheConfigurator)
    without.model = torch.nn.Identity()
    return [pool_class(side, None), without._resolve_kv_pool_class(kind="mha", default=MHATokenToKVPool).__name__]


def pool_class_refused(side: str) -> str:
    """A layout that the model's pool does not have."""

    class PageMajor(MHATokenToKVPool):
        pass

    return pool_class(side, default=PageMajor)


EXAMPLES = {
    "seeded rows": seeded_rows,
    "seeded min-p": seeded_min_p,
    "seeded min-p renormalised": seeded_min_p_renormalised,
    "captured weights": captured_weights,
    "pool class": pool_class,
    "pool class by default": pool_class_by_default,
    "pool class refused": pool_class_refused,
}
