"""Prompts of an exact token length, cut from real text.

Text comes from files every machine has or that lie in ``bench/prompts``: source files of the running Python's
standard library (``code``), ``bench/prompts/prose.txt`` (``prose``), both in turn (``mixed``), lines of either, each
passage of which comes three times (``copy``), letters that mean nothing (``random``), or a file of the user's. It is
tokenised by the served model's own tokenizer and cut at fixed places, so the same model and Python give the same
prompts; ``digest`` is recorded because another Python has other sources.
"""

from __future__ import annotations

import hashlib
import random
import string
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent / "prompts"
# Held out of the demo models' training (demo_corpus.py): acceptance on them is not memory.
STDLIB = ("modulefinder.py", "asyncio/locks.py", "multiprocessing/util.py", "operator.py", "runpy.py")
KINDS = ("mixed", "code", "prose", "copy", "random")
PASSAGE = 4  # lines of what is copied


class Corpus(NamedTuple):
    """Named texts; prompts are taken from them in turn."""

    texts: dict[str, str]

    @property
    def digest(self) -> str:
        return hashlib.sha256("\0".join(self.texts.values()).encode()).hexdigest()[:16]


def corpus(source: str) -> Corpus:
    """``source``: one of ``KINDS``, or a text file."""
    if source not in KINDS:
        return Corpus({Path(source).name: Path(source).read_text(encoding="utf-8")})
    texts = {}
    if source == "random":
        letters = random.Random(0).choices(string.ascii_letters + string.digits + " ", k=20_000)
        return Corpus({source: "".join(letters)})
    if source == "copy":
        return Corpus({name: _repeated(text) for name, text in corpus("mixed").texts.items()})
    if source in ("mixed", "code"):
        library = Path(sysconfig.get_paths()["stdlib"])
        texts["code"] = "\n".join((library / name).read_text(encoding="utf-8") for name in STDLIB)
    if source in ("mixed", "prose"):
        texts["prose"] = (HERE / "prose.txt").read_text(encoding="utf-8")
    return Corpus(texts)


def _repeated(text: str) -> str:
    """Each passage three times in a row."""
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    passages = ["".join(lines[first : first + PASSAGE]) for first in range(0, len(lines), PASSAGE)]
    return "".join(passage * 3 for passage in passages)


def tokenised(source: Corpus, tokenize: Callable[[str], list[int]]) -> list[list[int]]:
    return [tokenize(text) for text in source.texts.values()]


def cut(tokens: Sequence[Sequence[int]], length: int, count: int, skip: int = 0) -> list[list[int]]:
    """``count`` different prompts of ``length`` tokens; ``skip`` prompts of the same series come before them.

    Places are spread evenly over a text and shifted for each length. A place whose tokens were had already
    (short prompts repeat in code) moves on. Texts too short for the length are left out.
    """
    longest = max(map(len, tokens))
    if longest <= length:
        raise ValueError(f"the longest text has {longest} tokens, too few for prompts of {length}")
    tokens = [text for text in tokens if len(text) > length]
    prompts: dict[tuple[int, ...], None] = {}
    for index in range(skip + count):
        text = tokens[index % len(tokens)]
        room = len(text) - length
        # The golden ratio's multiples are spread evenly however many are taken.
        place = int(((index // len(tokens) + 1) * 0.6180339887 + length * 0.1) % 1.0 * room)
        shifts = ((place + shift) % room for shift in range(room))
        candidates = (tuple(text[start : start + length]) for start in shifts)
        fresh = next((prompt for prompt in candidates if prompt not in prompts), None)
        if fresh is None:
            raise ValueError(f"{count} different prompts of {length} tokens cannot be cut from this text")
        prompts[fresh] = None
    return [list(prompt) for prompt in prompts][skip:]
