"""Traces of served pipelines: JSON lines, one event a line, in the order in which things happened.

``traced_pipeline`` writes them while a server runs (``SGLANG_TRUNC_TRACE``), ``bench/simulate.py`` replays them.

    {"trace": 1, "model": ..., "schedule": "LOOPSPEC_DUAL", "options": {...}, "plan": {R, d1, ...},
     "state_rows": 8, "exchange": true}               header; a file holds one part for every server that appended
    {"reset": branch slots}                           no lane lives: at the start, and where the pool is flushed
    {"keep": [keys]}                                  a round begins with these requests; the lanes of others go
    {"admit": [key, position, token, end, reserved]}  its requests, with the number of reserved slots
    {"watch": [key, position, token, end, node]}      a prefill begins; the node is the prompt's last token
    {"answer": [key, token]}                          it has chosen the first token
    {"leave": key}                                    a request's lanes go
    {"node": [node, parent, key, position, token]}    before it is first named; parent -1: nothing is known before it
    {"read": [[node, depth, token, probability]]}     a cycle's readouts, in the order of the lanes
    {"beside": [[node, depth, token, probability]]}   what its other lanes would have said; decides nothing
    {"counted": {...}}                                totals of ``core.counters`` after a round

A node is a token path of one request: a root continues the node of the token that was verified before it.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sglang_trunc.core.pipeline import Choice, Schedule

VERSION = 1
NO_NODE = -1


class TraceError(ValueError):
    """A file that is not a trace; the text is one sentence."""


class TraceWriter:
    """Appends events to a file; each is on disk when ``write`` returns."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def write(self, **event: Any) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
        self._file.flush()


class Node(NamedTuple):
    node: int
    parent: int
    key: Hashable
    position: int
    token: int


class Event(NamedTuple):
    name: str
    value: Any


class Said(NamedTuple):
    """One readout."""

    node: Node
    depth: int
    choice: Choice


@dataclass
class Text:
    """What one request was told: verified nodes, the first of them without a known parent."""

    key: Hashable
    nodes: list[int]
    tokens: list[int]  # of the nodes, and the last one's choice: one more than nodes
    first: int  # position of the first token
    end: int  # position of the last token that it might have had
    warm: bool  # the first node is a prompt's last token, so the first answer is the prefill's


@dataclass
class Trace:
    """One server's part of a file."""

    header: dict[str, Any]
    events: list[Event] = field(default_factory=list)  # all but ``node`` and ``beside``; ``read`` as list[Said]
    nodes: dict[int, Node] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # (node, token) -> node
    says: dict[int, dict[int, Choice]] = field(default_factory=dict)  # node -> depth -> first choice
    watched: dict[int, Hashable] = field(default_factory=dict)  # nodes of prompts' last tokens
    ends: dict[Hashable, int] = field(default_factory=dict)  # position of the last token that a request may have

    @property
    def schedule(self) -> str:
        return str(self.header["schedule"])

    @cached_property
    def plan(self) -> Schedule:
        return Schedule(**self.header["plan"])

    @property
    def depths(self) -> range:
        """At which every lane was read out."""
        return range(self.plan.d1, self.plan.recurrences + 1, self.plan.d1)

    @cached_property
    def texts(self) -> list[Text]:
        """In the order in which the requests came; those that got no verified token are left out."""
        found = (self._text(node) for node in self.nodes.values() if node.parent == NO_NODE)
        return [text for text in found if text.nodes]

    def _text(self, start: Node) -> Text:
        nodes, tokens = [], [start.token]
        node: int | None = start.node
        while node is not None and self.plan.recurrences in self.says.get(node, {}):
            nodes.append(node)
            tokens.append(self.says[node][self.plan.recurrences].token)
            node = self.children.get((node, tokens[-1]))
        return Text(start.key, nodes, tokens, start.position, self.ends[start.key], start.node in self.watched)


def read_traces(path: Path) -> list[Trace]:
    """Every server's part of a file. A line that was cut off at the very end is left out."""
    traces: list[Trace] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(filter(None, lines[:-1]), start=1):
        event = _parsed(line, f"line {number} of {path.name}")
        if "trace" in event:
            if event["trace"] != VERSION:
                raise TraceError(f"{path.name} has format {event['trace']}, this version reads format {VERSION}.")
            traces.append(Trace(event))
        elif not traces:
            raise TraceError(f"{path.name} does not begin with a trace's header.")
        else:
            _take(traces[-1], *event.popitem())
    if not traces:
        raise TraceError(f"{path.name} holds no trace.")
    return traces


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where} is not readable JSON: {error}.") from error
    if not isinstance(event, dict) or not event:
        raise TraceError(f"{where} is not an event of a trace.")
    return event


def _take(trace: Trace, name: str, value: Any) -> None:
    match name:
        case "node":
            node = trace.nodes[value[0]] = Node(*value)
            trace.children[node.parent, node.token] = node.node
            return
        case "beside":
            _hear(trace, _readouts(trace, value))
            return
        case "read":
            value = list(_readouts(trace, value))
            _hear(trace, value)
        case "watch":
            key, _, _, end, node_id = value
            trace.watched[node_id] = key
            trace.ends[key] = end
        case "answer":
            key, token = value
            node_id = next(node for node, owner in reversed(trace.watched.items()) if owner == key)
            trace.says.setdefault(node_id, {}).setdefault(trace.plan.recurrences, Choice(token, 1.0))
        case "admit":
            key, _, _, end, _ = value
            trace.ends[key] = max(end, trace.ends.get(key, end))
    trace.events.append(Event(name, value))


def _readouts(trace: Trace, value: list[list[Any]]) -> Iterator[Said]:
    for node, depth, token, probability in value:
        yield Said(trace.nodes[node], depth, Choice(token, probability))


def _hear(trace: Trace, readouts: Any) -> None:
    for node, depth, choice in readouts:
        trace.says.setdefault(node.node, {}).setdefault(depth, choice)
