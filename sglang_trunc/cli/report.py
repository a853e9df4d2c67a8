"""What ``verify`` prints and writes: the table of differences, the verdict in a sentence, the JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_trunc.cli.agreement import Agreement, Checked
from sglang_trunc.core.ties import Difference, Promise
from sglang_trunc.serving import counters

PROMISES = {
    Promise.BIT_EQUAL: "equal tokens without exception: a row's result does not depend on the other rows",
    Promise.NEAR_TIES: "equal tokens up to near ties: the two best logits within one BF16 ulp",
}


COLUMNS = ("prompt", "concurrency", "token", "where", "plain", "taken", "gap (ulps)", "to taken", "verdict")


def ulps(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def difference_table(checked: Sequence[Checked]) -> Table:
    table = Table(title="Differences from plain decoding")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("prompt", "where", "verdict") else "right")
    for one in checked:
        for d in one.differences:
            where = "after the answer" if d.after_end else "answer"
            name = f"{one.text.prompt} {one.text.kind}"
            cells = (name, one.text.concurrency, d.position, where, d.expected, d.taken)
            gaps = (ulps(d.gap_ulps), ulps(d.taken_ulps))
            table.add_row(*map(str, cells), *gaps, d.verdict.value, style=None if d.passes else "red")
    return table


def _count(differences: Sequence[Difference]) -> str:
    inside = sum(not d.after_end for d in differences)
    return f"{len(differences)} ({inside} in the answer, {len(differences) - inside} after it)"


def print_agreement(console: Console, agreement: Agreement) -> None:
    checked = agreement.checked
    if agreement.differences:
        console.print(difference_table(checked))
    by_level: dict[int, list[Checked]] = {}
    for one in checked:
        by_level.setdefault(one.text.concurrency, []).append(one)
    for level, texts in by_level.items():
        same = sum(one.identical for one in texts)
        console.print(
            f"concurrency {level}: {same} of {len(texts)} texts identical to plain decoding, "
            f"{agreement.max_new_tokens} tokens each; accept length {accept_length(texts):.2f}"
        )
    console.print(f"This back end promises {PROMISES[agreement.promise]}.")
    ties = [d for d in agreement.differences if d.passes]
    console.print(f"near ties: {_count(ties)}; failures: {_count(agreement.failures)}")
    for problem in agreement.problems:
        console.print(problem, style="red")
    if agreement.passes:
        console.print("PASS", style="bold green")
    else:
        console.print("FAIL", style="bold red")


def accept_length(texts: Sequence[Checked]) -> float:
    return counters.sum_up([one.text.speculation for one in texts]).accept_length


def as_json(agreement: Agreement, model: str, algorithm: str) -> dict[str, Any]:
    verdicts = Counter(d.verdict.value for d in agreement.differences)
    return {
        "model": model,
        "algorithm": algorithm,
        "promise": agreement.promise.value,
        "passes": agreement.passes,
        "max_new_tokens": agreement.max_new_tokens,
        "texts": len(agreement.checked),
        "identical": sum(one.identical for one in agreement.checked),
        "verdicts": dict(verdicts),
        "problems": agreement.problems,
        "results": [_text_json(one) for one in agreement.checked],
    }


def _text_json(one: Checked) -> dict[str, Any]:
    return {
        **one.text._asdict(),
        "speculation": one.text.speculation._asdict(),
        "differences": [{**d._asdict(), "verdict": d.verdict.value} for d in one.differences],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
