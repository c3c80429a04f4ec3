"""`grpo data`: look at a task's questions, check them, score completions that something else wrote."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from grpo_repro.config import choices, load_choice
from grpo_repro.errors import RunError, UserError
from grpo_repro.schema import WORDED_TASKS
from grpo_repro.validation import validate_task

data_app = typer.Typer(
    name="data",
    help="Check, show and score the questions of a task.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _complete_task(incomplete: str) -> list[str]:
    return [name for name in choices("task") if name.startswith(incomplete)]


Task = Annotated[str, typer.Argument(metavar="TASK", help="Name in conf/task.", autocompletion=_complete_task)]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(metavar="OVERRIDES", help="KEY=VALUE of the task, such as num_questions=20."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@data_app.command()
def check(task: Task, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check that every gold answer is read and paid, and that questions differ; exit 1 if not.

    All questions of a data set are checked unless split or num_questions are given.

    Example: grpo data check arithmetic split=train num_questions=1000
    """
    everything = ["split=all", "num_questions=0"] if task in WORDED_TASKS else []
    loaded = _load(task, [*everything, *(overrides or [])])
    questions = loaded.questions
    ids, texts = Counter(q.id for q in questions), Counter(q.text for q in questions)
    problems = [f"id {name!r} is used {times} times" for name, times in ids.items() if times > 1]
    problems += [f"question {text!r} occurs {times} times" for text, times in texts.items() if times > 1]
    problems += _unpaid(loaded)
    kinds = Counter(q.kind for q in questions)
    if as_json:
        facts = {"questions": len(questions), "kinds": dict(kinds), "data_hash": loaded.data_hash}
        print(json.dumps({"task": loaded.name, **facts, "problems": problems}))
        if problems:
            raise typer.Exit(1)
    else:
        print(f"{loaded.name}: {len(questions)} questions, data hash {loaded.data_hash}")
        for kind, number in sorted(kinds.items()):
            print(f"  {kind}: {number}")
        for problem in problems[:20]:
            print(f"  problem: {problem}")
    if problems:
        raise RunError(f"{len(problems)} problems in task {task}")


def _unpaid(task: Any) -> list[str]:
    """What is wrong with the gold answers that earn nothing, or that the verifier cannot read."""
    if task.name not in WORDED_TASKS:
        wrong = [question for question in task.questions if task.reward(question.answer, question) != 1.0]
        return [f"question {q.id}: its own answer {q.answer!r} is not paid" for q in wrong]
    verdicts = task.grade([(task.stated(q.answer), q, False) for q in task.questions])
    found = [f"question {question.id}: {reason}" for question, reason in task.excluded]
    found += [
        f"question {q.id}: its own answer {q.answer!r} is graded {verdict.outcome} {verdict.detail}".rstrip()
        for q, verdict in zip(task.questions, verdicts, strict=True)
        if verdict.outcome != "right"
    ]
    return found + [f"question {q.id}: {reason}" for q, reason in task.audit()]


@data_app.command()
def show(
    task: Task,
    overrides: Overrides = None,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many questions.")] = 10,
    as_json: Json = False,
) -> None:
    """Print the first questions of a task with their answers.

    Example: grpo data show arithmetic -n 5 seed=1
    """
    loaded = _load(task, overrides)
    shown = loaded.questions[:number]
    if as_json:
        print(json.dumps({"task": loaded.name, "questions": [vars(question) for question in shown]}))
        return
    for question in shown:
        fields = (question.id, question.kind, question.text, question.answer)
        print("\t".join(" ".join(field.split()) for field in fields))


