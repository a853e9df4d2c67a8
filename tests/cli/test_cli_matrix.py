"""The option matrix end to end against fake servers: what is exact, refused, a near tie or different, the exit code.

The fake servers ignore most options, so all cases of a prompt get its greedy text, and a swap changes all of them.
"""

import json
import random

import pytest
import torch
from fake_sglang import FakeSGLang, Model, Settings
from typer.testing import CliRunner

from sglang_trunc.cli import app, matrix, matrix_check, report
from sglang_trunc.cli.matrix_check import Asked, Checker, Job, Outcome, Result, choice_gap
from sglang_trunc.cli.prompts import Prompt
from sglang_trunc.core import noise
from sglang_trunc.core.ties import Promise, Verdict
from sglang_trunc.serving.client import RequestRefused
from sglang_trunc.serving.request_options import Case, OptionClient

PROMPT = "def f(x):\n"  # ten bytes, so that a prefix length names one output index
LENGTH = 10
TOKENS = 26
ULP = 0.125  # at the fake model's best logit, 20


@pytest.fixture
def options(model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"kind": "text", "text": PROMPT}))

    def make(**changes):
        defaults = {"model_path": model, "prompts": path, "max_new_tokens": TOKENS, "algorithms": ("trunc",)}
        return matrix.MatrixOptions(**(defaults | {"concurrency": (1, 3)} | changes))

    return make


def swap(monkeypatch, index, gap):
    monkeypatch.setenv("FAKE_SWAP", f"{LENGTH + index}:{gap}")


@pytest.mark.usefixtures("fake_servers")
class TestMatrix:
    def test_equal_answers_pass(self, options, console):
        result = matrix.verify(options(), console)
        assert result.passes
        assert {one.result for one in result.outcomes} == {Result.EXACT}
        by_level = {level: [one.case for one in result.outcomes if one.concurrency == level] for level in (1, 3)}
        assert sorted(by_level[1]) == sorted(by_level[3])
        assert by_level[1] != by_level[3]  # mixed
        assert len(set(by_level[1])) == len(by_level[1]) > 30

    def test_servers_and_what_they_are_started_with(self, options, console, fake_servers):
        assert matrix.run(options(algorithms=matrix.ALGORITHMS, server_args=("--page-size", "16")), console) == 0
        assert [server.name for server in fake_servers] == [*matrix.ALGORITHMS, "block-of-one", "plain"]
        for server in fake_servers:
            assert {"--page-size", "--enable-custom-logit-processor", "--enable-return-hidden-states"} < {*server.args}
        assert all(name in server.args for server, name in zip(fake_servers, matrix.ALGORITHMS, strict=False))
        *speculative, one_token, plain = fake_servers
        assert one_token.env == {"SGLANG_TRUNC_BLOCK_SIZE": "1"}
        assert "trunc" in one_token.args
        assert "--speculative-algorithm" not in plain.args
        assert {"--enable-deterministic-inference", "--disable-overlap-schedule"} < {*plain.args}
        assert not any("--enable-deterministic-inference" in server.args for server in speculative)
        said = console.export_text()
        assert "PASS" in said
        assert "loopspec_dual: " in said

    def test_a_difference_fails(self, options, console, monkeypatch, tmp_path):
        swap(monkeypatch, 4, ULP / 2)  # the fake device is cpu, which promises equal bits
        assert matrix.run(options(json=tmp_path / "deep" / "matrix.json"), console) == 1
        said = console.export_text()
        assert "DIFFERS at token 4 (2 of 2)" in said
        assert "trunc, logit_bias, prompt 0, concurrency 1: output_ids at 4 of answer 0" in said
        assert "and 24 more" in said
        written = json.loads((tmp_path / "deep" / "matrix.json").read_text())
        assert not written["passes"]
        assert written["counts"]["trunc"]["DIFFERS"] == len(written["results"]) - written["counts"]["trunc"]["exact"]
        assert {one["place"] for one in written["results"] if one["result"] == "DIFFERS"} == {4}

    def test_near_ties_pass_where_the_back_end_allows_them(self, options, console, monkeypatch):
        swap(monkeypatch, 4, ULP / 2)
        monkeypatch.setenv("FAKE_DEVICE", "cuda")
        result = matrix.verify(options(), console)
        assert {one.result for one in result.outcomes if one.case in ("greedy", "stop string")} == {Result.TIE}
        tie = next(one for one in result.outcomes if one.case == "greedy")
        assert tie.place == 4
        assert tie.difference.taken_ulps == pytest.approx(0.5)
        assert "2 near ties of 2" in report.cell([one for one in result.outcomes if one.case == "greedy"])
        # A text that was drawn is judged with its noise, which this pretended draw did not look at.
        assert {one.result for one in result.outcomes if one.case == "temperature 1"} <= {Result.TIE, Result.DIFFERS}

    def test_larger_gaps_fail_on_any_back_end(self, options, console, monkeypatch):
        swap(monkeypatch, 4, ULP * 1.5)
        result = matrix.verify(options(promise=Promise.NEAR_TIES), console)
        greedy = [one for one in result.outcomes if one.case == "greedy"]
        assert {one.difference.verdict for one in greedy} == {Verdict.LARGE_GAP}
        assert not result.passes

    def test_a_refusal_by_name_passes_and_is_shown(self, options, console, monkeypatch):
        monkeypatch.setenv("FAKE_REFUSE", "return_hidden_states")
        assert matrix.run(options(), console) == 0
        assert "refused: return_hidden_states" in console.export_text()

    def test_a_refusal_of_the_reference_alone_fails(self, options, console, monkeypatch):
        monkeypatch.setenv("FAKE_REFUSE_PLAIN", "regex")
        assert matrix.run(options(), console) == 1
        assert "the reference refuses it: HTTP 400: regex is refused." in console.export_text()

    def test_relaxed_acceptance_never_passes(self, options, console, monkeypatch):
        monkeypatch.setenv("FAKE_OPTIONS", '{"relax_top": 3, "relax_tau": 1.0}')
        assert matrix.run(options(), console) == 1
        assert "trunc: relax_top is 3: only 1 is lossless" in console.export_text()

    def test_another_sampling_policy_cannot_be_checked(self, options, console, monkeypatch):
        monkeypatch.setenv("FAKE_OPTIONS", '{"sampling_policy": "residual"}')
        assert matrix.run(options(), console) == matrix.CANNOT_CHECK
        assert "sampling_policy residual" in console.export_text()

    def test_unbalanced_pool_fails(self, options, console, monkeypatch):
        monkeypatch.setattr("sglang_trunc.serving.server.Server.pool_problem", lambda self: "2 slots in use")
        assert matrix.run(options(), console) == 1
        assert "trunc: the KV pool is out of balance: 2 slots" in console.export_text()

    def test_server_that_does_not_start(self, options, console, monkeypatch):
        monkeypatch.setenv("FAKE_FAIL", "no memory")
        assert matrix.run(options(), console) == matrix.CANNOT_CHECK
        assert "verify could not run: trunc stopped" in console.export_text()

    def test_too_few_tokens(self, options, console):
        assert matrix.run(options(max_new_tokens=20), console) == matrix.CANNOT_CHECK
        assert "--max-new-tokens 24" in console.export_text()

    @pytest.mark.parametrize(("algorithm", "servers"), [((), 5), (("--algorithm", "loopspec_dual"), 3)])
    def test_command(self, model, options, fake_servers, algorithm, servers):
        path = str(options().prompts)
        arguments = ["verify", "--model-path", model, "--options", "matrix", "--prompts", path]
        arguments += ["--max-new-tokens", str(TOKENS), "--concurrency", "2", *algorithm]
        result = CliRunner().invoke(app.app, arguments)
        assert result.exit_code == 0, result.output
        assert len(fake_servers) == servers
        assert all(name in fake_servers[0].args for name in algorithm[1:])


