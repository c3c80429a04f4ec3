"""Models from folders: prompts, end and padding tokens, types, and folders that are not as they should be."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_model import byte_tokenizer, save_byte_model
from safetensors.torch import load_file, save_file
from small_models import make
from tokenizers import processors

from grpo_repro import network
from grpo_repro.config import ModelConfig, load_choice
from grpo_repro.engine.sample import sample, uniforms
from grpo_repro.errors import UserError
from grpo_repro.policies import causal_lm
from grpo_repro.policies.causal_lm import CausalLM

BOS, EOS = "<bos>", "<eos>"


def tokenizer_of(front: bool = False, back: bool = False, chat: str | None = None) -> Any:
    """Bytes with a BOS token; `front` puts it before every text, `back` puts EOS behind."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": BOS})
    single = f"{BOS if front else ''} $A {EOS if back else ''}".split()
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.chat_template = chat
    return tokenizer


def policy_of(tokenizer: Any, **changes: Any) -> CausalLM:
    return replace(make("llama", vocab=len(tokenizer), tokenizer=tokenizer).policy, template="{question}", **changes)


def text_of(policy: CausalLM, tokens: list[int]) -> str:
    return policy.tokenizer.decode(tokens)


# Prompts.

CHATS = {
    "with": "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
    "without": "{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
}


@pytest.mark.parametrize("front", [True, False], ids=["adds", "adds none"])
@pytest.mark.parametrize("chat", [None, *CHATS])
@pytest.mark.parametrize("template", ["{question}", BOS + "{question}"], ids=["plain", "explicit"])
def test_a_prompt_has_one_bos_if_the_tokenizer_or_a_template_has_it(front, chat, template):
    tokenizer = tokenizer_of(front, chat=CHATS.get(chat or ""))
    policy = replace(policy_of(tokenizer), chat=chat is not None, template=template)
    tokens = policy.encode("1+2")
    count = tokens.count(tokenizer.bos_token_id)
    if chat != "without" or template == "{question}":  # there a BOS of the user's stands inside of the message
        assert count == (1 if front or chat == "with" or template != "{question}" else 0) + (
            chat == "with" and template != "{question}"
        )
    assert tokens[0] == tokenizer.bos_token_id or not (front or chat == "with")
    assert tokens[:2] != [tokenizer.bos_token_id] * 2
    assert "1+2" in text_of(policy, tokens)


@pytest.mark.parametrize("front", [True, False])
def test_an_eos_that_a_tokenizer_adds_does_not_end_the_prompt(front):
    policy = policy_of(tokenizer_of(front, back=True))
    assert policy.tokenizer("1")["input_ids"][-1] == policy.tokenizer.eos_token_id
    tokens = policy.encode("1+2")
    assert policy.tokenizer.eos_token_id not in tokens
    assert text_of(policy, tokens) == (BOS if front else "") + "1+2"


def test_examples_of_the_template_come_before_the_question_in_chat_and_plain_prompts():
    tokenizer = tokenizer_of(chat=CHATS["without"])
    for chat, wanted in ((False, "1+1=2\n5-3="), (True, "[1+1=2\n5-3=]")):
        policy = replace(policy_of(tokenizer), chat=chat, template="1+1=2\n{question}=")
        assert text_of(policy, policy.encode("5-3")) == wanted


# End and padding tokens.


def saved(folder: Path, generation: Any = None, config: Any = None, **tokens: str | None) -> Path:
    """The byte model with these end tokens in its generation config and its config, and tokens of its tokenizer."""
    save_byte_model(folder)
    for name, ids in (("generation_config.json", generation), ("config.json", config)):
        settings = json.loads((folder / name).read_text())
        settings["eos_token_id"] = ids
        (folder / name).write_text(json.dumps(settings))
    tokenizer = byte_tokenizer()
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(folder)
    return folder


