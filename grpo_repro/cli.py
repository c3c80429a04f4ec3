"""The command `grpo`: thin, and quick to start, since it imports neither torch nor Hydra by itself."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from grpo_repro.cli_help import ExperimentCommand, complete_check, complete_override
from grpo_repro.config import EXPERIMENTS
from grpo_repro.data_cli import data_app
from grpo_repro.errors import RunError, UserError
from grpo_repro.model_cli import model_app
from grpo_repro.outcome import INTERRUPTED
from grpo_repro.results_cli import results_app

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

app = typer.Typer(
    name="grpo",
    help="How many outputs per prompt should GRPO sample? Experiments, theory and figures.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
    epilog="An argument with = is an override (model=bundled-base), one without is a name. "
    "Exit codes: 0 done, 1 a run or check failed, 2 bad usage or configuration, 130 interrupted (SIGINT or SIGTERM).",
)
sweep_app = typer.Typer(
    name="sweep",
    help="Training runs over group sizes, budgets and iterations.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=HELP,
)
app.add_typer(sweep_app)
app.add_typer(model_app)
app.add_typer(data_app)
app.add_typer(results_app)

Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - older releases of typer read no other form
    typer.Argument(metavar="OVERRIDES", help="Hydra overrides, KEY=VALUE.", autocompletion=complete_override),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, all else on stderr.")]


DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show cells, completions, tokens, time and memory; run nothing.")
]
Multirun = Annotated[bool, typer.Option("-m", "--multirun", help="Run a job for each combination of KEY=A,B.")]
Cfg = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--cfg", metavar="job|hydra|all", help="Print the resolved configuration only."),
]


@app.command("mse-eval", cls=ExperimentCommand)
def mse_eval(
    overrides: Overrides = None, dry_run: DryRun = False, as_json: Json = False, multirun: Multirun = False,
    cfg: Cfg = None,
) -> None:  # fmt: skip
    """Figure 4: the error of each gradient estimator against the group size."""
    _experiment("mse-eval", overrides, dry_run, as_json, multirun, cfg)


@app.command("train", cls=ExperimentCommand)
def train(
    overrides: Overrides = None, dry_run: DryRun = False, as_json: Json = False, multirun: Multirun = False,
    cfg: Cfg = None,
) -> None:  # fmt: skip
    """One run of GRPO: B prompts, G completions each, one update an iteration."""
    _experiment("train", overrides, dry_run, as_json, multirun, cfg)


@sweep_app.command("group-size", cls=ExperimentCommand)
def group_size(
    overrides: Overrides = None, dry_run: DryRun = False, as_json: Json = False, multirun: Multirun = False,
    cfg: Cfg = None,
) -> None:  # fmt: skip
    """Figure 5: which G learns best at a fixed budget N = B G, at every checkpoint n."""
    _experiment("group-size", overrides, dry_run, as_json, multirun, cfg)


@sweep_app.command("budget", cls=ExperimentCommand)
def budget(
    overrides: Overrides = None, dry_run: DryRun = False, as_json: Json = False, multirun: Multirun = False,
    cfg: Cfg = None,
) -> None:  # fmt: skip
    """Table 2: which G learns best at each budget N."""
    _experiment("budget", overrides, dry_run, as_json, multirun, cfg)


@sweep_app.command("iterations", cls=ExperimentCommand)
def iterations(
    overrides: Overrides = None, dry_run: DryRun = False, as_json: Json = False, multirun: Multirun = False,
    cfg: Cfg = None,
) -> None:  # fmt: skip
    """The best G against the number n of iterations."""
    _experiment("iterations", overrides, dry_run, as_json, multirun, cfg)


@app.command("theory", cls=ExperimentCommand)
def theory(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[CHECK|OVERRIDE]", help="Names of checks, all by default; Hydra overrides, KEY=VALUE.",
                       autocompletion=complete_check),
    ] = None,
    dry_run: DryRun = False, as_json: Json = False, multirun: Multirun = False, cfg: Cfg = None,
) -> None:  # fmt: skip
    """Check the paper's lemmas, theorems and corollaries numerically; exit 1 if one does not hold."""
    given = words or []
    named, overrides = [word for word in given if "=" not in word], [word for word in given if "=" in word]
    if named and any(word.partition("=")[0] == "checks" for word in overrides):
        raise UserError(f"checks are named twice, {named[0]} and by checks=; use one of the two")
    if named:
        overrides = [f"checks=[{','.join(named)}]", *overrides]
    _experiment("theory", overrides, dry_run, as_json, multirun, cfg)


def _experiment(
    name: str, overrides: list[str] | None, dry_run: bool, as_json: bool, multirun: bool, cfg: str | None
) -> None:
    from grpo_repro.launch import Flags, launch
    from grpo_repro.report import print_outcome

    if cfg not in (None, "job", "hydra", "all"):
        raise UserError(f"--cfg {cfg} is unknown; use job, hydra or all")
    try:
        outcome = launch(name, overrides or [], Flags(multirun, dry_run, cfg))
    except KeyboardInterrupt:
        message = "interrupted; the same command resumes"
        print(message, file=sys.stderr)
        if as_json:
            print(json.dumps({"experiment": name, "error": message}))
        raise typer.Exit(INTERRUPTED) from None
    if outcome is not None:
        print_outcome(outcome, as_json, multirun)
        raise typer.Exit(outcome.status)


@app.command()
def plot(
    figures: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="FIGURE", help="Names of figures; without one, all that have data."),
    ] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder of the results.")] = Path("results"),
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="Folder of the figures; RESULTS/figures by default."),
    ] = None,
    image_format: Annotated[str, typer.Option("--format", metavar="png|pdf|svg", help="File format.")] = "png",
    models: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--model", metavar="NAME", help="Only this policy's results; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw figures from results; runs no model.

    Example: grpo plot gap table2 --model bundled-base --format pdf
    """
    from grpo_repro.plot_cli import draw

    paths = draw(figures or [], results, out or results / "figures", image_format, models or [])
    if as_json:
        print(json.dumps({"figures": [str(path) for path in paths]}))
    else:
        print("\n".join(str(path) for path in paths))


@app.command()
def doctor(
    results_dir: Annotated[Path, typer.Option("--results", help="Folder of the results.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Check that this machine can run the bundled job; exit 0 if it can, else 1.

    Example: grpo doctor
    """
    from grpo_repro.doctor import diagnose

    checks = diagnose(results_dir)
    healthy = all(check.ok for check in checks if check.needed)
    if as_json:
        print(json.dumps({"ok": healthy, "checks": [vars(check) for check in checks]}))
    else:
        for check in checks:
            mark = "ok  " if check.ok else ("FAIL" if check.needed else "-   ")
            print(f"{mark} {check.name}: {check.detail}")
        print("ready" if healthy else "not ready: see the lines marked FAIL")
    raise typer.Exit(0 if healthy else 1)


def main() -> None:
    """Run the command line; the user's errors are one message without a traceback."""
    import warnings

    warnings.showwarning = _show_warning
    # A cluster that takes a job's machine away terminates it first: that is an interruption like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except UserError as error:
        sys.exit(_failed(error, 2))
    except RunError as error:
        sys.exit(_failed(error, 1))


def _failed(error: Exception, status: int) -> int:
    """Print an error, with --json on stdout too; return the exit code."""
    print(f"error: {error}", file=sys.stderr)
    if "--json" in sys.argv:
        named = [word for word in sys.argv[1:3] if word in EXPERIMENTS]
        experiment = {"experiment": named[0]} if named else {}
        print(json.dumps(experiment | {"error": str(error)}))
    return status


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
