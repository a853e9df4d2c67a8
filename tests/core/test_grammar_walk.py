"""Walks over trees of drafted paths: equal to a fresh grammar for every path, and gone without a trace.

First with a small grammar of our own, strict about how it is used; then with SGLang's objects over real matchers.
"""

import random

import pytest
import torch

from sglang_trunc.core.grammar_walk import GrammarWalk
from tests.core.grammar_kinds import (
    AB,
    EOS,
    KINDS,
    SCHEMA,
    A,
    B,
    X,
    grow,
    llguidance_kind,
    mask_of,
    plainly,
    reasoner,
    state,
)


class Brackets:
    """Balanced brackets: 1 opens, 2 closes, 0 ends the text once it is balanced. Refuses what a walk must not do."""

    def __init__(self, tokens=()):
        self.current_token: int | None = None
        self.finished = False
        self.calls: list[str] = []
        self._depths = [0]
        for token in tokens:
            self.accept_token(token)
        self.calls.clear()

    def accept_token(self, token: int) -> None:
        assert not self.is_terminated(), "accepted behind the end"
        self.current_token = token
        self.calls.append(f"+{token}")
        depth = self._depths[-1]
        if not self._allows(token):
            raise ValueError(token)
        self._depths.append({1: depth + 1, 2: depth - 1, 0: -1}[token])

    def rollback(self, k: int) -> None:
        assert 0 < k < len(self._depths)
        self.calls.append(f"-{k}")
        del self._depths[-k:]

    def is_terminated(self) -> bool:
        return self._depths[-1] < 0

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        assert not self.is_terminated()
        mask[row] = sum(1 << token for token in range(3) if self._allows(token))

    def _allows(self, token: int) -> bool:
        depth = self._depths[-1]
        return {0: depth == 0, 1: True, 2: depth > 0}.get(token, False)


def test_moving_between_siblings_keeps_the_common_beginning():
    grammar = Brackets([1])
    walk = GrammarWalk(grammar)
    assert walk.at([1, 1, 2])
    assert walk.at([1, 1, 1, 2])
    assert walk.at([1])
    assert walk.at([1])
    assert walk.at([])
    assert grammar.calls == ["+1", "+1", "+2", "-1", "+1", "+2", "-3", "-1"]


def test_fill_writes_its_own_row_alone():
    mask = torch.full((3, 1), -1, dtype=torch.int32)
    with GrammarWalk(Brackets()) as walk:
        assert walk.fill(mask, 1, [1])
    assert mask.flatten().tolist() == [-1, 0b110, -1]


def test_behind_its_end_a_grammar_constrains_nothing_and_takes_nothing():
    mask = torch.full((1, 1), -1, dtype=torch.int32)
    grammar = Brackets([1])
    walk = GrammarWalk(grammar)
    for path in ([2, 0], [2, 0, 1], [2, 0, 1, 1]):
        assert not walk.fill(mask, 0, path)
    assert mask.item() == -1
    assert walk.fill(mask, 0, [2, 1])
    assert mask.item() == 0b110


def test_a_refused_token_ends_the_path_and_nothing_else():
    mask = torch.full((1, 1), -1, dtype=torch.int32)
    walk = GrammarWalk(Brackets([1]))
    for path in ([2, 2], [2, 2, 1], [7], [0]):
        assert not walk.fill(mask, 0, path)
        assert mask.item() == -1
    assert walk.fill(mask, 0, [2])
    assert mask.item() == 0b011


@pytest.mark.parametrize("finished", [True, False])
def test_a_grammar_that_is_through_is_left_alone(finished):
    grammar = Brackets([1] if finished else [1, 2, 0])
    grammar.finished = finished
    with GrammarWalk(grammar) as walk:
        assert not walk.at([])
        assert not walk.at([1, 2])
    assert grammar.calls == []


@pytest.mark.parametrize("path", [[], [7], [1], [2, 0], [2, 1, 0]])
def test_closing_returns_to_the_base_once(path):
    grammar = Brackets([1])
    walk = GrammarWalk(grammar)
    walk.at(path)
    walk.close()
    assert grammar.current_token == 1
    assert grammar._depths == [0, 1]
    calls = list(grammar.calls)
    walk.close()
    assert grammar.calls == calls
    with pytest.raises(AssertionError, match="closed"):
        walk.at([])


