"""Prompt files and what a checkpoint's JSON files say."""

import json

import pytest

from sglang_trunc.cli import facts, prompts
from sglang_trunc.cli.prompts import Prompt


def test_bundled_prompts():
    given = prompts.bundled()
    assert len(given) >= 12
    assert {"code", "prose", "chat", "list"} <= {prompt.kind for prompt in given}
    assert len({prompt.text for prompt in given}) == len(given)


def test_json_lines_and_plain_lines(tmp_path):
    path = tmp_path / "p"
    path.write_text('{"text": "a\\nb", "kind": "code"}\n\nplain line\n{"text": "c"}\n')
    assert prompts.load(path) == [Prompt("code", "a\nb"), Prompt("text", "plain line"), Prompt("text", "c")]


@pytest.mark.parametrize(
    ("content", "message"), [('{"txt": 1}', "p:1 is not"), ("{oops", "p:1 is not"), ("\n", "no prompt")]
)
def test_bad_prompt_files(tmp_path, content, message):
    path = tmp_path / "p"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        prompts.load(path)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config.json": {"eos_token_id": 2}}, {2}),
        ({"config.json": {"eos_token_id": [2, 3]}, "generation_config.json": {"eos_token_id": 4}}, {2, 3, 4}),
        (
            {
                "config.json": {"eos_token_id": 2},
                "tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}},
                "tokenizer.json": {"added_tokens": [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "x"}]},
            },
            {2, 7},
        ),
        ({"config.json": {}}, set()),
    ],
)
def test_stop_tokens_of_every_file(tmp_path, files, ids):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert facts.stop_token_ids(str(tmp_path)) == ids
