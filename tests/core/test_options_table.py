"""The README's table of options: its rows, what it says of algorithms with several classes."""

from dataclasses import fields
from pathlib import Path

from sglang_trunc.core.options import OPTIONS
from sglang_trunc.core.options_table import options_table
from tests.core.options_stand import CONTROL, NAMES, OF_ALL, TRUNC

README = Path(__file__).parents[2] / "README.md"
ROWS = options_table().splitlines()
CELLS = {row.split("`")[1]: row.split(" | ") for row in ROWS[2:]}  # option -> its cells


def test_table_has_one_row_for_every_option():
    first = ["d1", "d2", "max_width", "min_survival", "block_size", "draft_threshold", *OF_ALL, *CONTROL]
    assert [row.split("`")[1] for row in ROWS[2:]] == first
    assert {*first} == set().union(*NAMES.values())
    assert ROWS[:2] == ["| option | environment variable | algorithms | accepted | meaning |", "|---|---|---|---|---|"]
    assert all(row.count(" | ") == 4 for row in ROWS[2:])
    assert ROWS[2] == (
        "| `d1` | `SGLANG_TRUNC_D1` | all | TRUNC: a divisor of R below it with lanes, an integer from 1 to R with "
        "blocks; LOOPSPEC_SINGLE: a divisor of R below it; LOOPSPEC_DUAL: a divisor of R below R / 2 | depth "
        "(recurrences done) at which drafts are read out |"
    )


def test_table_says_who_has_an_option_and_with_which_schedule():
    of_lanes = "TRUNC with lanes, LOOPSPEC_SINGLE, LOOPSPEC_DUAL"
    assert {name: cells[2] for name, cells in CELLS.items()} == {
        "d1": "all",
        "d2": "TRUNC with lanes, LOOPSPEC_DUAL",
        "max_width": of_lanes,
        "min_survival": of_lanes,
        "control": of_lanes,
        "lookup_candidates": of_lanes,
        "block_size": "TRUNC with blocks",
        "draft_threshold": "TRUNC with blocks",
    } | dict.fromkeys(OF_ALL, "all")


def test_table_says_what_is_accepted():
    accepted = {name: cells[3] for name, cells in CELLS.items() if name != "d1"}
    assert accepted == {
        "d2": "TRUNC: a multiple of d1 between d1 and R, or 0 for none; LOOPSPEC_DUAL: a multiple of d1 between d1 "
        "and R",
        "max_width": "an integer from 1 to 256",
        "min_survival": "a number from 0 to 1",
        "block_size": "an integer from 1 to 64",
        "draft_threshold": "a number from 0 to 1",
        "sampling_policy": "seeded or residual",
        "relax_top": "an integer from 1 to 64; only 1 where sampling_policy is residual",
        "relax_tau": "a number from 0 to 1; only 1 where sampling_policy is residual",
        "lookup": "an integer from 0 to 64",
        "lookup_min_match": "an integer from 1 to 32",
        "control": "measured or fixed",
        "lookup_candidates": "an integer from 1 to 8",
        "lookup_corpus": "the path of a JSON Lines file, or nothing",
        "screen_top": "an integer from 0 to 64",
    }


def test_classes_of_one_algorithm_can_be_told_apart():
    for algorithm, kinds in OPTIONS.items():
        assert len({kind.schedule for kind in kinds}) == len(kinds)
        assert all(bool(kind.schedule) == (len(kinds) > 1) for kind in kinds), algorithm
    assert [kind.schedule for kind in OPTIONS[TRUNC]] == ["lanes", "blocks"]


def test_an_option_of_several_classes_means_the_same_in_each():
    docs: dict[str, set[str]] = {}
    for kinds in OPTIONS.values():
        for kind in kinds:
            for field in fields(kind):
                docs.setdefault(field.name, set()).add(field.metadata["doc"])
    assert all(len(texts) == 1 for texts in docs.values())


def test_readme_shows_the_table():
    assert f"\n{options_table()}\n" in README.read_text(encoding="utf-8")
