"""The demo end to end against fake servers, and what it prints."""

import pytest

from sglang_trunc.cli import demo, facts, prompts
from sglang_trunc.core.ties import first_difference

pytestmark = pytest.mark.usefixtures("fake_servers")


def options(model, **changes):
    return demo.DemoOptions(model=model, max_new_tokens=10, **changes)


def test_equal_tokens(model, console):
    assert demo.run(options(model, concurrency=2), console) == 0
    said = console.export_text()
    assert "The tokens are equal." in said
    assert said.count("same tokens") == demo.PROMPTS
    assert "accept length" in said


def test_unequal_tokens(model, console, monkeypatch):
    lengths = [len(p.text.encode()) for p in demo._one_of_each_kind(prompts.bundled())]
    monkeypatch.setenv("FAKE_SWAP", f"{lengths[0] + 4}:0.1")
    assert demo.run(options(model), console) == 1
    said = console.export_text()
    assert "differs from plain at token 4" in said
    assert "The tokens differ for 1 of 4 prompts" in said


def test_server_that_does_not_start(model, console, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "no memory")
    assert demo.run(options(model), console) == demo.CANNOT_RUN
    assert "demo could not run: plain stopped with exit code 1: ValueError: no memory" in console.export_text()


def test_missing_demo_model_is_named(console, monkeypatch, tmp_path):
    monkeypatch.setattr(facts.resources, "files", lambda package: tmp_path)
    assert demo.run(options("ouro"), console) == demo.CANNOT_RUN
    assert "no demo model 'ouro'" in console.export_text()


def test_one_prompt_of_each_kind():
    kinds = [prompt.kind for prompt in demo._one_of_each_kind(prompts.bundled())]
    assert sorted(kinds) == ["chat", "code", "list", "prose"]


def test_both_servers_get_the_same_prompts(model, console):
    plain = demo.serve(model, None, prompts.bundled()[:2], options(model), console)
    fast = demo.serve(model, "trunc", prompts.bundled()[:2], options(model), console)
    assert plain.accept_length is None
    for one, other in zip(plain.completions, fast.completions, strict=True):
        assert first_difference(one.output_ids, other.output_ids) is None
    assert plain.tokens_per_second > 0


def test_long_answers_are_cut_for_the_screen():
    assert demo._shown("a\nb") == "a\nb"
    assert demo._shown("x\n" * 99).splitlines() == ["x"] * demo.SHOWN_LINES + ["..."]
