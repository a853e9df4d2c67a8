"""Numbers in answers: hard strings from reports of graders that read them wrongly, and some of our own."""

from fractions import Fraction

import pytest
from evaluation.tasks import gsm8k, numbers
from evaluation.tasks.problem import Style
from evaluation.tasks.thoughts import after_thoughts
from hypothesis import given
from hypothesis import strategies as st

HARD = [
    # from the field: an empty result, a lost sign, a number of the thoughts
    ("So she sold 48 + 24 = 72 clips, altogether.", "72"),
    ("The temperature fell to -3", "-3"),
    ("The answer is -3.", "-3"),
    ("The answer is \u22123 degrees.", "-3"),
    ("The answer is $-12.50.", "-12.5"),
    ("The answer is -$12.50.", "-12.5"),
    # marks and boxes
    ("He has 5 left.\n#### 18", "18"),
    ("#### 1,234,567\nand 3 more", "1234567"),
    ("#### $70,000 of profit, 5 of them", "70000"),
    (r"First \boxed{3}, so finally \boxed{42}. Checked 7 times.", "42"),
    (r"\boxed{\$1,080}", "1080"),
    (r"\boxed{1{,}080}", "1080"),
    (r"\boxed{12\text{ apples}}", "12"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{-7}", "-7"),
    # sentences
    ("The answer is 25. Check: 25 + 47 = 72.", "25"),
    ("The answer is: **64**", "64"),
    ("Answer: 9 pens", "9"),
    ("So the final answer is $21.", "21"),
    ("The answer is five, that is 5.", "5"),
    ("The answer is 1/2 of a cake", "0.5"),
    ("The answer is 2.50 dollars", "2.5"),
    ("The answer is 1\u00a0500", "1500"),
    ("The answer is .75", "0.75"),
    ("the answer is unknown.\nBut 4 * 5 = 20", "20"),
    # a minus that is none
    ("10 - 3 = 7", "7"),
    ("That leaves 10-3", "3"),
    ("That leaves 10 -3", "3"),
    ("apples - 3", "3"),
    ("- 3", "-3"),
    ("We need:\n- 3", "3"),
    ("model x-3", "3"),
    ("= -3", "-3"),
    # a second question run on
    (" 6 * 7 = 42. The answer is 42.\n\nQ: How many? \nA: The answer is 99.", "42"),
    (" 6 * 7 = 42.\n\nQuestion: A man has 3 hats", "42"),
    (" It is 42.\n\nProblem 2: A man has 3 hats", "42"),
    (" It is 42<|im_start|>user\nAnd 3?", "42"),
    ("Question 1: 4 + 4?\nIt is 8.", "8"),
    # ends
    ("72.", "72"),
    ("It is 72, not 73.\n#### 72", "72"),
    ("", None),
    ("I do not know.", None),
    ("####", None),
    (r"\boxed{", None),
    ("1/0", None),
]


@pytest.mark.parametrize(("text", "expected"), HARD)
def test_hard_strings(text, expected):
    assert numbers.answer_in(text) == expected


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["The answer is {}.", "#### {}", "\\boxed{{{}}}", "so it is {}"])
)
def test_integers_with_and_without_separators_are_read_back(value, form):
    for written in (str(value), f"{value:,}"):
        assert numbers.answer_in(form.format(written)) == str(value)


@given(st.fractions(max_denominator=1000))
def test_plain_is_the_value(value):
    assert Fraction(numbers.plain(value)) == value


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("18", "18", True), ("18.0", "18", True), ("1/2", "0.5", True), ("-18", "18", False), (None, "18", False)],
)
def test_equality(one, other, same):
    assert numbers.equal(one, other) is same


def test_latex_needs_math_verify():
    pytest.importorskip("math_verify")
    found = numbers.answer_in(r"\boxed{\frac{36}{2}}")
    assert found == r"\frac{36}{2}"
    assert numbers.equal(found, "18")
    assert not numbers.equal(found, "19")


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<think>7?</think>It is 8.", False, "It is 8."),
        ("7?</think>It is 8.", True, "It is 8."),
        ("<think>7?", False, None),
        ("maybe 7", True, None),
        ("It is 8.", False, "It is 8."),
        ("<think>a</think><think>b</think>c", True, "c"),
    ],
)
def test_thoughts(text, thinking, answer):
    assert after_thoughts(text, thinking) == answer


def row(target="-3"):
    return {"question": "How cold is it?", "answer": f"Cold.\n#### {target}"}


def graded(text, style=Style.BASE, target="-3"):
    problem = gsm8k.problem(row(target), 0, style, [])
    return gsm8k.grade(problem, text, style is Style.THINKING)


def test_a_number_inside_the_thoughts_is_no_answer():
    inside = "The answer is -3. \\boxed{-3}"
    assert graded(inside, Style.THINKING).score == 0
    assert graded(f"{inside}</think>", Style.THINKING).score == 0
    assert graded(f"It was 3 yesterday.</think>{inside}", Style.THINKING).score == 1
    assert graded(f"{inside}</think>It is 3.", Style.THINKING).score == 0


def test_the_reason_names_both_numbers():
    assert graded(" The answer is 3.")[:3] == (0.0, "3", "3 is not -3")


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        (" The answer is 1,234.", 1, 1),
        (" The answer is 1,234", 0, 1),  # its pattern wants one more character
        (" It is 1,234.", 0, 1),
        (" The answer is 1,234. Next: 5 + 5 = 10.", 1, 0),
        (" nothing", 0, 0),
    ],
)
def test_lm_evals_filters_are_reported_beside_ours(text, strict, flexible):
    assert graded(text, target="1,234").also == {"strict-match": strict, "flexible-extract": flexible}


def test_base_prompts_have_the_form_of_the_published_tables():
    shots = gsm8k.load_shots("own").shots
    problem = gsm8k.problem(row(), 0, Style.BASE, shots)
    assert len(shots) == 3
    assert problem.text.count("Q: ") == 4
    assert problem.text.endswith("\n\nQ: How cold is it?\nA:")
    for shot in shots:
        said = f" {shot.answer}"
        assert gsm8k.lm_eval_scores(said, numbers.answer_in(said))["strict-match"] == 1


def test_chat_models_get_one_message():
    problem = gsm8k.problem(row(), 0, Style.THINKING, [])
    assert problem.text is None
    assert [message.role for message in problem.messages] == ["user"]
    assert "\\boxed{}" in problem.messages[0].content


def test_rows_of_either_origin_are_read():
    other = {"id": "x-1", "prompt": "How cold?", "expected": "1,234"}
    assert gsm8k.problem(other, 0, Style.BASE, []).reference == {"target": "1234"}
    assert gsm8k.problem(other, 0, Style.BASE, []).id == "x-1"
    with pytest.raises(ValueError, match="no number"):
        gsm8k.problem({"question": "?", "answer": "#### none"}, 7, Style.BASE, [])
