"""Doctor's rows and exit code, with the checks replaced or broken."""

import pytest

from sglang_trunc.cli import doctor
from sglang_trunc.cli.doctor import Row


def only(monkeypatch, *rows):
    monkeypatch.setattr(doctor, "checks", lambda model_path: [("stub", lambda: rows)])


def test_everything_holds(monkeypatch, console):
    seams = [Row(f"seam {path}", True, "holds") for path in ("a.b", "a.c")]
    only(monkeypatch, Row("sglang", True, "0.5.23"), *seams)
    assert doctor.run(None, console) == 0
    said = console.export_text()
    assert "2 hold" in said
    assert "a.b" not in said


def test_seams_are_listed_on_request(monkeypatch, console):
    only(monkeypatch, Row("seam a.b", True, "holds"))
    doctor.run(None, console, all_seams=True)
    assert "a.b" in console.export_text()


def test_broken_seam_is_named_with_its_remedy(monkeypatch, console):
    only(monkeypatch, Row("seam a.b", False, "not found", "install the supported release"))
    assert doctor.run(None, console) == 1
    assert "seam a.b: not found. install the supported release" in console.export_text()


def test_a_check_that_raises_is_a_broken_row():
    def broken():
        yield Row("first", True, "fine")
        raise ImportError("no module named sglang")

    assert list(doctor.guarded("seams", broken)) == [
        Row("first", True, "fine"),
        Row("seams", False, "ImportError: no module named sglang"),
    ]


def test_versions_name_a_wrong_sglang(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "0.1")
    wrong = [row for row in doctor.versions() if not row.ok]
    assert [(row.part, row.found) for row in wrong] == [("sglang", "0.1")]
    assert "sglang==" in wrong[0].remedy


def test_missing_triton_is_not_broken(monkeypatch):
    def missing(name):
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    broken = {row.part for row in doctor.versions() if not row.ok}
    assert "triton" not in broken
    assert {"sglang", "torch"} <= broken


def test_missing_entry_point_is_broken(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    assert [row.ok for row in doctor.entry_points()] == [False, False]


@pytest.mark.parametrize(("path", "count"), [(None, 5), ("m", 6)])
def test_the_model_is_checked_only_when_named(path, count):
    assert len(doctor.checks(path)) == count
