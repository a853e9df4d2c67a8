"""Training text of the demo models: what every machine with Python has.

Documents are the standard library's own sources, the licence texts of a Debian system if there are any, and
ChatML dialogues made from the sources (a docstring as the request, the function as the answer), so that the
chat template gives something sensible. The order is by path and by a hash of the path, never by the file
system; a twentieth of the files is held out. The text depends on the Python version, so `Corpus.digest`
identifies it. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_trunc.reference.tokenizer import SPECIAL_TOKENS, byte_level

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LICENCES = Path("/usr/share/common-licenses")
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "pydoc_data"}
SKIPPED_SUBSTRINGS = ("config-3", "encodings/cp", "encodings/mac", "encodings/iso", "_sysconfigdata")
MAX_FILE_BYTES = 400_000
HELD_OUT_ONE_IN = 20
MAX_ANSWER_CHARS = 1500
THINKING_ONE_IN = 4


@dataclass(frozen=True)
class Corpus:
    train: list[str]
    held_out: list[str]
    dialogues: list[str]  # from training files only
    held_out_dialogues: list[str]
    digest: str  # sha256 of every document, 12 hex digits

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.train)) + sum(map(len, self.dialogues))


def load_corpus() -> Corpus:
    train, held_out, dialogues, held_out_dialogues = [], [], [], []
    digest = hashlib.sha256()
    for name, text in sorted(_documents(), key=lambda item: _hash(item[0])):
        digest.update(text.encode())
        unseen = _hash(name) % HELD_OUT_ONE_IN == 0
        (held_out if unseen else train).append(text)
        made = list(_dialogues(name, text)) if name.endswith(".py") else []
        (held_out_dialogues if unseen else dialogues).extend(made)
    return Corpus(train, held_out, dialogues, held_out_dialogues, digest.hexdigest()[:12])


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; the special tokens take the first ids, as in Ouro's vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return byte_level(tokenizer)


def _documents() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if SKIPPED_FOLDERS & set(name.split("/")) or any(part in name for part in SKIPPED_SUBSTRINGS):
            continue
        if path.stat().st_size <= MAX_FILE_BYTES:
            yield name, path.read_text(encoding="utf-8", errors="ignore")
    if LICENCES.is_dir():
        for path in LICENCES.iterdir():
            if path.is_file() and not path.is_symlink():
                yield f"licences/{path.name}", path.read_text(encoding="utf-8", errors="ignore")


def _dialogues(name: str, text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        request = ast.get_docstring(node)
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if not request or len(source) > MAX_ANSWER_CHARS:
            continue
        first = request.split("\n\n")[0].replace("\n", " ")
        thought = ""
        if _hash(f"{name}:{node.name}") % THINKING_ONE_IN == 0:
            arguments = ", ".join(argument.arg for argument in node.args.args)
            thought = f"<think>\nI need a function {node.name}({arguments}).\n</think>\n"
        yield chat_turn("user", f"Write {node.name}: {first}") + chat_turn("assistant", thought + source)


def chat_turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
