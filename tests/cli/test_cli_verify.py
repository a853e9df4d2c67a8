"""The agreement gate end to end against fake servers: exit codes, differences, what is written."""

import json

import pytest
from fake_sglang import VOCABULARY, FakeSGLang, Model, Settings
from typer.testing import CliRunner

from sglang_trunc.cli import agreement, app, verify
from sglang_trunc.cli.prompts import Prompt
from sglang_trunc.core.ties import Promise, Verdict
from sglang_trunc.serving.client import Client

PROMPTS = ["def f(x):\n", "Once upon "]  # ten bytes each, so that a prefix length names one output index
LENGTH = 10
ULP = 0.125  # at the fake model's best logit, 20


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"kind": "text", "text": text}) for text in PROMPTS))
    return path


@pytest.fixture
def options(model, prompt_file):
    def make(**changes):
        defaults = {"model_path": model, "prompts": prompt_file, "max_new_tokens": 12, "concurrency": (1, 2)}
        return verify.VerifyOptions(**(defaults | changes))

    return make


def swap(monkeypatch, *pairs):
    monkeypatch.setenv("FAKE_SWAP", ",".join(f"{LENGTH + index}:{gap}" for index, gap in pairs))


@pytest.mark.usefixtures("fake_servers")
class TestVerify:
    def test_equal_texts_pass(self, options, console):
        assert verify.run(options(), console) == 0
        said = console.export_text()
        assert "concurrency 2: 2 of 2 texts identical" in said
        assert "equal tokens without exception" in said  # the fake device is cpu
        assert "PASS" in said

    def test_near_tie_passes_only_where_the_back_end_allows_it(self, options, console, monkeypatch):
        swap(monkeypatch, (4, ULP / 2))
        assert verify.run(options(promise=Promise.NEAR_TIES), console) == 0
        assert verify.run(options(), console) == 1
        said = console.export_text()
        assert "near ties: 4 (4 in the answer, 0 after it); failures: 0" in said
        assert Verdict.BROKEN_PROMISE.value in said

    def test_device_decides_the_promise(self, options, console, monkeypatch):
        swap(monkeypatch, (4, ULP / 2))
        monkeypatch.setenv("FAKE_DEVICE", "cuda")
        assert verify.run(options(), console) == 0

    def test_larger_gap_fails(self, options, console, monkeypatch):
        swap(monkeypatch, (4, ULP * 1.5))
        assert verify.run(options(promise=Promise.NEAR_TIES), console) == 1
        assert "1.50" in console.export_text()

    def test_larger_gap_after_the_answer_fails_and_is_reported_apart(self, options, console, monkeypatch):
        swap(monkeypatch, (6, ULP * 1.5))
        monkeypatch.setenv("FAKE_ANSWER_AT", str(LENGTH + 3))
        assert verify.run(options(promise=Promise.NEAR_TIES), console) == 1
        assert "failures: 4 (0 in the answer, 4 after it)" in console.export_text()

    def test_every_difference_is_found(self, options, console, monkeypatch):
        swap(monkeypatch, (2, ULP / 4), (5, ULP / 4), (9, ULP * 2))
        result = verify.verify(options(promise=Promise.NEAR_TIES, concurrency=(1,)), console)
        for checked in result.checked:
            assert [d.position for d in checked.differences] == [2, 5, 9]
            assert [d.passes for d in checked.differences] == [True, True, False]
            assert [d.taken_ulps for d in checked.differences] == pytest.approx([0.25, 0.25, 2.0])

    def test_json(self, options, console, monkeypatch, tmp_path):
        swap(monkeypatch, (4, ULP / 2))
        out = tmp_path / "deep" / "result.json"
        verify.run(options(json=out, promise=Promise.NEAR_TIES), console)
        written = json.loads(out.read_text())
        assert (written["passes"], written["texts"], written["identical"]) == (True, 4, 0)
        assert written["verdicts"] == {"near tie": 4}
        (difference,) = written["results"][0]["differences"]
        assert difference["position"] == 4
        assert difference["taken"] == difference["expected"] + 1

    def test_unbalanced_pool_fails(self, options, console, monkeypatch):
        monkeypatch.setenv("FAKE_USED", "2")
        monkeypatch.setattr("sglang_trunc.serving.server.Server.pool_problem", lambda self: "2 slots in use")
        assert verify.run(options(), console) == 1
        assert "out of balance: 2 slots" in console.export_text()

    def test_relaxed_acceptance_fails_although_the_texts_agree(self, options, console, monkeypatch):
        monkeypatch.setenv("FAKE_OPTIONS", '{"relax_top": 1, "relax_tau": 0.3}')
        assert verify.run(options(), console) == 1
        assert "relax_tau is 0.3: only 1 is lossless" in console.export_text()

    def test_server_that_does_not_start(self, options, console, monkeypatch):
        monkeypatch.setenv("FAKE_FAIL", "d1 is 9, but this model has 4 recurrences.")
        assert verify.run(options(), console) == verify.CANNOT_CHECK
        assert "ValueError: d1 is 9, but this model has 4 recurrences." in console.export_text()

    def test_arguments_after_the_dashes_reach_both_servers(self, model, prompt_file, fake_servers):
        arguments = ["verify", "--model-path", model, "--prompts", str(prompt_file), "--max-new-tokens", "3"]
        result = CliRunner().invoke(app.app, [*arguments, "--concurrency", "1", "--", "--page-size", "16"])
        assert result.exit_code == 0, result.output
        speculative, plain = fake_servers
        assert list(speculative.args) == ["--speculative-algorithm", "trunc", "--page-size", "16"]
        assert list(plain.args) == ["--enable-custom-logit-processor", "--page-size", "16"]


