"""SGLang's grammar objects over real matchers and a vocabulary of a few words, and what plain decoding makes of them.

A kind makes one grammar after another, all at their start. Whatever is not installed skips the test that asks for it.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

# A token a word; the first ends the text.
WORDS = ["<eos>", "a", "b", "ab", "{", "}", '"', ":", "1", "2", ",", " ", "true", "false", '"a"', "[", "]", "null", "x"]
EOS, A, B, AB, X = 0, 1, 2, 3, 18
THINK_END = (A, B, A)


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
SPECIAL = 'start: ("a" | "b")+ <[0]> ("x" | <[0]> "1")+'
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
    grammar = {
        "regex": matcher.grammar_from_regex,
        "json": matcher.grammar_from_json_schema,
        "lark": matcher.grammar_from_lark,
    }[form](text)

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
    "llguidance special token": lambda: llguidance_kind("lark", SPECIAL),
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
