"""SGLang's own ``Req`` fed with whole runs ends where it ends when fed token by token."""

from __future__ import annotations

import random
import types

import pytest

from sglang_trunc.engine import finish

pytestmark = pytest.mark.usefixtures("sglang_context", "ours")
STOP, OTHER_STOP = 300, 301


@pytest.fixture
def ours(monkeypatch):
    spec = types.SimpleNamespace(speculative_algorithm="TRUNC")
    monkeypatch.setattr(finish, "get_spec", lambda: spec)
    return spec


@pytest.fixture(scope="module")
def tokenizer(sglang_context, tiny_checkpoint):
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(str(tiny_checkpoint("ouro")))


@pytest.fixture
def decode_runs(tokenizer):
    """``decode_runs(runs, **sampling)``: (output ids through the stop, finish reason, whether it has ended)."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    def feed(runs: list[list[int]], **sampling) -> tuple[list[int], dict | None]:
        params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 100, **sampling})
        params.normalize(tokenizer)
        request = Req("id", "", [5, 6], params, eos_token_ids={0}, vocab_size=512)
        request.tokenizer = tokenizer
        for run in runs:
            request.output_ids.extend(run)
            request.update_finish_state(len(run))
            if request.finished():
                break
        reason = request.finished_reason.to_json() if request.finished() else None
        return list(request.output_ids_through_stop), reason

    return feed


@pytest.mark.parametrize(
    ("cap", "ids", "reason"),
    [
        (5, [10, 11, STOP], {"type": "stop", "matched": STOP}),  # sglang#31599: the cap hid an earlier stop
        (3, [10, 11, STOP], {"type": "stop", "matched": STOP}),
        (2, [10, 11], {"type": "length", "length": 2}),
        (1, [10], {"type": "length", "length": 1}),
    ],
)
def test_stop_and_cap_in_one_run(decode_runs, cap, ids, reason):
    run = [10, 11, STOP, 20, 21, 22]
    assert decode_runs([run], max_new_tokens=cap, stop_token_ids=[STOP]) == (ids, reason)


def test_stop_token_before_a_stop_string(decode_runs, tokenizer):
    string = tokenizer.decode([400, 401])
    run = [310, STOP, 311, 400, 401, 312]
    assert decode_runs([run], stop=[string], stop_token_ids=[STOP]) == (
        [310, STOP],
        {"type": "stop", "matched": STOP},
    )


def test_first_stop_string_in_the_text_not_in_the_list(decode_runs, tokenizer):
    early, late = tokenizer.decode([400, 401]), tokenizer.decode([410, 411])
    run = [310, 400, 401, 311, 410, 411]
    assert decode_runs([run], stop=[late, early]) == ([310, 400, 401], {"type": "stop", "matched": early})


def test_runs_of_any_length_end_where_single_tokens_end(decode_runs, tokenizer):
    """Random texts over few tokens, so that stops of every kind fall into every place of a run."""
    choose = random.Random(5)
    letters = [300 + i for i in range(12)] + [0]
    ended = {"stop": 0, "length": 0, None: 0}
    for _ in range(300):
        tokens = [choose.choice(letters) for _ in range(30)]
        sampling = {"max_new_tokens": choose.choice([3, 9, 20, 100])}
        if choose.random() < 0.7:
            sampling["stop"] = [
                tokenizer.decode(choose.choices(letters[:-1], k=choose.choice([1, 2])))[choose.choice([0, 1]) :]
                for _ in range(choose.choice([1, 2, 3]))
            ]
        if choose.random() < 0.3:
            sampling["stop_regex"] = [choose.choice(["e[a-t]e", "t.$", "[aeo]{3}"])]
        if choose.random() < 0.5:
            sampling["stop_token_ids"] = choose.choices(letters[:-1], k=2)
        runs, at = [], 0
        while at < len(tokens):
            length = choose.randint(1, 8)
            runs.append(tokens[at : at + length])
            at += length
        want = decode_runs([[token] for token in tokens], **sampling)
        assert decode_runs(runs, **sampling) == want, (tokens, runs, sampling)
        ended[want[1] and want[1]["type"]] += 1
    assert min(ended["stop"], ended["length"]) > 20


def test_overshoot_stays_behind_the_stop(decode_runs, tokenizer, monkeypatch):
    """SGLang counts on ``output_ids`` holding the whole run."""
    from sglang.srt.managers.schedule_batch import Req

    seen = []
    original = Req.update_finish_state
    monkeypatch.setattr(Req, "update_finish_state", lambda self, n=1: (original(self, n), seen.append(self))[0])
    decode_runs([[310, 400, 401, 311]], stop=[tokenizer.decode([400, 401])])
    assert list(seen[-1].output_ids) == [310, 400, 401, 311]
    assert seen[-1].finished_len == 3


def test_other_algorithms_keep_sglangs_rules(ours):
    ours.speculative_algorithm = None
    request = types.SimpleNamespace(
        sampling_params=types.SimpleNamespace(stop_strs=["x"], stop_regex_strs=[]),
        to_finish=None,
        grammar=None,
        finished=lambda: False,
    )
    assert finish.update_token_by_token(lambda req, n: (req, n), request, 4) == (request, 4)
