"""What every diff of ``patches/`` repairs: examples that fail on stock SGLang, and not with the diff or with our part.

The examples run in processes without plugins: on the installed SGLang, by itself and with this package's part in the
place of the diff, and on a patched overlay. Imports are most of this module's time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patches import patched_tree
from tests.patches.run_examples import SEPARATOR, Job

pytestmark = pytest.mark.skipif(patched_tree.why_not() is not None, reason=str(patched_tree.why_not()))

# Per diff, the examples in which stock SGLang differs; "=" marks those in which this package's part does as the diff.
SHOWN = {
    "custom-spec-algo-contract": ["=contract", "joined family", "contract guard"],
    "custom-spec-verify-input": ["verify inputs"],
    "speculative-plugin-config": ["plugin config", "plugin config refused"],
    "first-stop-of-a-run": ["=first stop", "=runs against tokens"],
    "req-to-token-row-headroom": ["=row overflow"],
    "bounded-decode-reserve": ["=reserves"],
    "seeded-sampling-by-row": ["=seeded rows", "=seeded min-p"],
    "model-kv-pool-class": ["=pool class", "pool class refused"],
    "row-release-notice": ["=release notices", "members without a request"],
    "custom-spec-validate-request": ["=refusal"],
    "spec-alloc-without-triton": ["=assigned rows", "=last slots"],
    "spec-worker-internal-state": ["=internal state"],
}
NAMES = [(patch, name.removeprefix("=")) for patch, names in SHOWN.items() for name in names]
ALIKE = [name[1:] for names in SHOWN.values() for name in names if name.startswith("=")]
# Those in which nothing is to change.
UNCHANGED = ["reserves by default", "seeded min-p renormalised", "captured weights", "pool class by default"]

Answers = dict[str, dict[str, Any]]


def run(*jobs: Job) -> list[Answers]:
    """Answers of each job, from the SGLang that it names."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "TRITON_"))}
    environ |= {"SGLANG_PLUGINS": "none", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.patches.run_examples", json.dumps(jobs)]
    done = subprocess.run(
        command, cwd=patched_tree.REPOSITORY, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.rpartition(SEPARATOR)[2])
    for (_, folder), job_answers in zip(jobs, answers, strict=True):
        home = patched_tree.installed() if folder is None else Path(folder) / "sglang"
        assert Path(job_answers.pop("sglang")).parent == home
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Answers:
    """Per example, per side: ``{"value": ...}`` or ``{"error": ...}``."""
    folder = tmp_path_factory.mktemp("overlay")
    patched_tree.overlay(patched_tree.PATCHES, folder)
    stock, patched = run((["stock", "ours"], None), (["patched"], str(folder)))
    return {name: {**stock[name], **patched[name]} for name in stock}


@pytest.fixture
def value(answers):
    """``value(example, side="patched")``: what the example has returned."""
    return lambda example, side="patched": answers[example][side]["value"]


@pytest.mark.parametrize(("patch", "example"), NAMES)
def test_stock_fails_where_the_diff_does_not(answers, patch, example):
    stock, patched = answers[example]["stock"], answers[example]["patched"]
    assert stock != patched
    if example not in ("contract guard", "pool class refused"):
        assert "value" in patched


@pytest.mark.parametrize("example", ALIKE)
def test_this_package_does_the_same_without_it(answers, example):
    assert answers[example]["ours"] == answers[example]["patched"]


@pytest.mark.parametrize("example", UNCHANGED)
def test_what_has_no_part_in_it_stays(answers, example):
    assert answers[example]["stock"] == answers[example]["patched"]
    assert "value" in answers[example]["patched"]


# --- what comes out, by diff ---


def test_a_registered_algorithm_has_what_the_scheduler_calls(answers, value):
    assert "carries_draft_hidden_states" in answers["contract"]["stock"]["error"]
    assert value("contract") == {
        "carries_draft_hidden_states": False,
        "need_topk": False,
        "get_platform_worker_cls": None,
        "relay rows": 5,
    }
    assert value("joined family") == [True, True]


def test_the_guard_sees_every_method_of_the_enum(answers):
    assert answers["contract guard"]["stock"] == {"value": "registered"}
    assert "brand_new" in answers["contract guard"]["patched"]["error"]


def test_an_algorithm_builds_its_own_verify_input(value):
    stock, patched = value("verify inputs", "stock"), value("verify inputs")
    own = ["NgramVerifyInput", 4]
    assert stock["own input"] == [None, None]
    assert patched["own input"] == patched["own before eagle's"] == [own, own]
    for name in ("no input", "eagle's", "built in"):
        assert patched[name] == stock[name]


def test_options_reach_the_algorithm_and_nobody_else(answers, value):
    assert value("plugin config", "stock") == "unknown: --speculative-plugin-config"
    assert value("plugin config") == {"seen": [{"depth": 2}], "namespace": "spec"}
    assert value("plugin config", "ours") == [2, 2]  # by variable, by launch override
    assert [sentence.split()[-1] for sentence in value("plugin config refused")] == ["None.", "NGRAM.", "[1]."]


# text through the stop, kind of reason, what matched
FIRST_STOPS = {
    "stop token before a stop string": ["a$", "stop", ord("$")],
    "first in the text, not in the list": ["x", "stop", "x"],
    "string before a pattern": ["ax", "stop", "x"],
    "first of two patterns": ["ax", "stop", "x"],
    "stop before the cap": ["ab$", "stop", ord("$")],
}
OTHER_STOPS = {
    "end of text before a fault": ["a$$", "stop", "NaN happened"],
    "fault before a stop string": ["a$", "stop", "NaN happened"],
    "string and token at once": ["ab$", "stop", "$"],
    "string over two runs": ["axy", "stop", "xy"],
    "stop behind the cap": ["ab", "length", None],
    "nothing": ["abc", None, None],
}


def test_a_run_ends_at_its_first_stop(value):
    stock, patched = value("first stop", "stock"), value("first stop")
    assert patched == {**FIRST_STOPS, **OTHER_STOPS}
    assert {name for name in stock if stock[name] != patched[name]} == set(FIRST_STOPS)


def test_random_runs_end_where_single_tokens_end(value):
    assert value("runs against tokens", "stock")["differences"] > 20
    assert value("runs against tokens")["differences"] == 0
    assert value("runs against tokens")["stopped"] > 200


def test_a_row_holds_what_a_request_is_given(value):
    stock, patched = value("row overflow", "stock"), value("row overflow")
    assert stock["eagle, 64 drafts"] == 56
    assert stock["registered, 9 drafts"] == 1  # the least of a chain
    assert stock["ngram, 12 drafts"] > 0
    assert max(over for name, over in patched.items() if name != "no speculation") < 0
    for name in ("eagle, 4 drafts", "eagle, 12 drafts, page 16", "uno, 12 drafts", "no speculation"):
        assert patched[name] == stock[name]


def test_the_reserve_ends_with_the_request(value):
    """Per moment: allocated length, slots asked for at page size 1; 150 positions are all there can be."""
    assert value("reserves") == [[108, 8], [112, 4], [150, 2], [150, 0], [160, 0], [160, 0], [160, 0]]
    assert value("reserves", "stock")[2:4] == [[153, 5], [157, 7]]


def test_a_seeded_row_does_not_see_its_neighbours(value):
    stock, patched = value("seeded rows", "stock"), value("seeded rows")
    assert stock["open alone"] != stock["open beside filtered"]
    assert patched["open alone"] == patched["open beside filtered"]
    assert patched["filtered alone"] == patched["filtered beside open"]
    for alone in ("open alone", "filtered alone"):  # neither kind's text has changed
        assert patched[alone] == stock[alone]


def test_seeded_min_p_draws_from_the_law_it_means(answers, value):
    assert "AssertionError" in answers["seeded min-p"]["stock"]["error"]
    assert value("seeded min-p") == value("seeded min-p renormalised")
    assert value("captured weights") == [True, True, True]


def test_a_models_pool_must_fit_the_layout(answers, value):
    assert value("pool class") == "OwnPool"
    assert "expected a subclass of PageMajor" in answers["pool class refused"]["patched"]["error"]
    assert "PageMajor is not supported" in answers["pool class refused"]["ours"]["error"]


def test_a_worker_hears_who_has_left(value):
    left = ["request 0", "request 1"]
    assert value("release notices") == {"plain": left, "decode instance": left}
    assert len(value("members without a request")) == 2


def test_a_request_is_refused_before_it_is_queued(value):
    assert value("refusal") == [True, None]
    assert value("builtin refusal") == "not by UNO"


def test_slots_are_assigned_without_triton(value):
    assert value("assigned rows") == [[0] * 8, [0] * 8, [0, 11, 12, 13, 0, 0, 0, 0], [14, 15, 0, 0, 0, 0, 0, 0]]
    assert value("last slots") == [27, -1, 23]


def test_a_workers_counters_are_reported(value):
    assert value("internal state", "stock") == {}
    assert value("internal state") == {"sglang_trunc": {"drafts": 3}}


# --- the inventory ---


def test_notes_list_every_diff_once_and_every_diff_is_shown():
    listed = [row.patch for row in patched_tree.inventory() if row.patch]
    assert listed == [patch.name for patch in patched_tree.PATCHES]
    assert list(SHOWN) == [patched_tree.slug(patch) for patch in patched_tree.PATCHES]


def test_what_stands_in_for_a_diff_is_there(value):
    assert all(row.stand_ins for row in patched_tree.inventory())
    assert value("stand-ins", "ours")["missing"] == []


def test_notes_name_every_hook(value):
    named = {name.removeprefix("hook ") for row in patched_tree.inventory() for name in row.stand_ins}
    assert set(value("stand-ins", "ours")["hooks"]) <= named


@pytest.mark.slow
def test_no_diff_needs_another(answers, tmp_path):
    jobs = []
    for patch in patched_tree.PATCHES:
        folder = tmp_path / patched_tree.slug(patch)
        folder.mkdir()
        patched_tree.overlay([patch], folder)
        jobs.append((["patched"], str(folder)))
    for patch, alone in zip(patched_tree.PATCHES, run(*jobs), strict=True):
        for name in SHOWN[patched_tree.slug(patch)]:
            example = name.removeprefix("=")
            assert alone[example]["patched"] == answers[example]["patched"], (patch.name, example)
