"""GSM8K for lm-eval: our rows and worked examples as its task, so that both ask a server the very same text.

lm-eval's filters are applied by our grader too (``tasks.gsm8k.lm_eval_scores``), so ``strict-match`` and
``flexible-extract`` of a greedy run must come out alike. Its own ``gsm8k_cot`` reads the Hub; this task reads the rows
that we read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evaluation.tasks import gsm8k
from evaluation.tasks.problem import Style, Task

NAME = "gsm8k_cot_local"


def write(task: Task, folder: Path) -> Path:
    """``NAME``.yaml and its rows. JSON is YAML, and needs no library."""
    if task.name != "gsm8k" or task.style is not Style.BASE:
        raise ValueError("only GSM8K for base models is written for lm-eval")
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for problem in task.problems:
            # The worked examples are part of the text, so lm-eval adds none of its own.
            file.write(json.dumps({"prompt": problem.text, "target": problem.reference["target"]}) + "\n")
    path = folder / f"{NAME}.yaml"
    path.write_text(json.dumps(description(task, rows), indent=1) + "\n", encoding="utf-8")
    return path


def description(task: Task, rows: Path) -> dict[str, Any]:
    """Filters and metric as in lm-eval 0.4's gsm8k_cot."""
    filters = {
        "strict-match": {"function": "regex", "regex_pattern": gsm8k.STRICT.pattern},
        "flexible-extract": {"function": "regex", "group_select": -1, "regex_pattern": gsm8k.FLEXIBLE.pattern},
    }
    metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    ignoring = {"ignore_case": True, "ignore_punctuation": False, "regexes_to_ignore": list(gsm8k.IGNORED)}
    return {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows.resolve())}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{target}}",
        "num_fewshot": 0,
        "generation_kwargs": {"until": list(task.stop), "do_sample": False, "temperature": 0.0},
        "filter_list": [{"name": name, "filter": [rule, {"function": "take_first"}]} for name, rule in filters.items()],
        "metric_list": [{**metric, **ignoring}],
        "metadata": {"version": 1.0},
    }


def command(url: str, model_path: str, folder: Path, concurrency: int, limit: int | None) -> str:
    model = f"model={model_path},tokenizer={model_path},base_url={url.rstrip('/')}/v1/completions"
    arguments = f"{model},num_concurrent={concurrency},tokenized_requests=False"
    words = ["lm_eval --model local-completions", f"--model_args {arguments}", f"--include_path {folder}"]
    words += [f"--tasks {NAME} --gen_kwargs max_gen_toks={gsm8k.BASE_TOKENS} --batch_size 1"]
    return " ".join(words + ([f"--limit {limit}"] if limit else []))
