"""From logits to tokens, row by row: greedy, or drawn with the seeded noise of ``core.noise``.

Every readout of a round comes through ``choose``, drafts and verification alike: one rule, so a draft is right exactly
where full depth chooses the same token. Penalties, masks and biases have been applied to the logits before.

Source: SGLang 0.5.23, ``srt/layers/sampler.py``: ``Sampler.forward`` under deterministic inference, its functions
``sampling_from_probs_torch`` and ``top_k_top_p_min_p_sampling_from_probs_torch``, with a seed. Two differences, both on
purpose:

* SGLang filters a whole batch as soon as one request asks for it, and noise by rank is not noise by token id. Here a
  row's kind is its own, so a request's text does not depend on its neighbours.
* SGLang refuses min-p with a seed: its comment asks for renormalised probabilities first. But a constant added to a
  row's logprobs does not move the argmax of logprob + noise, so nothing needs renormalising and min-p is served.

Equal probabilities are ordered as ``torch.sort(descending=True)`` orders them on the device, because SGLang's are. On
CPUs that sort is not stable and its order depends on the whole row: where the order matters, only the sort will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_trunc.core.noise import perturbed_argmax

# Leading ranks looked at before a CPU sorts the whole row: torch.topk is quick up to 1/64 of a vocabulary.
PREFIXES = (256, 4096)


class Choices(NamedTuple):
    """What every row chose."""

    tokens: Tensor  # int64 [n]
    probabilities: Tensor  # float32 [n]: softmax at the row's temperature, unfiltered, of that token; 0 for NaN


class SamplingRows(NamedTuple):
    """How every row chooses. The three host-side facts save a device's answer: any may be wider than the truth.

    A row neither greedy nor filtered is open: temperature only. A row both greedy and filtered is greedy.
    """

    temperatures: Tensor  # float32 [n], positive; 1 for a request at temperature 0, which is greedy
    top_ks: Tensor  # int32 [n], at least 1; the vocabulary's size or more: no limit
    top_ps: Tensor  # float32 [n] in (0, 1]
    min_ps: Tensor  # float32 [n] in [0, 1]
    seeds: Tensor  # int64 [n]
    positions: Tensor  # int64 [n]: of the row's own token; with the seed it keys the noise
    greedy: Tensor  # bool [n]
    filtered: Tensor  # bool [n]: whether top-k, top-p or min-p is in effect
    all_greedy: bool  # True only if every row is greedy
    any_filtered: bool  # False only if no row is filtered, greedy ones aside
    any_open: bool  # False only if no row is open

    def take(self, index: Tensor) -> SamplingRows:
        """Rows ``index`` int64 [k], in that order; repeats allowed. The host-side facts stay true of any selection."""
        return self._replace(
            temperatures=self.temperatures[index],
            top_ks=self.top_ks[index],
            top_ps=self.top_ps[index],
            min_ps=self.min_ps[index],
            seeds=self.seeds[index],
            positions=self.positions[index],
            greedy=self.greedy[index],
            filtered=self.filtered[index],
        )


def choose(logits: Tensor, rows: SamplingRows) -> Choices:
    """One token a row.

    ``logits`` float32 [n, vocabulary], not changed. Greedy: the highest logit, the lowest id on ties. Open: the argmax
    of log softmax(logits / temperature) + noise by token id. Filtered: the same over the ranks that top-k, top-p and
    min-p keep, noise by rank. A row whose probabilities are NaN still gets a token, with probability 0. On accelerators
    nothing waits for the host.
    """
    probabilities = _softmax(logits, rows)
    tokens = _by_kind(logits, probabilities, rows, _Kinds(_best, _draw_open, _draw_filtered))
    chosen = probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Choices(tokens, chosen.nan_to_num(nan=0.0))


def laws(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The distribution each row draws from: float64 [n, vocabulary], by token id, each row's sum 1.

    ``logits`` float32 [n, vocabulary]. Greedy: all mass on the argmax. Filtered: the kept mass, renormalised. Where
    probabilities are NaN: all mass on the token that ``choose`` gives. On accelerators nothing waits for the host.
    """
    return _by_kind(logits, _softmax(logits, rows), rows, _Kinds(_point_masses, _law_open, _law_filtered))


