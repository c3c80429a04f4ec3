"""The tasks gsm8k and math from the command line: data commands, and experiments on a small random model."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from byte_model import save_byte_model
from house import message
from shared import CASES, GSM8K, MATH, lines, needs_cases, needs_data

from grpo_repro.experiments.grading import OUTCOME_METRICS

SMALL = ["model=hf", "task.num_questions=4", "max_new_tokens=12"]


@needs_data
@pytest.mark.slow
def test_gsm8k_trains_and_is_measured_on_a_model_that_knows_nothing(grpo):
    save_byte_model(grpo.folder / "model")
    common = ["task=gsm8k", f"task.path={GSM8K}", "model.path=model", *SMALL]
    training = ["group_sizes=[2,4]", "budget=8", "iterations=2", "checkpoints=[0]", "seeds=[0]", "prompt_pool=10"]
    run = grpo("sweep", "group-size", *common, *training, "eval_samples=2", "predict_seeds=[]", PYTHONPATH="")
    assert run.returncode == 0, run.stderr
    run = grpo("mse-eval", *common, "group_sizes=[2,4]", "completions_per_prompt=8", "replicates=3", PYTHONPATH="")
    assert run.returncode == 0, run.stderr
    cells = sorted((grpo.folder / "results").glob("*/*/metrics.parquet"))
    assert [cell.parts[-3] for cell in cells] == ["group-size"] * 2 + ["mse-eval"] * 2
    for cell in cells:
        rows = pd.read_parquet(cell)
        graded = 8 if "group-size" in cell.parts else 32
        for _, part in rows[rows["metric"].isin(OUTCOME_METRICS[:-1])].groupby("iteration", dropna=False):
            assert sorted(part["metric"]) == sorted(OUTCOME_METRICS[:-1])
            assert set(part["count"]) == {graded} and part["value"].sum() == graded
        if "group-size" in cell.parts:
            cut = rows[rows["metric"] == "truncated_fraction"]["value"]
            assert len(cut) and cut.between(0.5, 1).all()
            assert set(rows[rows["metric"] == "error_fraction"]["value"]) == {0.0}
        excluded = rows[rows["metric"] == "questions_excluded"]
        assert len(excluded) and set(excluded["value"]) == {0.0}
        manifest = json.loads((cell.parent / "manifest.json").read_text())
        assert manifest["data_hash"] and manifest["packages"]["math-verify"]


@needs_data
def test_a_plan_knows_all_questions_and_nothing_is_run(grpo):
    save_byte_model(grpo.folder / "model")
    command = ["mse-eval", "--dry-run", "--json", "task=math", f"task.path={MATH}", "task.split=all", "model=hf"]
    run = grpo(*command, "task.num_questions=0", "model.path=model", "methods=[components]", PYTHONPATH="")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["plan"][0]["completions"] == 500 * 64
    assert not (grpo.folder / "results").exists()


@needs_data
def test_every_gold_is_checked(grpo):
    for task, path, number in (("gsm8k", GSM8K, 8792), ("math", MATH, 500)):
        run = grpo("data", "check", task, f"task.path={path}", "--json")
        found = json.loads(run.stdout)
        assert (run.returncode, found["questions"], found["problems"]) == (0, number, [])


def test_golds_that_cannot_be_read_are_listed(grpo):
    rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(["5", "", "x^2"])]
    (grpo.folder / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = grpo("data", "check", "gsm8k", "path=d.jsonl", "--json")
    found = json.loads(run.stdout)
    assert run.returncode == 1 and found["questions"] == 1
    assert found["problems"] == [
        "question d.jsonl:2: gold answer '' is not one number",
        "question d.jsonl:3: gold answer 'x^2' is not one number",
    ]  # fmt: skip
    assert (
        grpo("data", "show", "gsm8k", "path=d.jsonl", "split=all", "num_questions=0").stdout
        == "d.jsonl:1\tgsm8k\tq0\t5\n"
    )
    assert "does not exist" in message(grpo("data", "check", "math", "path=nowhere"))


@needs_cases
@pytest.mark.parametrize("task", ["gsm8k", "math"])
def test_scores_of_the_shared_cases(grpo, task):
    cases = [case for case in lines(CASES) if case["task"] == task]
    path = grpo.folder / "cases.jsonl"
    path.write_text("\n".join(map(json.dumps, cases)), encoding="utf-8")
    run = grpo("data", "score", task, path, "--json")
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [entry["outcome"] for entry in found] == [case["outcome"] for case in cases]
    assert [entry["reward"] for entry in found] == [float(case["outcome"] == "right") for case in cases]
    summary = grpo("data", "score", task, path).stdout.splitlines()
    assert len(summary) == len(cases) + 1 and summary[-1].startswith(f"{task}: {len(cases)} completions")


BAD = {
    "not json": ("{bad", "not JSON"),
    "cut off": ('{"completion": "5", "gol', "not JSON"),
    "a list": ("[1]", "not a JSON object"),
    "no completion": ('{"gold": "5"}', 'with "completion" and "gold"'),
    "no gold": ('{"completion": "5"}', 'with "completion" and "gold"'),
    "null": ('{"completion": null, "gold": "5"}', "completion null is no text"),
    "number": ('{"completion": 5, "gold": "5"}', "completion 5 is no text"),
    "nan": ('{"completion": NaN, "gold": "5"}', "completion NaN is no text"),
    "list": ('{"completion": ["5"], "gold": "5"}', "is no text"),
    "object": ('{"completion": {"a": 1}, "gold": "5"}', "is no text"),
    "nested": ("[" * 100_000, "nested too deeply"),
}
NO_GOLDS = (float("nan"), None, True, ["5"], "")
GOLDS = [("5", "right"), (5, "right"), (5.0, "right"), (10**400, "wrong")] + [(x, "gold_unparsable") for x in NO_GOLDS]


def test_bad_lines_are_named_one_by_one_and_the_others_are_scored(grpo):
    path = grpo.folder / "mixed.jsonl"
    good = [json.dumps({"completion": "#### 5", "gold": gold}) for gold, _ in GOLDS]
    cut = json.dumps({"completion": "5 or", "gold": "5", "finish_reason": "length"})
    path.write_text("\n".join([*(line for line, _ in BAD.values()), "", *good, cut]))
    run = grpo("data", "score", "gsm8k", path, "--json")
    assert run.returncode == 2
    errors = run.stderr.strip().splitlines()
    assert len(errors) == len(BAD)
    for number, (error, (_, words)) in enumerate(zip(errors, BAD.values(), strict=True), 1):
        assert error.startswith(f"error: {path}:{number}: ") and words in error
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [entry["outcome"] for entry in found] == [outcome for _, outcome in GOLDS] + ["truncated"]
    assert found[0]["line"] == len(BAD) + 2


def test_completions_of_a_data_set_are_found_by_their_ids(grpo):
    (grpo.folder / "d.jsonl").write_text('{"id": "a", "question": "q", "answer": "#### 4"}')
    (grpo.folder / "c.jsonl").write_text('{"id": "a", "completion": "4"}\n{"id": "b", "completion": "4"}')
    run = grpo("data", "score", "gsm8k", "c.jsonl", "path=d.jsonl")
    assert run.returncode == 2 and run.stdout.startswith("1\tright\t1\ngsm8k: 1 completions, mean reward 1.0000")
    assert run.stderr == "error: c.jsonl:2: id 'b' is no question of gsm8k\n"
    (grpo.folder / "none.jsonl").write_text("\n")
    assert "holds no completions" in message(grpo("data", "score", "math", "none.jsonl"))
    assert "No such file" in message(grpo("data", "score", "math", "nowhere.jsonl"))
    assert "is no file" in message(grpo("data", "score", "math", "."))
