"""Trains the two demo checkpoints that ship in the package: `train_demo.py train ouro`, then `raven`.

Text is the machine's own standard library (demo_corpus.py), shapes and losses are in demo_models.py. Each
run writes config, bfloat16 weights, tokenizer and a training.json with seed, steps, wall time, losses and
held-out agreement of every depth; `train_demo.py report` renders those records as a table. Same seed, same
Python and same thread count give the same weights up to the CPU's own rounding.

Sequences of several lengths share one token budget per step, so that positions up to 1024 are trained.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import sys
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from demo_corpus import Corpus, load_corpus, train_tokenizer
from demo_eval import batch_greedy, evaluate
from demo_models import MAX_POSITIONS, VOCAB_SIZE, Losses, build, losses
from rich.console import Console
from rich.progress import track

from sglang_trunc.reference.checkpoint import load_checkpoint, save_checkpoint
from sglang_trunc.reference.looped import LoopedReference
from sglang_trunc.reference.tokenizer import END_OF_TEXT, save_tokenizer

ROOT = Path(__file__).resolve().parents[1]
DEMOS = ROOT / "sglang_trunc" / "demos"
FAMILIES = ("ouro", "raven")
TOKENS_PER_STEP = 2048
LENGTHS, LENGTH_WEIGHTS = (256, 512, 1024), (0.75, 0.15, 0.10)
SHORTEST_PASSAGE = 8
WARMUP_STEPS = 60
MUON_LEARNING_RATE = 0.02
FINAL_LR_SHARE = 0.02
PROBE = "def read_json(path):\n"

app = typer.Typer(add_completion=False, no_args_is_help=True)
console = Console(width=110)


@app.command()
def train(
    family: str,
    steps: int = 2000,
    seed: int = 0,
    learning_rate: float = 5e-3,
    threads: int = 1,
    out: Path | None = None,
    start_from: Annotated[Path | None, typer.Option(help="go on from this checkpoint")] = None,
    repeats: Annotated[float, typer.Option(min=0, max=1, help="share of sequences that repeat a passage")] = 0.0,
) -> None:
    """Train one demo model and write it to sglang_trunc/demos/FAMILY."""
    if family not in FAMILIES:
        raise typer.BadParameter(f"family must be one of {FAMILIES}, got {family!r}")
    out = out or DEMOS / family
    torch.set_num_threads(threads)
    corpus = load_corpus()
    tokenizer = train_tokenizer([*corpus.train, *corpus.dialogues], VOCAB_SIZE)
    stream = token_stream(tokenizer, [*corpus.train, *corpus.dialogues], seed)
    held_out = token_stream(tokenizer, [*corpus.held_out, *corpus.held_out_dialogues], seed)
    console.print(f"{len(stream)} training tokens, {len(held_out)} held out, corpus {corpus.digest}")

    model = build(family, seed) if start_from is None else load_checkpoint(start_from, torch.float32).train()
    started, cpu_started = time.monotonic(), time.process_time()
    history = run_steps(model, stream, steps, seed, learning_rate, repeats)
    wall, cpu = time.monotonic() - started, time.process_time() - cpu_started
    save_checkpoint(model, out, torch.bfloat16)
    save_tokenizer(tokenizer, out, MAX_POSITIONS)
    figures = evaluate(load_checkpoint(out, torch.float32), held_out)
    record = {
        "family": family,
        "date": date.today().isoformat(),
        "command": "python " + shlex.join(["bench/train_demo.py", *sys.argv[1:]]),
        "seed": seed,
        "steps": steps,
        "tokens_per_step": TOKENS_PER_STEP,
        "learning_rate": learning_rate,
        "threads": threads,
        "wall_minutes": round(wall / 60, 1),
        "cpu_minutes": round(cpu / 60, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **corpus_record(corpus, stream),
        "training_loss": history,
        "held_out": figures,
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print_json(data=record)
    show_sample(load_checkpoint(out, torch.float32), tokenizer)


def token_stream(tokenizer: Any, documents: list[str], seed: int) -> torch.Tensor:
    """All documents in a seeded order, each closed by <|endoftext|>, as one int64 tensor."""
    order = list(documents)
    random.Random(seed).shuffle(order)
    pieces = []
    for encoding in tokenizer.encode_batch(order):
        pieces.append(torch.tensor([*encoding.ids, END_OF_TEXT], dtype=torch.int64))
    return torch.cat(pieces)


def run_steps(
    model: LoopedReference, stream: torch.Tensor, steps: int, seed: int, learning_rate: float, repeats: float
) -> dict[str, dict[str, float]]:
    """Trains in place; returns mean loss per depth over windows of steps: {"step": {"depth": loss}}."""
    rng = random.Random(seed)
    optimizers = make_optimizers(model, learning_rate)
    history: dict[str, dict[str, float]] = {}
    seen: dict[int, list[float]] = defaultdict(list)
    window = max(1, steps // 20)
    started = time.monotonic()
    for step in track(range(steps), description="training", console=console, disable=not console.is_terminal):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * schedule(step, steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result: Losses = losses(model, draw_batch(stream, rng, repeats), rng, step)
        result.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        for depth, value in zip(result.depths, result.values, strict=True):
            seen[depth].append(value)
        if (step + 1) % window == 0:
            means = {str(depth): round(sum(v) / len(v), 4) for depth, v in sorted(seen.items())}
            history[str(step + 1)] = means
            console.print(f"step {step + 1} after {time.monotonic() - started:.0f} s: {means}")
            seen.clear()
    return history


def make_optimizers(model: LoopedReference, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embedding, head and norm weights.

    With a few million tokens to learn from, AdamW alone is still far from a sane text when they are used up.
    """
    inner, table, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "early_exit_gate" in name:
            vectors.append(parameter)
        elif name.endswith(("embed_tokens.weight", "wte.weight", "lm_head.weight")):
            table.append(parameter)
        else:
            inner.append(parameter)
    muon = {"params": inner, "peak_lr": MUON_LEARNING_RATE}
    tables = {"params": table, "peak_lr": learning_rate, "weight_decay": 0.01}
    rest = {"params": vectors, "peak_lr": learning_rate, "weight_decay": 0.0}
    return [
        torch.optim.Muon([muon], lr=MUON_LEARNING_RATE, weight_decay=0.05),
        torch.optim.AdamW([tables, rest], lr=learning_rate, betas=(0.9, 0.95)),
    ]


