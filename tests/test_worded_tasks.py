"""The tasks gsm8k and math: every layout of the data, splits, draws, hostile files, rewards and prompts."""

from __future__ import annotations

import json
import os
import pickle
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from byte_model import byte_tokenizer
from shared import GSM8K, MATH, needs_data
from small_models import make

from grpo_repro.cells import Cell, canonical_json
from grpo_repro.config import load_choice
from grpo_repro.engine.sample import Rollout
from grpo_repro.errors import UserError
from grpo_repro.experiments.grading import OUTCOME_METRICS, Tally, grade
from grpo_repro.experiments.mse_eval import plan, settings
from grpo_repro.fingerprint import model_settings, task_settings
from grpo_repro.policies.causal_lm import CausalLM
from grpo_repro.rewards import Verdict
from grpo_repro.schema import ModelConfig, MseEvalConfig, TaskConfig
from grpo_repro.tasks import load_task
from grpo_repro.validation import validate, validate_task

ROWS = [{"question": f"What is {i} and {i}?", "answer": f"They are {2 * i}.\n#### {2 * i}"} for i in range(20)]
PROBLEMS = [
    {
        "problem": f"Half of ${i}$?",
        "solution": f"It is $\\boxed{{\\frac{{{i}}}{{2}}}}.$",
        "level": "Level 1",
        "type": "Algebra",
    }
    for i in range(1, 13)
]


def config(path: Path | None, name: str = "gsm8k", **changes: object) -> TaskConfig:
    chosen = load_choice("task", name)
    return replace(chosen, path=None if path is None else str(path), **({"num_questions": 5} | changes))


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


# -- layouts


def gsm8k_lines(root: Path) -> None:
    write_lines(root / "train.jsonl", ROWS[:12])
    write_lines(root / "test.jsonl", ROWS[12:])


def gsm8k_hub_parquet(root: Path) -> None:
    write_parquet(root / "main" / "train-00000-of-00001.parquet", ROWS[:12])
    write_parquet(root / "main" / "test-00000-of-00001.parquet", ROWS[12:])


def gsm8k_json(root: Path) -> None:
    (root / "train.json").write_text(json.dumps(ROWS[:12]))
    (root / "test.json").write_text("\ufeff" + json.dumps(ROWS[12:]), encoding="utf-8")


def gsm8k_folders(root: Path) -> None:
    for split, rows in (("train", ROWS[:12]), ("test", ROWS[12:])):
        for number, row in enumerate(rows):
            path = root / split / "words" / f"{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(row, indent=1))


@pytest.mark.parametrize("layout", [gsm8k_lines, gsm8k_hub_parquet, gsm8k_json, gsm8k_folders])
def test_every_layout_holds_the_same_questions(tmp_path, layout):
    layout(tmp_path)
    for split, rows in (("train", ROWS[:12]), ("test", ROWS[12:]), ("all", ROWS)):
        questions = load_task(config(tmp_path, split=split, num_questions=0)).questions
        assert {(q.text, q.answer) for q in questions} == {
            (row["question"], row["answer"].split("#### ")[1]) for row in rows
        }


def test_the_folders_of_math_and_its_lines(tmp_path):
    for number, row in enumerate(PROBLEMS):
        path = tmp_path / "MATH" / ("train" if number < 8 else "test") / "algebra" / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row))
    train = load_task(config(tmp_path / "MATH", "math", split="train", num_questions=0))
    assert [(q.answer, q.kind) for q in train.questions][:2] == [
        ("\\frac{1}{2}", "Algebra"),
        ("\\frac{2}{2}", "Algebra"),
    ]
    assert len(train.questions) == 8
    assert len(load_task(config(tmp_path / "MATH", "math", num_questions=0)).questions) == 4
    row = {
        "problem": "p",
        "answer": "\\text{Evelyn}",
        "solution": "\\boxed{x}",
        "subject": "Geometry",
        "unique_id": "test/1",
    }
    lines = write_lines(tmp_path / "math500.jsonl", [row])
    (question,) = load_task(config(lines, "math", split="all", num_questions=0)).questions
    assert vars(question) == {"id": "test/1", "text": "p", "answer": "\\text{Evelyn}", "kind": "Geometry"}


