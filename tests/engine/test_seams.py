"""The seam table: it holds here, names what broke, and lists every SGLang name the package imports or hooks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sglang_trunc
from sglang_trunc import seams
from sglang_trunc.engine.names import ALGORITHMS
from sglang_trunc.seams import REMEDY, SeamError, check_all, require_all

pytestmark = pytest.mark.usefixtures("sglang_context")
PACKAGE = Path(sglang_trunc.__file__).parent
LISTED = {seam.path for seam in seams.TABLE}


def test_every_seam_holds():
    assert [report for report in check_all() if not report.ok] == []


def test_a_renamed_method_is_named_with_the_remedy(monkeypatch):
    from sglang.srt.managers.schedule_batch import Req

    monkeypatch.delattr(Req, "set_finish_with_abort")
    with pytest.raises(SeamError) as caught:
        require_all()
    assert "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort: not found" in str(caught.value)
    assert REMEDY in str(caught.value)
    assert "update_finish_state" not in str(caught.value)


def test_a_renamed_parameter_is_named(monkeypatch):
    from sglang.srt.mem_cache import allocation

    monkeypatch.setattr(allocation, "get_last_loc", lambda req_to_token, rows, prefix_lens_tensor: None)
    with pytest.raises(SeamError, match="get_last_loc: no longer takes req_pool_indices_tensor"):
        require_all()


def test_another_release_is_named(monkeypatch):
    monkeypatch.setattr(seams.importlib.metadata, "version", lambda name: "0.5.24")
    with pytest.raises(SeamError, match=r"sglang: version 0\.5\.24 is installed, 0\.5\.23 is needed"):
        require_all()


def test_a_broken_seam_makes_the_algorithm_refuse_with_its_sentence(monkeypatch):
    from sglang.srt.speculative import spec_registry

    from sglang_trunc import plugin

    registered = {}
    monkeypatch.setattr(spec_registry, "get_spec", lambda name: None)
    monkeypatch.setattr(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.register",
        lambda name, *, validate_server_args, **_: (registered.update({name: validate_server_args}), lambda fn: fn)[1],
    )
    monkeypatch.setattr(seams, "TABLE", (seams.Seam("managers.scheduler.Scheduler.renamed", "call"),))
    plugin.register()
    assert set(registered) == set(ALGORITHMS)
    with pytest.raises(
        ValueError, match=r"cannot run here: sglang\.srt\.managers\.scheduler\.Scheduler\.renamed: not found"
    ):
        registered["TRUNC"](None)


def imported_names() -> dict[str, str]:
    """Dotted name below ``sglang.srt`` -> the file that imports it."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt"):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}".removeprefix("sglang.srt.")
                    found[name] = str(file.relative_to(PACKAGE))
    return found


def test_every_imported_name_is_listed():
    unlisted = {
        name: file
        for name, file in imported_names().items()
        if not any(path == name or path.startswith(name + ".") for path in LISTED)
    }
    assert not unlisted


def test_every_hook_is_listed():
    from sglang_trunc.engine.install import HOOKS

    assert {target.removeprefix("sglang.srt.") for target, _, _ in HOOKS} <= LISTED


def test_every_hook_took_effect():
    """SGLang only logs a hook that it cannot apply."""
    import pkgutil

    from sglang_trunc.engine.install import HOOKS

    for target, _, _ in HOOKS:
        assert hasattr(pkgutil.resolve_name(target), "__wrapped__"), target
