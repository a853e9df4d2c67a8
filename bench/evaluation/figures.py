"""Figures of runs: a pure function of the store's lines.

Speeds, of the problems that a run has answered:

* ``decode_tps``: tokens after the first event / seconds after it, both summed over the requests (prefill left out;
  LoopSpec's token-weighted speed);
* ``total_tps``: all tokens / all seconds of the requests, prefill and queue included;
* ``throughput``: all tokens / seconds in which at least one request was in flight, so that pauses of an interrupted run
  count for nothing.

The reference is plain, or the first contestant where no plain server ran. Ratios and comparisons of outcomes use the
problems that both runs have. Percentiles between tokens share an event's wait among its tokens. ``accept_length`` is
tokens a round with the bonus token; ``ticks_per_token`` is measured by the engine over the uninterrupted parts
(``counted`` answers).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evaluation.store import Line
from sglang_trunc.core.ties import Verdict, first_difference
from sglang_trunc.serving import counters

PLAIN = "plain"
PERCENTILES = (50, 90, 99)
CONFIDENCE = 0.95


class Speed(NamedTuple):
    decode_tps: float | None
    total_tps: float | None
    throughput: float | None


class Score(NamedTuple):
    mean: float | None  # None: nothing has a score
    number: int
    low: float | None  # 95 % (Wilson); None without scipy, or where scores are not 0 and 1
    high: float | None
    also: dict[str, float]


class Compared(NamedTuple):
    """A run beside plain, on the problems of both."""

    problems: int
    decode_ratio: float | None
    total_ratio: float | None
    throughput_ratio: float | None
    equal: int  # texts
    gained: int  # right here, wrong there
    lost: int
    p_value: float | None  # McNemar's exact test of gained against lost
    near_ties: int
    faults: int
    unjudged: int


@dataclass
class Figures:
    run: str
    settings: dict[str, Any]
    source: str
    server: dict[str, Any]
    answers: int
    refused: int
    tokens: int
    speed: Speed
    ttft: dict[int, float] | None  # percentile -> seconds
    inter_token: dict[int, float] | None
    counted_events: bool
    score: Score
    accept_length: float | None
    ticks_per_token: float | None
    counted: int  # answers behind ticks and histograms
    counters: dict[str, Any]
    compared: Compared | None = None
    seeded: tuple[int, int] | None = None  # sampled: texts equal to the first of our schedules, and texts of both
    differences: list[Line] = field(default_factory=list)

    @property
    def contestant(self) -> str:
        return str(self.settings["contestant"]["name"])

    @property
    def draws_by_seed(self) -> bool:
        """A sampled run of one of our schedules; stock plain does so under --enable-deterministic-inference only."""
        return self.settings["sampling"]["temperature"] > 0 and bool(self.server.get("options"))

    @property
    def cell(self) -> tuple[Any, ...]:
        """What two runs must share to be compared."""
        s = self.settings
        shared = (s["model"], s["task"], s["style"], s["data"], s["max_new_tokens"], s["sampling"]["name"])
        return (*shared, s["concurrency"], tuple(s["server_args"]))


class Gathered(NamedTuple):
    """Lines of one run."""

    answers: dict[str, Line]  # by problem
    grades: dict[str, Line]
    differences: dict[str, Line]


def collect(lines: Iterable[Line]) -> list[Figures]:
    """One for every run that was started, in that order."""
    by_run: dict[str, list[Line]] = {}
    for line in lines:
        if "run" in line:
            by_run.setdefault(line["run"], []).append(line)
    gathered = {run: gather(mine) for run, mine in by_run.items()}
    found = [figures(run, mine, gathered[run]) for run, mine in by_run.items() if any(_of(mine, "run"))]
    references: dict[tuple[Any, ...], Figures] = {}
    for one in sorted(found, key=lambda one: one.contestant != PLAIN):
        references.setdefault(one.cell, one)
    for one in found:
        reference = references[one.cell]
        if reference is not one:
            one.compared = compare(gathered[one.run], gathered[reference.run])
    for one in found:
        first = next((other for other in found if other.cell == one.cell and other.draws_by_seed), None)
        if one.draws_by_seed and first is not one and first is not None:
            one.seeded = equal_texts(gathered[one.run], gathered[first.run])
    return found


def gather(lines: Sequence[Line]) -> Gathered:
    return Gathered(
        *({line["problem"]: line for line in _of(lines, kind)} for kind in ("answer", "grade", "difference"))
    )


def _of(lines: Iterable[Line], kind: str) -> Iterable[Line]:
    return (line for line in lines if line["kind"] == kind)


def figures(run: str, lines: Sequence[Line], gathered: Gathered) -> Figures:
    started = list(_of(lines, "run"))[-1]
    answers = list(gathered.answers.values())
    spent = list(_of(lines, "counters"))
    totals = added([line["counters"] for line in spent])
    return Figures(
        run,
        started["settings"],
        started["source"],
        started["server"],
        len(answers),
        len({line["problem"] for line in _of(lines, "refused")} - set(gathered.answers)),
        sum(line["completion_tokens"] for line in answers),
        speed(answers),
        percentiles([line["first"] for line in answers]),
        percentiles([wait for line in answers for wait in inter_token(line)]),
        all(line["counted"] for line in answers),
        score(list(gathered.grades.values())),
        accept_length(answers),
        counters.ticks_per_token(counters.totals(totals)) if totals else None,
        sum(line["answers"] for line in spent),
        totals,
        differences=list(gathered.differences.values()),
    )


def speed(answers: Sequence[Line]) -> Speed:
    decoded = sum(line["completion_tokens"] - line["events"][0][1] for line in answers)
    decoding = sum(line["end"] - line["first"] for line in answers)
    tokens = sum(line["completion_tokens"] for line in answers)
    seconds = sum(line["end"] for line in answers)
    busy = covered([(line["begin"], line["begin"] + line["end"]) for line in answers])
    return Speed(_ratio(decoded, decoding), _ratio(tokens, seconds), _ratio(tokens, busy))


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


def inter_token(line: Line) -> list[float]:
    """One wait per token after the first event."""
    waits: list[float] = []
    for (before, had), (at, has) in zip(line["events"], line["events"][1:], strict=False):
        waits += [(at - before) / (has - had)] * (has - had) if has > had else []
    return waits


def percentiles(values: Sequence[float]) -> dict[int, float] | None:
    if len(values) < 2:
        return dict.fromkeys(PERCENTILES, values[0]) if values else None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {rank: cuts[rank - 1] for rank in PERCENTILES}


def accept_length(answers: Sequence[Line]) -> float | None:
    known = [line["speculation"] for line in answers if line["speculation"]]
    return _ratio(sum(tokens for tokens, _ in known), sum(rounds for _, rounds in known))


def score(grades: Sequence[Line]) -> Score:
    scored = [line["score"] for line in grades if line["score"] is not None]
    names = {name for line in grades for name in line["also"]}
    also = {name: statistics.fmean(line["also"].get(name, 0.0) for line in grades) for name in sorted(names)}
    if not scored:
        return Score(None, 0, None, None, also)
    low, high = interval(scored)
    return Score(statistics.fmean(scored), len(scored), low, high, also)


def interval(scored: Sequence[float]) -> tuple[float | None, float | None]:
    try:
        from scipy.stats import binomtest
    except ImportError:
        return None, None
    if not set(scored) <= {0.0, 1.0}:
        return None, None
    found = binomtest(int(sum(scored)), len(scored)).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def equal_texts(mine: Gathered, other: Gathered) -> tuple[int, int]:
    """(equal, problems of both)"""
    common = [name for name in mine.answers if name in other.answers]
    return sum(same_text(mine.answers[name], other.answers[name]) for name in common), len(common)


def compare(mine: Gathered, plain: Gathered) -> Compared:
    common = [name for name in mine.answers if name in plain.answers]
    ours, theirs = (speed([side.answers[name] for name in common]) for side in (mine, plain))
    equal, _ = equal_texts(mine, plain)
    pairs = [(_score(mine, name), _score(plain, name)) for name in common]
    gained = sum(a > b for a, b in pairs if a is not None and b is not None)
    lost = sum(a < b for a, b in pairs if a is not None and b is not None)
    verdicts = [mine.differences[name]["verdict"] for name in common if name in mine.differences]
    ties = verdicts.count(Verdict.NEAR_TIE.value)
    return Compared(
        len(common),
        _ratio(ours.decode_tps, theirs.decode_tps),
        _ratio(ours.total_tps, theirs.total_tps),
        _ratio(ours.throughput, theirs.throughput),
        equal,
        gained,
        lost,
        p_value(gained, lost),
        ties,
        len(verdicts) - ties,
        len(common) - equal - len(verdicts),
    )


def same_text(one: Line, other: Line) -> bool:
    """By tokens where both servers tell them."""
    if one["output_ids"] is None or other["output_ids"] is None:
        return bool(one["text"] == other["text"])
    return first_difference(one["output_ids"], other["output_ids"]) is None


def _score(side: Gathered, name: str) -> float | None:
    return side.grades[name]["score"] if name in side.grades else None


def p_value(gained: int, lost: int) -> float | None:
    try:
        from scipy.stats import binomtest
    except ImportError:
        return None
    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else None


def added(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The engine's counters of several parts."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                total[name] = added([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total
