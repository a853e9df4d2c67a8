"""The cases of request options, how they are sent, and when two answers count as equal."""

import json

import pytest
from fake_sglang import FakeSGLang, Settings

from sglang_trunc.serving import request_options
from sglang_trunc.serving.client import Completion, RequestRefused
from sglang_trunc.serving.request_options import Case, OptionClient, Parting, body, first_difference, visible

SAID = [9, 9, 17, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]
PROMPT = [3, 6, 9]


def greedy(ids=SAID, text="some greedy text"):
    return Completion(ids, text, {}, 0.0, 0.0)


@pytest.fixture
def cases():
    return request_options.cases(PROMPT, greedy())


def test_every_option_of_a_request_is_in_a_case(cases):
    used = {name for case in cases for name in case.options}
    assert used == {
        *("temperature", "top_p", "top_k", "min_p", "sampling_seed", "n"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "logit_bias"),
        *("custom_logit_processor", "custom_params", "json_schema", "regex", "ebnf", "structural_tag"),
        *("stop", "stop_regex", "stop_token_ids", "no_stop_trim", "skip_special_tokens"),
        *("return_logprob", "top_logprobs_num", "token_ids_logprob", "return_hidden_states"),
    }


def test_cases_are_told_apart_by_name(cases):
    assert len({case.name for case in cases}) == len(cases)


def test_a_case_that_draws_brings_its_seed(cases):
    """Without one, two servers have nothing in common."""
    assert all("sampling_seed" in case.sampling for case in cases if case.draws)


def test_stock_is_no_reference_for_its_faults(cases):
    additive = {"frequency_penalty", "presence_penalty"}
    for case in cases:
        options = set(case.options)
        faulty = "min_p" in options or ("repetition_penalty" in options and bool(options & additive))
        assert case.stock is not faulty, case.name


def test_grammars_do_not_ignore_end_tokens(cases):
    grammars = {"json_schema", "regex", "ebnf", "structural_tag"}
    assert all(case.ends for case in cases if grammars & set(case.options))


@pytest.mark.parametrize(("prompt", "start"), [(PROMPT, 6), ([9, 17], 17)])
def test_the_thinking_budget_is_used_up_in_the_answer(prompt, start):
    """It counts from a token of the prompt that the answer does not repeat, where there is one."""
    case = next(case for case in request_options.cases(prompt, greedy()) if case.name == "custom_logit_processor")
    params = case.sampling["custom_params"]
    assert params["think_start_id"] == start
    assert params["thinking_budget"] == len(prompt) - 1 - prompt.index(start) + 5
    assert params["think_end_id"] not in {*prompt, *SAID}


def test_short_greedy_text_is_refused():
    with pytest.raises(ValueError, match="24 tokens"):
        request_options.cases(PROMPT, greedy(SAID[:-1]))


@pytest.mark.parametrize(
    ("sampling", "draws", "filtered"),
    [
        ({}, False, False),
        ({"temperature": 0.0, "top_p": 0.5}, False, False),
        ({"temperature": 0.8}, True, False),
        ({"temperature": 0.8, "top_k": 1}, False, False),
        ({"temperature": 0.8, "top_k": 5}, True, True),
        ({"temperature": 0.8, "min_p": 0.1}, True, True),
    ],
)
def test_how_a_case_chooses(sampling, draws, filtered):
    case = Case("case", sampling)
    assert (case.draws, case.filtered) == (draws, filtered)


