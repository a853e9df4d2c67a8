"""Tokenizers of the checkpoints built here: byte-level BPE with Ouro's special tokens at Ouro's ids.

`byte_tokenizer` needs no training text: the 256 bytes plus merges of frequent letter pairs, 512 entries in
all, so that every id a tiny model can emit has a text. `save_tokenizer` writes tokenizer.json and
tokenizer_config.json with the ChatML template; the demo models use it with a trained vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
END_OF_TEXT, IM_START, IM_END = 0, 1, 2
STOP_IDS = (END_OF_TEXT, IM_END)
TINY_VOCAB = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)


def byte_tokenizer(vocab_size: int = TINY_VOCAB) -> Tokenizer:
    """Specials, then bytes, then two-letter tokens until the vocabulary is full."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = "etaoinshrdlucmfwygpb_()."
    pairs = [(a, b) for a in letters for b in letters]
    entries = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    room = vocab_size - len(entries)
    if not 0 <= room <= len(pairs):
        raise ValueError(f"vocab_size must be in [{len(entries)}, {len(entries) + len(pairs)}]")
    merges = pairs[:room]
    vocab = {token: i for i, token in enumerate([*entries, *(a + b for a, b in merges)])}
    return byte_level(Tokenizer(models.BPE(vocab=vocab, merges=merges)))


def byte_level(tokenizer: Tokenizer) -> Tokenizer:
    """Adds the byte-level pre-tokenizer and decoder, and the special tokens."""
    from tokenizers import decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS[:3]))
    tokenizer.add_tokens(list(SPECIAL_TOKENS[3:]))  # thinking tags stay visible in decoded text
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path, max_length: int) -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[END_OF_TEXT],
        eos_token=SPECIAL_TOKENS[END_OF_TEXT],
        pad_token=SPECIAL_TOKENS[IM_END],
        additional_special_tokens=[SPECIAL_TOKENS[IM_START], SPECIAL_TOKENS[IM_END]],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(directory))