# From (logits [n, V], probabilities [n, V], rows) to something a row: [n] or [n, V].
_Rule = Callable[[Tensor, Tensor, SamplingRows], Tensor]
# From (probabilities [n, V], rows, w) to the same as the w leading ranks have it; bool [n], no later rank counts;
# bool [n], the answer depends on the order of equal values.
_Attempt = Callable[[Tensor, SamplingRows, int], tuple[Tensor, Tensor, Tensor]]


class _Kinds(NamedTuple):
    greedy: _Rule
    open: _Rule
    filtered: _Rule


def _softmax(logits: Tensor, rows: SamplingRows) -> Tensor:
    return torch.softmax(logits / rows.temperatures.unsqueeze(1), dim=-1)


def _by_kind(logits: Tensor, probabilities: Tensor, rows: SamplingRows, kinds: _Kinds) -> Tensor:
    """Every row's answer by its own kind's rule."""
    if rows.all_greedy:
        return kinds.greedy(logits, probabilities, rows)
    rules = [(rows.greedy, kinds.greedy)]
    if rows.any_open:
        rules.append((~(rows.greedy | rows.filtered), kinds.open))
    if rows.any_filtered:
        rules.append((~rows.greedy & rows.filtered, kinds.filtered))
    apply = _each_alone if logits.device.type == "cpu" else _everywhere
    return apply(logits, probabilities, rows, rules)


def _each_alone(logits: Tensor, probabilities: Tensor, rows: SamplingRows, rules: list[tuple[Tensor, _Rule]]) -> Tensor:
    """The rows of a kind are picked out for its rule."""
    parts = []
    for of_kind, rule in rules:
        index = of_kind.nonzero().squeeze(1)
        if len(index) == len(logits):
            return rule(logits, probabilities, rows)
        if len(index):
            parts.append((index, rule(logits[index], probabilities[index], rows.take(index))))
    answers = torch.cat([answer for _, answer in parts])
    return torch.empty_like(answers).index_copy_(0, torch.cat([index for index, _ in parts]), answers)


def _everywhere(logits: Tensor, probabilities: Tensor, rows: SamplingRows, rules: list[tuple[Tensor, _Rule]]) -> Tensor:
    """Every rule for all rows: asking which are of its kind would wait for the device."""
    answer = rules[0][1](logits, probabilities, rows)
    for of_kind, rule in rules[1:]:
        other = rule(logits, probabilities, rows)
        answer = torch.where(of_kind.view(-1, *([1] * (other.dim() - 1))), other, answer)
    return answer


def _best(logits: Tensor, probabilities: Tensor, rows: SamplingRows) -> Tensor:
    return logits.argmax(-1)


def _point_masses(logits: Tensor, probabilities: Tensor, rows: SamplingRows) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.float64).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)


def _draw_open(logits: Tensor, probabilities: Tensor, rows: SamplingRows) -> Tensor:
    return perturbed_argmax(probabilities.log(), rows.seeds, rows.positions)


def _law_open(logits: Tensor, probabilities: Tensor, rows: SamplingRows) -> Tensor:
    return _normalised(probabilities)


def _draw_filtered(logits: Tensor, probabilities: Tensor, rows: SamplingRows) -> Tensor:
    return _from_ranks(probabilities, rows, _draw_attempt, _widths(probabilities))


def _law_filtered(logits: Tensor, probabilities: Tensor, rows: SamplingRows) -> Tensor:
    return _from_ranks(probabilities, rows, _law_attempt, _widths(probabilities))


