"""Times of the CPU kernels by rows and context: what the cost of a tick on a GPU-less machine is made of.

    python bench/cpu_kernels.py --threads 1

Each figure is the least of several calls, in milliseconds, with the memory traffic (weights, or K and V) that it
amounts to and the arithmetic it did. Calls rotate over enough layers or slots to defeat the third-level cache, as
a tick does. With one thread the clock is the thread's own processor time, so that other processes on the machine
disturb little; with more it is wall time, and the machine should be idle.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor

from sglang_trunc.platform.cpu_attention import lane_attention
from sglang_trunc.platform.cpu_elementwise import rms_norm_add, rope_store, silu_mul
from sglang_trunc.platform.cpu_linear import PackedLinear

Call = Callable[[], object]
CACHE = 100_000_000  # bytes that calls rotate over


def least(calls: list[Call], repeats: int) -> float:
    """Milliseconds of the fastest of ``repeats`` calls, after one warm-up each."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = float("inf")
    for call in itertools.islice(itertools.cycle(calls), repeats):
        start = clock()
        call()
        best = min(best, clock() - start)
    return 1e3 * best


def report(name: str, ms: float, read: float = 0.0, work: float = 0.0) -> None:
    rates = f"{read / ms / 1e6:8.1f} GB/s" if read else ""
    rates += f"{work / ms / 1e6:8.0f} GFLOP/s" if work else ""
    typer.echo(f"{name:42}{ms:10.4f} ms{rates}")


def linear(n: int, k: int) -> None:
    """A product as a model has it: the next layer's weights come from memory."""
    size = 2 * n * k
    layers = [PackedLinear(torch.randn(n, k).bfloat16()) for _ in range(max(1, CACHE // size))]
    for rows in (1, 2, 4, 8, 16, 32, 64, 256):
        x, out = torch.randn(rows, k).bfloat16(), torch.empty(rows, n).bfloat16()

        def sweep(x: Tensor = x, out: Tensor = out) -> None:
            for layer in layers:
                layer(x, out)

        ms = least([sweep], 5) / len(layers)
        report(f"linear {n} x {k}, {rows} rows", ms, size, 2.0 * n * k * rows)


def attention(heads: int, dim: int, pool: torch.dtype) -> None:
    """Decoding: rows of one request share their tokens, rows of several do not."""
    row = heads * dim * pool.itemsize
    slots = max(4096 * 2, CACHE // row)
    k, v = torch.randn(2, slots, heads * dim).to(pool)
    order = torch.randperm(slots).int()
    for requests, shared, context in itertools.product((1, 8), (1, 4), (64, 256, 900, 4096)):
        if requests * context > slots:
            continue
        start = (torch.arange(requests) * context).repeat_interleave(shared)
        length, zero = torch.full_like(start, context), torch.zeros_like(start)
        q = torch.randn(len(start), heads * dim).bfloat16()
        out = torch.empty_like(q)

        def call(first: int, q=q, start=start, length=length, zero=zero, out=out) -> Tensor:
            return lane_attention(q, k, v, order[first:], start, length, zero, out, dim**-0.5, heads)

        firsts = range(0, slots - requests * context + 1, requests * context)
        calls = [lambda first=first, call=call: call(first) for first in firsts]
        name = f"attention {heads}x{dim} {pool}, {requests} x {shared} rows, {context}".replace("torch.", "")
        report(name, least(calls, 60), 2.0 * requests * context * row)


def prefill(heads: int, dim: int, pool: torch.dtype) -> None:
    for rows in (128, 800, 2048):
        k, v = torch.randn(2, rows, heads * dim).to(pool)
        q = torch.randn(rows, heads * dim).bfloat16()
        zero, out = torch.zeros(rows, dtype=torch.int64), torch.empty_like(q)
        where = (torch.randperm(rows).int(), zero, torch.arange(1, rows + 1), zero)
        ms = least([lambda: lane_attention(q, k, v, *where, out, dim**-0.5, heads)], 5)  # noqa: B023
        name = f"attention {heads}x{dim} {pool}, prefill of {rows}".replace("torch.", "")
        report(name, ms, work=2.0 * heads * dim * rows * (rows + 1))


def elementwise(width: int, inner: int, dim: int) -> None:
    angle = torch.rand(4096, dim // 2)
    for rows in (1, 4, 16, 256):
        x, weight = torch.randn(rows, width).bfloat16(), torch.randn(width).bfloat16()
        gate_up, fused = torch.randn(rows, 2 * inner).bfloat16(), torch.randn(rows, 3 * width).bfloat16()
        q, k, v = fused.split(width, -1)
        pool, index, out = torch.zeros(2, rows, width), torch.arange(rows), torch.empty_like(x)
        turn = (index, angle.cos(), angle.sin())
        for name, call in (
            ("rms_norm_add", lambda: rms_norm_add(x, weight, 1e-6, x, out)),  # noqa: B023
            ("silu_mul", lambda: silu_mul(gate_up)),  # noqa: B023
            ("rope_store", lambda: rope_store(q, k, v, *turn, *pool, index, dim)),  # noqa: B023
        ):
            report(f"{name}, {rows} rows of {inner if name == 'silu_mul' else width}", least([call], 200))


def main(
    threads: Annotated[int, typer.Option(help="Threads of torch and of the kernels.")] = 1,
    hidden: Annotated[int, typer.Option(help="Model width.")] = 1024,
    inner: Annotated[int, typer.Option(help="Width of the gated MLP.")] = 2816,
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 64,
    vocabulary: Annotated[int, typer.Option(help="Rows of the LM head.")] = 49152,
) -> None:
    """Print one line per kernel and size."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    for n, k in ((3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner), (vocabulary, hidden)):
        linear(n, k)
    for pool in (torch.bfloat16, torch.float32):
        attention(hidden // head_dim, head_dim, pool)
        prefill(hidden // head_dim, head_dim, pool)
    elementwise(hidden, inner, head_dim)


if __name__ == "__main__":
    typer.run(main)
