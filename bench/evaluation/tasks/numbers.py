r"""The number that a worked answer gives.

Looked for in this order, within the first answer only (base models go on with a question of their own):

1. ``#### 18``, GSM8K's own mark;
2. ``\boxed{18}``, the last one;
3. ``the answer is 18``, the first one: what follows may be a check or a remark;
4. the last number.

A number may carry a sign, a currency, thousands separators, a fraction, a percent sign, a unit behind it. Values are
compared exactly, as fractions. Where a box holds LaTeX that this cannot read, ``math-verify`` is asked if it is
installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

DIGITS = r"(?:\d{1,3}(?:[,\u00a0\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
MINUS = "-\u2212\u2013"
BELOW = r"(?:\s?/\s?(?P<below>\d+(?![\d.])))?"
NUMBER = re.compile(rf"(?P<sign>[{MINUS}]\s?)?(?:[$€£]\s?)?(?P<digits>{DIGITS}){BELOW}")
# Where a base model starts the next problem, or another speaker.
NEXT_QUESTION = re.compile(r"(?:^|\n)\s*(?:Q|Question|Problem|Exercise)\s*\d*\s*[:.]|<\|im_start\|>|<\|endoftext\|>")
MARK = re.compile(r"####\s*")
ANSWER_IS = re.compile(r"answer\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
BOX = "\\boxed{"


def first_answer(text: str) -> str:
    """The text up to a second question."""
    following = NEXT_QUESTION.search(text, pos=1) if NEXT_QUESTION.match(text) else NEXT_QUESTION.search(text)
    return text[: following.start()] if following else text


def answer_in(text: str) -> str | None:
    """The answer as it is written, normalised where it is a number; None where there is none."""
    text = first_answer(text)
    if mark := MARK.search(text):
        return next(written(text[mark.end() :].split("\n")[0]), None)
    if (boxed := last_box(text)) is not None:
        return next(written(boxed), None) if _is_plain(boxed) else boxed.strip()
    for said in ANSWER_IS.finditer(text):
        line = text[said.end() :].split("\n")[0].replace("**", "")
        if found := next(written(line), None):
            return found
    return max(enumerate(written(text)), default=(0, None))[1]


def _is_plain(boxed: str) -> bool:
    return not re.search(r"\\(?!%|\$|,|!|text)", boxed)


def written(text: str) -> Iterator[str]:
    """Every number of a text, normalised: no separators, no currency, ``-`` as the sign, lowest terms."""
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$")
    for found in NUMBER.finditer(text):
        value = Fraction(re.sub(r"[,\u00a0\u202f]", "", found["digits"]))
        if found["below"]:
            if int(found["below"]) == 0:
                continue
            value /= int(found["below"])
        if found["sign"] and not _is_operator(text[: found.start()], spaced=found["sign"][-1].isspace()):
            value = -value
        yield plain(value)


def _is_operator(before: str, spaced: bool) -> bool:
    """Whether a minus subtracts, hyphenates or opens a list item: ``10 -3``, ``x-3``, ``apples - 3``, ``\\n- 3``."""
    if re.search(r"[\d)\]%]\s?$|\w$", before):
        return True
    return spaced and bool(re.search(r"\w\s$|\n\s*$", before))


def plain(value: Fraction) -> str:
    """``18``, ``2.5``; ``1/3`` where no decimal ends."""
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    if value.denominator == 1 or below != 1:
        return str(value)
    text = f"{float(value):.12f}".rstrip("0")
    return text if Fraction(text) == value else str(value)


def last_box(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` holds, braces inside counted."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth, begin = 1, start + len(BOX)
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at]
    return None


def equal(one: str | None, other: str) -> bool:
    """Equal values; ``18.0`` is 18 and ``0.5`` is ``1/2``."""
    if one is None:
        return False
    try:
        return Fraction(one) == Fraction(other)
    except (ValueError, ZeroDivisionError):
        return one == other or _verified(one, other)


def _verified(one: str, other: str) -> bool:
    """By math-verify (optional): LaTeX that is not a plain number."""
    try:
        from math_verify import parse, verify
    except ImportError:
        return False
    # Its own time limit works by signals, which threads may not use.
    given, wanted = (parse(f"${text}$", parsing_timeout=None) for text in (one, other))
    return bool(given) and bool(wanted) and bool(verify(wanted, given, timeout_seconds=None))
