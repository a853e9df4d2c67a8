"""A request's grammar at drafted positions: to any path behind its committed output, and back.

The masks of a round belong to rows whose requests stand at different tokens, drafted ones included. A walk takes the
one grammar object of a request from path to path, rolls back only what differs, and leaves it as it found it:
committing tokens is the scheduler's, once the round is over. Until ``close`` nobody else may move the grammar.

Plain decoding (``SamplingBatchInfo.update_regex_vocab_mask``) masks a row unless its grammar is finished or terminated;
so does ``fill``. Behind a token that the grammar refuses there is no row of plain decoding to be equal to.

What SGLang 0.5.23's objects (``constrained/*_backend.py``) do not take back by themselves, and what is done about it:

* ``rollback`` leaves ``current_token``, and a refused token is noted there, too: ``close`` puts back all plain fields,
  those of a grammar inside a reasoner's wrapper included;
* ``XGrammarGrammar.rollback(0)`` forgets all ``accepted_tokens``: it is never called with 0;
* behind its end xgrammar ignores tokens, yet ``ReasonerGrammarObject`` counts them and would roll back too much:
  nothing is accepted there;
* llguidance 1.9.1 (field ``ll_matcher``): a refused token breaks the matcher for good; rollback leaves a part of an
  end-of-text token that its grammar has in the middle; and the newest mask is kept by row number and lexer state, which
  another branch may share. So every token goes to a copy, and going back puts back the matcher that stood there.

Outlines cannot roll back and is refused at admission. xgrammar 0.2.7 has no limit on rollback, whatever it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Grammar(Protocol):
    """What a walk asks of SGLang's ``BaseGrammarObject``."""

    current_token: int | None

    @property
    def finished(self) -> bool: ...

    def accept_token(self, token: int) -> None:
        """Go one token on; ``ValueError`` where the grammar forbids it."""

    def rollback(self, k: int) -> None: ...

    def is_terminated(self) -> bool: ...

    def fill_vocab_mask(self, mask: Tensor, row: int) -> None: ...


class GrammarWalk:
    """One grammar during one readout. Its base is where the grammar stands at construction."""

    def __init__(self, grammar: Grammar):
        self._grammar = grammar
        self._taken: list[int] = []  # tokens accepted behind the base
        self._layers = _layers(grammar)
        self._fields = [_plain_fields(layer) for layer in self._layers]
        self._copied = [layer for layer in self._layers if hasattr(layer, "ll_matcher")]
        self._matchers: list[list[Any]] = []  # of those layers, before each token taken
        self._closed = False

    def __enter__(self) -> GrammarWalk:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def at(self, path: Sequence[int]) -> bool:
        """Move to base + path; whether the grammar constrains the next token there.

        False where it is finished, terminates on the way or at the end, or refuses a token of the path; it then
        stands at the last token that it took.
        """
        assert not self._closed, "the walk has been closed"
        self._return_to(_common(self._taken, path))
        for token in path[len(self._taken) :]:
            if not self._constrains or not self._takes(token):
                return False
        return self._constrains

    def fill(self, mask: Tensor, row: int, path: Sequence[int]) -> bool:
        """Fill one row of the grammar's mask for the token after base + path; whether it is constrained.

        ``mask``: as the grammar's ``allocate_vocab_mask`` makes it, on CPU; a row without constraint stays as it is.
        """
        constrained = self.at(path)
        if constrained:
            self._grammar.fill_vocab_mask(mask, row)
        return constrained

    def close(self) -> None:
        """Back to the base, in every field. Does nothing the second time."""
        if self._closed:
            return
        self._return_to(0)
        for layer, fields in zip(self._layers, self._fields, strict=True):
            vars(layer).update(fields)
        self._closed = True

    @property
    def _constrains(self) -> bool:
        return not self._grammar.finished and not self._grammar.is_terminated()

    def _return_to(self, length: int) -> None:
        """Back to the base and so many of the tokens taken."""
        surplus = len(self._taken) - length
        if surplus:
            self._grammar.rollback(surplus)
            self._put(self._matchers[length])
            del self._taken[length:], self._matchers[length:]

    def _takes(self, token: int) -> bool:
        """Accept a token, or leave the grammar's state as it is."""
        matchers = [layer.ll_matcher for layer in self._copied]
        self._put([matcher.deep_copy() for matcher in matchers])
        try:
            self._grammar.accept_token(token)
        except ValueError:
            self._put(matchers)
            return False
        self._taken.append(token)
        self._matchers.append(matchers)
        return True

    def _put(self, matchers: Sequence[Any]) -> None:
        for layer, matcher in zip(self._copied, matchers, strict=True):
            layer.ll_matcher = matcher


def _layers(grammar: Any) -> list[Any]:
    """A grammar and those inside it, from the outside in; a reasoner's wrapper has one inside, or none."""
    layers = []
    while grammar is not None:
        layers.append(grammar)
        grammar = getattr(grammar, "grammar", None)
    return layers


def _plain_fields(layer: Any) -> dict[str, Any]:
    """Fields that hold a number, a string or nothing. Whatever holds more is rolled back by the grammar itself."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, int | float | str | None)}


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
