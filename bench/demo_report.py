"""Markdown of the demo models' training records, for notes/results/demo-training.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADER = """# Demo checkpoints: training record

Written by `python bench/train_demo.py report` from the `training.json` beside each checkpoint in
`sglang_trunc/demos/`. Text: the sources of the machine's own Python standard library, dialogues made from
its docstrings, licence texts; one file in twenty held out. Agreement of a depth is the share of positions
where its argmax is that of full depth, measured with the stored bfloat16 weights in float32: on held-out text
(teacher-forced) and on the model's own greedy continuations of held-out prompts (96 + 96 tokens).

Optimiser: Muon for the matrices of the blocks, AdamW for the rest. In pilots of the Ouro model with 160 steps,
AdamW alone (learning rate 5e-3, branch norms starting at 1) had a full-depth training loss of 5.38 at the end;
with Muon and branch norms starting at 0.4 the run below was at 4.87 after 150 steps.
"""

FACTS = (
    ("date", "date"),
    ("command", "command"),
    ("seed", "seed"),
    ("steps", "steps"),
    ("tokens per step", "tokens_per_step"),
    ("learning rate (AdamW part)", "learning_rate"),
    ("threads", "threads"),
    ("wall minutes (machine shared)", "wall_minutes"),
    ("CPU minutes", "cpu_minutes"),
    ("parameters", "parameters"),
    ("Python, torch", ("python", "torch")),
    ("corpus digest", "corpus"),
    ("corpus files, dialogues", ("corpus_files", "corpus_dialogues")),
    ("corpus characters, tokens", ("corpus_chars", "corpus_tokens")),
)


def render(records: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join([HEADER, *(_section(record) for record in records)])


def _section(record: Mapping[str, Any]) -> str:
    held_out = record["held_out"]
    lines = [f"## {record['family'].capitalize()}", "", "| | |", "|---|---|"]
    for label, key in FACTS:
        keys = key if isinstance(key, tuple) else (key,)
        lines.append(f"| {label} | {', '.join(str(record[k]) for k in keys)} |")
    lines += ["", "| depth | held-out loss | agreement on text | agreement on greedy continuations |"]
    lines.append("|---|---|---|---|")
    columns = (held_out["loss_per_depth"], held_out["agreement_teacher_forced"], held_out["agreement_greedy"])
    for depth, (loss, forced, greedy) in enumerate(zip(*columns, strict=True), start=1):
        lines.append(f"| {depth} | {loss:.3f} | {forced:.3f} | {greedy:.3f} |")
    lines += [
        "",
        f"Held-out tokens: {held_out['held_out_tokens']}; greedy tokens: {held_out['greedy_tokens']}, "
        f"{held_out['distinct_tokens_per_continuation']} distinct ones per continuation on average. "
        f"Loss of the full depth at positions 640 to 768: {held_out['loss_at_positions_640_to_768']:.3f}.",
        "",
        "Training loss (nats per token, mean over the steps since the row above; Raven draws one depth a step):",
        "",
        _history(record["training_loss"]),
    ]
    return "\n".join(lines)


def _history(history: Mapping[str, Mapping[str, float]]) -> str:
    depths = sorted({int(depth) for means in history.values() for depth in means})
    lines = ["| step | " + " | ".join(f"depth {d}" for d in depths) + " |", "|---" * (len(depths) + 1) + "|"]
    for step, means in history.items():
        cells = [f"{means[str(d)]:.2f}" if str(d) in means else "" for d in depths]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
