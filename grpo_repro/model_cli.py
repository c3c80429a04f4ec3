"""`grpo model`: the policies that can be named, and how the bundled ones are made."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from grpo_repro.config import ModelConfig, TaskConfig, choices, load_choice
from grpo_repro.errors import UserError

model_app = typer.Typer(
    name="model",
    help="List the policies, build the bundled ones.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RECIPES = ("base", "instruct")
QUESTIONS, SAMPLES = 200, 8
"""What `model list` samples of each bundled policy."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@model_app.command("list")
def list_models(
    accuracy: Annotated[
        bool, typer.Option(help=f"Sample the bundled ones ({QUESTIONS} questions, {SAMPLES} times each).")
    ] = True,
    as_json: Json = False,
) -> None:
    """List the policies of conf/model, with the bundled ones' sampled accuracy for each kind of question.

    Example: grpo model list --no-accuracy
    """
    entries = []
    for name in choices("model"):
        model = load_choice("model", name)
        entry: dict[str, Any] = {"name": name, "kind": model.kind, "source": model.path or model.family}
        folder = _bundled_folder(model)
        if folder is not None:
            entry["present"] = (folder / "config.json").is_file()
            if accuracy and entry["present"]:
                print(f"sampling {name}", file=sys.stderr)
                entry["accuracy"] = _accuracy(folder, model.template)
        entries.append(entry)
    if as_json:
        print(json.dumps({"models": entries}))
        return
    for entry in entries:
        missing = "" if entry.get("present", True) else "  (not installed: grpo model build)"
        print(f"{entry['name']}\t{entry['kind']}\t{entry['source'] or 'model.path=DIR'}{missing}")
        for kind, (mean, error) in entry.get("accuracy", {}).items():
            print(f"    {kind:15s} {mean:.3f} +- {error:.3f}")


def _bundled_folder(model: ModelConfig) -> Path | None:
    if not (model.path or "").startswith("bundled:"):
        return None
    from grpo_repro import bundled

    return bundled.path((model.path or "").removeprefix("bundled:"))


def _accuracy(folder: Path, template: str) -> dict[str, tuple[float, float]]:
    from grpo_repro.policies.accuracy import sampled_accuracy
    from grpo_repro.tasks import load_task

    questions = load_task(TaskConfig(name="arithmetic", num_questions=QUESTIONS)).questions
    return sampled_accuracy(folder, template, questions, SAMPLES, seed=0)


@model_app.command()
def build(
    name: Annotated[str, typer.Argument(metavar="NAME", help="base or instruct.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="Folder to write; models/NAME by default, and never overwritten."),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of the first weights and of the text.")
    ] = 0,
    base: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--base", help="What instruct starts from; the bundled base by default."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a bundled policy again from a seed, on one core.

    Example: grpo model build base --out models/base
    """
    recipe = name.removeprefix("bundled-")
    if recipe == "icl":
        raise UserError(f"{name} has no weights of its own: it is instruct with examples in its prompt; build that")
    if recipe not in RECIPES:
        raise UserError(f"no recipe for model {name!r}; known: {', '.join(RECIPES)}")
    target = out or Path("models") / recipe
    if os.path.lexists(target):
        raise UserError(f"{target} exists already and is not overwritten; name another folder with --out DIR")
    facts = _build(recipe, target, seed, base)
    if as_json:
        print(json.dumps({"model": recipe, "path": str(target), **facts}))
        return
    print(f"{target}: {facts['parameters']:,} parameters, {facts['steps']} steps, {facts['seconds']:.0f} s")
    print(f"use it with: model=hf model.path={target}")


def _build(recipe: str, target: Path, seed: int, base: Path | None) -> dict[str, Any]:
    """Build into a folder beside the target, which appears only when it is whole."""
    from transformers.utils import logging

    from grpo_repro.policies import pretrain
    from grpo_repro.progress import Reporter

    logging.disable_progress_bar()

    reporter = Reporter()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        temporary.chmod(0o755)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; name another folder with --out") from error
    try:
        with reporter:
            reporter.start(f"model {recipe}")
            facts = pretrain.build(recipe, temporary, seed, reporter.progress, base)
        os.rename(temporary, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; free space or use --out DIR") from error
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return facts
