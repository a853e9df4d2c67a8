"""The depth report of a store's plain greedy answers (``depth_figures``, ``depth_report``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evaluation import depth_figures, depth_report
from evaluation.chat import ChatTemplate
from evaluation.figures import PLAIN, collect
from evaluation.store import Line
from evaluation.tasks.problem import Task


class Text(NamedTuple):
    prompt: list[int]
    output: list[int]


def write(lines: Sequence[Line], tasks: Sequence[Task], model_path: str, limit: int | None, folder: Path) -> Path:
    """Markdown, JSON and picture into ``folder``; the path of the first. Raises ValueError without texts."""
    from sglang_trunc.reference.checkpoint import load_checkpoint

    found = list(texts(lines, tasks, ChatTemplate(model_path), limit))
    model = load_checkpoint(model_path)
    told = [depth_figures.tell(model, text.prompt, text.output) for text in found]
    figures = depth_figures.summed_up(told)
    law = depth_report.law(figures.distance, figures.recurrences)
    cases = depth_report.simulated(told, figures.recurrences)
    runs = depth_report.served(collect(lines))
    depth_report.draw(figures, law, folder / "depths.png")
    content: dict[str, Any] = depth_report.as_json(figures, law, cases)
    (folder / "depths.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path = folder / "depths.md"
    path.write_text(depth_report.markdown(figures, law, cases, runs, Path(model_path).name), encoding="utf-8")
    return path


def texts(lines: Sequence[Line], tasks: Sequence[Task], chat: ChatTemplate, limit: int | None) -> Iterator[Text]:
    """Each problem's plain greedy answer once, whatever the concurrency."""
    known = {(task.name, task.style.value, task.digest): task for task in tasks}
    runs: dict[str, Task] = {}
    for line in lines:
        if line["kind"] == "run" and _is_plain_greedy(line["settings"]):
            s = line["settings"]
            task = known.get((s["task"], s["style"], s["data"]))
            if task is not None:
                runs[line["run"]] = task
    seen: dict[str, set[str]] = {}
    for line in lines:
        if line["kind"] != "answer" or line["run"] not in runs or not line["output_ids"]:
            continue
        task = runs[line["run"]]
        mine = seen.setdefault(task.digest, set())
        if line["problem"] in mine or (limit is not None and len(mine) >= limit):
            continue
        problem = next((one for one in task.problems if one.id == line["problem"]), None)
        if problem is not None:
            mine.add(problem.id)
            prompt = chat.text_ids(problem.text) if problem.text is not None else chat.ids(problem.messages, task.style)
            yield Text(prompt, line["output_ids"])


def _is_plain_greedy(settings: dict[str, Any]) -> bool:
    return settings["contestant"]["name"] == PLAIN and settings["sampling"]["temperature"] == 0
