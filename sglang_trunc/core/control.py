"""Who decides how many lanes run: what rows cost here, what proposals have been worth, and when to leave it alone.

A pipeline has one ``Control``. After every cycle it is asked how many of the ranked lanes run in the next one
(``width``) and how much of a looked-up chain starts (``chain``). Without a cost table every row of the budget is used.

Estimates may be wrong, and the early readouts that find proposals cost something even where no lane pays. So it keeps
an account: every cycle costs what the table says, every token earns what plain decoding would have spent on it. While
there is *credit*, in rounds of plain decoding, lanes run as the estimates say. Without, the schedule is plain decoding
(roots alone, nothing read early), which earns ``ALLOWANCE`` a round towards the next try. By the table, no more than
that is ever lost to plain decoding in the long run, whatever the text.

Inputs are counts and the table, no clock: equal inputs give equal decisions, and ``explain`` is told each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from sglang_trunc.core.cycle_cost import CycleCost
from sglang_trunc.core.survival import SurvivalEstimator

# In rounds of plain decoding.
ALLOWANCE = 0.02  # earned by every one of them
TRY = 0.5  # credit that another try takes
FIRST, MOST = 2.0, 4.0  # credit at the start, and what good times may put aside
# Cycles that a lane runs in vain, as long as none has: of a draft until d2 or its parent contradicts it, and of a
# looked-up token until d1 does. The first is a mean over the lanes that went, with a prior of so many of them.
IN_VAIN, SCREENED, PRIOR_WEIGHT = 1.5, 1.0, 16


class Decision(NamedTuple):
    """How many lanes run beside the roots in a cycle, and what was expected of it."""

    requests: int
    asked: int  # lanes and proposals that wanted a row
    room: int  # rows of the budget for them
    lanes: int  # that got one
    tokens_per_second: float  # expected with them, all requests together
    plain_tokens_per_second: float  # with the roots alone
    credit: float


class Control:
    """Estimates, cost and the decisions made of them; one a pipeline."""

    def __init__(self, cost: CycleCost | None = None, explain: Callable[[Decision], None] | None = None):
        self.estimator = SurvivalEstimator()  # of all requests
        self.listens = True  # whether proposals are read at all, and lanes run
        self.credit = FIRST
        self._cost = cost
        self._explain = explain
        self._requests: dict[Hashable, SurvivalEstimator] = {}
        self._gone = 0  # lanes
        self._gone_after = 0  # cycles, in all

    def of(self, key: Hashable) -> SurvivalEstimator:
        """A request's own estimates; what others have taught is their prior."""
        found = self._requests.get(key)
        if found is None:
            found = self._requests[key] = SurvivalEstimator(self.estimator)
        return found

    def forget(self, key: Hashable) -> None:
        self._requests.pop(key, None)

    def account(self, rows: int, roots: int, readers: int, tokens: int) -> None:
        """A cycle is over: it had so many rows, ``roots`` of them roots (at least 1), read out ``readers`` and
        committed ``tokens``."""
        if self._cost is None:
            return
        plain = self._cost.plain_round(roots)
        cycles = self._cost.cycles
        if self.listens:
            earned = tokens / roots - self._cost.spent(rows, readers) / plain
            self.credit = min(self.credit + earned, MOST)
            self.listens = self.credit > 0
        else:
            self.credit += ALLOWANCE / cycles
            self.listens = self.credit >= TRY

    def note_gone(self, lanes: int, cycles: int) -> None:
        """Lanes were dropped, after so many cycles altogether."""
        self._gone += lanes
        self._gone_after += cycles

    def _worth(self, survival: float, in_vain: float) -> float:
        """Of a row, where a root's is 1: what becomes a token, of the cycles that are spent.

        A lane that is kept turns all its cycles into a token. One that is not runs until that is known, no longer: so a
        row is worth more than its lane's chance.
        """
        assert self._cost is not None
        kept = survival * self._cost.cycles
        return kept / (kept + (1 - survival) * in_vain)

    def width(self, roots: int, survivals: Sequence[float], room: int) -> int:
        """How many of the ranked lanes run beside ``roots`` rows: at most ``room``, the best first."""
        if self._cost is None:
            return min(room, len(survivals))
        in_vain = (IN_VAIN * PRIOR_WEIGHT + self._gone_after) / (PRIOR_WEIGHT + self._gone)
        worths = [self._worth(survival, in_vain) for survival in survivals[:room]]
        lanes = self._cost.best(roots, worths, room) if self.listens else 0
        if self._explain is not None and roots:
            expected, plain = (self._cost.rate(roots, worths[:count]) for count in (lanes, 0))
            self._explain(Decision(roots, len(survivals), room, lanes, expected, plain, self.credit))
        return lanes

    def chain(self, rows: int, roots: int, value: float, survivals: Sequence[float]) -> int:
        """How many of a chain's lanes start, a prefix of them, in a cycle of so many rows worth ``value`` tokens."""
        if self._cost is None:
            return len(survivals)
        worths = [self._worth(survival, SCREENED) for survival in survivals]
        return self._cost.gains(rows, roots, value, worths) if self.listens else 0
