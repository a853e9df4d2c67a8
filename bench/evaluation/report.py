"""The report: Markdown, JSON and pictures, a pure function of the store.

    write(read(path), folder)     report.md, report.json, *.png

Speed and score of a run stand in one table, beside the number of texts that equal plain's: a fast contestant with other
tokens is not faster. Every difference is listed with its gap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evaluation import plots
from evaluation.figures import Figures, collect
from evaluation.store import Line

COLUMNS = (
    *("contestant", "score", "95 %", "n", "tok/s", "ratio", "in all", "ratio", "server", "ratio"),
    *("accept", "ticks", "equal", "near ties", "faults"),
)
LATENCIES = ("contestant", "TTFT p50", "p90", "p99", "between tokens p50", "p90", "p99")
LEGEND = """\
*score*: share of right answers (Wilson interval); *tok/s*: decoding, of a request, prefill left out; *in all*: with
prefill and queue; *server*: tokens of all requests by the time in which any was in flight; *ratio*: to plain, on the
problems of both; *accept*: tokens a round; *ticks*: passes of the looped core that a token waits for; *equal*: texts
with plain's tokens; *near ties*: texts whose first difference lies within one BF16 ulp; *faults*: any other judged
difference (there should be none). Texts of other engines and sampled texts are compared, not judged: stock plain
decoding draws by seed, as the schedules do, only under `--enable-deterministic-inference`."""


def write(lines: Sequence[Line], folder: Path) -> Path:
    """Path of the Markdown."""
    found = collect(lines)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = plots.draw(found, folder)
    content = {"provenance": provenances(lines), "runs": [as_json(one) for one in found], "failed": failures(lines)}
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path = folder / "report.md"
    path.write_text(markdown(lines, found, [picture.name for picture in pictures]), encoding="utf-8")
    return path


def as_json(one: Figures) -> dict[str, Any]:
    compared = one.compared._asdict() if one.compared else None
    fields = {**asdict(one), "speed": one.speed._asdict(), "score": one.score._asdict(), "compared": compared}
    return {**fields, "acceptance": plots.acceptance(one)}


def provenances(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Of every start, those alike but for the date once."""
    seen: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == "run":
            one = line["provenance"]
            seen.setdefault(json.dumps({**one, "date": None, "argv": None}, sort_keys=True), one)
    return list(seen.values())


def failures(lines: Iterable[Line]) -> list[dict[str, str]]:
    """Servers that failed and did not come up later."""
    last: dict[str, str | None] = {}
    for line in lines:
        if line["kind"] == "failed":
            last[line["contestant"]] = line["reason"]
        elif line["kind"] == "run":
            last[line["settings"]["contestant"]["name"]] = None
    return [{"contestant": name, "reason": reason} for name, reason in last.items() if reason]


def markdown(lines: Sequence[Line], found: Sequence[Figures], pictures: Sequence[str]) -> str:
    models = ", ".join(dict.fromkeys(one.settings["model"] for one in found)) or "nothing measured"
    parts = [f"# Evaluation of {models}", *_provenance(provenances(lines)), *_sources(found)]
    for cell in dict.fromkeys(one.cell for one in found):
        parts += _cell([one for one in found if one.cell == cell])
    parts += [LEGEND, *_differences(found), *_refusals(lines), *_failures(lines)]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in pictures]
    return "\n\n".join(parts) + "\n"


def _provenance(seen: Sequence[dict[str, Any]]) -> list[str]:
    if not seen:
        return []
    one = seen[-1]
    machine, git = one["machine"], one["git"] or {}
    packages = ", ".join(f"{name} {version}" for name, version in one["packages"].items() if version)
    changed = " with uncommitted changes" if git.get("modified") else ""
    said = [
        f"Commit {(git.get('commit') or 'unknown')[:12]}{changed}; {packages}; Python {one['python']}.",
        f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['memory_gb']} GB, "
        f"accelerator: {machine['accelerator'] or 'none'}; {one['date']}.",
    ]
    if len(seen) > 1:
        said.append(f"**Measured in {len(seen)} different settings of code, machine or environment; see report.json.**")
    return [" ".join(said)]


def _sources(found: Sequence[Figures]) -> list[str]:
    sources = dict.fromkeys(f"{one.settings['task']}: {one.source}" for one in found)
    return ["Data: " + "; ".join(sources) + "."] if sources else []


