"""The commands beside the experiments: plot, data, model, doctor."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from house import message

from grpo_repro import config as schema
from grpo_repro import data_cli, doctor, doctor_paper
from grpo_repro.doctor_check import Check
from grpo_repro.errors import UserError

# -- the other commands


def test_plot_without_results_says_what_to_do(grpo):
    for folder in ("nowhere", "."):
        text = message(grpo("plot", "--results", folder, FAKE_PLOTS="1"))
        assert "run `grpo mse-eval` first" in text
    assert "known: mse, budget" in message(grpo("plot", "nope", "--results", "nowhere", FAKE_PLOTS="1"))
    assert "png, pdf, svg" in message(grpo("plot", "--format", "gif"))
    (grpo.folder / "file").write_text("")
    assert "is a file" in message(grpo("plot", "--results", "file"))


def test_plot_draws_without_a_display_and_prints_what_it_wrote(grpo):
    assert grpo("mse-eval").returncode == 0
    headless = {"FAKE_PLOTS": "1", "MPLBACKEND": "QtAgg", "DISPLAY": ""}
    run = grpo("plot", **headless)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "results/figures/mse.png\n"
    assert "left out budget: no rows" in run.stderr
    run = grpo("plot", "mse", "mse", "--format", "svg", "--out", "drawn", "--json", **headless)
    assert json.loads(run.stdout) == {"figures": ["drawn/mse.svg"]}
    assert "<svg" in (grpo.folder / "drawn" / "mse.svg").read_text()
    assert "run it first" in message(grpo("plot", "budget", **headless))
    (grpo.folder / "file").write_text("")
    assert "--out DIR" in message(grpo("plot", "mse", "--out", "file", **headless))
    # Figures inside the results folder are not taken for results.
    assert "warning" not in grpo("plot", "mse", **headless).stderr


def test_data_commands(grpo):
    found = json.loads(grpo("data", "check", "arithmetic", "num_questions=50", "--json").stdout)
    assert (found["questions"], found["problems"]) == (50, [])
    assert sum(found["kinds"].values()) == 50
    lines = grpo("data", "show", "arithmetic", "-n", "3").stdout.splitlines()
    assert len(lines) == 3
    name, _, _, answer = lines[0].split("\t")
    path = grpo.folder / "completions.jsonl"
    entries = [{"id": name, "completion": answer}, {"id": name, "completion": "no idea"}]
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    scored = json.loads(grpo("data", "score", "arithmetic", path, "--json").stdout)
    assert (scored["count"], scored["reward_mean"]) == (2, 0.5)


def test_data_errors(grpo):
    path = grpo.folder / "bad.jsonl"
    path.write_text('{"id": "nope", "completion": "1"}\n')
    assert "known: arithmetic, bandit, gsm8k, math" in message(grpo("data", "show", "algebra"))
    assert "'nope' is no question" in message(grpo("data", "score", "arithmetic", path))
    path.write_text("{}\n")
    assert "bad.jsonl:1" in message(grpo("data", "score", "arithmetic", path))
    assert "No such file" in message(grpo("data", "score", "arithmetic", "nowhere"))
    assert "did you mean 'seed'" in message(grpo("data", "show", "arithmetic", "sed=1"))
    assert "whole number" in message(grpo("data", "show", "arithmetic", "seed=x"))
    assert "'dev'" in message(grpo("data", "show", "arithmetic", "split=dev"))
    assert "seed=-1" in message(grpo("data", "show", "arithmetic", "seed=-1"))
    assert "too large" in message(grpo("data", "show", "arithmetic", "operand_max=99999999999"))
    assert "KEY=VALUE" in message(grpo("data", "show", "arithmetic", "num_questions={a"))
    assert "KEY=VALUE" in message(grpo("data", "show", "arithmetic", "="))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"id": "1", "completion": "\xff"}', "is not UTF-8"),
        (b'{"id": "1", "completion": null}', "completion null is no text"),
        (b'{"id": "1", "completion": NaN}', "completion NaN is no text"),
        (b'{"id": "1", "completion": true}', "completion true is no text"),
        (b'{"id": "1", "completion": ["9"]}', "is no text"),
    ],
)
def test_completions_that_cannot_be_scored(tmp_path, monkeypatch, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line)))
    for name in (str(path), "-"):
        with pytest.raises(UserError, match=words):
            list(data_cli._read(name))


def test_a_byte_order_mark_is_no_part_of_a_completion(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_text('{"id": "1", "completion": "2"}', encoding="utf-8-sig")
    assert list(data_cli._read(str(path))) == [(1, "1", "2")]


def test_model_commands(grpo):
    found = json.loads(grpo("model", "list", "--no-accuracy", "--json").stdout)["models"]
    assert [entry["name"] for entry in found] == schema.choices("model")
    assert "known: base, instruct" in message(grpo("model", "build", "nope"))
    assert "instruct with examples" in message(grpo("model", "build", "bundled-icl"))
    assert "not overwritten" in message(grpo("model", "build", "base", "--out", "."))
    (grpo.folder / "broken").symlink_to("nowhere")
    assert "not overwritten" in message(grpo("model", "build", "base", "--out", "broken"))
    assert grpo("model", "build", "base", "--seed", "9" * 20).returncode == 2


def test_the_doctor_says_what_each_of_the_papers_runs_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor_paper, "_has_model", lambda name: name == "qwen2.5-1.5b-instruct")

    def lacks(**state):
        found = [Check(name.replace("_", "-"), ok, "", needed=False) for name, ok in state.items()]
        return {check.name.partition("=")[2]: check.detail for check in doctor_paper.summary(found)}

    here = {"gpu": True, "datasets": True, "math_verify": True}
    assert lacks(hub=True, **here) == dict.fromkeys(("fig4", "fig5", "table2"), "ready")
    assert lacks(hub=True, **here | {"math_verify": False})["table2"] == "lacks math-verify"
    assert lacks(hub=True, **here | {"datasets": False})["fig5"] == "lacks the package datasets"
    alone = lacks(hub=False, **here | {"gpu": False})
    assert alone["fig4"] == "lacks a GPU, the model qwen2.5-0.5b, the model qwen2.5-0.5b-instruct"
    assert alone["fig5"] == "lacks a GPU, the data of gsm8k"
    (tmp_path / "openai___gsm8k").mkdir()
    assert lacks(hub=False, **here)["fig5"] == "ready"


def test_doctor_reports_every_check(grpo):
    run = grpo("doctor", "--json")
    found = json.loads(run.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert run.returncode == (0 if found["ok"] else 1)
    for name in ("python", "torch", "transformers", "conf", "results folder", "disk", "matplotlib"):
        assert checks[name]["ok"], checks[name]
    assert {"bundled models", "launchers", "vllm", "hub"} <= set(checks)
    parts = {"gpu", "datasets", "paper's data", "paper's models", "space for models"}
    runs = {"+paper=fig4", "+paper=fig5", "+paper=table2"}
    assert parts | runs <= set(checks)
    assert not any(checks[name]["needed"] for name in parts | runs)
    (grpo.folder / "broken").symlink_to("nowhere")
    for folder in ("/proc/results", "broken"):
        assert not doctor._writable(Path(folder) if folder[0] == "/" else grpo.folder / folder).ok
    assert doctor._disk(grpo.folder / "broken").detail.endswith("GiB free")
    assert "Loading weights" not in run.stderr