def _widths(probabilities: Tensor) -> list[int]:
    """Numbers of leading ranks to try, the last one the vocabulary's size."""
    vocabulary = probabilities.shape[1]
    short = PREFIXES if probabilities.device.type == "cpu" else ()
    return [*(width for width in short if width < vocabulary), vocabulary]


def _from_ranks(probabilities: Tensor, rows: SamplingRows, attempt: _Attempt, widths: list[int]) -> Tensor:
    """Answers of the full formula, for most rows without a sort."""
    answers, complete, split = attempt(probabilities, rows, widths[0])
    if len(widths) > 1:
        # More ranks where later ones may count, the sort itself where it decides between equal values.
        for again, wider in ((~complete, widths[1:]), (complete & split, widths[-1:])):
            left = again.nonzero().squeeze(1)
            if len(left):
                answers[left] = _from_ranks(probabilities[left], rows.take(left), attempt, wider)
    return answers


def _draw_attempt(probabilities: Tensor, rows: SamplingRows, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int64 [n]. Which rank wins follows from values alone; topk gives its id if no other id has that value."""
    ranks = _leading(probabilities, rows, width)
    winner = perturbed_argmax(ranks.kept.to(torch.float64).log_(), rows.seeds, rows.positions).unsqueeze(1)
    tokens = ranks.ids.gather(1, winner).squeeze(1)
    won = ranks.values.gather(1, winner)
    split = (ranks.values == won).sum(-1) > 1
    split |= winner.squeeze(1) == width - 1  # the next value is unknown
    return tokens, ranks.complete, split


def _law_attempt(probabilities: Tensor, rows: SamplingRows, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Laws float64 [n, V]. Which id is which matters only where of equal values some are kept and some are masked."""
    ranks = _leading(probabilities, rows, width)
    law = torch.zeros_like(probabilities, dtype=torch.float64).scatter_(1, ranks.ids, _normalised(ranks.kept))
    kept = ranks.kept > 0
    split = ((ranks.values[:, :-1] == ranks.values[:, 1:]) & (kept[:, :-1] != kept[:, 1:])).any(-1)
    split |= kept[:, -1]  # the next value is unknown
    return law, ranks.complete, split


class _Ranks(NamedTuple):
    values: Tensor  # float32 [n, w]: the highest probabilities, in order
    ids: Tensor  # int64 [n, w]; the order of equal values is SGLang's only where w is the whole vocabulary
    kept: Tensor  # float32 [n, w]: values, 0 where masked
    complete: Tensor  # bool [n]: all later ranks are masked for sure


def _leading(probabilities: Tensor, rows: SamplingRows, width: int) -> _Ranks:
    """SGLang's three masks over the ``width`` leading ranks; sums run from rank 0, so no mask depends on ``width``."""
    if width < probabilities.shape[1]:
        values, ids = probabilities.topk(width, dim=-1)
    else:
        values, ids = probabilities.sort(dim=-1, descending=True)
    before = values.cumsum(-1) - values
    least = values[:, :1] * rows.min_ps.unsqueeze(1)
    masked = torch.arange(width, device=values.device) >= rows.top_ks.unsqueeze(1)
    masked |= before > rows.top_ps.unsqueeze(1)
    masked |= values < least
    complete = rows.top_ks <= width
    # A CPU sums in order, and values fall: `before` never falls, rounded or not, so later ranks are past top-p as well.
    complete |= before[:, -1] > rows.top_ps
    complete |= values[:, -1] < least[:, 0]
    complete &= values[:, 0] >= 0  # NaN: only the sort says whose id comes first
    return _Ranks(values, ids, values.masked_fill(masked, 0.0), complete)


def _normalised(weights: Tensor) -> Tensor:
    """float64 [n, w] with row sums 1; NaN puts everything on column 0, where an argmax over NaN lands."""
    shares = weights.to(torch.float64)
    shares = shares / shares.cumsum(-1)[:, -1:]  # a plain sum may split one long row among threads, but not several
    first = torch.zeros_like(shares)
    first[:, 0] = 1
    return torch.where(shares.isnan(), first, shares)
