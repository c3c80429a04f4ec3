"""The verifier: it follows docs/rewards.md on every gold of the data sets, on properties and on hostile completions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import CASES, GSM8K, MATH, lines, needs_cases, needs_data

from grpo_repro.rewards import OUTCOMES, boxed, decimals, gsm8k, mathematics, pool
from grpo_repro.rewards.pool import Pool

HANGS = "(10^{9})!"


def math_outcome(answer: str, gold: str, cut: bool = False) -> str:
    return mathematics.grade([(answer, gold, cut)])[0].outcome


def outcome(task: str, completion: str, gold: str, cut: bool = False) -> str:
    return gsm8k.grade(completion, gold, cut).outcome if task == "gsm8k" else math_outcome(completion, gold, cut)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@needs_cases
def test_every_shared_case_holds():
    cases = lines(CASES)
    found = [outcome(case["task"], case["completion"], case["gold"]) for case in cases]
    wrong = [
        (case["why"], case["outcome"], got) for case, got in zip(cases, found, strict=True) if got != case["outcome"]
    ]
    assert len(cases) >= 30 and not wrong


# -- every gold of the data sets


@needs_data
def test_every_gold_of_gsm8k_verifies_itself_and_the_number_plus_one_never():
    rows = lines(GSM8K / "train.jsonl") + lines(GSM8K / "test.jsonl")
    assert len(rows) == 8792
    for row in rows:
        gold = row["answer"].rpartition("####")[2].strip()
        number = int(gold.replace(",", ""))
        for completion in (
            row["answer"],
            f"\\boxed{{{gold}}}",
            f"The answer is {number}.",
            f"I get {number:,}.00 in all.",
        ):
            assert gsm8k.grade(completion, row["answer"]).outcome == "right", (completion, gold)
        for completion in (f"#### {number + 1}", f"The answer is {number + 1:,}.", f"\\boxed{{{number}1}}"):
            assert gsm8k.grade(completion, row["answer"]).outcome == "wrong", (completion, gold)
        if number:
            assert gsm8k.grade(f"#### {-number}", row["answer"]).outcome == "wrong"


@needs_data
def test_every_gold_of_math_verifies_itself_by_math_verify_too_and_plus_one_never():
    golds = [row["answer"] for row in lines(MATH / "test.jsonl")]
    assert len(golds) == 500
    assert [gold for gold in golds if mathematics.unreadable(gold)] == []
    items = [(f"\\boxed{{{gold}}}", gold, False) for gold in golds]
    assert {verdict.outcome for verdict in mathematics.grade(items)} == {"right"}
    assert [reason for reason in mathematics.audit(golds) if reason] == []
    more = [(f"\\boxed{{({gold}) + 1}}", gold, False) for gold in golds]
    assert {verdict.outcome for verdict in mathematics.grade(more)} == {"wrong"}


@needs_data
def test_the_solutions_of_math_are_graded_right():
    items = [(row["solution"], row["answer"], False) for row in lines(MATH / "test.jsonl")]
    assert {verdict.outcome for verdict in mathematics.grade(items)} == {"right"}


# -- numbers

signs = st.sampled_from(["-", "\u2212", "\uff0d", "\u2013"])
numbers = st.integers(-(10**30), 10**30)


@given(
    numbers, signs, st.sampled_from(["", "$", "\\$", "\u20ac"]), st.sampled_from(["", ".00", "%", "\\%", " km", "."])
)
def test_spellings_of_a_number_are_one_value(number, sign, currency, tail):
    text = f"{abs(number):,}"
    for digits in (str(abs(number)), text, text.replace(",", "{,}"), text.replace(",", ",\\!"), "0" + str(abs(number))):
        spelt = f"{sign if number < 0 else ''}{currency}{digits}{tail}"
        assert decimals.only(spelt) == decimals.exact(str(number)), spelt
        assert gsm8k.grade(f"So it is {spelt}", str(number)).outcome == "right", spelt


@given(numbers, numbers)
def test_different_numbers_differ_whatever_their_length(a, b):
    expected = "right" if a == b else "wrong"
    assert gsm8k.grade(f"#### {a}", str(b)).outcome == expected
    assert math_outcome(f"\\boxed{{{a}}}", str(b)) == expected


@given(st.integers(-(10**6), 10**6), st.integers(0, 6), st.integers(0, 3))
def test_decimals_are_compared_exactly(digits, places, zeros):
    text = f"{Decimal(digits).scaleb(-places):f}"
    padded = text + "0" * zeros if places else text
    assert decimals.exact(padded) == decimals.exact(text)
    sign, coefficient, exponent = decimals.exact(text)
    assert Fraction(f"{sign}{coefficient}e{exponent}") == Fraction(digits, 10**places)


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 50))
def test_fractions_are_reduced_and_meet_their_decimals(over, under, factor):
    value = mathematics.number(f"{'-' * (over < 0)}\\frac{{{abs(over) * factor}}}{{{under * factor}}}")
    assert value == mathematics.number(f"{over}/{under}")
    if value[0] == "/":
        assert Fraction(value[1]) == Fraction(over, under)
    else:
        assert Fraction(f"{value[0]}{value[1]}e{value[2]}") == Fraction(over, under)


@settings(max_examples=300)
@given(st.text(alphabet="0123456789,.eE+-\u2212 \n()=x$%\\{}/#^_boxed:answer is", max_size=80), st.booleans())
def test_grading_of_any_text_has_an_outcome(text, cut):
    assert gsm8k.grade(text, "5", cut).outcome in OUTCOMES
    assert gsm8k.grade("5", text).outcome in OUTCOMES
    assert boxed.last_boxed(text) is None or isinstance(boxed.last_boxed(text), str)
    mathematics.normal(text)


@pytest.mark.parametrize(
    ("completion", "gold", "expected"),
    [
        ("#### 5 + 3 = 8", "8", "right"),
        ("#### Step 2: add\nThe answer is 7", "2", "right"),
        ("#### Final answer\n\\boxed{42}", "42", "right"),
        ("####\n42", "42", "right"),
        ("The answer is 20 - 4, which is 16. I used 3 steps.", "16", "right"),
        ("**Answer:** 12 eggs\nEach has 2 yolks.", "12", "right"),
        ("50-8", "8", "right"),
        ("It is -$5.", "-5", "right"),
        ("It is $-5.", "-5", "right"),
        ("1/2", "2", "wrong"),
        ("\\boxed{\\frac{1}{2}}", "2", "wrong"),
        ("\\boxed{\\frac{84}{2}}", "42", "right"),
        ("\\boxed{6^2}", "2", "wrong"),
        ("\\boxed{x = 5 \\text{ km}}", "5", "right"),
        ("1.5 \\times 10^6", "1500000", "right"),
        ("1.5e3", "1500", "right"),
        ("Well...42", "42", "right"),
        ("Rs.500", "500", "right"),
        ("x42", "42", "no_answer"),
        (".5", "0.5", "right"),
        ("\\boxed{}", "0", "no_answer"),
        ("5/0", "5", "wrong"),
        ("1e99999999999", "5", "wrong"),
        ("9", "nan", "gold_unparsable"),
        ("9", "8 or 9", "gold_unparsable"),
        ("9", "x^9", "gold_unparsable"),
    ],
)
def test_the_answers_of_gsm8k(completion, gold, expected):
    assert gsm8k.grade(completion, gold).outcome == expected


@pytest.mark.parametrize(
    ("task", "completion", "expected"),
    [
        ("gsm8k", "She has 42 apples and then", "truncated"),
        ("gsm8k", "#### 42\nI checked", "right"),
        ("gsm8k", "#### 42", "truncated"),
        ("gsm8k", "The answer is 42", "truncated"),
        ("gsm8k", "The answer is 42. Let me", "right"),
        ("gsm8k", "\\boxed{42}", "right"),
        ("gsm8k", "\\boxed{42", "truncated"),
        ("gsm8k", "", "truncated"),
        ("math", "\\boxed{42}", "right"),
        ("math", "\\boxed{42", "truncated"),
        ("math", "so x = 42", "truncated"),
    ],
)
def test_completions_that_were_cut_off(task, completion, expected):
    assert outcome(task, completion, "42", cut=True) == expected


# -- boxes and LaTeX


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{x = \boxed{5}}", "x = {5}"),
        (r"\boxed{{5}}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{1}", r"\{1"),
        (r"\fbox{3} } } {", "3"),
        (r"\boxed 5$", "5"),
        ("the \\boxed notation", None),
        (r"\boxed{}", ""),
        (r"{\boxed{7}", "7"),
        ("", None),
    ],
)
def test_the_last_box(text, content):
    assert boxed.last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        (r"\sqrt{12}", r"2\sqrt{3}", "right"),
        ("x^2-1", "(x-1)(x+1)", "right"),
        ("x=5", "5", "right"),
        ("5, 3", "3,5", "right"),
        ("(5, 3)", "(3,5)", "wrong"),
        (r"\{1,2\}", "(1,2)", "wrong"),
        ("(1,6]", "(1,6)", "wrong"),
        ("52_8", "52_9", "wrong"),
        (r"\text{C}", r"\text{(C)}", "right"),
        ("East", r"\text{east}", "right"),
        (r"1\frac{4}{5}", "1.8", "right"),
        (r"\$18.90", "18.90", "right"),
        (r"90^\circ", "90", "right"),
        (r"5.4", r"5.4 \text{ cents}", "right"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", "wrong"),
        (r"\frac{2}{2^{81}}", r"\frac{1}{2^{80}}", "right"),
        ("0.3333", r"\frac{1}{3}", "wrong"),
        ("10^{10}+1", "10^{10}", "wrong"),
        ("9^9^9^9", "5", "wrong"),
        ("2^{2^{3}}", "256", "right"),
        ("2^{99999999}", "5", "wrong"),
        ("5", "", "gold_unparsable"),
        ("5", r"\frac{1}{", "gold_unparsable"),
        ("5", "NaN", "gold_unparsable"),
        ("5", r"\boxed{5", "gold_unparsable"),
    ],
)
def test_the_answers_of_math(answer, gold, expected):
    assert math_outcome(f"So \\boxed{{{answer}}}.", gold) == expected


HOSTILE = {
    "a megabyte of digits": "1" * 10**6,
    "a megabyte of thousands": "1" + ",234" * 250_000 + "5",
    "a megabyte of boxes": "\\boxed{" * 140_000,
    "nested boxes": "\\boxed{" * 50_000 + "5" + "}" * 50_000,
    "a megabyte in a box": "\\boxed{" + "x+" * 500_000 + "}",
    "unbalanced braces": "\\boxed{" + "{" * 10**5 + "}" * 10,
    "deep brackets": "\\boxed{" + "(" * 400 + "5" + ")" * 400 + "}",
    "a tower": "\\boxed{9^9^9^9^9^9^9^9^9^9^9^9}",
    "an empty box": "\\boxed{}",
    "nan": "\\boxed{NaN}",
    "markers": "####" * 250_000,
    "phrases": "answer is " * 100_000,
    "slashes": "1/" * 500_000,
    "fractions": "\\frac{1}{" * 100_000,
    "texts": "\\boxed{5" + "\\text{" * 100_000 + "}",
    "spaces": "\\boxed{5" + " " * 10**6 + "x}",
    "surrogates": "\\boxed{" + "\ud800" * 100 + "}",
    "zero bytes": "\\boxed{\0}",
    "code": "\\boxed{__import__('os').system('touch hacked')}",
    "code in a set": "\\boxed{\\{\\text{__import__('os').system('touch hacked')}, open('hacked','w')\\}}",
    "signs": "-" * 10**6 + "1",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("task", ["gsm8k", "math"])
def test_hostile_completions_are_graded_within_the_deadline(task, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    for cut in (False, True):
        assert outcome(task, HOSTILE[name], "7", cut) in ("wrong", "no_answer", "truncated", "error")
    assert time.monotonic() - start < 4 + 2 * mathematics.DEADLINE
    assert not (tmp_path / "hacked").exists()


# -- the processes


def test_a_hanging_expression_ends_at_the_deadline_and_its_process_is_gone():
    workers = Pool(1.0, size=1)
    assert workers.compare([(r"\sqrt{12}", r"2\sqrt{3}")])[0].outcome == "right"
    (before,) = workers.pids
    start = time.monotonic()
    verdict = workers.compare([(HANGS, "5")])[0]
    assert (verdict.outcome, verdict.detail) == ("error", "no verdict within 1 s")
    assert time.monotonic() - start < 3
    assert gone(before) and workers.pids == []
    assert workers.compare([(r"\sqrt{12}", r"2\sqrt{3}")])[0].outcome == "right"
    (after,) = workers.pids
    workers.close()
    assert gone(after)


def test_a_worker_that_dies_is_an_error_and_is_replaced():
    workers = Pool(5.0, size=1)
    workers.compare([("x", "x")])
    os.kill(workers.pids[0], signal.SIGKILL)
    assert workers.compare([("x", "y")])[0].outcome == "error"
    assert workers.compare([("x+1", "1+x")])[0].outcome == "right"
    workers.close()


def test_threads_get_their_own_verdicts():
    workers = Pool(5.0, size=2)
    found: dict[int, list[str]] = {}

    def work(number: int) -> None:
        pairs = [(f"x+{number}", f"{number}+x"), (f"x+{number}", f"x+{number + 1}")] * 3
        found[number] = [verdict.outcome for verdict in workers.compare(pairs)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: ["right", "wrong"] * 3 for number in range(6)}
    assert len(workers.pids) <= 2
    workers.close()


def test_no_process_starts_where_text_and_numbers_decide(monkeypatch):
    monkeypatch.setattr(pool, "_pools", {})
    monkeypatch.setattr(pool.subprocess, "Popen", None)
    assert math_outcome(r"\boxed{\sqrt{2}}", r"\sqrt{2}") == "right"
    assert math_outcome(r"\boxed{7}", "8") == "wrong"
    assert math_outcome(r"\boxed{\dfrac{1}{2}}", "0.5") == "right"
    assert math_outcome("I give up", r"\frac{x}{2}") == "no_answer"


def test_equal_comparisons_are_made_once(monkeypatch):
    calls = []

    class Counted:
        def compare(self, pairs):
            calls.append(list(pairs))
            return [mathematics.Verdict("wrong") for _ in pairs]

    monkeypatch.setattr(pool, "shared", lambda deadline: Counted())
    items = [(r"I say \boxed{x+1}", "x+2", False), (r"So \boxed{x+1}", "x+2", False)] * 5
    assert {verdict.outcome for verdict in mathematics.grade(items)} == {"wrong"}
    assert calls == [[("x+1", "x+2")]]


SCRIPT = """
import sys
from grpo_repro.rewards.pool import shared
pool = shared({deadline})
pool.compare([("x", "y")])
print(pool.pids[0], flush=True)
pool.compare([("{answer}", "5")])
"""


@pytest.mark.parametrize("how", ["end", "kill"])
def test_no_process_outlives_its_parent(how):
    code = SCRIPT.format(deadline=2.0, answer="y+1" if how == "end" else HANGS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    pid = int(parent.stdout.readline())
    if how == "kill":
        time.sleep(0.5)
        parent.kill()
    parent.wait()
    end = time.monotonic() + 12
    while not gone(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert gone(pid)


def test_a_missing_math_verify_is_named(monkeypatch):
    monkeypatch.setattr(pool, "find_spec", lambda name: None)
    with pytest.raises(pool.UserError, match="pip install math-verify"):
        Pool(5.0, size=1).compare([("x", "y")])