@data_app.command()
def score(
    task: Task,
    completions: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help='JSON lines {"id": ..., "completion": ...}, of worded tasks {"completion": ..., "gold": ...}; - is '
            "stdin.",
        ),
    ],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Score completions of a task's questions: mean reward, over all and for each kind.

    gsm8k and math grade completions against the gold answers beside them, and print the outcome and reward of each.

    Example: grpo data score arithmetic completions.jsonl
    """
    if "=" in completions:
        raise UserError(f"{completions!r} is an override, not a file: grpo data score TASK FILE KEY=VALUE")
    if task in WORDED_TASKS:
        _score_worded(task, completions, overrides, as_json)
        return
    loaded = _load(task, overrides)
    by_id = {question.id: question for question in loaded.questions}
    rewards: dict[str, list[float]] = defaultdict(list)
    for line, name, completion in _read(completions):
        if name not in by_id:
            raise UserError(
                f"{completions}:{line}: id {name!r} is no question of {task}; see grpo data show {task}, "
                "and give the overrides that made the questions"
            )
        rewards[by_id[name].kind].append(loaded.reward(completion, by_id[name]))
    if not rewards:
        raise UserError(f"{completions} holds no completions; each line is {{'id': ..., 'completion': ...}}")
    every = [reward for kind in rewards.values() for reward in kind]
    means = {kind: sum(values) / len(values) for kind, values in sorted(rewards.items())}
    if as_json:
        found = {
            "task": loaded.name,
            "count": len(every),
            "reward_mean": sum(every) / len(every),
            "kinds": means,
        }
        print(json.dumps(found))
        return
    print(f"{loaded.name}: {len(every)} completions, mean reward {sum(every) / len(every):.4f}")
    for kind, mean in means.items():
        print(f"  {kind}: {mean:.4f} ({len(rewards[kind])})")


def _score_worded(name: str, completions: str, overrides: list[str] | None, as_json: bool) -> None:
    from grpo_repro.scoring import score as score_lines
    from grpo_repro.tasks import worded, worded_kind

    config = _config(name, overrides)
    kind = worded_kind(name)
    rules = worded.WordedTask(kind, [], "", [], 0, config.format_reward, config.deadline)

    def asked() -> dict[str, Any]:
        everything = ["split=all", "num_questions=0"]
        return {question.id: question for question in _load(name, [*everything, *(overrides or [])]).questions}

    score_lines(completions, _lines(completions), rules, asked, as_json)


def _load(name: str, overrides: list[str] | None) -> Any:
    config = _config(name, overrides)
    from grpo_repro.tasks import load_task

    return load_task(config)


def _config(name: str, overrides: list[str] | None) -> Any:
    import yaml  # type: ignore[import-untyped]
    from omegaconf.errors import OmegaConfBaseException

    for item in overrides or []:
        if "=" not in item or item.startswith("="):
            raise UserError(f"{item!r} is not an override; write KEY=VALUE, for example num_questions=20")
    stripped = [item.removeprefix("task.") for item in overrides or []]
    try:
        config = load_choice("task", name, stripped)
    except OmegaConfBaseException as error:
        from grpo_repro.hydra_errors import explain

        raise UserError(explain(error, "mse-eval", "task.")) from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot read {' '.join(stripped)!r} ({reason}); write KEY=VALUE") from error
    validate_task(config, least=1)
    return config


def _read(name: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, id and completion of each line of a file."""
    yield from _parse(name, (line for _, line in _lines(name, blank=True)))


def _lines(name: str, blank: bool = False) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of a file, of blank ones too if asked."""
    try:
        # A byte order mark, which some editors write, is no part of the first line.
        if name == "-":
            file: Any = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig")
        else:
            if Path(name).exists() and not Path(name).is_file():
                raise UserError(f"{name} is no file; give JSON lines, or - for stdin")
            file = Path(name).open(encoding="utf-8-sig")
        with file:
            yield from ((number, line) for number, line in enumerate(file, 1) if blank or line.strip())
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}; give JSON lines, or - for stdin") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text ({error.reason}); give a file of JSON lines") from error


def _parse(name: str, lines: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question, completion = str(entry["id"]), entry["completion"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else repr(error)
            raise UserError(
                f'{name}:{number}: not a JSON object with "id" and "completion" ({reason}); mend that line'
            ) from error
        if not isinstance(completion, str):
            raise UserError(f"{name}:{number}: completion {json.dumps(completion)[:80]} is no text; put it in quotes")
        yield number, question, completion
