"""Walks over trees of drafted paths: equal to a fresh grammar for every path, and gone without a trace.

First with a small grammar of our own, strict about how it is used; then with SGLang's objects over real matchers.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from sglang_trunc.core.grammar_walk import GrammarWalk

# A token a word; the first ends the text.
WORDS = ["<eos>", "a", "b", "ab", "{", "}", '"', ":", "1", "2", ",", " ", "true", "false", '"a"', "[", "]", "null", "x"]
EOS, A, B, AB, X = 0, 1, 2, 3, 18
THINK_END = (A, B, A)


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


# SGLang's objects. A kind makes one grammar after another, all at their start.


class Kind(NamedTuple):
    make: Callable[[], Any]
    likely: tuple[int, ...] = ()  # tokens worth trying: those that end the thinking


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": [1, 2]}}]}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
REGEX = "(a|b)+(1|2x)?"
WITH_THINKING = "(ab[12]*x)?(a|b)+1?"


def xgrammar_kind(form: str, text: str) -> Kind:
    xgrammar = pytest.importorskip("xgrammar")
    backend = pytest.importorskip("sglang.srt.constrained.xgrammar_backend")
    info = xgrammar.TokenizerInfo(WORDS, vocab_size=len(WORDS), stop_token_ids=[EOS])
    compiler = xgrammar.GrammarCompiler(info)
    compiled = compiler.compile_regex(text) if form == "regex" else compiler.compile_json_schema(text)

    def make():
        matcher = xgrammar.GrammarMatcher(compiled, max_rollback_tokens=backend.MAX_ROLLBACK_TOKENS)
        return backend.XGrammarGrammar(matcher, len(WORDS), compiled, None, text)

    return Kind(make)


def llguidance_kind(form: str, text: str) -> Kind:
    llguidance = pytest.importorskip("llguidance")
    backend = pytest.importorskip("sglang.srt.constrained.llguidance_backend")
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(SmallTokenizer()))
    matcher = llguidance.LLMatcher
    grammar = matcher.grammar_from_regex(text) if form == "regex" else matcher.grammar_from_json_schema(text)

    def make():  # log_level 0: a refusal is no news here
        return backend.GuidanceGrammar(tokenizer, grammar, ll_matcher=matcher(tokenizer, grammar, log_level=0))

    return Kind(make)


class SmallTokenizer:
    """What llguidance asks of a tokenizer."""

    eos_token_id, bos_token_id = EOS, None
    tokens = [word.encode() for word in WORDS]
    special_token_ids = [EOS]

    def __call__(self, text):
        return [self.tokens.index(bytes([byte])) for byte in (text.encode() if isinstance(text, str) else text)]


def reasoner(inner: Kind | None, thinking: bool = True, in_grammar: bool = False, **options) -> Kind:
    """A grammar that waits for the end of the thinking; ``in_grammar``: it also describes the thinking."""
    module = pytest.importorskip("sglang.srt.constrained.reasoner_grammar_backend")
    backend = pytest.importorskip("sglang.srt.constrained.xgrammar_backend").XGrammarGrammarBackend

    def make():
        grammar = module.ReasonerGrammarObject(
            inner.make() if inner is not None else None,
            THINK_END,
            token_filter_fn=backend.set_token_filter,
            allocate_vocab_mask_fn=backend.allocate_vocab_mask,
            decode=lambda tokens: "".join(WORDS[token] for token in tokens),
            **options,
        )
        grammar.maybe_init_reasoning(thinking)
        if in_grammar:
            grammar.set_request_think_end_ids((X,))
            grammar.set_reasoning_in_grammar()
        return grammar

    return Kind(make, (X,) if in_grammar else THINK_END)


STRICT = {"enable_token_filter": True, "think_excluded_token_ids": [4], "max_think_tokens": 4}
KINDS = {
    "xgrammar regex": lambda: xgrammar_kind("regex", REGEX),
    "xgrammar json": lambda: xgrammar_kind("json", SCHEMA),
    "llguidance regex": lambda: llguidance_kind("regex", REGEX),
    "llguidance json": lambda: llguidance_kind("json", SCHEMA),
    "reasoner xgrammar": lambda: reasoner(xgrammar_kind("regex", REGEX)),
    "reasoner llguidance": lambda: reasoner(llguidance_kind("regex", REGEX)),
    "reasoner that does not think": lambda: reasoner(xgrammar_kind("json", SCHEMA), thinking=False),
    "strict reasoner": lambda: reasoner(xgrammar_kind("regex", REGEX), **STRICT),
    "strict reasoner alone": lambda: reasoner(None, **STRICT),
    "thinking in the grammar": lambda: reasoner(
        xgrammar_kind("regex", WITH_THINKING), in_grammar=True, think_starts=("ab1", "a2"), **STRICT
    ),
}


def mask_of(grammar) -> torch.Tensor:
    mask = grammar.allocate_vocab_mask(vocab_size=len(WORDS), batch_size=1, device="cpu")
    return mask.fill_(-1)


def plainly(kind: Kind, tokens: list[int]) -> torch.Tensor | None:
    """The mask [1, words] that plain decoding has behind these tokens; None: no constraint, or not to be reached."""
    grammar = kind.make()
    for token in tokens:
        if grammar.finished or grammar.is_terminated():
            return None
        try:
            grammar.accept_token(token)
        except ValueError:
            return None
    if grammar.finished or grammar.is_terminated():
        return None
    mask = mask_of(grammar)
    grammar.fill_vocab_mask(mask, 0)
    return mask


def grow(kind: Kind, rng: random.Random, tokens: list[int], mistakes: float) -> list[int]:
    """One more token: mostly one that plain decoding may choose, where it may choose any."""
    mask = plainly(kind, tokens)
    legal = [] if mask is None else [t for t in range(len(WORDS)) if mask[0, 0].item() >> t & 1]
    if not legal or rng.random() < mistakes:
        return [*tokens, rng.randrange(len(WORDS))]
    likely = [token for token in kind.likely if token in legal]
    return [*tokens, rng.choice(likely if likely and rng.random() < 0.6 else legal)]


def state(grammar) -> list[dict[str, Any]]:
    """Everything that can be seen of a grammar, from the outside in."""
    seen = []
    while grammar is not None:
        fields = {k: v for k, v in vars(grammar).items() if isinstance(v, int | str | list | tuple | None)}
        if matcher := getattr(grammar, "matcher", None):
            fields["matcher"] = matcher._debug_print_internal_state(), matcher.is_completed()
        if matcher := getattr(grammar, "ll_matcher", None):
            fields["matcher"] = matcher.is_stopped(), matcher.is_accepting(), matcher.stop_reason()
        seen.append(fields)
        grammar = getattr(grammar, "grammar", None)
    return seen


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
