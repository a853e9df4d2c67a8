"""The suite's own order of work: tests that share a server, or a module, run on one worker."""

from __future__ import annotations

import pytest


def test_a_workers_test_carries_its_group(request):
    """Without the group in the id, xdist spreads a module over its workers, and each starts the same servers."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("without xdist there is nothing to group")
    assert request.node.nodeid.endswith(f"@{request.path}")