def test_body_is_greedy_unless_the_case_says_otherwise():
    plain = body(Case("plain"), PROMPT, 12)
    assert plain["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    other = body(Case("other", {"temperature": 0.5}, {"return_logprob": True}, ends=True), PROMPT, 12)
    assert other["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 12, "ignore_eos": False}
    assert other["return_logprob"]
    assert other["input_ids"] == PROMPT


# --- sending ---


@pytest.fixture
def server():
    with FakeSGLang(Settings(speculative=True)) as fake:
        yield fake


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_and_whole_answers_agree(server, n):
    request = body(Case("n", {"n": n}), PROMPT, 10)
    with OptionClient(server.url) as client:
        whole, streamed = client.ask(request), client.ask_streamed(request)
    assert len(whole) == len(streamed) == n
    assert visible(whole) == visible(streamed)


@pytest.mark.parametrize("ask", ["ask", "ask_streamed"])
def test_a_refusal_is_raised(server, ask):
    server.settings.refused = "regex"
    with OptionClient(server.url) as client, pytest.raises(RequestRefused, match="regex is refused"):
        getattr(client, ask)(body(Case("regex", {"regex": "a"}), PROMPT, 10))


# --- comparing ---


def answer(**changes):
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": changes.pop("cached_tokens", 0),
        "output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None]],
        "hidden_states": [[[0.0, 0.0], [1.0, 2.0]], [3.0, 4.0]],
    }
    whole = {"output_ids": [4, 5], "text": "ab", "meta_info": meta}
    for name in list(changes):
        (whole if name in whole else meta)[name] = changes[name]
    return json.loads(json.dumps(whole))


def difference(left, right, **options):
    return first_difference(visible(left, **options), visible(right, **options))


def test_equal_answers():
    assert difference([answer()], [answer(cached_tokens=2)]) is None


@pytest.mark.parametrize(
    ("changes", "field", "place"),
    [
        ({"output_ids": [4, 6], "text": "ac"}, "output_ids", 1),
        ({"output_ids": [4, 5, 6]}, "output_ids", 2),
        ({"text": "a"}, "text", None),
        ({"finish_reason": {"type": "stop", "matched": 5}}, "finish", None),
        ({"prompt_tokens": 4}, "prompt_tokens", None),
        ({"completion_tokens": 3}, "completion_tokens", None),
        ({"output_token_logprobs": [[-0.5, 4, None], [-0.5, 5, None]]}, "output_token_logprobs", 1),
        ({"output_top_logprobs": [[], []]}, "output_top_logprobs", None),
        ({"hidden_states": [[[1.0, 2.0]], [3.0, 5.0]]}, "hidden_states", 1),
    ],
)
def test_whatever_a_client_sees_counts(changes, field, place):
    found = difference([answer()], [answer(**changes)])
    assert found is not None
    assert (found.answer, found.field, found.place) == (0, field, place)


def test_states_of_prompt_tokens_do_not_count():
    """How many there are depends on what the prefix cache had."""
    assert difference([answer()], [answer(hidden_states=[[[1.0, 2.0]], [3.0, 4.0]])]) is None


def test_forbidden_tokens_among_the_best_do_not_count():
    """Their logprobs are equal, so which ones are named says nothing."""
    best, forbidden = [-0.25, 7, None], -3.4028234663852886e38
    one, other = ([[best, [forbidden, token, None]]] for token in (1, 2))
    assert difference([answer(output_top_logprobs=one)], [answer(output_top_logprobs=other)]) is None
    worse = [[best, [-9.0, 1, None]]]
    assert difference([answer(output_top_logprobs=one)], [answer(output_top_logprobs=worse)]) is not None


def test_values_can_be_left_out():
    other = answer(output_token_logprobs=[[-0.5, 4, None], [-0.5, 5, None]], hidden_states=[[[9.0, 2.0]], [3.0, 4.0]])
    assert difference([answer()], [other], values=False) is None
    assert difference([answer()], [answer(text="b")], values=False) is not None


def test_each_of_several_answers_counts():
    assert difference([answer(), answer()], [answer(), answer(text="b")]).answer == 1
    assert difference([answer(), answer()], [answer()]) == Parting(1, "answers", None, "2 against 1")


def test_a_difference_is_said_in_a_line():
    found = difference([answer()], [answer(output_ids=[4, 6])])
    assert str(found) == "output_ids at 1 of answer 0: 5 against 6"
    assert len(str(difference([answer(text="x" * 500)], [answer()]))) < 200
