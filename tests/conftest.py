"""What every part of the suite shares: tiny checkpoints and their reference models, made once a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Tests run beside a server or two: one thread each is faster than two, and results must not depend on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module's tests stay on one worker (``--dist loadgroup``); server tests are grouped by their servers."""
    for item in items:
        if "server" not in item.keywords:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(family, **options)``: the directory of a tiny random checkpoint.

    ``family`` is one of ``reference.tiny``'s, or "llama": a model without a loop.
    """
    from sglang_trunc.reference.tiny import write_tiny

    written: dict[str, Path] = {}

    def checkpoint(family: str, **options) -> Path:
        key = repr((family, sorted(options.items(), key=lambda item: item[0])))
        if key not in written:
            folder = tmp_path_factory.mktemp(family)
            written[key] = write_llama(folder) if family == "llama" else write_tiny(family, folder, **options)
        return written[key]

    return checkpoint


def write_llama(directory: Path) -> Path:
    """A random Llama of transformers', with the tiny models' tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from sglang_trunc.reference.tokenizer import TINY_VOCAB, byte_tokenizer, save_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(byte_tokenizer(), directory, config.max_position_embeddings)
    return directory
