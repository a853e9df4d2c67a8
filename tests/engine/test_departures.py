"""Who is told when a request gives its row of the slot table back."""

from __future__ import annotations

import types

import pytest

from sglang_trunc.engine import departures

pytestmark = pytest.mark.usefixtures("sglang_context")


def request(name: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(rid=name)


def test_the_listener_of_a_table_hears_of_its_requests_only():
    one, two, none = (types.SimpleNamespace() for _ in range(3))
    heard, others = [], []
    departures.announce(one, heard.append)
    departures.announce(two, others.append)
    for table, name in ((one, "a"), (two, "b"), (none, "c"), (one, "d")):
        departures.on_free("what free returned", table, request(name))
    assert (heard, others) == (["a", "d"], ["b"])


def test_sglangs_own_table_reports_a_freed_row():
    """The hook is in place: ``sglang_context`` has loaded the plugins, as every server process does."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(size=4, max_context_len=8, device="cpu", enable_memory_saver=False)
    heard = []
    departures.announce(pool, heard.append)
    req = types.SimpleNamespace(rid="left", kv=types.SimpleNamespace(req_pool_idx=pool.alloc_rows(1)[0], holds_kv=True))
    pool.free(req)
    assert heard == ["left"]
    assert pool.available_size() == 4