def test_options_other_than_matrix_are_a_usage_error():
    result = CliRunner().invoke(app.app, ["verify", "--model-path", "m", "--options", "all"])
    assert result.exit_code == 2


def test_bundled_prompts_of_the_matrix():
    assert [prompt.kind for prompt in matrix.bundled()] == list(matrix.BUNDLED)


# --- one answer against its reference ---


@pytest.fixture
def reference():
    with FakeSGLang(Settings(Model({LENGTH + 2: ULP / 2}))) as server, OptionClient(server.url) as client:
        yield server, client


def outcome(client, answer, case=None, promise=Promise.BIT_EQUAL, values=True) -> Outcome:
    job = Job(0, list(range(LENGTH)), case or Case("greedy"), 6)
    if answer is None:
        answer = client.ask(job.request)
    return Checker(client, promise, values).outcome(Asked("trunc", 1, job, answer))


def test_exact(reference):
    _, client = reference
    assert outcome(client, None).result is Result.EXACT


def test_a_refusal_must_name_the_option(reference):
    _, client = reference
    case = Case("top_p", {"temperature": 1.0, "top_p": 0.5})
    refused = outcome(client, RequestRefused(400, "top_p 0.5: not supported"), case)
    assert (refused.result, refused.said) == (Result.REFUSED, "top_p")
    for answer in (RequestRefused(400, "not supported"), RequestRefused(500, "top_p: internal error")):
        assert outcome(client, answer, case).result is Result.DIFFERS


def test_a_difference_elsewhere_than_in_the_tokens(reference):
    _, client = reference
    answer = client.ask(Job(0, list(range(LENGTH)), Case("greedy"), 6).request)
    answer[0]["meta_info"]["finish_reason"] = {"type": "stop", "matched": 5}
    found = outcome(client, answer, promise=Promise.NEAR_TIES)
    assert found.result is Result.DIFFERS
    assert found.place is None
    assert found.said.startswith("finish of answer 0: {'type': 'length'")


@pytest.mark.parametrize(
    ("promise", "place", "result"),
    [
        (Promise.NEAR_TIES, 2, Result.TIE),
        (Promise.BIT_EQUAL, 2, Result.DIFFERS),
        (Promise.NEAR_TIES, 3, Result.DIFFERS),  # five nats apart
    ],
)
def test_tokens_that_differ(reference, promise, place, result):
    _, client = reference
    answer = client.ask(Job(0, list(range(LENGTH)), Case("greedy"), 6).request)
    answer[0]["output_ids"][place] += 1  # the second best of the fake model
    found = outcome(client, answer, promise=promise)
    assert (found.result, found.place) == (result, place)


