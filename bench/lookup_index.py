"""What looking drafts up in a text costs: time of an update and of a query, and memory, by kind of text.

    python bench/lookup_index.py --tokens 100000

Builds an index of ``--tokens`` tokens, then appends ``--calls`` more one by one with a query after each, as a decode
round of one request does. The clock is the thread's own processor time, so that other processes on the machine
disturb little; reading it costs half a microsecond, which the figures contain. Ends with 1 where a median
update or query of the request's own text is over ``--limit``; queries in a corpus are shown beside them.

    code      this Python's standard library, cut into words, blanks and signs: the case to judge by
    random    50,000 different tokens, nothing to find
    bits      two tokens at random: the most nodes and steps
    period    50 tokens over and over
    equal     one token over and over: the longest way down the tree
    words     the Fibonacci word: repetitions at all scales
"""

from __future__ import annotations

import random
import re
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from sglang_trunc.core.lookup.corpus import Corpus
from sglang_trunc.core.lookup.index import MAX_MATCH, LookupIndex


class Query(NamedTuple):
    min_match: int
    max_match: int
    length: int
    candidates: int


@dataclass
class Cost:
    """Seconds of single calls; bytes and seconds a token of the built index."""

    build: float
    memory: float
    updates: list[float]
    queries: list[float]
    corpus: list[float]  # queries in a corpus of the same tokens
    found: int = 0  # queries with a candidate


def code(length: int) -> list[int]:
    """Ids in order of first use. ``ValueError`` where the standard library has too few."""
    ids: dict[str, int] = {}
    tokens: list[int] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        pieces = re.findall(r"\w+|\s+|[^\w\s]", file.read_text(encoding="utf-8", errors="replace"))
        tokens += (ids.setdefault(piece, len(ids)) for piece in pieces)
        if len(tokens) >= length:
            return tokens[:length]
    raise ValueError(f"the standard library has {len(tokens)} tokens, {length} are needed")


def drawn(symbols: int, length: int) -> list[int]:
    return random.Random(1).choices(range(symbols), k=length)


def fibonacci(length: int) -> list[int]:
    before, word = [1], [0]
    while len(word) < length:
        before, word = word, word + before
    return word[:length]


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "code": code,
    "random": lambda length: drawn(50_000, length),
    "bits": lambda length: drawn(2, length),
    "period": lambda length: [at % 50 for at in range(length)],
    "equal": lambda length: [5] * length,
    "words": fibonacci,
}


def measured(tokens: Sequence[int], held: int, query: Query) -> Cost:
    """The first ``held`` tokens are the context, the rest is appended."""
    clock = time.thread_time
    start = clock()
    index = LookupIndex.build(tokens[:held], query.max_match, max_tokens=4 * len(tokens))
    build = (clock() - start) / held
    memory = index.nbytes / held
    corpus = Corpus([tokens[:held]], query.max_match)
    cost = Cost(build, memory, [], [], [])
    for token in tokens[held:]:
        times = [clock()]
        index.extend((token,))
        times.append(clock())
        candidates = index.candidates(*query)
        times.append(clock())
        corpus.candidates(index.tail(query.max_match), *query)
        times.append(clock())
        cost.found += bool(candidates)
        for kept, end, begin in zip((cost.updates, cost.queries, cost.corpus), times[1:], times, strict=False):
            kept.append(end - begin)
    return cost


def shown(seconds: list[float], limit: float) -> str:
    """Median and 99th percentile in microseconds."""
    ordered = sorted(seconds)
    text = f"{1e6 * median(ordered):.1f} / {1e6 * ordered[len(ordered) * 99 // 100]:.1f}"
    return f"[red]{text}[/red]" if over(seconds, limit) else text


def over(seconds: list[float], limit: float) -> bool:
    return 1e6 * median(seconds) > limit


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of context.")] = 100_000,
    calls: Annotated[int, typer.Option(min=1, help="Updates and queries that are timed.")] = 5000,
    max_match: Annotated[int, typer.Option(help="Longest match, and depth of the tree.")] = MAX_MATCH,
    min_match: Annotated[int, typer.Option(help="Shortest match.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens of a candidate.")] = 8,
    count: Annotated[int, typer.Option(help="Candidates of a query.")] = 4,
    text: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(TEXTS)}.")] = None,
    limit: Annotated[float, typer.Option(help="Microseconds that a median may take.")] = 20.0,
) -> None:
    """Print one line per kind of text."""
    unknown = sorted(set(text or ()) - set(TEXTS))
    if unknown:
        raise typer.BadParameter(f"no text {', '.join(unknown)}; there are {', '.join(TEXTS)}")
    query = Query(min_match, max_match, length, count)
    title = f"{tokens} tokens of context, matches of {min_match} to {max_match}, {count} candidates of {length}"
    table = Table(title=title, caption="us: a token of the build; a call, median / 99th percentile. Bytes a token.")
    for name in ("text", "build", "bytes", "update", "query", "in corpus", "hits"):
        table.add_column(name, justify="left" if name == "text" else "right")
    failed = False
    for name in text or TEXTS:
        cost = measured(TEXTS[name](tokens + calls), tokens, query)
        timed = (cost.updates, cost.queries, cost.corpus)
        failed |= over(cost.updates, limit) or over(cost.queries, limit)
        times = (shown(seconds, limit) for seconds in timed)
        table.add_row(name, f"{1e6 * cost.build:.1f}", f"{cost.memory:.0f}", *times, f"{cost.found / calls:.0%}")
    Console().print(table)
    raise typer.Exit(code=int(failed))


if __name__ == "__main__":
    typer.run(main)
