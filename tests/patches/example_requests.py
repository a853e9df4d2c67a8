"""Examples for requests: where a run of tokens ends, and who hears that a request has left its row."""

from __future__ import annotations

import random
import types
from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.patches.run_examples import replaced

EOS = "$"
OUTSIDE = "\u2603"  # a token id that the vocabulary does not have


class Letters:
    """A tokenizer of one token a letter."""

    eos_token_id = ord(EOS)
    additional_stop_token_ids = None

    def encode(self, text: str, **_) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


# --- first-stop-of-a-run ---

# The text that was chosen, in runs, and what the request asked for.
RUNS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "stop token before a stop string": (["a$bz"], {"stop": ["z"]}),
    "first in the text, not in the list": (["xyz"], {"stop": ["z", "x"]}),
    "string before a pattern": (["axb"], {"stop": ["b"], "stop_regex": ["x"]}),
    "first of two patterns": (["axb"], {"stop_regex": ["b", "x"]}),
    "end of text before a fault": (["a$" + OUTSIDE], {}),
    "fault before a stop string": (["a" + OUTSIDE + "z"], {"stop": ["z"]}),
    "string and token at once": (["ab$c"], {"stop": ["$"]}),
    "string over two runs": (["ax", "yb"], {"stop": ["xy"]}),
    "stop behind the cap": (["abc$"], {"max_new_tokens": 2, "stop": ["c"]}),
    "stop before the cap": (["ab$c"], {"max_new_tokens": 3, "stop": ["c"]}),
    "nothing": (["abc"], {"stop": ["z"]}),
}


def decode_runs(side: str, runs: Sequence[str], asked: dict[str, Any]) -> list[Any]:
    """(text through the stop, kind of reason, what matched)."""
    params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 100, **asked})
    params.normalize(Letters())
    request = Req("id", "", [5, 6], params, eos_token_ids={ord(EOS)}, vocab_size=256)
    request.tokenizer = Letters()
    update = Req.update_finish_state
    if side == "ours":
        from sglang_trunc.engine import finish
    for run in runs:
        request.output_ids.extend(map(ord, run))
        if side == "ours":
            with replaced(finish, is_ours=lambda algorithm: True, get_spec=unset_spec):
                finish.update_token_by_token(update, request, len(run))
        else:
            update(request, len(run))
        if request.finished():
            break
    reason = request.finished_reason.to_json() if request.finished() else {"type": None}
    return [Letters().decode(request.output_ids_through_stop), reason["type"], reason.get("matched")]


def unset_spec() -> types.SimpleNamespace:
    return types.SimpleNamespace(speculative_algorithm=None)


def first_stop(side: str) -> dict[str, Any]:
    return {name: decode_runs(side, *case) for name, case in RUNS.items()}


def runs_against_tokens(side: str) -> dict[str, int]:
    """Random texts: how many end elsewhere in runs than token by token, of how many that end before their cap."""
    choose = random.Random(3)
    differences = stopped = 0
    for _ in range(400):
        text = "".join(choose.choices("abcdef" + EOS, k=30))
        asked: dict[str, Any] = {"max_new_tokens": choose.choice([5, 20, 100])}
        if choose.random() < 0.7:
            asked["stop"] = ["".join(choose.choices("abcdef", k=choose.choice([1, 2, 3]))) for _ in range(2)]
        if choose.random() < 0.4:
            asked["stop_regex"] = choose.sample(["a[bc]d", "f.$", "[ae]{2}", "b"], k=2)
        runs, at = [], 0
        while at < len(text):
            length = choose.randint(1, 8)
            runs.append(text[at : at + length])
            at += length
        want = decode_runs("stock", list(text), asked)
        stopped += want[1] == "stop"
        differences += decode_runs(side, runs, asked) != want
    return {"differences": differences, "stopped": stopped}


# --- row-release-notice ---


class Holder:
    """A request, a session's slot: whatever holds a row."""

    def __init__(self, rid: str, row: int):
        self.rid = rid
        self.kv = types.SimpleNamespace(req_pool_idx=row, holds_kv=True)


def release_notices(side: str) -> dict[str, list[str]]:
    """Who has left, as a worker hears it that knows which request is in which row."""
    tables = {
        "plain": ReqToTokenPool(size=4, max_context_len=8, device="cpu", enable_memory_saver=False),
        "decode instance": DecodeReqToTokenPool(
            size=4, max_context_len=8, device="cpu", enable_memory_saver=False, pre_alloc_size=0
        ),
    }
    heard: dict[str, list[str]] = {}
    for name, table in tables.items():
        rows = [table.free_slots.pop() for _ in range(3)]
        holders = {row: Holder(f"request {index}", row) for index, row in enumerate(rows)}
        gone = heard[name] = []
        if side == "ours":
            from sglang_trunc.engine import departures

            departures.announce(table, gone.append)
        else:
            table.register_on_free_rows(lambda indices, g=gone, h=holders: g.extend(h[i].rid for i in indices))
        for row in rows[:2]:
            result = table.free(holders[row])
            if side == "ours":
                departures.on_free(result, table, holders[row])
        assert table.available_size() == 3
    return heard


def members_without_a_request(side: str) -> list[int]:
    """Rows of a beam are given back without a request."""
    table = ReqToTokenPool(size=4, max_context_len=8, device="cpu", enable_memory_saver=False)
    heard: list[int] = []
    table.register_on_free_rows(heard.extend)
    table.free_rows([])
    table.free_rows(sorted(table.alloc_rows(2)))
    return heard


EXAMPLES = {
    "first stop": first_stop,
    "runs against tokens": runs_against_tokens,
    "release notices": release_notices,
    "members without a request": members_without_a_request,
}
