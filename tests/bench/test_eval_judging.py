"""The gap that is judged is the one to the token that was taken."""

import pytest
from evaluation import judging
from evaluation.judging import Pair
from fake_sglang import BEST_LOGIT, FakeSGLang, Model, Settings

from sglang_trunc.core.ties import Promise, Verdict
from sglang_trunc.serving.client import Client

PROMPT, AT = [3, 4, 5], 2
ULP = 0.125


def plain(model, tokens=5):
    out = []
    for _ in range(tokens):
        out.append(model.choose([*PROMPT, *out], speculative=False))
    return out


def judge(model, other, promise=Promise.NEAR_TIES, prompt=PROMPT):
    with FakeSGLang(Settings(model=model)) as server, Client(server.url) as client:
        return judging.judge(client, Pair("run", "1", prompt, plain(model), other), promise)


def test_a_third_token_does_not_hide_behind_a_tie_of_the_first_two():
    model = Model(swaps={len(PROMPT) + AT: 0.1})
    reference = plain(model)
    logits = model.logits([*PROMPT, *reference[:AT]])
    second, third = sorted(range(len(logits)), key=lambda token: -logits[token])[1:3]
    for taken, verdict in ((second, Verdict.NEAR_TIE), (third, Verdict.LARGE_GAP)):
        found = judge(model, [*reference[:AT], taken, 1, 1])
        assert (found.position, found.expected, found.taken) == (AT, reference[AT], taken)
        assert found.gap_ulps == pytest.approx(0.1 / ULP)
        assert found.taken_ulps == pytest.approx((BEST_LOGIT - logits[taken]) / ULP)
        assert found.verdict is verdict


def test_a_prefill_that_rounds_the_other_way_is_a_near_tie_all_the_same():
    """Plain's own token is the second here: the gap is between the two, whichever is above."""
    model = Model(swaps={len(PROMPT) + AT: 0.1})
    reference = plain(model)
    taken = reference[AT]
    swapped = [*reference[:AT], model.choose([*PROMPT, *reference[:AT]], speculative=True), 1, 1]
    with FakeSGLang(Settings(model=model)) as server, Client(server.url) as client:
        pair = Pair("run", "1", PROMPT, swapped, [*reference[:AT], taken, 1, 1])
        found = judging.judge(client, pair, Promise.NEAR_TIES)
    assert found.taken_ulps == pytest.approx(0.1 / ULP)
    assert found.passes


def test_a_text_that_ends_early_is_no_near_tie():
    reference = plain(Model())
    found = judge(Model(), reference[:3])
    assert (found.position, found.taken, found.verdict) == (3, None, Verdict.UNKNOWN_GAP)


def test_equal_bits_excuse_nothing():
    model = Model(swaps={len(PROMPT) + AT: 0.1})
    reference = plain(model)
    taken = model.choose([*PROMPT, *reference[:AT]], speculative=True)
    assert judge(model, [*reference[:AT], taken], Promise.BIT_EQUAL).verdict is Verdict.BROKEN_PROMISE


def test_equal_texts_are_nothing_to_judge():
    with pytest.raises(ValueError, match="equal"):
        judge(Model(), plain(Model()))
