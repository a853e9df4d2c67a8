"""time(width) of a pipeline's cycle, and the width at which a machine makes most tokens of it.

A lane that is kept turns R/d1 row-cycles into one token, as a root does; a row's *worth* is that part of it that is
not spent in vain (``control``), a root's is 1. Of ranked lanes the best so many are taken that worth per second is
largest; with none beside the roots the schedule is plain decoding, so a machine on which rows cost what they are
worth gets plain decoding. No clock is read here: the table was measured before, or comes from a file, and is the same
on every rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple


class CostTable(NamedTuple):
    """Seconds by number of rows."""

    context: int  # tokens each row attends to
    tick: Mapping[int, float]
    readout: Mapping[int, float]


def interpolated(times: Mapping[int, float], rows: float) -> float:
    """Seconds at a number of rows: linear between measured neighbours, proportional outside of them. ``times`` is not
    empty."""
    known = sorted(times)
    after = bisect_left(known, rows)
    if after == 0:
        return times[known[0]]
    if after == len(known):
        return times[known[-1]] * rows / known[-1]
    low, high = known[after - 1], known[after]
    return times[low] + (times[high] - times[low]) * (rows - low) / (high - low)


class CycleCost:
    """Seconds of a cycle: d1 ticks of all rows, a readout of some of them, and what a round costs beside."""

    def __init__(self, table: CostTable, recurrences: int, d1: int, d2: int | None, host: float = 0.0):
        """``host``: seconds of a cycle that do not depend on rows."""
        cycles = recurrences // d1
        self.cycles = cycles  # of a round
        self._table = table
        self._d1 = d1
        self._readers = (2 if d2 is None else 3) / cycles  # readouts of a lane, spread over its cycles
        self._plain = 1 / cycles
        self._host = host
        self.seconds = lru_cache(maxsize=4096)(self._seconds)

    def _seconds(self, rows: int, roots: int) -> float:
        """Of one cycle with so many rows, ``roots`` of them roots. Without others, nothing but R is read out."""
        readers = rows * self._readers if rows > roots else roots * self._plain
        # At least one row is read out where any is; below one it is read out in some cycles only.
        readout = interpolated(self._table.readout, max(readers, 1.0)) * min(readers, 1.0)
        return self._d1 * interpolated(self._table.tick, rows) + readout + self._host

    def spent(self, rows: int, readers: int) -> float:
        """Seconds of a cycle of which so many rows were read out."""
        readout = interpolated(self._table.readout, readers) if readers else 0.0
        return self._d1 * interpolated(self._table.tick, rows) + readout + self._host

    def plain_round(self, roots: int) -> float:
        """Seconds in which plain decoding gives each of so many requests a token."""
        return self.spent(roots, roots) + (self.cycles - 1) * self.spent(roots, 0)

    def best(self, roots: int, worths: Sequence[float], most: int) -> int:
        """How many of the ranked lanes to run beside ``roots`` rows: the count with the most value a second.

        ``worths``: of lanes, best first, each at most 1; at most ``most`` are taken.
        """
        if roots == 0:
            return 0
        value = float(roots)
        best, found = value / self.seconds(roots, roots), 0
        for count, worth in enumerate(worths[:most], start=1):
            value += worth
            rate = value / self.seconds(roots + count, roots)
            if rate > best:
                best, found = rate, count
        return found

    def rate(self, roots: int, worths: Sequence[float]) -> float:
        """Tokens a second with these lanes beside ``roots`` rows, at least 1 of them."""
        value = roots + sum(worths)
        return value * self._plain / self.seconds(roots + len(worths), roots)

    def gains(self, rows: int, roots: int, value: float, worths: Sequence[float]) -> int:
        """How many of a chain's lanes to add to a cycle of so many rows worth ``value`` tokens: a prefix of them."""
        best, found = value / self.seconds(rows, roots), 0
        for count, worth in enumerate(worths, start=1):
            value += worth
            rate = value / self.seconds(rows + count, roots)
            if rate > best:
                best, found = rate, count
        return found


def table_from(report: object) -> CostTable:
    """From JSON, which has turned widths into texts. ``ValueError`` names what is wrong with it."""
    if not isinstance(report, Mapping):
        raise ValueError(f"a cost table must be an object, not {report!r}")
    found = {}
    for name in ("tick", "readout"):
        times = report.get(name)
        if not isinstance(times, Mapping) or not times:
            raise ValueError(f"a cost table needs {name!r}: rows -> seconds, at least one pair")
        try:
            found[name] = {int(rows): float(seconds) for rows, seconds in times.items()}
        except (TypeError, ValueError):
            raise ValueError(f"{name!r} of a cost table must map numbers of rows to seconds, not {times!r}") from None
        if min(found[name]) < 1 or min(found[name].values()) <= 0:
            raise ValueError(f"{name!r} of a cost table must map 1 or more rows to positive seconds, not {times!r}")
    return CostTable(int(report.get("context", 0)), found["tick"], found["readout"])