def schedule(step: int, steps: int) -> float:
    """Linear warm-up, then cosine."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done))


def draw_batch(stream: torch.Tensor, rng: random.Random, repeats: float) -> torch.Tensor:
    length = rng.choices(LENGTHS, LENGTH_WEIGHTS)[0]
    return torch.stack([_draw(stream, rng, length + 1, repeats) for _ in range(TOKENS_PER_STEP // length)])


def _draw(stream: torch.Tensor, rng: random.Random, length: int, repeats: float) -> torch.Tensor:
    """A stretch of the text, or one of its passages over and over, from which copying is learnt."""
    start = rng.randrange(len(stream) - length)
    if not repeats or rng.random() >= repeats:
        return stream[start : start + length]
    passage = stream[start : start + rng.randint(SHORTEST_PASSAGE, length // 2)]
    return passage.repeat(-(-length // len(passage)))[:length]


def corpus_record(corpus: Corpus, stream: torch.Tensor) -> dict[str, Any]:
    return {
        "corpus": corpus.digest,
        "corpus_files": len(corpus.train) + len(corpus.held_out),
        "corpus_dialogues": len(corpus.dialogues) + len(corpus.held_out_dialogues),
        "corpus_chars": corpus.num_chars,
        "corpus_tokens": len(stream),
    }


def show_sample(model: LoopedReference, tokenizer: Any) -> None:
    ids = torch.tensor([tokenizer.encode(PROBE).ids])
    text = tokenizer.decode(batch_greedy(model, ids, 120)[0].tolist(), skip_special_tokens=False)
    console.print(text, markup=False)


@app.command()
def report(out: Path = ROOT / "notes" / "results" / "demo-training.md") -> None:
    """Render the training records of both demo models as Markdown."""
    from demo_report import render

    records = [json.loads((DEMOS / family / "training.json").read_text()) for family in FAMILIES]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(records))
    console.print(f"wrote {out.name}")


if __name__ == "__main__":
    app()
