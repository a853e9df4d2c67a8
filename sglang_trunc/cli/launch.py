"""Starting a server in front of a person: a spinner while it loads, one line when it is ready."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console

from sglang_trunc.serving.server import Server


@contextlib.contextmanager
def started(server: Server, console: Console) -> Iterator[Server]:
    """The server for the length of the block."""
    with console.status(f"starting the {server.name} server"):
        server.start()
    with server:
        console.print(f"{server.name} server ready after {server.start_seconds:.0f} s")
        yield server
