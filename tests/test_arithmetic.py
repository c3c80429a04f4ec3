"""The arithmetic task: answers are true, splits are disjoint, extraction survives anything."""

from __future__ import annotations

import re
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from grpo_repro.errors import UserError
from grpo_repro.tasks import load_task
from grpo_repro.tasks.arithmetic import (
    KINDS,
    TEST_FRACTION,
    Ranges,
    count,
    extract_integer,
    generate,
    question_at,
    split_of,
)

FORMS = {
    "two_step": r"\d+[+-]\d+",
    "three_step": r"\d+[+-]\d+[+-]\d+",
    "multiplication": r"\d+\*\d+",
    "division": r"\d+/\d+",
    "brackets": r"\d+[+-]\(\d+[+-]\d+\)",
}


def value(text: str) -> Fraction:
    """Independent evaluation by a small recursive descent, in exact fractions."""
    tokens = re.findall(r"\d+|[-+*/()]", text)

    def atom() -> Fraction:
        token = tokens.pop(0)
        if token == "(":
            inner = total()
            assert tokens.pop(0) == ")"
            return inner
        return Fraction(int(token))

    def product() -> Fraction:
        left = atom()
        while tokens and tokens[0] in "*/":
            left = left * atom() if tokens.pop(0) == "*" else left / atom()
        return left

    def total() -> Fraction:
        left = product()
        while tokens and tokens[0] in "+-":
            left = left + product() if tokens.pop(0) == "+" else left - product()
        return left

    result = total()
    assert not tokens
    return result


def config(**changes: object) -> SimpleNamespace:
    fields = {"name": "arithmetic", "num_questions": 500, "split": "test", "seed": 0}
    ranges = {"operand_min": 1, "operand_max": 30, "factor_min": 1, "factor_max": 10}
    return SimpleNamespace(**(fields | ranges | changes))


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_true_and_forms_are_those_of_the_kinds(split: str) -> None:
    questions = generate(500, split, 3, Ranges())
    for question in questions:
        assert re.fullmatch(FORMS[question.kind], question.text)
        assert value(question.text) == Fraction(question.answer)
        assert split_of(question.text) == split
    assert len({question.id for question in questions}) == 500
    assert {kind: sum(q.kind == kind for q in questions) for kind in KINDS} == dict.fromkeys(KINDS, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_numbering_reaches_every_question_once(kind: str) -> None:
    ranges = Ranges(2, 6, 1, 7)
    texts = {question_at(kind, index, ranges).text for index in range(count(kind, ranges))}
    assert len(texts) == count(kind, ranges)
    used = {int(number) for text in texts for number in re.findall(r"\d+", text)}
    if kind == "division":
        assert {int(text.split("/")[1]) for text in texts} == set(range(1, 8))
        assert {value(text) for text in texts} == set(range(2, 7))
    else:
        assert used == set(range(1, 8)) if kind == "multiplication" else used == set(range(2, 7))


def test_splits_are_disjoint_for_any_seed_and_ranges() -> None:
    train = {q.text for seed in range(3) for q in generate(400, "train", seed, Ranges(0, 40, 1, 12))}
    test = {q.text for seed in range(3) for q in generate(400, "test", seed, Ranges())}
    assert not train & test


def test_share_of_the_test_split_is_the_stated_one() -> None:
    ranges = Ranges()
    hits = sum(split_of(question_at("three_step", i, ranges).text) == "test" for i in range(20000))
    assert stats.binomtest(hits, 20000, TEST_FRACTION).pvalue > 1e-3


def test_a_remainder_goes_to_random_kinds_and_seeds_decide() -> None:
    counts = [[sum(q.kind == kind for q in generate(7, "test", s, Ranges())) for kind in KINDS] for s in range(200)]
    assert all(sorted(row) == [1, 1, 1, 2, 2] for row in counts)
    # Each kind gets one of two extra places among five: mean 1.4.
    error = np.sqrt(0.4 * 0.6 / 200)
    assert np.all(np.abs(np.mean(counts, axis=0) - 1.4) < 4 * error)
    assert generate(50, "test", 1, Ranges()) == generate(50, "test", 1, Ranges())
    assert generate(50, "test", 1, Ranges()) != generate(50, "test", 2, Ranges())


def test_wide_ranges_need_no_enumeration() -> None:
    start = time.perf_counter()
    questions = generate(1000, "test", 0, Ranges(1, 10**6, 1, 10**6))
    assert time.perf_counter() - start < 5
    assert all(value(question.text) == Fraction(question.answer) for question in questions)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factor_max": 5}, "of kind multiplication are needed"),
        ({"split": "dev"}, "unknown split 'dev'"),
        ({"num_questions": 0}, "num_questions is 0"),
        ({"operand_min": 9, "operand_max": 8}, "operand range is 9..8"),
        ({"factor_min": 0}, "factor range is 0..10"),
        ({"name": "algebra"}, "unknown task 'algebra'"),
    ],
)
def test_bad_settings_are_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        load_task(config(**changes))


