"""The ``TreeEngine`` over a served model: lanes of many requests, each at its own depth, branches included.

A lane knows its state row, slot, position and request row (``core.lane_tree``); a call turns them into one
small integer tensor. What a lane attends to is its request's row of the slot table up to its own position; where
a branch slot is in its path, the part of the path behind the root comes from the lane's tail instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_trunc.core.lane_tree import Lane, Move
from sglang_trunc.engine.rows import RowRunner, Rows


class TreeLanes:
    """Runs lanes through the served model (``core.pipeline_round.TreeEngine``)."""

    def __init__(self, runner: RowRunner):
        self.runner = runner

    def start(self, lanes: Sequence[Lane]) -> None:
        tokens = torch.tensor([lane.token for lane in lanes], device=self.runner.req_to_token.device)
        self.runner.embed(self.load(lanes), tokens)

    def advance(self, lanes: Sequence[Lane], ticks: int) -> None:
        self.runner.advance(self.load(lanes), ticks)

    def readout(self, lanes: Sequence[Lane]) -> Tensor:
        return self.runner.readout(self.load(lanes))

    def hidden(self, lanes: Sequence[Lane]) -> Tensor:
        """What the head reads for these lanes: ``[n, d]``."""
        return self.runner.read_hidden(self.load(lanes))

    def peek(self, lanes: Sequence[Lane]) -> Tensor:
        """``readout`` that leaves no mark, for lanes that are not due."""
        return self.runner.peek(self.load(lanes))

    def move(self, moves: Sequence[Move]) -> None:
        """Page size 1: the table names the branch slot. Larger pages belong together, so there K/V are copied."""
        table, pool = self.runner.req_to_token, self.runner.pool
        rows, positions, slots, reserved = torch.tensor(
            [(move.request_row, move.position, move.slot, move.reserved) for move in moves], device=table.device
        ).unbind(1)
        if pool.page_size == 1:
            table[rows, positions] = slots.to(table.dtype)
        else:
            pool.copy_rows(slots, reserved)

    def load(self, lanes: Sequence[Lane]) -> Rows:
        """The row buffers, filled for these lanes."""
        real = len(lanes)
        rows = self.runner.take(real)
        table = self.runner.req_to_token
        facts = torch.tensor(
            [
                (lane.row, lane.position, lane.slot, lane.request_row, lane.depth, lane.position + 1 - len(lane.tail))
                for lane in lanes
            ],
            device=table.device,
        )
        bank, positions, slots, request_rows, depths, shared = facts.unbind(1)
        rows.bank[:real] = bank
        rows.positions[:real] = positions
        rows.slots[:real] = slots
        rows.kv_start[:real] = request_rows * table.shape[1]
        rows.kv_len[:real] = positions + 1
        rows.kv_shared[:real] = shared
        rows.kv_offset[:real] = depths * self.runner.pool.rows_per_step
        for index, lane in enumerate(lanes):
            if lane.tail:
                rows.kv_tails[index, : len(lane.tail)] = torch.tensor(lane.tail, dtype=torch.int32)
        return rows