def _cell(found: Sequence[Figures]) -> list[str]:
    s = found[0].settings
    rule = s["sampling"]
    sampling = rule["name"]
    if rule["temperature"] > 0:
        sampling = f"{sampling} (temperature {rule['temperature']}, top-p {rule['top_p']})"
    arguments = f", server arguments `{' '.join(s['server_args'])}`" if s["server_args"] else ""
    title = f"## {s['task']} ({s['style']}), {sampling}, {s['concurrency']} at a time"
    under = f"At most {s['max_new_tokens']} new tokens{arguments}."
    return [title, under, table(COLUMNS, map(_row, found)), table(LATENCIES, map(_latency, found)), *_also(found)]


def _row(one: Figures) -> list[str]:
    score, compared = one.score, one.compared
    row = [
        one.contestant,
        number(score.mean, 3),
        "-" if score.low is None else f"{score.low:.2f}-{score.high:.2f}",
        str(one.answers),
    ]
    ratios = compared[1:4] if compared else (None, None, None)
    for value, ratio in zip(one.speed, ratios, strict=True):
        row += [number(value, 1), number(ratio, 2)]
    row += [number(one.accept_length, 2), number(one.ticks_per_token, 2)]
    if compared is None:
        return [*row, "-", "-", "-"]
    judged = compared.near_ties + compared.faults
    ties = [str(compared.near_ties), str(compared.faults)] if judged or not compared.unjudged else ["-", "-"]
    return [*row, f"{compared.equal}/{compared.problems}", *ties]


def _latency(one: Figures) -> list[str]:
    ttft = [milliseconds(value) for value in (one.ttft or dict.fromkeys((1, 2, 3))).values()]
    waits = [milliseconds(value) for value in (one.inter_token or dict.fromkeys((1, 2, 3))).values()]
    return [one.contestant, *ttft, *(waits if one.counted_events else ["not told"] * 3)]


def _also(found: Sequence[Figures]) -> list[str]:
    """Scores by other rules, and outcomes that changed."""
    said = []
    for one in found:
        if one.score.also:
            rules = ", ".join(f"{name} {value:.3f}" for name, value in one.score.also.items())
            said.append(f"{one.contestant} by lm-eval's rules: {rules}")
        if one.compared and one.compared.gained + one.compared.lost:
            c = one.compared
            p = "" if c.p_value is None else f" (McNemar p = {c.p_value:.2f})"
            said.append(f"{one.contestant} against plain: {c.gained} answers gained, {c.lost} lost{p}")
        if one.seeded:
            said.append(f"{one.contestant}: {one.seeded[0]} of {one.seeded[1]} texts are the first schedule's")
    return ["; ".join(said) + "."] if said else []


def _differences(found: Sequence[Figures]) -> list[str]:
    heads = ("task", "contestant", "x", "problem", "token", "plain", "taken", "gap (ulps)", "to taken", "verdict")
    rows = [
        [
            str(one.settings["task"]),
            one.contestant,
            str(one.settings["concurrency"]),
            line["problem"],
            *(str(line[name]) for name in ("position", "expected", "taken")),
            number(line["gap_ulps"], 2),
            number(line["taken_ulps"], 2),
            line["verdict"],
        ]
        for one in found
        for line in one.differences
    ]
    return ["## Differences from plain", table(heads, rows)] if rows else []


def _refusals(lines: Iterable[Line]) -> list[str]:
    counts: dict[tuple[str, str], int] = {}
    titles = {line["run"]: _title(line["settings"]) for line in lines if line["kind"] == "run"}
    for line in lines:
        if line["kind"] == "refused":
            key = str(titles.get(line["run"], line["run"])), str(line["reason"])
            counts[key] = counts.get(key, 0) + 1
    rows = [[title, str(count), reason[:200]] for (title, reason), count in counts.items()]
    return ["## Refused by the server", table(("run", "problems", "reason"), rows)] if rows else []


def _title(settings: dict[str, Any]) -> str:
    name = settings["contestant"]["name"]
    return f"{settings['task']} {settings['sampling']['name']} x{settings['concurrency']} {name}"


def _failures(lines: Sequence[Line]) -> list[str]:
    rows = [[one["contestant"], one["reason"].split("\n")[0][:300]] for one in failures(lines)]
    return ["## Did not run", table(("contestant", "reason"), rows)] if rows else []


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *body])


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
