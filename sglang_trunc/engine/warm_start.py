"""Lanes that start while their prompt is still being prefilled.

A prompt's last token passes the same depths as any lane. After d1 recurrences of the prefill it proposes the first
token, and a lane on that token can run along: its rows are appended to the prefill's in every following
recurrence, which costs a few rows beside a whole prompt. When the prefill has chosen the first token, the lane on it
is R - d1 steps ahead of a cold start, with children of its own.

Carried to ``LoopedCausalLM.forward`` as the batch's ``spec_info``. Only a prompt's last chunk has riders. The
readout of a model with a coda runs over all rows of the chunk, since the last row attends to the others' coda K/V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglang_trunc.core.lane_tree import Lane
from sglang_trunc.core.pipeline import Choice, Pipeline
from sglang_trunc.engine.rows import Rows
from sglang_trunc.engine.tree_lanes import TreeLanes
from sglang_trunc.models.looped import Attend, AttentionSite, LoopedCausalLM, LoopState


class PrefillRiders:
    """The riders of one prefill batch."""

    _rows: Rows  # of the riders, for the cycle at hand
    _state: LoopState

    def __init__(
        self,
        lanes: TreeLanes,
        pipeline: Pipeline,
        last_rows: dict[str, int],
        choose: Callable[[Sequence[Lane], Tensor], list[Choice]],
    ):
        """``last_rows``: request, watched by the pipeline -> row of its last token in the prefill batch. ``choose``:
        as in ``pipeline_round``."""
        self.lanes = lanes
        self.pipeline = pipeline
        self._choose = choose
        self.keys = last_rows.keys()
        self._row_of = {pipeline.trees[key].root: row for key, row in last_rows.items()}
        self._riding: list[Lane] = []

    def recur(self, model: LoopedCausalLM, step: int, state: LoopState, positions: Tensor, attend: Attend) -> LoopState:
        """One recurrence of the prefill's rows and of the riders'; returns the prefill's."""
        if self._riding:
            state = self._recur_both(model, state, positions, attend)
        else:
            state = model.recur(state, positions, attend)
        if (step + 1) % self.pipeline.schedule.d1 == 0:
            self._end_cycle(model, step + 1, state, positions, attend)
        return state

    def _recur_both(self, model: LoopedCausalLM, state: LoopState, positions: Tensor, attend: Attend) -> LoopState:
        runner, rows, own = self.lanes.runner, self._rows, state.hidden.shape[0]
        beside = runner.attend(rows)

        def attend_both(site: AttentionSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # The prompt's K/V of a step are older than any rider's at that step.
            return torch.cat((attend(site, q[:own], k[:own], v[:own]), beside(site, q[own:], k[own:], v[own:])))

        runner.begin_step(rows)
        both = model.recur(_joined(state, self._state), torch.cat((positions, rows.positions)), attend_both)
        runner.end_step(rows)
        self._state = _part(both, slice(own, None))
        return _part(both, slice(own))

    def _end_cycle(
        self, model: LoopedCausalLM, depth: int, state: LoopState, positions: Tensor, attend: Attend
    ) -> None:
        """d1 recurrences are through: readouts, births, and the rows of the next cycle."""
        pipeline, runner = self.pipeline, self.lanes.runner
        if self._riding:
            runner.scatter(self._rows, self._state)
            pipeline.counters.warm_rows += len(self._riding) * pipeline.schedule.d1
        lanes = pipeline.lanes(self.keys)
        readers = pipeline.advanced(lanes)
        if depth < pipeline.schedule.recurrences:
            roots = [lane for lane in readers if lane.parent is None]
        else:
            roots, readers = [], [lane for lane in readers if lane.parent is not None]
        pipeline.absorb(readers, self._choices(model, readers, roots, state, positions, attend))
        self._riding = [lane for lane in pipeline.lanes(self.keys) if lane.parent is not None]
        if self._riding and depth < pipeline.schedule.recurrences:
            new = [lane for lane in self._riding if lane.depth == 0]
            if new:
                self.lanes.start(new)
            self._rows = self.lanes.load(self._riding)
            self._state = runner.gather(self._rows)

    def _choices(
        self,
        model: LoopedCausalLM,
        readers: Sequence[Lane],
        roots: Sequence[Lane],
        state: LoopState,
        positions: Tensor,
        attend: Attend,
    ) -> list[Choice]:
        """Choices of riders, and of the prompts whose last tokens are at a proposal depth."""
        found: dict[Lane, Choice] = {}
        if roots:
            logits = self._prompt_logits(model, roots, state, positions, attend)
            found.update(zip(roots, self._choose(roots, logits), strict=True))
        riders = [lane for lane in readers if lane not in found]
        if riders:
            found.update(zip(riders, self._choose(riders, self.lanes.readout(riders)), strict=True))
            for lane in riders:
                self.pipeline.counters.count_readout(lane.depth, 1)
        return [found[lane] for lane in readers]

    def _prompt_logits(
        self, model: LoopedCausalLM, roots: Sequence[Lane], state: LoopState, positions: Tensor, attend: Attend
    ) -> Tensor:
        last = torch.tensor([self._row_of[lane] for lane in roots], device=positions.device)
        if model.shape.coda:
            return model.logits(model.readout(state, positions, attend)[last])
        return model.logits(model.readout(_part(state, last), positions[last], attend))


def _joined(first: LoopState, second: LoopState) -> LoopState:
    if first.injected is None or second.injected is None:
        return LoopState(torch.cat((first.hidden, second.hidden)), None)
    return LoopState(torch.cat((first.hidden, second.hidden)), torch.cat((first.injected, second.injected)))


def _part(state: LoopState, rows: slice | Tensor) -> LoopState:
    return LoopState(state.hidden[rows], None if state.injected is None else state.injected[rows])
