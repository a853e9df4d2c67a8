"""The diffs of ``patches/``, applied to copies of the installed SGLang; the installation itself is never written to."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
PATCHES = sorted((REPOSITORY / "patches").glob("*.patch"))
WRITTEN_FOR = "0.5.23"


def why_not() -> str | None:
    """Why the diffs cannot be tried here, None if they can."""
    found = importlib.metadata.version("sglang")
    if found != WRITTEN_FOR:
        return f"patches/ is for SGLang {WRITTEN_FOR}, {found} is installed"
    if shutil.which("patch") is None:
        return "the program 'patch' is not installed"
    return None


def slug(patch: Path) -> str:
    """``0004-first-stop-of-a-run.patch`` -> ``first-stop-of-a-run``."""
    return patch.stem.split("-", 1)[1]


def installed() -> Path:
    """The folder ``sglang/``, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def touched(patch: Path) -> list[Path]:
    """Files that a diff changes, relative to the folder that holds ``sglang/``."""
    return [Path(name) for name in re.findall(r"^\+\+\+ b/python/(\S+)", patch.read_text(), re.MULTILINE)]


def apply(patch: Path, folder: Path) -> str:
    """Apply to copies under ``folder``, every line of context as it stands; what ``patch`` says."""
    command = ["patch", "-p2", "--fuzz=0", "--forward", "--no-backup-if-mismatch", "-i", str(patch)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copies(patches: Sequence[Path], folder: Path) -> None:
    """Put copies of the files that these diffs change under ``folder``."""
    for path in {path for patch in patches for path in touched(patch)}:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(installed().parent / path, folder / path)


def overlay(patches: Sequence[Path], folder: Path) -> None:
    """An importable ``sglang/`` under ``folder``: links to the installed one, and patched copies."""
    copies(patches, folder)
    for patch in patches:
        apply(patch, folder)
    for directory in [folder / "sglang", *(path for path in (folder / "sglang").rglob("*") if path.is_dir())]:
        link(installed().parent / directory.relative_to(folder), directory)
        # Byte code, too, but not its folder: what a patched file is compiled to must not land in the installation.
        link(installed().parent / directory.relative_to(folder) / "__pycache__", directory / "__pycache__")


def link(source: Path, directory: Path) -> None:
    """Links in ``directory`` to everything in ``source`` that is not there yet, its byte code aside."""
    if not source.is_dir():
        return
    directory.mkdir(exist_ok=True)
    for item in source.iterdir():
        if item.name != "__pycache__" and not (directory / item.name).exists():
            (directory / item.name).symlink_to(item)


class Row(NamedTuple):
    """One line of the inventory, ``notes/patches.md``."""

    patch: str  # file name, empty for a hook without a patch
    stand_ins: list[str]  # "hook ...", "override ..." or "function ...": what does the same here


def inventory() -> list[Row]:
    """The tables of the notes; a stand-in is code that begins with one of the three words."""
    rows = []
    for line in (REPOSITORY / "notes" / "patches.md").read_text().splitlines():
        cells = line.split("|")
        codes = re.findall(r"`([^`]+)`", line)
        if len(cells) > 3 and codes:
            named = [code for code in codes if re.match(r"(hook|override|function) ", code)]
            rows.append(Row(codes[0] if codes[0].endswith(".patch") else "", named))
    return rows
