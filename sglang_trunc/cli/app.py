"""Commands and options of ``sglang-trunc``; the work is in one module per command.

Anything after ``--`` goes to both servers as it is, for example
``sglang-trunc verify --model-path M -- --dtype float32 --page-size 16``. Options of the algorithm are set
as for a server: ``SGLANG_TRUNC_*`` variables or ``--json-model-override-args``.

The command modules are imported when they run, so that ``--help`` answers at once.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="sglang-trunc",
    help="Lossless self-speculative decoding of looped transformers on stock SGLang.",
    no_args_is_help=True,
    add_completion=False,
)

Algorithm = Annotated[str, typer.Option(help="Value of --speculative-algorithm.")]
ServerArgs = Annotated[
    list[str] | None, typer.Argument(help="After --: arguments for both servers.", metavar="-- SERVER_ARGS")
]


@app.command()
def demo(
    server_args: ServerArgs = None,
    model: Annotated[str, typer.Option(help="ouro or raven (bundled), or a checkpoint.")] = "ouro",
    algorithm: Algorithm = "trunc",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt.")] = 96,
) -> None:
    """Plain and speculative servers on a bundled model: texts, speed, and whether the tokens are equal."""
    from sglang_trunc.cli import demo as command

    options = command.DemoOptions(model, algorithm, concurrency, max_new_tokens, tuple(server_args or ()))
    raise typer.Exit(command.run(options, Console()))


@app.command()
def verify(
    model_path: Annotated[str, typer.Option(help="Checkpoint folder or Hub name.")],
    server_args: ServerArgs = None,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON lines with a text, or text."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt, stop tokens ignored.")] = 64,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, one pass each.")] = "1,4",
    algorithm: Annotated[
        str | None, typer.Option(help="Value of --speculative-algorithm: trunc if not given, all with a matrix.")
    ] = None,
    options: Annotated[
        str | None,
        typer.Option(
            help="matrix: compare the answer under every request option, for all algorithms.", metavar="matrix"
        ),
    ] = None,
    promise: Annotated[
        str, typer.Option(help="auto, bit-equal or near-ties: what counts as equal.", metavar="PROMISE")
    ] = "auto",
    json: Annotated[Path | None, typer.Option(help="Write the result here as well.")] = None,
) -> None:
    """The agreement gate: exit 1 when speculation changes the text beyond the back end's promise."""
    from sglang_trunc.cli import matrix
    from sglang_trunc.cli import verify as greedy

    if options not in (None, "matrix"):
        raise typer.BadParameter(f"--options knows only matrix, got {options!r}")
    try:
        levels, kept = greedy.parse_levels(concurrency), greedy.parse_promise(promise)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    more = (prompts, max_new_tokens, levels, kept, json, tuple(server_args or ()))
    if options is None:
        raise typer.Exit(greedy.run(greedy.VerifyOptions(model_path, algorithm or "trunc", *more), Console()))
    algorithms = (algorithm,) if algorithm else matrix.ALGORITHMS
    raise typer.Exit(matrix.run(matrix.MatrixOptions(model_path, algorithms, *more), Console()))


@app.command()
def doctor(
    model_path: Annotated[str | None, typer.Option(help="Also say what would run for this checkpoint.")] = None,
    all_seams: Annotated[bool, typer.Option("--all-seams", help="List the seams that hold, too.")] = False,
) -> None:
    """What is installed, which SGLang names hold, which device, what would run."""
    from sglang_trunc.cli import doctor as command

    raise typer.Exit(command.run(model_path, Console(), all_seams))


def main() -> None:
    # So that the servers' context managers run when the command is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()


if __name__ == "__main__":
    main()