def test_an_answer_that_is_too_short_differs(reference):
    _, client = reference
    answer = client.ask(Job(0, list(range(LENGTH)), Case("greedy"), 6).request)
    answer[0]["output_ids"] = answer[0]["output_ids"][:2]
    found = outcome(client, answer, promise=Promise.NEAR_TIES)
    assert (found.result, found.difference.verdict) == (Result.DIFFERS, Verdict.UNKNOWN_GAP)


def test_a_reference_is_asked_once(reference):
    server, client = reference
    job = Job(0, list(range(LENGTH)), Case("greedy"), 6)
    answer = client.ask(job.request)
    checker = Checker(client, Promise.BIT_EQUAL, True)
    before = len(server.settings.requests)
    for level in (1, 4):
        assert checker.outcome(Asked("trunc", level, job, answer)).result is Result.EXACT
    assert len(server.settings.requests) == before + 1


# --- by how much a token won ---


def noisy(temperature, seed, position, logprobs):
    """Logprob at a temperature plus noise, as in ``core.sampling``; both tokens must be drawn that way."""
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    columns = torch.arange(len(logprobs))
    return torch.tensor(logprobs, dtype=torch.float64) + noise.gumbel(noise.murmur32(seeds, positions, columns))[0]


def test_the_gap_of_a_greedy_choice_is_that_of_the_logprobs():
    assert choice_gap(Case("greedy"), 0.25, (3, 4), 11) == 0.25
    assert choice_gap(Case("top_k 1", {"temperature": 2.0, "top_k": 1}), 0.25, (3, 4), 11) == 0.25
    assert choice_gap(Case("greedy"), -1e-7, (3, 4), 11) == 0.0


def test_the_gap_of_a_draw_has_its_noise():
    generator = random.Random(3)
    for seed in (5, -5, 2**40):
        logprobs = [generator.uniform(-3, 0) for _ in range(8)]
        perturbed = noisy(0.5, seed, 11, logprobs)
        best, second = perturbed.topk(2).indices.tolist()
        case = Case("draw", {"temperature": 0.5, "sampling_seed": seed})
        gap = choice_gap(case, logprobs[best] - logprobs[second], (best, second), 11)
        assert gap == pytest.approx(0.5 * float(perturbed[best] - perturbed[second]))
        assert choice_gap(case, logprobs[best] - logprobs[second], (best, second), 12) != pytest.approx(gap)


def test_under_a_filter_only_ranks_that_changed_places_count():
    case = Case("top_k", {"temperature": 0.5, "sampling_seed": 5, "top_k": 8})
    assert choice_gap(case, -0.25, (3, 4), 11) == 0.125


# --- the table ---


def made(*results, said="", place=None):
    return [Outcome("trunc", 1, 0, "case", result, said, place) for result in results]


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        (made(Result.EXACT, Result.EXACT), "exact"),
        (made(Result.EXACT) + made(Result.TIE, place=3), "1 near ties of 2"),
        (made(Result.REFUSED, Result.REFUSED, said="top_p"), "refused: top_p"),
        (
            made(Result.TIE, place=3) + made(Result.DIFFERS, place=9) + made(Result.DIFFERS, place=7),
            "at token 7 (2 of 3)",
        ),
        (made(Result.DIFFERS, said="text of answer 0: 'a' against 'b'"), "DIFFERS: text of answer 0"),
    ],
)
def test_cell(outcomes, text):
    assert text in report.cell(outcomes)


def test_a_matrix_without_outcomes_does_not_pass():
    assert not matrix.Matrix(Promise.BIT_EQUAL, 24, ("trunc",), [Prompt("a", "b")], []).passes


def test_logit_changes_do_not_hide_in_the_judges_second_question(reference):
    """It asks under the case's own options, so the gap is between transformed logits."""
    server, client = reference
    case = Case("penalty", {"repetition_penalty": 1.3})
    answer = client.ask(Job(0, list(range(LENGTH)), case, 6).request)
    answer[0]["output_ids"][2] += 1
    assert outcome(client, answer, case, Promise.NEAR_TIES).result is Result.TIE
    again = next(one for one in server.settings.requests if one.get("token_ids_logprob"))
    assert again["sampling_params"]["repetition_penalty"] == 1.3


def test_reference_that_does_not_repeat_itself_excuses_nothing(reference):
    _, client = reference
    job = Job(0, list(range(LENGTH)), Case("greedy"), 6)
    answer = client.ask(job.request)
    answer[0]["output_ids"][2] += 1
    checker = matrix_check.Checker(client, Promise.NEAR_TIES, True)
    known = client.ask(job.request)
    known[0]["output_ids"][1] += 1
    answer[0]["output_ids"][1] += 1
    checker._references[0, "greedy"] = known
    assert checker.outcome(Asked("trunc", 1, job, answer)).difference.verdict is Verdict.UNKNOWN_GAP
