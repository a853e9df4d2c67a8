"""The answer behind a model's thinking.

A Thinking model's template may open ``<think>`` in the prompt, so its text can hold the closing tag alone. Numbers
and code inside the thoughts are no answer: they are drafts, and often of something else.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def after_thoughts(text: str, thinking: bool) -> str | None:
    """What comes after the thoughts; None where the model never left them.

    ``thinking``: the prompt opened the thoughts, so a text without a closing tag is all thoughts.
    """
    if CLOSE in text:
        return text.rpartition(CLOSE)[2]
    return None if thinking or OPEN in text else text