@pytest.mark.parametrize("value", ["0", "1,x", ""])
def test_bad_concurrency_is_a_usage_error(value):
    result = CliRunner().invoke(app.app, ["verify", "--model-path", "m", "--concurrency", value])
    assert result.exit_code == 2


def test_unknown_size_of_a_logit_never_passes():
    """A plain server that refuses the probe leaves every difference unexcused."""

    class NoProbe(Client):
        def generate(self, prompt, **options):
            if (options.get("extra") or {}).get("custom_logit_processor"):
                raise agreement.RequestRefused(400, "custom logit processors are not enabled")
            return super().generate(prompt, **options)

    with FakeSGLang(Settings(Model({5: 0.01}))) as server, NoProbe(server.url) as client:
        prompt = [1, 2, 3]
        reference = agreement.plain_references(client, [prompt], 6)[0]
        other = list(reference.output_ids)
        other[2] = (other[2] + 1) % VOCABULARY
        (found,) = agreement.differences(client, prompt, reference, other[:3], (), Promise.NEAR_TIES)[:1]
        assert found.verdict is Verdict.UNKNOWN_GAP


def test_token_outside_the_best_is_measured_by_the_probe():
    with FakeSGLang() as server, Client(server.url) as client:
        reference = agreement.plain_references(client, [[7]], 3)[0]
        other = list(reference.output_ids)
        other[0] = 63  # last of the vocabulary: far from the best
        first = agreement.differences(client, [7], reference, other, (), Promise.NEAR_TIES)[0]
        assert first.gap_ulps == pytest.approx(5.0 / ULP)
        assert first.taken_ulps > 100


def test_warm_passes_follow_a_flush():
    with FakeSGLang(Settings(speculative=True)) as server, Client(server.url) as client:
        given = [Prompt("code", "ab"), Prompt("prose", "cd")]
        texts = list(agreement.speculative_texts(client, given, [[1, 2], [3, 4]], (1, 4), 5))
        assert [(t.prompt, t.kind, t.concurrency) for t in texts] == [
            (0, "code", 1),
            (1, "prose", 1),
            (0, "code", 4),
            (1, "prose", 4),
        ]
        assert texts[0].speculation == (4, 2)


@pytest.mark.parametrize(
    ("info", "problems"),
    [
        ({}, 0),
        ({"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0}, 0),
        ({"speculative_accept_threshold_single": 0.9, "speculative_accept_threshold_acc": 1.0}, 1),
        ({"internal_states": [{}]}, 0),
        ({"internal_states": [{"sglang_trunc": {"options": {"relax_top": 1, "relax_tau": 1.0}}}]}, 0),
        ({"internal_states": [{"sglang_trunc": {"options": {"relax_top": 4, "relax_tau": 1.0}}}]}, 1),
        ({"internal_states": [{"sglang_trunc": {"options": {"relax_top": 4, "relax_tau": 0.5}}}]}, 2),
    ],
)
def test_relaxed_acceptance_is_named(info, problems):
    assert len(agreement.relaxed_acceptance(info)) == problems


@pytest.mark.parametrize(
    ("info", "promise"),
    [
        ({"device": "cpu", "dtype": "auto"}, Promise.BIT_EQUAL),
        ({"device": "cuda", "dtype": "bfloat16"}, Promise.NEAR_TIES),
        ({"device": "cuda", "dtype": "float32"}, Promise.BIT_EQUAL),
    ],
)
def test_promise_of_a_back_end(info, promise):
    assert agreement.promise_of(info) is promise
