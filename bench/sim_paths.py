"""What every token path says at every depth, for the simulator: from a recorded trace, or by chance.

A ``TokenPath`` ends with one token of a simulated request. On the path that full depth takes, the text is known;
beside it tokens are made up, distinct from all others, since a lane there is never committed and only its agreement
with itself and its probabilities decide how long it lives.

From a trace (``RecordedText``): on the text's path every depth is recorded. Beside it, what was recorded is
used; everything else is **an approximation**: such a path answers like the text's own token at the same position, with
the same agreement between its depths and the same probabilities. The same holds behind the end of the text, for which
its last token stands.

By chance (``ChanceText``): one number u a path, uniform in [0, 1): depth d is right where u is below its agreement. So
a deeper readout that is no worse never loses a token that an earlier one had; wrong early readouts are wrong alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from random import Random
from typing import Protocol

from sglang_trunc.core.pipeline import Choice
from sglang_trunc.core.trace import Text as TracedText
from sglang_trunc.core.trace import Trace

_FRESH = itertools.count(1 << 32)  # tokens that no vocabulary has


class Text(Protocol):
    """One request: its tokens from position ``first`` on, at most up to position ``end``."""

    tokens: list[int]
    first: int
    end: int
    warm: bool  # the first token is a prompt's last one, the second the prefill's answer
    overlap: bool  # the server schedules a round before it knows what the last one gave

    def start(self) -> TokenPath:
        """The path that ends with the first token."""

    def says(self, path: TokenPath, depth: int) -> Choice:
        """What a path chooses at a depth."""

    def node_after(self, path: TokenPath, token: int) -> int | None:
        """The trace's node of a path and a further token, where it has one."""


class TokenPath:
    """Tokens of a text up to one of its positions, or others from some position on."""

    def __init__(self, text: Text, index: int, on_text: bool, node: int | None):
        """``index``: of the path's last token, from the text's first on. ``node``: of the trace, where it has one."""
        self.text = text
        self.index = index
        self.on_text = on_text
        self.node = node
        self.fresh: dict[int, int] = {}  # token of the text's path -> the token that stands for it here
        self.luck: float | None = None
        self._children: dict[int, TokenPath] = {}

    def says(self, depth: int) -> Choice:
        return self.text.says(self, depth)

    def child(self, token: int) -> TokenPath:
        """The path that goes on with a token."""
        if token not in self._children:
            following = self.index + 1
            on_text = self.on_text and following < len(self.text.tokens) and token == self.text.tokens[following]
            self._children[token] = TokenPath(self.text, following, on_text, self.text.node_after(self, token))
        return self._children[token]

    def stand_in(self, token: int) -> int:
        """A token of this path's own for one of the text's path."""
        return self.fresh.setdefault(token, next(_FRESH))


class RecordedText:
    """A request of a trace."""

    def __init__(self, trace: Trace, text: TracedText, limit: int | None = None):
        """``limit``: of tokens, where only the beginning is wanted."""
        self.trace = trace
        self.tokens = text.tokens[: limit and limit + 1]
        self.first = text.first
        self.end = text.end
        self.warm = text.warm
        self.overlap = True
        self._nodes = text.nodes
        self._likes: dict[int, list[int]] = {}  # depth -> index -> node of the text that was read there

    def start(self) -> TokenPath:
        return TokenPath(self, 0, on_text=True, node=self._nodes[0])

    def says(self, path: TokenPath, depth: int) -> Choice:
        recorded = self._recorded(path.node)
        if depth in recorded:
            return recorded[depth]
        like = self._recorded(self._like(path.index, depth))
        for other, choice in recorded.items():
            if other in like:
                path.fresh.setdefault(like[other].token, choice.token)
        return Choice(path.stand_in(like[depth].token), like[depth].probability)

    def node_after(self, path: TokenPath, token: int) -> int | None:
        return None if path.node is None else self.trace.children.get((path.node, token))

    def _recorded(self, node: int | None) -> Mapping[int, Choice]:
        return {} if node is None else self.trace.says.get(node, {})

    def _like(self, index: int, depth: int) -> int:
        """The text's own node at a position. A prompt's last token may not have been read there: then the next one."""
        if depth not in self._likes:
            found = None
            nodes: list[int | None] = []
            for node in reversed(self._nodes):
                found = node if depth in self._recorded(node) else found
                nodes.append(found)
            read = [node for node in reversed(nodes) if node is not None]
            if not read:
                raise ValueError(f"the trace has no readout at depth {depth}")
            self._likes[depth] = read
        likes = self._likes[depth]
        return likes[min(index, len(likes) - 1)]


class ChanceText:
    """A request of ``length`` tokens after its first; ``agreement``: depth -> share of right choices."""

    def __init__(self, recurrences: int, agreement: Mapping[int, float], length: int, seed: int):
        self.tokens = [next(_FRESH) for _ in range(length + 1)]
        self.first = 0
        self.end = length
        self.warm = self.overlap = False
        self._recurrences = recurrences
        self._agreement = agreement
        self._random = Random(seed)

    def start(self) -> TokenPath:
        return TokenPath(self, 0, on_text=True, node=None)

    def says(self, path: TokenPath, depth: int) -> Choice:
        if path.luck is None:
            path.luck = self._random.random()
        right = depth == self._recurrences or path.luck < self._agreement[depth]
        following = path.index + 1
        on_text = path.on_text and following < len(self.tokens)
        token = (self.tokens[following] if on_text else path.stand_in(0)) if right else path.stand_in(1)
        return Choice(token, 1.0 if depth == self._recurrences else self._agreement[depth])

    def node_after(self, path: TokenPath, token: int) -> int | None:
        return None
