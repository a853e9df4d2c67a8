"""What ``verify`` prints and writes: tables of differences or of the option matrix, the verdict, the JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from sglang_trunc.cli.agreement import Agreement, Checked
from sglang_trunc.cli.matrix_check import Outcome, Result
from sglang_trunc.core.ties import Difference, Promise
from sglang_trunc.serving import counters

if TYPE_CHECKING:
    from sglang_trunc.cli.matrix import Matrix

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
    _print_verdict(console, agreement)


def _print_verdict(console: Console, result: Agreement | Matrix) -> None:
    for problem in result.problems:
        console.print(problem, style="red", markup=False)
    if result.passes:
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


# The option matrix.

MOST_SHOWN = 40  # differences in full; the JSON has all


def matrix_table(matrix: Matrix) -> Table:
    """A row for each case, a column for each algorithm."""
    table = Table(title=f"Request options against plain decoding, {matrix.max_new_tokens} tokens")
    table.add_column("case")
    for algorithm in matrix.algorithms:
        table.add_column(algorithm)
    cells: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in matrix.outcomes:
        cells.setdefault(outcome.case, {}).setdefault(outcome.algorithm, []).append(outcome)
    for case, by_algorithm in cells.items():
        found = [by_algorithm.get(algorithm, []) for algorithm in matrix.algorithms]
        differs = any(one.result is Result.DIFFERS for outcomes in found for one in outcomes)
        table.add_row(case, *map(cell, found), style="red" if differs else None)
    return table


def cell(outcomes: Sequence[Outcome]) -> str:
    """What became of a case's answers, the worst first."""
    by_result: dict[Result, list[Outcome]] = {}
    for outcome in outcomes:
        by_result.setdefault(outcome.result, []).append(outcome)
    if differing := by_result.get(Result.DIFFERS):
        places = [one.place for one in differing if one.place is not None]
        where = f" at token {min(places)}" if places else f": {differing[0].said}"
        return f"DIFFERS{where} ({len(differing)} of {len(outcomes)})"
    if refused := by_result.get(Result.REFUSED):
        return f"refused: {refused[0].said}"
    ties = len(by_result.get(Result.TIE, []))
    return f"{ties} near ties of {len(outcomes)}" if ties else Result.EXACT.value


def print_matrix(console: Console, matrix: Matrix) -> None:
    console.print(matrix_table(matrix))
    for one in matrix.failures[:MOST_SHOWN]:
        where = f"{one.algorithm}, {one.case}, prompt {one.prompt}, concurrency {one.concurrency}"
        console.print(f"{where}: {one.said}", style="red", markup=False)
    if len(matrix.failures) > MOST_SHOWN:
        console.print(f"and {len(matrix.failures) - MOST_SHOWN} more", style="red")
    kinds = ", ".join(f"{index} {prompt.kind}" for index, prompt in enumerate(matrix.prompts))
    levels = ", ".join(str(level) for level in dict.fromkeys(one.concurrency for one in matrix.outcomes))
    console.print(f"prompts: {kinds}; concurrency {levels}; text, counts, finish reasons and logprobs compared")
    console.print(f"This back end promises {PROMISES[matrix.promise]}.")
    for algorithm in matrix.algorithms:
        count = Counter(one.result for one in matrix.outcomes if one.algorithm == algorithm)
        console.print(f"{algorithm}: " + ", ".join(f"{count[result]} {result.value}" for result in Result))
    _print_verdict(console, matrix)


def matrix_json(matrix: Matrix, model: str) -> dict[str, Any]:
    counts = Counter((one.algorithm, one.result.value) for one in matrix.outcomes)
    return {
        "model": model,
        "algorithms": list(matrix.algorithms),
        "promise": matrix.promise.value,
        "passes": matrix.passes,
        "max_new_tokens": matrix.max_new_tokens,
        "prompts": [prompt._asdict() for prompt in matrix.prompts],
        "counts": {name: {r.value: counts[name, r.value] for r in Result} for name in matrix.algorithms},
        "problems": matrix.problems,
        "results": [_outcome_json(one) for one in matrix.outcomes],
    }


def _outcome_json(one: Outcome) -> dict[str, Any]:
    judged = one.difference
    given = None if judged is None else {**judged._asdict(), "verdict": judged.verdict.value}
    return {**vars(one), "result": one.result.value, "difference": given}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
