"""Doctor's rows and exit code, with the checks replaced or broken."""

import logging
from types import SimpleNamespace

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


def test_logging_is_quiet_meanwhile_and_on_again_afterwards(monkeypatch, console, caplog):
    def checks(model_path):
        logging.error("heard by nobody")
        return []

    monkeypatch.setattr(doctor, "checks", checks)
    doctor.run(None, console)
    logging.error("heard again")
    assert [record.message for record in caplog.records] == ["heard again"]


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


def config(recurrences: int) -> SimpleNamespace:
    """Of a shape that no preset fits."""
    return SimpleNamespace(
        architectures=["OuroForCausalLM"], hidden_size=64, num_hidden_layers=2, recurrences=recurrences, vocab_size=300,
        num_key_value_heads=2,
    )  # fmt: skip


OF_ALL = {"SAMPLING_POLICY": "seeded", "RELAX_TOP": 1, "RELAX_TAU": 1.0, "LOOKUP": 0, "LOOKUP_MIN_MATCH": 3} | {
    "LOOKUP_CORPUS": "",
    "SCREEN_TOP": 1,
}
LANES = {"LOOKUP_CANDIDATES": 1}
PIPELINE = {"MAX_WIDTH": 16, "MIN_SURVIVAL": 0.02}
SHOWN = {
    "TRUNC": {
        "D1": 1,
        "D2": 2,
        "MAX_WIDTH": 32,
        "MIN_SURVIVAL": 0.02,
        **OF_ALL,
        "LOOKUP": 8,
        "CONTROL": "measured",
        **LANES,
    },
    "LOOPSPEC_SINGLE": {"D1": 1, **PIPELINE, **OF_ALL, "CONTROL": "fixed", **LANES},
    "LOOPSPEC_DUAL": {"D1": 1, "D2": 2, **PIPELINE, **OF_ALL, "CONTROL": "fixed", **LANES},
}


@pytest.fixture
def no_options(monkeypatch):
    for name in ("BLOCK_SIZE", "DRAFT_THRESHOLD", *SHOWN["TRUNC"]):
        monkeypatch.delenv(f"SGLANG_TRUNC_{name}", raising=False)


@pytest.mark.usefixtures("no_options")
def test_options_of_every_algorithm_are_shown():
    expected = [
        Row(f"option {algorithm} {name.lower()}", True, f"{value} (default for 4 recurrences)")
        for algorithm, shown in SHOWN.items()
        for name, value in shown.items()
    ]
    assert sorted(map(str, doctor.options(config(4)))) == sorted(map(str, expected))


@pytest.mark.usefixtures("no_options")
def test_an_algorithm_that_does_not_fit_is_named_and_no_fault():
    *shown, dual = doctor.options(config(2))
    assert dual.part == "options of LOOPSPEC_DUAL"
    assert dual.found.startswith("refused: R is 2, but LOOPSPEC_DUAL needs at least 3: ")
    assert dual.ok
    assert {row.part.split()[1] for row in shown} == {"TRUNC", "LOOPSPEC_SINGLE"}


@pytest.mark.usefixtures("no_options")
def test_options_that_no_algorithm_takes_are_broken(monkeypatch):
    monkeypatch.setenv("SGLANG_TRUNC_D1", "9")
    rows = list(doctor.options(config(4)))
    assert [row.ok for row in rows] == [False] * 3
    assert rows[0] == Row(
        "options of TRUNC",
        False,
        "refused: d1 is 9 (from environment variable SGLANG_TRUNC_D1), but must be a divisor of R = 4 "
        "below it where no block_size is set: 1, 2",
    )
