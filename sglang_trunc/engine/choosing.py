"""Chooses the tokens of a batch's readouts, at every depth, by what each request asked for.

Made by a worker for one round (or one prefill): ``Transforms`` first, then ``core.sampling``: the best token of
greedy requests, the best of perturbed logits of the others, with the noise of their own seed and position. So a draft
and its verification draw the same way, and a schedule's text is plain seeded decoding's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from sglang_trunc.core import sampling, trunc
from sglang_trunc.core.lane_tree import LOOKUP, Lane
from sglang_trunc.core.options import RESIDUAL, Options
from sglang_trunc.core.pipeline import Choice
from sglang_trunc.core.pipeline_round import choose
from sglang_trunc.core.relaxed import relax
from sglang_trunc.core.residual import ResidualMemory
from sglang_trunc.core.sampling import Choices, SamplingRows
from sglang_trunc.engine.cascades import Cascade
from sglang_trunc.engine.outputs import Outputs
from sglang_trunc.engine.seeds import seed_of
from sglang_trunc.engine.transforms import Path, Transforms


class BatchChooser:
    """The requests of one batch, as choosers see them."""

    def __init__(self, batch, bases: Tensor, outputs: Outputs):
        """``bases`` int64 ``[bs]``: position of each request's newest token, where all paths begin."""
        self.bases = bases
        # At the end of a chunk the base lies inside the prompt; what was emitted before is on the host then.
        records = [
            outputs.ready(req, max(base + 1 - len(req.origin_input_ids), len(req.output_ids)))
            for req, base in zip(batch.reqs, bases.tolist(), strict=True)
        ]
        self._transforms = Transforms(batch.reqs, batch.sampling_info, records)
        self._sampling = sampling_rows(batch.sampling_info, seeds_of(batch.reqs, bases.device), bases)

    @property
    def plain(self) -> bool:
        """Whether every row's choice is the best of its raw logits."""
        return self._sampling.all_greedy and not self._transforms.active

    def transform(self, logits: Tensor, requests: Tensor, paths: Callable[[], Sequence[Path]]) -> None:
        """Penalties, masks, biases, processors; in place. ``logits`` float32 ``[n, vocabulary]``, before temperature.

        ``requests`` int64 ``[n]``: index of each row's request. ``paths``: tokens of each row behind its request's
        base; asked for only where they matter.
        """
        if self._transforms.active:
            self._transforms.apply(logits, requests.tolist(), paths())

    def greedy(self, requests: Tensor) -> Tensor:
        """Which rows take the best token: bool ``[n]``. Relaxed acceptance is for them alone."""
        return self._sampling.greedy[requests]

    def rows(self, requests: Tensor, positions: Tensor) -> SamplingRows:
        """How rows of these requests draw at these positions."""
        return self._sampling.take(requests)._replace(positions=positions)


class ChainChooser:
    """For TRUNC's chains (``core.trunc``)."""

    def __init__(self, batch_chooser: BatchChooser, options: Options, most: int):
        """``most``: nodes of a round."""
        self._batch = batch_chooser
        self._options = options
        self._cascade = Cascade(ResidualMemory(most)) if options.sampling_policy == RESIDUAL else None

    def __call__(self, readout: trunc.Readout) -> Tensor:
        tokens = self._tokens(readout)
        options = self._options
        if options.relaxed and readout.drafts is not None:
            kept = relax(readout.logits, tokens, readout.drafts, options.relax_top, options.relax_tau)
            return torch.where(self._batch.greedy(readout.nodes.request), kept, tokens)
        return tokens

    def _tokens(self, readout: trunc.Readout) -> Tensor:
        nodes = readout.nodes
        if self._batch.plain:
            return trunc.choose_greedily(readout)
        positions = self._batch.bases[nodes.request] + nodes.offset
        self._batch.transform(readout.logits, nodes.request, lambda: _chain_paths(readout))
        rows = self._batch.rows(nodes.request, positions)
        if self._cascade is None:
            return sampling.choose(readout.logits, rows).tokens
        places = list(zip(nodes.request.tolist(), nodes.offset.tolist(), strict=True))
        final = [readout.drafts is not None] * len(places)
        laws = sampling.laws(readout.logits, rows)
        return self._cascade.choose(places, final, laws, rows.seeds, rows.positions)


def _chain_paths(readout: trunc.Readout) -> list[Path]:
    chains = readout.chains.tolist()
    places = zip(readout.nodes.request.tolist(), readout.nodes.offset.tolist(), strict=True)
    return [chains[request][1 : offset + 1] for request, offset in places]


