"""The controller by the clock of its own cost table: what it costs against plain decoding and every fixed width."""

from __future__ import annotations

import pytest

from sglang_trunc.core.control import ALLOWANCE, FIRST, MOST, TRY, Control, Decision
from sglang_trunc.core.cycle_cost import CostTable, CycleCost, interpolated
from sglang_trunc.core.pipeline import Schedule
from sglang_trunc.core.survival import Standing
from tests.core.pipeline_stand import ScriptedLookups, Stand
from tests.core.scripted_engine import Script

ROWS = (1, 2, 4, 8, 16, 32, 64)
# Seconds of a tick: rows are free, cost what they cost on a CPU, or cost all there is.
MACHINES = {
    "flat": CostTable(256, {rows: 1 + rows / 100 for rows in ROWS}, dict.fromkeys(ROWS, 0.1)),
    "knee": CostTable(256, {rows: 1 + max(0, rows - 6) / 8 for rows in ROWS}, {rows: 0.1 + rows / 60 for rows in ROWS}),
    "linear": CostTable(256, dict(zip(ROWS, map(float, ROWS), strict=True)), {rows: rows / 5 for rows in ROWS}),
}
PLAN = Schedule(4, 1, 2, 32, 0.02, 4)
WANTED = 40


class Clock:
    """Seconds of a stand's calls, by a table."""

    def __init__(self, stand: Stand, table: CostTable):
        self.seconds = 0.0
        self.table = table
        self._advance, self._readout = stand.engine.advance, stand.engine.readout
        stand.engine.advance, stand.engine.readout = self.advance, self.readout

    def advance(self, lanes, ticks):
        self.seconds += ticks * interpolated(self.table.tick, len(lanes))
        return self._advance(lanes, ticks)

    def readout(self, lanes):
        self.seconds += interpolated(self.table.readout, len(lanes))
        return self._readout(lanes)


def seconds(plan: Schedule, table: CostTable, right: float, requests: int, controlled: bool, looked_up=None) -> float:
    script = Script(3, {plan.d1: right, plan.d2: min(1.0, right + 0.2)})
    stand = Stand(
        plan,
        script,
        [([1 + key], WANTED) for key in range(requests)],
        lookahead=plan.cycles * (1 + plan.lookup) + 1,
        lookups=None if looked_up is None else ScriptedLookups(script, looked_up, plan.lookup),
        control=Control(CycleCost(table, plan.recurrences, plan.d1, plan.d2)) if controlled else None,
    )
    clock = Clock(stand, table)
    stand.run()
    return clock.seconds


PLAIN = PLAN._replace(max_width=1, lookup=0)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("requests", "right"), [(1, 0.0), (4, 0.0), (4, 0.3), (16, 0.3), (16, 0.9), (40, 0.9)])
@pytest.mark.parametrize("looked_up", [None, 0.2, 0.9])
def test_it_loses_next_to_nothing_to_plain_decoding(machine, requests, right, looked_up):
    """The credit that it has at first, the allowance, and a round that goes beyond."""
    table = MACHINES[machine]
    plan = PLAN if looked_up is not None else PLAN._replace(lookup=0)
    plain = seconds(PLAIN, table, right, requests, controlled=False)
    own = seconds(plan, table, right, requests, True, looked_up)
    assert own <= plain * (1 + ALLOWANCE + (FIRST + TRY + 1) / WANTED)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("requests", "right"), [(1, 0.3), (1, 0.9), (4, 0.6), (16, 0.9)])
def test_it_is_about_as_fast_as_the_best_fixed_width(machine, requests, right):
    table = MACHINES[machine]
    own = seconds(PLAN, table, right, requests, True)
    widths = [PLAN._replace(max_width=width) for width in (1, 4, 8, 16, 32)]
    assert own <= 1.12 * min(seconds(plan, table, right, requests, False) for plan in widths)


def control(table: CostTable = MACHINES["knee"], explain=None) -> Control:
    return Control(CycleCost(table, 4, 1, 2), explain)


def test_without_a_table_all_rows_are_used():
    free = Control()
    assert free.width(2, [0.1] * 5, 3) == 3
    assert free.width(2, [0.1], 3) == 1
    assert free.chain(4, 2, 3.0, [0.1, 0.01]) == 2
    for _ in range(100):
        free.account(rows=64, roots=1, readers=64, tokens=0)
        assert free.listens


def test_losses_end_in_silence_and_the_allowance_in_another_try():
    asked, heard = control(), []
    for _ in range(1000):
        asked.account(rows=8 if asked.listens else 1, roots=1, readers=4 if asked.listens else 0, tokens=0)
        heard.append(asked.listens)
    assert asked.width(1, [0.9], 8) == (asked.listens and 1)
    tries = sum(later and not before for before, later in zip(heard, heard[1:], strict=False))
    assert tries > 3
    assert sum(heard) < 1000 / 8


def test_while_it_is_silent_nothing_starts():
    asked = control()
    asked.account(rows=64, roots=1, readers=64, tokens=0)
    assert not asked.listens
    assert asked.width(1, [0.9], 8) == 0
    assert asked.chain(1, 1, 1.0, [0.9]) == 0


def test_gains_are_put_aside_up_to_a_limit():
    asked = control()
    for _ in range(100):
        asked.account(rows=4, roots=1, readers=2, tokens=1)
    assert asked.credit == MOST


def test_every_decision_is_explained():
    heard: list[Decision] = []
    lanes = control(explain=heard.append).width(1, [0.9, 0.8, 0.001], 8)
    (said,) = heard
    assert said[:4] == (1, 3, 8, lanes)
    assert lanes == 2
    assert said.tokens_per_second > said.plain_tokens_per_second
    # A token of plain decoding takes R ticks and a readout.
    assert said.plain_tokens_per_second == pytest.approx(1 / (4 * 1 + 0.1 + 1 / 60))


def test_requests_are_told_apart_and_teach_the_newcomer():
    asked = control()
    asked.of("code").observe([(Standing.OPEN, 0.5, True)] * 200)
    asked.of("noise").observe([(Standing.OPEN, 0.5, False)] * 200)
    code, noise, new = (asked.of(key).estimate(Standing.OPEN, 0.5) for key in ("code", "noise", "new"))
    assert code > 0.9
    assert noise < 0.1
    assert 0.4 < new < 0.6
    asked.forget("code")
    assert asked.of("code").estimate(Standing.OPEN, 0.5) == pytest.approx(new)
