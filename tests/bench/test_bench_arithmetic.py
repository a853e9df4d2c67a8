"""Arms, prompt cutting, summaries and provenance without a server."""

import math

import arms
import demo_corpus
import prompt_text
import provenance
import pytest
import summary
from arms import Arm
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import Cell, Measured, in_waves, speed

CELL = Cell(200, 4)


def measured(arm, number, tps, ids=((1, 2, 3),), **changes):
    base = Measured(arm, number, CELL, tps, tps / 2, 0.1, None, None, None, [list(text) for text in ids], {})
    return base._replace(**changes)


def test_ratio_is_taken_within_a_round():
    # A machine twice as fast in round 1: speeds move, ratios do not.
    results = [
        measured("plain", 0, 10.0),
        measured("trunc", 0, 20.0, accept_length=3.0),
        measured("plain", 1, 20.0),
        measured("trunc", 1, 44.0, accept_length=2.0),
        measured("plain", 2, 10.0),
        measured("trunc", 2, 18.0, accept_length=2.5),
    ]
    plain, trunc = summary.summarise(results)
    assert (plain.ratio, plain.ratio_min, plain.ratio_max) == (1.0, 1.0, 1.0)
    assert (trunc.ratio, trunc.ratio_min, trunc.ratio_max) == (2.0, 1.8, 2.2)
    assert trunc.decode_tps == 20.0
    assert trunc.accept_length == 2.5
    assert plain.accept_length is None


def test_equality_is_counted_text_by_text():
    results = [
        measured("plain", 0, 1.0, [(1, 2, 3), (4, 5, 6)]),
        measured("trunc", 0, 1.0, [(1, 2, 9), (4, 5, 6)]),
    ]
    trunc = summary.summarise(results)[1]
    assert (trunc.equal, trunc.texts, trunc.first_differences) == (1, 2, [2])


def test_every_cell_has_a_row_in_both_tables():
    lines = summary.summarise([measured("plain", 0, 1.0), measured("trunc", 0, math.nan)])
    assert summary.markdown(lines).count("\n|") == 3
    assert summary.rich_table(lines, "t").row_count == 2


def test_the_worst_cell_of_every_arm_is_named():
    other = Cell(200, 8, "copy")
    results = [
        measured("plain", 0, 10.0),
        measured("trunc", 0, 12.0),
        measured("plain", 0, 10.0)._replace(cell=other),
        measured("trunc", 0, 9.0)._replace(cell=other),
    ]
    assert summary.worst_cells(summary.summarise(results)).splitlines()[2:] == ["| trunc | 0.90 | copy 200 x 8 |"]


def test_rows_are_counted_per_committed_token():
    counted = {
        "rounds": 2,
        "runs": 2,
        "tokens": 5,
        "ticks": 8,
        "rows": 40,
        "request_ticks": 8,
        "drafted": 0,
        "accepted": 0,
    }
    assert measured("trunc", 0, 1.0, counters=counted).rows_per_token == 8.0
    assert measured("plain", 0, 1.0).rows_per_token is None


@given(st.integers(1, 20), st.integers(1, 8))
def test_waves_are_full_and_keep_the_order(count, concurrency):
    waves = in_waves(list(range(count)), concurrency)
    assert all(len(wave) == concurrency for wave in waves)
    assert [item for wave in waves for item in wave] == list(range(count - count % concurrency))


def test_speed_adds_windows_and_does_not_average_speeds():
    assert speed([(10, 1.0), (10, 3.0)]) == 5.0


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("trunc", Arm("trunc", "trunc")),
        ("deep:d1=2,block_size=6", Arm("deep", "trunc", (), {"SGLANG_TRUNC_D1": "2", "SGLANG_TRUNC_BLOCK_SIZE": "6"})),
        ("x:--page-size=16,--disable-radix-cache", Arm("x", "trunc", ("--page-size", "16", "--disable-radix-cache"))),
        ("y:algorithm=none,env.OMP_NUM_THREADS=2", Arm("y", None, (), {"OMP_NUM_THREADS": "2"})),
        ("plain:--page-size=16", Arm("plain", None, ("--page-size", "16"))),
        ("single", Arm("single", "loopspec_single")),
        ("dual:d2=4", Arm("dual", "loopspec_dual", (), {"SGLANG_TRUNC_D2": "4"})),
        ("block1:d1=2", Arm("block1", "trunc", (), {"SGLANG_TRUNC_BLOCK_SIZE": "1", "SGLANG_TRUNC_D1": "2"})),
        ("wide:algorithm=loopspec_dual", Arm("wide", "loopspec_dual")),
    ],
)  # fmt: skip
def test_arm_spelling(text, arm):
    assert arms.parse_arm(text) == arm