class LaneChooser:
    """For the lanes of pipelines (``core.pipeline_round``); follows what a round commits."""

    def __init__(
        self,
        batch_chooser: BatchChooser,
        request_rows: Sequence[int],
        recurrences: int,
        options: Options,
        cascade: Cascade | None = None,
        read_hidden: Callable[[Sequence[Lane]], Tensor] | None = None,
    ):
        """``request_rows``: each request's row of the slot table, which its lanes know. ``cascade``: under the residual
        policy. ``read_hidden``: what the head reads for lanes ``[n, d]``; given where requests want to see it."""
        self._options = options
        self._cascade = cascade
        self._batch = batch_chooser
        self._bases = batch_chooser.bases.tolist()
        self._index = {row: index for index, row in enumerate(request_rows)}
        self._recurrences = recurrences
        self._committed: list[list[int]] = [[] for _ in request_rows]  # in this round
        self._read_hidden = read_hidden
        self.hidden: list[list[Tensor]] = [[] for _ in request_rows]  # of the tokens that this round commits

    def __call__(self, lanes: Sequence[Lane], logits: Tensor) -> list[Choice]:
        choices = self._screening(lanes, logits, self._relaxed(lanes, logits, self._choices(lanes, logits)))
        committed = []
        for lane, choice in zip(lanes, choices, strict=True):
            if self._is_committed(lane):
                self._committed[self._index[lane.request_row]].append(choice.token)
                committed.append(lane)
        if self._read_hidden is not None and committed:
            for lane, row in zip(committed, self._read_hidden(committed), strict=True):
                self.hidden[self._index[lane.request_row]].append(row)
        return choices

    def _choices(self, lanes: Sequence[Lane], logits: Tensor) -> list[Choice]:
        if self._batch.plain:
            return choose(logits)
        rows = self._transformed(lanes, logits)
        if self._cascade is None:
            return _as_list(sampling.choose(logits, rows))
        return _as_list(self._draw(self._cascade, lanes, logits, rows))

    def _is_committed(self, lane: Lane) -> bool:
        """Whether a lane, read out after its ancestors, is one that the committed text goes through."""
        index = self._index[lane.request_row]
        committed = self._committed[index]
        newest = lane.position - self._bases[index] == len(committed)
        return lane.depth == self._recurrences and newest and (not committed or committed[-1] == lane.token)

    def peek(self, lanes: Sequence[Lane], logits: Tensor) -> list[Choice]:
        """What lanes would choose that are not due, by their seeds; nothing is noted of it."""
        return _as_list(sampling.choose(logits, self._transformed(lanes, logits)))

    def _transformed(self, lanes: Sequence[Lane], logits: Tensor) -> SamplingRows:
        """Transforms the logits in place; how the rows draw from them."""
        indices = [self._index[lane.request_row] for lane in lanes]
        requests = torch.tensor(indices, device=logits.device)
        positions = torch.tensor([lane.position for lane in lanes], device=logits.device)
        self._batch.transform(
            logits, requests, lambda: [self._path(lane, index) for lane, index in zip(lanes, indices, strict=True)]
        )
        return self._batch.rows(requests, positions)

    def _draw(self, cascade: Cascade, lanes: Sequence[Lane], logits: Tensor, rows: SamplingRows) -> Choices:
        laws = sampling.laws(logits, rows)
        final = [lane.depth == self._recurrences for lane in lanes]
        tokens = cascade.choose(lanes, final, laws, rows.seeds, rows.positions)
        return Choices(tokens, laws.gather(1, tokens.unsqueeze(1)).squeeze(1).to(torch.float32))

    def _relaxed(self, lanes: Sequence[Lane], logits: Tensor, choices: list[Choice]) -> list[Choice]:
        """Full depth's choices, or proposals of the lanes that come close, the first one first."""
        options = self._options
        if not options.relaxed:
            return choices
        tokens = torch.tensor([choice.token for choice in choices], device=logits.device)
        requests = torch.tensor([self._index[lane.request_row] for lane in lanes], device=logits.device)
        greedy = self._batch.greedy(requests)
        for number in (1, 0):
            drafts = [
                lane.proposals[number].token if lane.depth == self._recurrences and len(lane.proposals) > number else -1
                for lane in lanes
            ]
            drafted = torch.tensor(drafts, device=logits.device)
            kept = relax(logits, tokens, drafted, options.relax_top, options.relax_tau)
            tokens = torch.where(greedy, kept, tokens)
        return [choice._replace(token=token) for choice, token in zip(choices, tokens.tolist(), strict=True)]

    def _screening(self, lanes: Sequence[Lane], logits: Tensor, choices: list[Choice]) -> list[Choice]:
        """With the best tokens, by probability, of the rows that have looked-up tokens to screen."""
        top = self._options.screen_top
        if top <= 1:
            return choices
        awaited = [
            row
            for row, lane in enumerate(lanes)
            if lane.depth < self._recurrences and any(proposal.depth == LOOKUP for proposal in lane.proposals)
        ]
        best = logits[awaited].topk(min(top, logits.shape[1])).indices.tolist()
        choices = list(choices)
        for row, tokens in zip(awaited, best, strict=True):
            choices[row] = choices[row]._replace(best=tokens)
        return choices

    def _path(self, lane: Lane, index: int) -> Path:
        """Tokens behind the base: what this round has committed up to the root, then the lanes below it."""
        below = []
        while lane.parent is not None:
            below.append(lane.token)
            lane = lane.parent
        return [*self._committed[index][: lane.position - self._bases[index]], *reversed(below)]


def _as_list(choices: Choices) -> list[Choice]:
    return [Choice(*pair) for pair in zip(choices.tokens.tolist(), choices.probabilities.tolist(), strict=True)]


def seeds_of(reqs: Sequence[Any], device: torch.device) -> Tensor:
    """int64 ``[bs]``."""
    return torch.tensor([seed_of(req) for req in reqs], dtype=torch.int64, device=device)


def sampling_rows(info, seeds: Tensor, positions: Tensor) -> SamplingRows:
    """One row a request, from SGLang's ``SamplingBatchInfo``, whose flags may say more than is there any more."""
    greedy = info.top_ks <= 1
    cut = (info.top_ks < TOP_K_ALL) | (info.top_ps != 1.0) | (info.min_ps > 0.0)
    return SamplingRows(
        temperatures=info.temperatures.view(-1),
        top_ks=info.top_ks,
        top_ps=info.top_ps,
        min_ps=info.min_ps,
        seeds=seeds,
        positions=positions,
        greedy=greedy,
        filtered=cut & ~greedy,
        all_greedy=info.is_all_greedy,
        any_filtered=info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling,
        any_open=not info.is_all_greedy,
    )