def test_a_single_file_is_halved_and_the_halves_are_disjoint_for_every_seed(tmp_path):
    path = write_lines(tmp_path / "all.jsonl", ROWS)
    halves = {
        split: [
            {q.text for q in load_task(config(path, split=split, num_questions=10, seed=seed)).questions}
            for seed in range(3)
        ]
        for split in ("train", "test")
    }
    assert halves["train"][0] == halves["train"][1] == halves["train"][2]
    assert not halves["train"][0] & halves["test"][0]
    assert halves["train"][0] | halves["test"][0] == {row["question"] for row in ROWS}
    alone = tmp_path / "folder" / "test.jsonl"
    write_lines(alone, ROWS)
    assert {q.text for q in load_task(config(alone.parent, num_questions=0)).questions} == halves["test"][0]
    # The order of the lines does not matter.
    write_lines(tmp_path / "turned.jsonl", ROWS[::-1])
    assert {q.text for q in load_task(config(tmp_path / "turned.jsonl", num_questions=0)).questions} == halves["test"][
        0
    ]


def test_a_draw_follows_its_seed_and_the_hash_its_questions(tmp_path):
    path = write_lines(tmp_path / "all.jsonl", ROWS)
    one, same, other = (load_task(config(path, seed=seed)) for seed in (1, 1, 2))
    assert one.questions == same.questions and one.data_hash == same.data_hash
    assert one.questions != other.questions and one.data_hash != other.data_hash
    assert load_task(config(path, num_questions=3, seed=1)).questions == one.questions[:3]


@needs_data
def test_the_shared_data_are_read_whole():
    assert len(load_task(config(GSM8K, split="train", num_questions=0)).questions) == 7473
    assert len(load_task(config(GSM8K, num_questions=0)).questions) == 1319
    task = load_task(config(MATH, "math", split="all", num_questions=0))
    assert len(task.questions) == 500 and task.excluded == [] and task.audit() == []


# -- the hub