@pytest.mark.parametrize("text", ["", ":d1=1", "x:d1"])
def test_bad_arms(text):
    with pytest.raises(ValueError, match=r"arm|value"):
        arms.parse_arm(text)


def test_plain_is_always_there_and_first():
    assert [arm.name for arm in arms.chosen(["a", "b:d1=2"])] == ["plain", "a", "b"]
    assert [arm.name for arm in arms.chosen(["a", "plain:--page-size=16"])] == ["plain", "a"]
    assert [arm.name for arm in arms.chosen([])] == ["plain", "block1", "trunc", "single", "dual"]
    with pytest.raises(ValueError, match="same name"):
        arms.chosen(["a", "a:d1=2"])


TEXTS = [list(range(5000)), list(range(9000, 11000))]


@given(st.integers(1, 1500), st.integers(1, 32), st.integers(0, 64))
@settings(deadline=None)
def test_prompts_have_their_length_and_are_different(length, count, skip):
    prompts = prompt_text.cut(TEXTS, length, count, skip)
    assert [len(prompt) for prompt in prompts] == [length] * count
    assert len({prompt[0] for prompt in prompts}) == count  # no common prefix at all
    assert prompts == prompt_text.cut(TEXTS, length, count + 3, skip)[:count]


def test_skipping_gives_other_prompts():
    first, second = (prompt_text.cut(TEXTS, 50, 8, skip) for skip in (0, 8))
    assert not {tuple(prompt) for prompt in first} & {tuple(prompt) for prompt in second}


def test_long_prompts_come_from_the_texts_that_are_long_enough():
    assert all(prompt[0] < 9000 for prompt in prompt_text.cut(TEXTS, 3000, 4))
    with pytest.raises(ValueError, match="5000 tokens, too few for prompts of 6000"):
        prompt_text.cut(TEXTS, 6000, 1)


def test_texts_that_cannot_give_enough_prompts_are_refused():
    with pytest.raises(ValueError, match="cannot be cut"):
        prompt_text.cut([list(range(8))], 6, 5)


@pytest.mark.parametrize("kind", prompt_text.KINDS)
def test_bundled_texts_are_long_enough(kind):
    corpus = prompt_text.corpus(kind)
    assert all(len(text) > 4000 for text in corpus.texts.values())
    assert corpus.digest == prompt_text.corpus(kind).digest


def test_code_prompts_were_held_out_of_the_demo_models_training():
    assert all(demo_corpus._hash(name) % demo_corpus.HELD_OUT_ONE_IN == 0 for name in prompt_text.STDLIB)


def test_a_file_can_be_the_text(tmp_path):
    (tmp_path / "mine.txt").write_text("hello")
    assert prompt_text.corpus(str(tmp_path / "mine.txt")).texts == {"mine.txt": "hello"}


def test_provenance_names_code_machine_and_command(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = provenance.collect(["bench/compare.py", "--threads", "1"], {"OMP_NUM_THREADS": "1"})
    assert found["argv"] == ["bench/compare.py", "--threads", "1"]
    assert found["environment"]["OMP_NUM_THREADS"] == "1"
    assert found["packages"]["torch"]
    assert found["machine"]["usable_cores"] >= 1
    assert found["date"].endswith("+00:00")


def test_provenance_keeps_private_paths_out(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert provenance.shortened(str(tmp_path / "models" / "m")) == "models/m"
    assert provenance.shortened("/home/somebody/models/ouro") == "models/ouro"
    assert provenance.shortened("--rounds") == "--rounds"


def test_no_git_is_null_and_not_a_guess(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.git_state() is None