def test_too_few_names_a_number_that_works() -> None:
    with pytest.raises(UserError) as caught:
        load_task(config(num_questions=2000))
    most = int(re.search(r"at most (\d+)", str(caught.value))[1])  # type: ignore[index]
    assert len(load_task(config(num_questions=most)).questions) == most


@pytest.mark.parametrize(
    ("completion", "integer"),
    [
        ("42", "42"),
        ("42\n7*8=56\n", "42"),
        ("\n\n 42\nNext: 5", "42"),
        ("The answer is 42.", "42"),
        ("40 + 2 = 42", "42"),
        ("**42**", "42"),
        ("_42_ apples", "42"),
        ("答案是42。", "42"),
        ("Well...42", "42"),
        ("-5", "-5"),
        ("= -5", "-5"),
        ("\u22125", "-5"),
        ("+5", "5"),
        ("50-8", "8"),
        ("(50)-8", "8"),
        ("1,234,567", "1234567"),
        ("1\u202f234", "1234"),
        ("1,23", "23"),
        ("1,2345", "2345"),
        ("007", "7"),
        ("-0", "0"),
        ("42.0", "42"),
        ("42.5", None),
        ("4e2", None),
        ("x42", None),
        ("", None),
        ("none", None),
        ("\u0664\u0662", None),
    ],
)
def test_extraction(completion: str, integer: str | None) -> None:
    assert extract_integer(completion) == integer


@given(st.integers(), st.sampled_from(["{}", " {}.", "The answer is {}.", "{}\n99", "= {} apples"]))
def test_any_integer_is_found(number: int, frame: str) -> None:
    assert extract_integer(frame.format(number)) == str(number)
    assert extract_integer(frame.format(f"{number:,}")) == str(number)


@settings(max_examples=300)
@given(st.text(alphabet=st.sampled_from("0123456789,.eE+-\u2212 \n()=x\u00a0"), max_size=60))
def test_extraction_never_raises_and_is_canonical(text: str) -> None:
    found = extract_integer(text)
    assert found is None or found == str(int(found))


@pytest.mark.parametrize(
    "text",
    [
        "1" * 10**6,
        "x" * 10**6,
        "1,234" * 200_000,
        "1," * 500_000,
        "1," + "234," * 250_000,
        "1" + ",234" * 250_000 + "5",
        "-" * 10**6 + "1",
        "\n" * 10**6 + "1",
        "1." * 500_000,
        "1e" * 500_000,
        "\ud800" * 1000,
    ],
    ids=lambda text: ascii(text[:5]),
)
def test_a_megabyte_neither_hangs_nor_raises(text: str) -> None:
    start = time.perf_counter()
    extract_integer(text)
    assert time.perf_counter() - start < 5


def test_a_million_digits_are_compared_exactly() -> None:
    assert extract_integer("9" * 10**6) == "9" * 10**6


def test_reward_is_binary_and_the_hash_follows_the_data() -> None:
    task = load_task(config(num_questions=50))
    for question in task.questions:
        assert task.reward(f"{question.answer}\n1+1=2", question) == 1.0
        assert task.reward(str(int(question.answer) + 1), question) == 0.0
        assert task.reward("", question) == 0.0
    assert task.data_hash == load_task(config(num_questions=50)).data_hash
    assert task.data_hash != load_task(config(num_questions=50, seed=1)).data_hash
