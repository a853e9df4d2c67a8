"""What one answer owes to drafts: where each of its tokens came from, and how long it waited for them.

A worker notes every run (``add``) as soon as it has decided on it; what the client gets may be less, since a stop cuts
a run, and a retraction takes back what was under way. So the tokens are kept in order, and are counted when they
are handed out (``settle``): the totals are those of the answer's own tokens, whenever they are asked for.

*Source* of a token: the depth that proposed it, ``LOOKUP``, ``KNOWN`` where no draft brought it and the request
started afresh on it, ``ENDED`` where nothing was wanted after it. A token that no run brought is the prefill's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_trunc.core.lane_tree import KNOWN, LOOKUP

ENDED = -2
_PREFILL = -3


class Account:
    """One request's; a plain object that lives and goes with it."""

    def __init__(self, names: Mapping[int, str]):
        """``names``: of the sources that are drafts, as the client reads them."""
        self._names = names
        self._sources: Counter[int] = Counter()
        self._ticks = 0
        self._recurrences = 0  # 0 before the first run
        self._settled = 0  # tokens that are in the totals
        self._ahead: list[tuple[int, int]] = []  # of those behind them: source, ticks waited for

    def add(self, before: int, sources: Sequence[int], ticks: int, recurrences: int) -> None:
        """A round has given the request a run.

        ``before``: tokens of the answer before it. ``sources``: of its tokens, at least one. ``ticks``: what the
        request waited for in this round, a full pass being ``recurrences`` of them; all are charged to the first token,
        since a round's tokens come together.
        """
        self.take_back(before)
        self._ahead += [(_PREFILL, 0)] * (before - self._settled - len(self._ahead))
        self._ahead.append((sources[0], ticks))
        self._ahead += [(source, 0) for source in sources[1:]]
        self._recurrences = recurrences

    def take_back(self, tokens: int) -> None:
        """Only so many tokens of the answer hold."""
        del self._ahead[max(0, tokens - self._settled) :]

    def settle(self, tokens: int) -> dict[str, Any]:
        """So many tokens of the answer have been handed out; what is said of them, ready for JSON.

        ``tokens`` counts what rounds gave: the drafts accepted and ``restarts``, and one more where a pipeline came to
        the length that was asked for. ``full_passes``: ticks waited for, by R.
        """
        fresh = self._ahead[: max(0, tokens - self._settled)]
        del self._ahead[: len(fresh)]
        self._settled = max(tokens, self._settled)
        for source, ticks in fresh:
            self._sources[source] += 1
            self._ticks += ticks
        given = self._sources.total() - self._sources[_PREFILL]
        return {
            "tokens": given,
            "drafts_accepted": {name: self._sources[source] for source, name in self._names.items()},
            "restarts": self._sources[KNOWN],
            "full_passes": self._ticks / self._recurrences if self._ticks else 0.0,
            "tokens_per_full_pass": given * self._recurrences / self._ticks if self._ticks else None,
        }


def draft_names(d1: int, d2: int | None, lookup: bool) -> dict[int, str]:
    """How clients read the sources that are drafts; only those that a schedule has. ``d2``: None or 0 for none."""
    names = {d1: "d1"}
    if d2:
        names[d2] = "d2"
    if lookup:
        names[LOOKUP] = "lookup"
    return names


def chain_sources(run: Sequence[int], looked_up: Sequence[int], d1: int) -> list[int]:
    """Of a TRUNC run, accepted drafts and the bonus token. ``looked_up``: what entered the chain behind its root.

    A looked-up token was kept as long as the run says the same: where d1 screened it out, d1's own choice stood in its
    place.
    """
    drafts = run[:-1]
    kept = 0
    while kept < min(len(drafts), len(looked_up)) and drafts[kept] == looked_up[kept]:
        kept += 1
    return [LOOKUP] * kept + [d1] * (len(drafts) - kept) + [KNOWN]
