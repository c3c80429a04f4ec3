"""`grpo model`: the policies that can be named, and how the bundled ones are made."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from grpo_repro.config import choices, load_choice

model_app = typer.Typer(
    name="model",
    help="List the policies, build the bundled ones.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@model_app.command("list")
def list_models(as_json: Json = False) -> None:
    """List the policies of conf/model.

    Example: grpo model list
    """
    models = [load_choice("model", name) for name in choices("model")]
    if as_json:
        print(json.dumps({"models": [asdict(model) for model in models]}))
        return
    for model in models:
        print(f"{model.name}\t{model.kind}\t{model.path or model.family or 'model.path=DIR'}")