def test_an_error_in_between_does_not_keep_the_grammar_out():
    grammar = Brackets()
    with pytest.raises(IndexError), GrammarWalk(grammar) as walk:
        walk.fill(torch.zeros(1, 1, dtype=torch.int32), 5, [1])
    assert grammar._depths == [0]


# SGLang's objects.


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_path_of_a_tree_is_as_in_a_fresh_grammar(kind):
    kind = kind()
    for seed in range(25):
        rng = random.Random(seed)
        base: list[int] = []
        for _ in range(rng.randrange(8)):
            longer = grow(kind, rng, base, mistakes=0)
            if plainly(kind, longer) is not None:
                base = longer
        grammar, twin = kind.make(), kind.make()
        for token in base:
            grammar.accept_token(token)
            twin.accept_token(token)
        paths: list[list[int]] = [[]]
        for _ in range(14):
            parent = rng.choice(paths[-4:] + paths)
            paths.append(grow(kind, rng, base + parent, mistakes=0.15)[len(base) :])
        walk = GrammarWalk(grammar)
        for path in rng.choices(paths, k=25):
            expected, mask = plainly(kind, base + path), mask_of(grammar)
            assert walk.fill(mask, 0, path) is (expected is not None), (seed, base, path)
            assert torch.equal(mask, mask_of(grammar) if expected is None else expected), (seed, base, path)
        walk.close()
        assert state(grammar) == state(twin), (seed, base)
        for _ in range(6):  # and goes on like one that was never walked
            base = grow(kind, rng, base, mistakes=0)
            if plainly(kind, base) is None:
                break
            grammar.accept_token(base[-1])
            twin.accept_token(base[-1])
            assert state(grammar) == state(twin), (seed, base)
            mask = mask_of(grammar)
            grammar.fill_vocab_mask(mask, 0)
            assert torch.equal(mask, plainly(kind, base)), (seed, base)


@pytest.mark.parametrize("kind", ["xgrammar regex", "llguidance regex", "reasoner xgrammar", "reasoner llguidance"])
@pytest.mark.parametrize(
    "path",
    [
        [],
        [X],  # refused at once
        [A, B, X, A],  # refused on the way
        [A, 8, EOS],  # ends
        [A, 8, EOS, A, A, A],  # ends on the way
        [AB] * 300,  # longer than the rollback that SGLang asks xgrammar for
    ],
    ids=lambda path: f"{len(path)} from {path[:1]}",
)
def test_one_path_and_back(kind, path):
    kind = KINDS[kind]()
    base = [*kind.likely, A, B]
    grammar, twin = kind.make(), kind.make()
    for token in base:
        grammar.accept_token(token)
        twin.accept_token(token)
    with GrammarWalk(grammar) as walk:
        assert walk.at(path) is (plainly(kind, base + path) is not None)
    assert state(grammar) == state(twin)
    mask = mask_of(grammar)
    grammar.fill_vocab_mask(mask, 0)
    assert torch.equal(mask, plainly(kind, base))


def test_llguidance_gives_out_no_mask_of_another_branch():
    """Its own rollback does (1.9.1): behind a list and behind a truth value it counts as many rows."""
    kind = llguidance_kind("json", SCHEMA)
    base, branches = [4, 14, 7], ([15, 11], [12, 11])
    grammar = kind.make()
    for token in base:
        grammar.accept_token(token)
    for path in (*branches, [], *reversed(branches)):
        mask = mask_of(grammar)
        with GrammarWalk(grammar) as walk:
            walk.fill(mask, 0, path)
        assert torch.equal(mask, plainly(kind, base + path))


@pytest.mark.parametrize("inner", ["xgrammar regex", "llguidance regex"])
def test_thinking_ends_inside_the_path(inner):
    kind = reasoner(KINDS[inner]())
    before, path = [AB, A, B], [A, A, EOS]  # the path's first token completes the end of the thinking
    grammar, twin = kind.make(), kind.make()
    for token in before:
        grammar.accept_token(token)
        twin.accept_token(token)
    walk = GrammarWalk(grammar)
    for length in (1, 3, 2, 3, 0, 2):
        expected, mask = plainly(kind, before + path[:length]), mask_of(grammar)
        assert walk.fill(mask, 0, path[:length]) is (expected is not None)
        assert expected is None or torch.equal(mask, expected)
    walk.close()
    assert state(grammar) == state(twin)
