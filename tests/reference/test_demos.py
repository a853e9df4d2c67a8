"""The demo checkpoints shipped in the package: small, loadable, and worth drafting from."""

import json
from pathlib import Path

import pytest
import torch

from sglang_trunc.reference.checkpoint import load_checkpoint
from sglang_trunc.reference.decode import first_argmax, greedy

pytestmark = pytest.mark.usefixtures("one_thread")
DEMOS = Path(__file__).resolve().parents[2] / "sglang_trunc" / "demos"
FULL_DEPTH = {"ouro": 4, "raven": 16}
PROMPT = "def read_lines(path):\n"
CHAT = [{"role": "user", "content": "Write read_lines: Return the lines of a file."}]


@pytest.fixture(scope="module", params=FULL_DEPTH)
def demo(request):
    return DEMOS / request.param


@pytest.fixture(scope="module")
def tokenizer(demo):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(demo)


@pytest.fixture(scope="module")
def model(demo):
    return load_checkpoint(demo, torch.float32)


def test_size_and_dtype(demo):
    assert sum(path.stat().st_size for path in demo.iterdir()) < 4_000_000
    assert load_checkpoint(demo).lm_head.weight.dtype == torch.bfloat16
    raw = json.loads((demo / "config.json").read_text())
    assert raw["torch_dtype"] == "bfloat16"
    assert raw["eos_token_id"] == [0, 2]


def test_shape(demo, model):
    assert model.full_depth == FULL_DEPTH[demo.name]
    assert (model.width, model.config.head_dim, model.vocab_size) == (128, 64, 2048)


def test_tokenizer(tokenizer):
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2, 3, 4]
    assert len(tokenizer) == 2048
    text = "class Naïve:\n    def __init__(self):\n        self.x = '\t'  # ünïcode\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    thinking = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert thinking == prompt + "<think>\n"


@torch.inference_mode()
def test_early_depths_agree_often_but_not_always(demo, model, tokenizer):
    prompt = tokenizer.encode(PROMPT)
    out = greedy(model, prompt, 64)
    logits = model.all_depths(torch.tensor(prompt + out))[:, len(prompt) - 1 : -1]
    chosen = first_argmax(logits)
    agreement = (chosen == chosen[-1]).float().mean(-1)
    assert 0.4 < agreement[0] < 1.0
    assert agreement[model.full_depth // 2 - 1] > 0.7


@torch.inference_mode()
def test_chat_is_answered_with_a_function(model, tokenizer):
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    text = tokenizer.decode(greedy(model, tokenizer.encode(prompt), 48, stop_ids=(0, 2)))
    assert text.startswith(("def ", "async def ", "@", "<think>"))
    assert "(" in text


def test_record(demo):
    record = json.loads((demo / "training.json").read_text())
    figures = record["held_out"]
    assert len(figures["loss_per_depth"]) == FULL_DEPTH[demo.name]
    assert figures["loss_per_depth"][-1] < 4.0  # nats per token of 2048; log(2048) is 7.6
    assert figures["loss_at_positions_640_to_768"] < 4.0  # long prompts stay sane
    assert 0.5 < figures["agreement_greedy"][0] < 0.95