def loaded(folder: Path, **changes: Any) -> CausalLM:
    return causal_lm.load(ModelConfig(name="m", path=str(folder), template="{question}", **changes), "cpu")


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [(5, None, (5, 1)), ([7, 5], 9, (7, 5, 9, 1)), (None, [9, 5], (9, 5, 1)), ([1, 5], 1, (1, 5)), (None, None, (1,))],
)
def test_every_end_token_of_the_files_stops_a_completion(tmp_path, generation, config, wanted):
    policy = loaded(saved(tmp_path, generation, config))
    assert set(policy.eos_ids) == set(wanted) and len(policy.eos_ids) == len(wanted)
    rollout = sample(policy, [policy.encode("1+2")], uniforms([np.random.SeedSequence(0)], 200, 40))
    ends = {int(tokens[mask][-1]) for tokens, mask in zip(rollout.tokens[0], rollout.mask[0], strict=True)}
    assert set(wanted) & ends and rollout.finished.any()
    inside = torch.isin(rollout.tokens[..., :-1], torch.tensor(wanted)) & rollout.mask[..., 1:]
    assert not inside.any()


@pytest.mark.parametrize("pad", ["<eos>", None], ids=["pad is eos", "no pad"])
def test_the_end_token_counts_even_where_it_pads_too(tmp_path, pad):
    """Its log-probability is part of log pi and the mask covers it; behind it nothing counts."""
    policy = loaded(saved(tmp_path, 1, 1, pad_token=pad))
    assert policy.pad_id == 1 == policy.eos_ids[0]
    rollout = sample(policy, [policy.encode("1+2"), policy.encode("7")], uniforms(seeds := [
        np.random.SeedSequence(0), np.random.SeedSequence(1)], 200, 40))  # fmt: skip
    assert len(seeds) == 2 and rollout.finished.any()
    for tokens, mask, log_probs, finished in zip(
        rollout.tokens.flatten(0, 1), rollout.mask.flatten(0, 1), rollout.log_probs.flatten(0, 1),
        rollout.finished.flatten(), strict=True,
    ):  # fmt: skip
        length = int(mask.sum())
        assert bool(finished) == (tokens[length - 1] == 1)
        assert not (tokens[: length - 1] == 1).any() and (log_probs[:length] < 0).all()
        assert (tokens[length:] == 1).all() and not log_probs[length:].any()


def test_types_of_weights(tmp_path):
    save_byte_model(tmp_path)
    assert loaded(tmp_path).model.dtype == torch.float32
    policy = loaded(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    rollout = sample(policy, [policy.encode("1")], uniforms([np.random.SeedSequence(0)], 4, 3))
    assert rollout.log_probs.dtype == torch.float32
    count = sum(p.numel() for p in policy.model.parameters())
    assert causal_lm.trained_facts(policy) == {"trained_parameters": f"all ({count}, bfloat16)"}


# Folders that are not as they should be.


class Payload:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("unpickled",)


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | changes))

    return change


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))


def disguised(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Payload()))


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("weights")


def a_loop(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder)


def a_loop_inside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "model.safetensors")


