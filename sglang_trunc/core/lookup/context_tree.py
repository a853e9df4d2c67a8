"""The contexts of a text's positions, in a tree of bounded depth: where did the last tokens occur earlier?

Position p stands between tokens p-1 and p; its context is the tokens before it, newest first. The tree is the
path-compressed trie of all contexts, cut at ``depth`` tokens: the suffix tree of the reversed text (which is the link
tree of the text's suffix automaton), cut where no query looks. Its edges are parts of the text.

Every node knows the newest position below it. So the descent that inserts a position passes, from short to long
matches, exactly the answers "the newest earlier position whose context agrees in k tokens". They never change
afterwards, and are kept as the position's *steps*: pairs (prior, reach), reach rising, prior falling. All older
positions that agree in k tokens are then found by following steps, without the tree.

Costs: adding a token takes at most ``depth`` comparisons and as many hash probes, whatever the length of the text;
the hash table grows by doubling, so that is amortised. No Python object is kept per token: a token has 8 bytes and 5
for every step, a node 13 and 6 to 12 of the table; 2 nodes and ``depth`` steps a token at most. Measured:
``bench/lookup_index.py``.

``index`` and ``corpus`` hold a tree each and read continuations from ``text``. Positions count from the start of
``text``, padding included.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SEPARATOR = -1  # in ``text``: before the first token, and between documents; equal to no token
MAX_DEPTH = 255  # depths are stored as bytes
LARGEST_TOKEN = 2**31 - 1  # tokens are stored as 32-bit integers

_ROOT = 0
_FIRST_SLOTS = 64
# Odd numbers whose bits look random: the golden ratio's, and a multiplier of xorshift*. Below 2**30, one digit of
# CPython's integers: products of such are the quick ones.
_MIX_NODE, _MIX_TOKEN = 0x278DDE6D, 0x2545F491


class Steps(NamedTuple):
    """Newest earlier positions by agreement: ``priors[i]`` for matches of more than ``reaches[i-1]``, up to
    ``reaches[i]`` tokens."""

    priors: array[int]  # int32, falling
    reaches: array[int]  # uint8, rising


class ContextTree:
    """Contexts of up to ``depth`` tokens (1 to 255, else ``ValueError``) of a growing text."""

    def __init__(self, depth: int):
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth must be from 1 to {MAX_DEPTH}, got {depth}")
        self.depth = depth
        # The padding makes every context ``depth`` tokens long. No two positions agree in padding: counted back from
        # different places, one of them still reads a token there.
        self.text = array("i", [SEPARATOR] * depth)
        self._priors, self._reaches = array("i"), array("B")
        self._ends = array("i", [0] * (depth + 1))  # position -> end of its steps; they start where the last one's end
        # Nodes, root first. A node's context is the ``_depths`` tokens before ``_newest``.
        self._parents, self._keys = array("i", [_ROOT]), array("i", [SEPARATOR])
        self._newest, self._depths = array("i", [0]), array("B", [0])
        # Open addressing: (parent, first token of the edge) -> node; 0, the root, is no one's child and means free.
        self._slots = array("i", [0] * _FIRST_SLOTS)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, their spare room included."""
        nodes = (self._parents, self._keys, self._newest, self._depths, self._slots)
        return sum(map(sys.getsizeof, (self.text, self._priors, self._reaches, self._ends, *nodes)))

    def push(self, token: int) -> None:
        """Append a token, or ``SEPARATOR``, without making the position after it findable."""
        self.text.append(token)
        self._ends.append(len(self._priors))

    def add(self, token: int) -> None:
        """Append a token and the position after it. ``ValueError``: not from 0 to 2**31 - 1."""
        _check_token(token)
        text = self.text
        text.append(token)
        position = len(text)
        node, slot, matched = self._descend(text, self.depth, self._priors, self._reaches, position)
        self._ends.append(len(self._priors))
        if matched < self.depth:
            if self._slots[slot]:
                node = self._split(slot, matched, position)
                slot = self._slot(node, text[position - 1 - matched])
            self._slots[slot] = self._new_node(node, text[position - 1 - matched], position, self.depth)
            if 3 * len(self._parents) > 2 * len(self._slots):
                self._grow()

    def steps(self, position: int) -> Steps:
        """Steps of a position that was added."""
        start, end = self._ends[position - 1], self._ends[position]
        return Steps(self._priors[start:end], self._reaches[start:end])

    def steps_after(self, context: Sequence[int]) -> Steps:
        """Steps of the position that these tokens, oldest first, would lead to; the tree stays as it is.

        Only the last ``depth`` count. ``ValueError``: one of them is not from 0 to 2**31 - 1.
        """
        found = Steps(array("i"), array("B"))
        last = context[-self.depth :]
        if last:
            _check_token(min(last))
            _check_token(max(last))
        self._descend(array("i", last), len(last), *found, 0)
        return found

    def occurrences(self, steps: Steps, shortest: int, longest: int) -> Iterator[tuple[int, int]]:
        """(position, match): earlier positions with these steps, longest match first, then the newest first.

        ``match``: tokens before both positions that agree, counted up to ``longest``; at least ``shortest`` >= 1.
        Lazy; a match length costs what all longer ones have yielded, and its own.
        """
        length = min(longest, steps.reaches[-1]) if steps.reaches else 0
        longer: list[int] = []
        while length >= shortest:
            seen, chain, length_below = iter(longer), [], 0
            skipped = next(seen, None)
            for position, below in self._agreeing(steps, length):
                length_below = max(length_below, below)
                if position == skipped:
                    skipped = next(seen, None)
                elif position:
                    yield position, length
                chain.append(position)
            # Match lengths between the two have no position that is not among the longer matches already.
            longer, length = chain[:-1], length_below

    def _agreeing(self, steps: Steps, length: int) -> Iterator[tuple[int, int]]:
        """Positions that agree in ``length`` tokens, newest first, then 0; and with each the greatest match of those
        passed over on the way, 0 if there is none."""
        priors, reaches, ends = self._priors, self._reaches, self._ends
        first, end = 0, len(steps.priors)
        at_priors, at_reaches = steps
        while True:
            at, below = first, 0
            while at < end and at_reaches[at] < length:
                below = at_reaches[at]
                at += 1
            if at == end:
                yield 0, below
                return
            position = at_priors[at]
            yield position, below
            first, end = ends[position - 1], ends[position]
            at_priors, at_reaches = priors, reaches

    def _descend(
        self, text: array[int], limit: int, priors: array[int], reaches: array[int], position: int
    ) -> tuple[int, int, int]:
        """Follow the context at the end of ``text`` as far as the tree agrees, at most ``limit`` tokens.

        Appends the steps. Makes ``position`` the newest one of the nodes that agree in full, unless it is 0.
        Returns the last such node, the slot of the edge behind it (free if there is none; without meaning at the
        limit) and the number of tokens that agree.
        """
        own, slots, parents, keys = self.text, self._slots, self._parents, self._keys
        newest, depths = self._newest, self._depths
        mask, end, prior = len(slots) - 1, len(text), 0
        node = slot = matched = 0
        while matched < limit:
            token = text[end - 1 - matched]
            mixed = node * _MIX_NODE + token * _MIX_TOKEN
            slot = (mixed ^ mixed >> 15) & mask
            child = slots[slot]
            while child and (parents[child] != node or keys[child] != token):
                slot = slot + 1 & mask
                child = slots[slot]
            if not child:
                break
            at, goal = newest[child], depths[child]
            goal = goal if goal < limit else limit
            matched += 1
            if matched < goal and text[end - 1 - matched] == own[at - 1 - matched]:
                matched = _agreement(text, end, own, at, matched, goal)
            if at == prior:
                reaches[-1] = matched
            else:
                priors.append(at)
                reaches.append(matched)
                prior = at
            if matched < depths[child]:
                break
            if position:
                newest[child] = position
            node = child
        return node, slot, matched

    def _slot(self, node: int, token: int) -> int:
        """The free slot for an edge that is not in the table yet."""
        slots = self._slots
        mask = len(slots) - 1
        mixed = node * _MIX_NODE + token * _MIX_TOKEN
        slot = (mixed ^ mixed >> 15) & mask
        while slots[slot]:
            slot = slot + 1 & mask
        return slot

    def _split(self, slot: int, depth: int, position: int) -> int:
        """Put a node of this depth, with this newest position, on the edge in ``slot``; returns it."""
        child = self._slots[slot]
        upper = self._new_node(self._parents[child], self._keys[child], position, depth)
        # The upper half keeps the edge's parent and token, so it keeps the slot.
        self._slots[slot] = upper
        self._parents[child], self._keys[child] = upper, self.text[self._newest[child] - 1 - depth]
        self._slots[self._slot(upper, self._keys[child])] = child
        return upper

    def _new_node(self, parent: int, key: int, newest: int, depth: int) -> int:
        self._parents.append(parent)
        self._keys.append(key)
        self._newest.append(newest)
        self._depths.append(depth)
        return len(self._parents) - 1

    def _grow(self) -> None:
        """Double the table."""
        self._slots = array("i", [0]) * (2 * len(self._slots))
        for node in range(1, len(self._parents)):
            self._slots[self._slot(self._parents[node], self._keys[node])] = node


def _agreement(text: array[int], end: int, own: array[int], at: int, agreed: int, goal: int) -> int:
    """How many tokens before ``end`` and ``at`` agree, at most ``goal``; the first ``agreed`` do, and the next one.

    A long edge agrees in full, which one comparison of slices shows, or parts soon.
    """
    if text[end - goal : end - agreed] == own[at - goal : at - agreed]:
        return goal
    agreed += 1
    while text[end - 1 - agreed] == own[at - 1 - agreed]:
        agreed += 1
    return agreed


def _check_token(token: int) -> None:
    if not 0 <= token <= LARGEST_TOKEN:
        raise ValueError(f"a token must be from 0 to {LARGEST_TOKEN}, got {token}")
