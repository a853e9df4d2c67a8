"""Other requests beside a test's own.

A pipeline's round lasts until every request has a token. Alone, a request gets exactly one; beside others that
wait for theirs, one whose drafts were right gets several, and only then can a stop fall inside a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from threading import Event

from sglang_trunc.serving.client import Client
from tests.server.oracle import Oracle, prompt_of

CLIENTS = 2
TOKENS = 24


@contextmanager
def in_company(client: Client, oracle: Oracle) -> Iterator[None]:
    """Two clients that keep asking until the block ends, and check what they get."""
    over = Event()

    def keep_asking(seed: int) -> None:
        for turn in count():
            prompt = prompt_of(4 + turn % 5, seed=seed)
            answer = client.generate(prompt, max_new_tokens=TOKENS, ignore_eos=True)
            assert oracle.mismatch(prompt, answer.output_ids) is None
            if over.is_set():
                return

    with ThreadPoolExecutor(max_workers=CLIENTS) as pool:
        others = [pool.submit(keep_asking, 200 + number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            over.set()
    for other in others:
        other.result()