def not_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def own_code(folder: Path) -> None:
    edit("config.json", model_type="house", auto_map={"AutoConfig": "house.A", "AutoModelForCausalLM": "house.B"})(
        folder
    )
    (folder / "house.py").write_text("import os; os.mkdir('unpickled')")


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty folder": (empty, "lacks config.json"),
    "truncated weights": (truncated, "could not be loaded"),
    "config is no JSON": (write("config.json", b"{model"), "is not readable JSON"),
    "config is a list": (write("config.json", b"[1]"), "holds a list"),
    "config is binary": (write("config.json", b"\xff\xfe\x00"), "is not readable JSON"),
    "unknown architecture": (edit("config.json", model_type="house", architectures=["House"]), "could not be loaded"),
    "an encoder-decoder": (edit("config.json", model_type="t5", architectures=["T5"]), "could not be loaded"),
    "pickled weights": (pickled, r"lacks weights \(safetensors\).*not read: convert"),
    "a pickle called safetensors": (disguised, "could not be loaded"),
    "no tokenizer": (no_tokenizer, "lacks a tokenizer"),
    "tokenizer is no JSON": (write("tokenizer.json", b"{"), "could not be loaded"),
    "fewer rows than the config says": (edit("config.json", vocab_size=400), "lack or misfit"),
    "another width": (edit("config.json", hidden_size=32), "lack or misfit"),
    "weights that are no numbers": (not_numbers, r"not finite in 1 tensors \(model.norm.weight\)"),
    "a file": (a_file, "is not a directory"),
    "a loop of links": (a_loop, "is not a directory"),
    "a loop of links inside": (a_loop_inside, r"lacks weights \(safetensors\)"),
    "code of its own": (own_code, "needs code of its own.*model.trust_remote_code=true"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_folder_that_is_no_model_is_one_message_and_runs_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    break_it, message = HOSTILE[name]
    break_it(save_byte_model(tmp_path / "model"))
    with pytest.raises(UserError, match=message) as caught:
        loaded(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert not Path("unpickled").exists() and os.listdir(tmp_path) == ["model"]


def test_a_tokenizer_of_another_model_is_one_message(tmp_path):
    """It has a token that the model has no row for; it is told when a prompt needs that token."""
    save_byte_model(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["+2"])
    tokenizer.save_pretrained(tmp_path)
    policy = loaded(tmp_path)
    assert policy.encode("7-2")
    with pytest.raises(UserError, match="makes token 258 of '1\\+2', the model has 258 tokens; they do not belong"):
        policy.encode("1+2")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("what", [".", "config.json", "model.safetensors"])
def test_a_folder_that_may_not_be_read(tmp_path, what):
    save_byte_model(tmp_path / "model")
    (tmp_path / "model" / what).chmod(0)
    try:
        with pytest.raises(UserError, match="cannot be read|could not be loaded"):
            loaded(tmp_path / "model")
    finally:
        (tmp_path / "model" / what).chmod(0o755)


def test_a_refusal_of_the_system_is_one_message(tmp_path, monkeypatch):
    """The same without being another user: what the system says when a file may not be read."""
    save_byte_model(tmp_path)

    def refused(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\); check its permissions"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["pickled weights", "code of its own", "truncated weights", "another width"])
def test_the_command_ends_with_status_2_and_no_traceback(name, tmp_path, grpo):
    HOSTILE[name][0](save_byte_model(tmp_path / "model"))
    run = grpo(
        "mse-eval", "model=hf", "model.path=model", "task=arithmetic", "task.num_questions=3", "methods=[components]",
        "model.path=./model", "completions_per_prompt=4", "max_new_tokens=2", PYTHONPATH="",
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr and "LOAD REPORT" not in run.stderr
    assert [line.startswith("error: ") for line in run.stderr.strip().splitlines()].count(True) == 1
    assert not (tmp_path / "unpickled").exists()


# The paper's models.

PAPER = {
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", False),
    "qwen2.5-0.5b-instruct": ("Qwen/Qwen2.5-0.5B-Instruct", True),
    "qwen2.5-1.5b-instruct": ("Qwen/Qwen2.5-1.5B-Instruct", True),
    "qwen2.5-math-7b": ("Qwen/Qwen2.5-Math-7B", False),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_models_name_the_hub_and_take_a_folder(name, tmp_path):
    model = load_choice("model", name)
    assert (model.path, model.chat, model.name) == (*PAPER[name], name)
    save_byte_model(tmp_path)
    policy = causal_lm.load(replace(model, path=str(tmp_path), chat=False), "cpu")
    assert policy.encode("1+2")


def test_without_a_network_one_message_names_both_ways(monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr("grpo_repro.policies.model_files.reachable", lambda: asked.append(True) or False)
    for read in (causal_lm.shape, lambda model: causal_lm.load(model, "cpu")):
        with pytest.raises(UserError, match="model.path=DIR, or connect to the network") as caught:
            read(load_choice("model", "qwen2.5-0.5b"))
        assert "model qwen2.5-0.5b: Qwen/Qwen2.5-0.5B" in str(caught.value) and "\n" not in str(caught.value)
    assert asked == [True, True]


def test_a_mirror_or_a_proxy_is_asked(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    assert network.reachable()
