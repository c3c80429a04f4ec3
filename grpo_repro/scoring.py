"""`grpo data score` for worded tasks: completions with their gold answers in one file, an outcome for each."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import typer

from grpo_repro.errors import UserError
from grpo_repro.rewards import OUTCOMES, Verdict
from grpo_repro.tasks import Question
from grpo_repro.tasks.worded import WordedTask


@dataclass(frozen=True)
class Line:
    """A line to be graded.

    Attributes:
        number: Of the line, from 1.
        completion: The text.
        gold: The gold answer as text, empty where it is none; None where the question's `id` stands instead.
        id: Of the question.
        cut: Whether the line says that the completion was cut off.
    """

    number: int
    completion: str
    gold: str | None
    id: str
    cut: bool


def parse(name: str, number: int, text: str) -> Line:
    """Read a line.

    Raises:
        UserError: If it is no object with a completion in text and a gold answer (or a question's id).
    """
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{name}:{number}: not JSON ({reason}); mend that line") from error
    if not isinstance(entry, dict) or "completion" not in entry or not {"gold", "id"} & entry.keys():
        raise UserError(f'{name}:{number}: not a JSON object with "completion" and "gold" (or "id"); mend that line')
    completion = entry["completion"]
    if not isinstance(completion, str):
        raise UserError(f"{name}:{number}: completion {json.dumps(completion)[:80]} is no text; put it in quotes")
    cut = entry.get("truncated") is True or entry.get("finish_reason") == "length"
    return Line(number, completion, _gold(entry["gold"]) if "gold" in entry else None, str(entry.get("id")), cut)


def _gold(value: Any) -> str:
    """A gold answer as text; numbers are taken as such, and what is neither cannot be read (empty)."""
    if isinstance(value, float):
        return str(value) if math.isfinite(value) else ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # json refuses integers of more digits than str does
    return value if isinstance(value, str) else ""


def score(name: str, lines: Iterable[tuple[int, str]], task: WordedTask, asked: Any, as_json: bool) -> None:
    """Grade and print every line; bad lines are named one by one, and make the command exit with status 2.

    Args:
        name: Of the file, for messages.
        lines: Number and text of each line.
        task: A task whose rules grade; it needs no questions.
        asked: A function that loads the task's questions, by id; called if a line has no gold.
        as_json: Whether to print one JSON object for each line.
    """
    good: list[Line] = []
    bad = 0
    for number, text in lines:
        try:
            good.append(parse(name, number, text))
        except UserError as error:
            bad += 1
            print(f"error: {error}", file=sys.stderr)
    if not good and not bad:
        raise UserError(f"{name} holds no completions; each line is {{'completion': ..., 'gold': ...}}")
    known = asked() if any(line.gold is None for line in good) else {}
    found = []
    for line in good:
        if line.gold is None and line.id not in known:
            bad += 1
            print(f"error: {name}:{line.number}: id {line.id!r} is no question of {task.name}", file=sys.stderr)
        else:
            question = known[line.id] if line.gold is None else Question(line.id, "", line.gold, task.name)
            found.append((line, question))
    verdicts = task.grade([(line.completion, question, line.cut) for line, question in found])
    rewards = [task.pay(line.completion, verdict) for (line, _), verdict in zip(found, verdicts, strict=True)]
    for (line, _), verdict, reward in zip(found, verdicts, rewards, strict=True):
        _show(line, verdict, reward, as_json)
    if found and not as_json:
        _summary(task.name, verdicts, rewards)
    if bad:
        raise typer.Exit(2)


def _show(line: Line, verdict: Verdict, reward: float, as_json: bool) -> None:
    if as_json:
        entry = {"line": line.number, "outcome": verdict.outcome, "reward": reward, "detail": verdict.detail}
        print(json.dumps(entry))
    else:
        detail = f"\t{verdict.detail}" if verdict.detail else ""
        print(f"{line.number}\t{verdict.outcome}\t{reward:g}{detail.encode(errors='replace').decode()}")


def _summary(name: str, verdicts: list[Verdict], rewards: list[float]) -> None:
    """Mean reward over the completions whose gold answer can be read, and the number of each outcome."""
    paid = [x for x, verdict in zip(rewards, verdicts, strict=True) if verdict.outcome != "gold_unparsable"]
    mean = f"mean reward {sum(paid) / len(paid):.4f} of {len(paid)}" if paid else "no gold answer can be read"
    counts = Counter(verdict.outcome for verdict in verdicts)
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    print(f"{name}: {len(verdicts)} completions, {mean} ({told})")