def test_the_hub_is_asked_for_the_pinned_revision(monkeypatch):
    asked = []

    class Split(list):
        def to_list(self):
            return list(self)

    def load_dataset(*arguments, **named):
        asked.append((arguments, named))
        return {"train": Split(ROWS[:12]), "test": Split(ROWS[12:])}

    fake = types.SimpleNamespace(load_dataset=load_dataset, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    questions = load_task(config(None, num_questions=0)).questions
    assert [q.text for q in questions] == [row["question"] for row in ROWS[12:]]
    chosen = load_choice("task", "gsm8k")
    assert asked == [((chosen.hub, chosen.subset), {"revision": chosen.revision})]
    assert len(chosen.revision) == len(load_choice("task", "math").revision) == 40
    fake.load_dataset = lambda *arguments, **named: 1 / 0
    with pytest.raises(
        UserError, match=r"could not be read from the hub \(ZeroDivisionError.*network, or .*task.path=DIR"
    ):
        load_task(config(None))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'grpo-repro\[data\]', or .*task.path=DIR"):
        load_task(config(None))


# -- hostile files

GOOD = json.dumps(ROWS[0]) + "\n"


class Payload:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


FILES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("x.jsonl", b"", "x.jsonl is empty"),
    "blank": ("x.jsonl", b"\n \n", "is empty"),
    "truncated line": ("x.jsonl", GOOD.encode() * 2 + GOOD.encode()[:30], r"x.jsonl:3 is not JSON"),
    "utf-16": ("x.jsonl", GOOD.encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    "utf-16 without mark": ("x.jsonl", GOOD.encode("utf-16-le"), "binary or UTF-16"),
    "latin-1": ("x.jsonl", b'{"question": "caf\xe9", "answer": "1"}', "is not UTF-8 text"),
    "nan": ("x.jsonl", b'{"question": "q", "answer": NaN}', r"x.jsonl:1 is not JSON \(NaN"),
    "null": ("x.jsonl", b'{"question": null, "answer": "1"}', "question is None and no text"),
    "a list for a text": ("x.jsonl", b'{"question": ["q"], "answer": "1"}', "no text"),
    "no question": ("x.jsonl", b'{"question": " ", "answer": "1"}', "question is empty"),
    "missing column": ("x.jsonl", b'{"question": "q", "reply": "1"}', "has the columns question, reply; .* expects"),
    "no object": ("x.jsonl", b"[1]\n[2]\n", "x.jsonl:1 is no JSON object"),
    "list of numbers": ("x.json", b"[1]", "x.json:1 is no JSON object"),
    "bad json": ("x.json", b'{"question": ', "x.json is not JSON"),
    "nested": ("x.jsonl", b"[" * 100_000, "nested too deeply"),
    "twice": ("x.jsonl", b'{"id": 7, "question": "q", "answer": "1"}\n' * 2, "id '7' is used more than once"),
    "pickle": ("x.jsonl", pickle.dumps(Payload()), "a pickle or another binary file"),
    "pickle as parquet": ("x.parquet", pickle.dumps(Payload()), "is not readable parquet"),
    "cut parquet": ("x.parquet", b"PAR1" + b"\0" * 50, "is not readable parquet"),
    "zip": ("x.jsonl", b"PK\x03\x04", "a zip archive"),
    "zero bytes": ("x.jsonl", b"\0" * 1000, "binary or UTF-16"),
    "html": ("x.jsonl", b"<html>", "x.jsonl:1 is not JSON"),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_files_are_one_message(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    file, data, words = FILES[name]
    Path(file).write_bytes(data)
    for path in (tmp_path / file, tmp_path):
        with pytest.raises(UserError, match=words) as caught:
            load_task(config(path, split="all", num_questions=0))
        assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)
    assert not Path("unpickled").exists()


def test_paths_without_data_are_one_message(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_task(config(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "data.pkl").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UserError, match=r"holds no data files \(data.pkl\)"):
        load_task(config(tmp_path / "empty"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="no regular file"):
        load_task(config(tmp_path / "pipe.jsonl"))
    with pytest.raises(UserError, match="no regular file"):
        load_task(config(Path("/dev/zero")))
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    with pytest.raises(UserError, match="cannot read"):
        load_task(config(tmp_path / "loop.jsonl"))
    write_parquet(tmp_path / "null.parquet", [{"question": "q", "answer": None}])
    with pytest.raises(UserError, match="null.parquet:1: answer is None"):
        load_task(config(tmp_path / "null.parquet"))
    write_lines(tmp_path / "few.jsonl", ROWS)
    with pytest.raises(UserError, match=r"11 questions of split test are needed but .* has 10; .*num_questions=0"):
        load_task(config(tmp_path / "few.jsonl", num_questions=11))


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes("".join(json.dumps(row) + "\r\n" for row in ROWS).encode("utf-8-sig"))
    assert len(load_task(config(path, split="all", num_questions=0)).questions) == 20


def test_unreadable_golds_are_left_out_and_counted(tmp_path):
    bad = [{"question": f"Bad {i}?", "answer": answer} for i, answer in enumerate(["", "many", "1 or 2"])]
    path = write_lines(tmp_path / "all.jsonl", bad + ROWS)
    task = load_task(config(path, split="all", num_questions=0))
    assert len(task.questions) == 20 and task.looked_at == 23
    assert sorted(q.text for q, _ in task.excluded) == ["Bad 0?", "Bad 1?", "Bad 2?"]
    assert ("questions_excluded", 3.0, 23) in Tally().rows(task)
    # The next questions take their places.
    assert len(load_task(config(path, split="all", num_questions=20)).questions) == 20
    problems = [{"problem": "p", "answer": answer} for answer in ("\\frac{1}{", "", "\\undefined\\command", "3")]
    math = load_task(config(write_lines(tmp_path / "math.jsonl", problems), "math", split="all", num_questions=0))
    assert [q.answer for q in math.questions] == ["3"]


# -- rewards


def test_the_format_reward_is_off_by_default_and_scaled(tmp_path):
    path = write_lines(tmp_path / "all.jsonl", ROWS)
    plain = load_task(config(path))
    weighted = load_task(config(path, format_reward=0.25))
    question = plain.questions[0]
    good, bare, wrong = f"#### {question.answer}", f"It is {question.answer}.", "#### 99999"
    assert [plain.reward(text, question) for text in (good, bare, wrong, "none")] == [1, 1, 0, 0]
    assert [weighted.reward(text, question) for text in (good, bare, wrong, "none")] == [1, 0.8, 0.2, 0]
    for outcome in ("error", "gold_unparsable"):
        assert weighted.pay(good, Verdict(outcome)) == 0


def policy_of(tokenizer: object, template: str = "{question}") -> CausalLM:
    return CausalLM(make("qwen2", vocab=258).policy.model, tokenizer, (), 0, template)


class Said:
    """A tokenizer whose token k is text k of a list."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.decoded = texts, 0

    def decode(self, tokens, skip_special_tokens) -> str:
        self.decoded += 1
        return "".join(self.texts[token] for token in tokens)


def rollout(tokens: list[list[int]], finished: list[list[bool]]) -> Rollout:
    found = torch.tensor(tokens)[..., None]
    return Rollout(found, torch.ones_like(found, dtype=torch.bool), torch.zeros(found.shape), torch.tensor(finished))


def test_outcomes_of_a_rollout_are_counted_and_each_distinct_completion_is_graded_once(tmp_path, monkeypatch):
    task = load_task(config(write_lines(tmp_path / "all.jsonl", ROWS)))
    questions = task.questions[:2]
    said = Said(f"#### {questions[0].answer}\n", "#### 777\n", "no idea", "and 5 more")
    sampled = rollout([[0, 0, 1, 2], [1, 2, 3, 3]], [[True, False, True, True], [True, False, False, True]])
    seen = []
    given = type(task).grade
    monkeypatch.setattr(type(task), "grade", lambda self, items: seen.extend(items) or given(self, items))
    tally = Tally()
    rewards = grade(policy_of(said), task, questions, sampled, tally)
    assert rewards.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
    assert dict(zip(OUTCOME_METRICS, tally.counts.tolist(), strict=False)) == {
        "outcome_right": 2, "outcome_wrong": 3, "outcome_no_answer": 1, "outcome_truncated": 2, "outcome_error": 0,
        "outcome_gold_unparsable": 0,
    }  # fmt: skip
    assert len(seen) == len(set((text, q.id, cut) for text, q, cut in seen)) == 8
    assert said.decoded == 4


def test_errors_and_unreadable_golds_are_not_paid_and_not_wrong(tmp_path, monkeypatch):
    task = load_task(config(write_lines(tmp_path / "all.jsonl", ROWS)))
    verdicts = [Verdict("error"), Verdict("right"), Verdict("gold_unparsable"), Verdict("right")]
    monkeypatch.setattr(type(task), "grade", lambda self, items: verdicts)
    tally = Tally()
    sampled = rollout([[0, 1], [2, 3]], [[True, True], [True, True]])
    rewards = grade(policy_of(Said("a", "b", "c", "d")), task, task.questions[:2], sampled, tally)
    assert rewards.tolist() == [[0, 1], [0, 0]]
    assert tally.counts.tolist() == [1, 0, 0, 0, 1, 2]


# -- configurations


def test_prompts_hold_the_instruction_of_the_task(tmp_path):
    task = config(write_lines(tmp_path / "all.jsonl", ROWS))
    model = ModelConfig(name="m", path=str(tmp_path), template="Q: {question}\n{instruction}\nA:")
    cell = Cell("mse-eval", {"model": model_settings(model), "task": task_settings(task)}, "")
    resolved, same = settings(cell)
    assert same == task
    policy = policy_of(byte_tokenizer(), resolved.template)
    tokens = policy.encode("Caf\u00e9 {instruction}?")
    assert policy.decode(tokens) == f"Q: Caf\u00e9 {{instruction}}?\n{task.instruction}\nA:"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "dev"}, "known: train, test, all"),
        ({"num_questions": 2}, "use 3 or more"),
        ({"format_reward": -0.1}, "task.format_reward=-0.1 is not between"),
        ({"deadline": 0.0}, "task.deadline=0.0 is not between"),
        ({"operand_max": 9}, "task.operand_max means nothing to task=gsm8k"),
    ],
)
def test_bad_values_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        validate_task(config(None, **changes))


def test_models_and_tasks_that_do_not_go_together():
    task = config(None)
    with pytest.raises(UserError, match="reads English"):
        validate(MseEvalConfig(task=task))
    with pytest.raises(UserError, match="digits and signs only"):
        validate(MseEvalConfig(task=task, model=load_choice("model", "bundled-base")))
    model = ModelConfig(name="m", path="somewhere", template="{instruction} {question}")
    with pytest.raises(UserError, match="task=arithmetic has none; leave it out"):
        validate(MseEvalConfig(task=TaskConfig(name="arithmetic"), model=model))
    with pytest.raises(UserError, match="task.instruction means nothing to task=arithmetic"):
        validate_task(TaskConfig(name="arithmetic", instruction="Add."))


def test_cells_are_known_by_their_data_and_not_by_the_path(tmp_path):
    model = ModelConfig(name="m", path="hub/id")
    paths = [write_lines(tmp_path / name / "all.jsonl", ROWS) for name in ("a", "b")]
    other = write_lines(tmp_path / "c" / "all.jsonl", [row | {"question": row["question"] + "!"} for row in ROWS])
    ids = [plan(MseEvalConfig(model=model, task=config(path)))[0].id for path in (*paths, other)]
    assert ids[0] == ids[1] != ids[2]
    cell = plan(MseEvalConfig(model=model, task=config(paths[0], split="all", num_questions=0)))[0]
    assert cell.config["task"]["num_questions"] == 20


def test_the_keys_of_worded_tasks_stay_out_of_other_cells():
    old = ("name", "num_questions", "split", "seed", "path", "operand_min", "operand_max", "factor_min", "factor_max")
    assert tuple(task_settings(TaskConfig(name="arithmetic"))) == old
    assert "path" in canonical_json({"task": task_settings(TaskConfig(name="arithmetic"))})
    assert np.array_equal(Tally().counts, np.zeros(6))
