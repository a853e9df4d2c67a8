"""Prompts as token ids, by a checkpoint's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from evaluation.tasks.problem import Message, Style


class ChatTemplate:
    def __init__(self, model_path: str) -> None:
        self.model_path = model_path

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_path)

    def ids(self, messages: Sequence[Message], style: Style) -> list[int]:
        """With the turn of the assistant opened; ``enable_thinking`` as Ouro's and Qwen's templates know it."""
        text = self._tokenizer.apply_chat_template(
            [message._asdict() for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=style is Style.THINKING,
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_ids(self, text: str) -> list[int]:
        """As a server reads plain text: with the special tokens that its tokenizer adds."""
        return list(self._tokenizer(text)["input_ids"])
