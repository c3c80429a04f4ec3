"""Adapters, and scores of some of the parameters: equal to autograd's, alone and through the experiments."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_model import save_random_model
from safetensors import safe_open
from safetensors.torch import load_file
from small_models import Case, every_architecture, make, padded
from test_scores import COMPLETIONS, TEMPERATURE, WEIGHTS, assert_equal_to
from test_update import CONFIG, PROMPTS, distance, plain_gradient, rollout_of
from torch import Tensor

from grpo_repro.cells import Cell
from grpo_repro.config import ModelConfig, TaskConfig
from grpo_repro.engine.attention import use_grouped_attention
from grpo_repro.engine.check import self_check
from grpo_repro.engine.layers import chosen_parameters
from grpo_repro.engine.sample import sample, uniforms
from grpo_repro.engine.scores import Scorer
from grpo_repro.engine.update import Learner, log_probs
from grpo_repro.errors import UserError
from grpo_repro.experiments import language_mse, language_train, mse_eval, training
from grpo_repro.experiments.training import plan
from grpo_repro.fingerprint import model_settings
from grpo_repro.model_validation import validate_model
from grpo_repro.policies import causal_lm, lora
from grpo_repro.schema import LoraSettings, MseEvalConfig, TrainConfig
from grpo_repro.validation import validate

pytest.importorskip("peft", reason="the extra [lora] is not installed")
PROMPT = [5, 6, 9, 11, 3, 8, 4, 4]
three_architectures = pytest.mark.parametrize("architecture", ["qwen2", "llama", "gemma2"])


def adapted(architecture: str, rank: int = 3, started: bool = False) -> Case:
    """A case with adapters on both of its models; B is not zero unless they have just started."""
    case = make(architecture)
    for model in (case.policy.model, case.plain):
        lora.attach(model, LoraSettings(rank=rank))
        model.requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in case.policy.model.named_parameters():
        if ".lora_B" in name and not started:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
            case.plain.get_parameter(name).data = parameter.data.clone()
    return case


def backward_passes(case: Case, which: str) -> tuple[Tensor, Tensor]:
    model = copy.deepcopy(case.plain).double().requires_grad_(True)
    rows, log_probs = [], []
    for completion in COMPLETIONS:
        logits = model(torch.tensor([[*PROMPT, *completion]]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
        value = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, torch.tensor(completion)[:, None]).sum()
        grads = torch.autograd.grad(value, list(chosen_parameters(model, which).values()), materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in grads]))
        log_probs.append(value.detach())
    return torch.stack(rows), torch.stack(log_probs)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@every_architecture
@pytest.mark.parametrize("worth", [0.0, float("inf")], ids=["shared", "together"])
@pytest.mark.parametrize("which", ["last_layer", "lora"])
def test_scores_of_some_parameters_equal_backward_passes(architecture, worth, which, monkeypatch):
    case = adapted(architecture) if which == "lora" else make(architecture)
    vectors, values = backward_passes(case, which)
    assert 0 < vectors.shape[1] < case.policy.num_parameters
    tokens, mask = padded(COMPLETIONS)
    for limit, micro_batch in ((1 << 25, 256), (23 * 5, 4)):
        monkeypatch.setattr("grpo_repro.engine.logits.LOGITS", limit)
        with Scorer(case.policy, TEMPERATURE, micro_batch, worth, which) as scorer:
            found = scorer.products(PROMPT, tokens, mask, WEIGHTS)
        assert_equal_to(found, vectors, values, WEIGHTS)
    assert not any(p.requires_grad for p in case.policy.model.parameters())


def test_the_last_layer_is_the_last_block():
    names = chosen_parameters(make("qwen2").policy.model, "last_layer")
    assert names and all(name.startswith("model.layers.1.") for name in names)
    with pytest.raises(UserError, match="score_params=lora, and the model has no such"):
        chosen_parameters(make("qwen2").policy.model, "lora")


# Adapters.


@three_architectures
def test_adapters_start_as_the_base_and_are_on_every_linear_layer_but_the_head(architecture):
    case, plain = adapted(architecture, started=True), make(architecture)
    assert torch.equal(rollout_of(case).tokens, rollout_of(plain).tokens)
    layers = {name.split(".lora_")[0] for name in chosen_parameters(case.policy.model, "lora")}
    linear = {n for n, m in plain.policy.model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    assert layers == linear
    self_check(case.policy, PROMPT, "lora")
    again = adapted(architecture, started=True).policy.trained
    assert all(torch.equal(p, again[name]) for name, p in case.policy.trained.items())
    assert causal_lm.weights_hash(case.policy.model) == causal_lm.weights_hash(plain.policy.model)


@three_architectures
@pytest.mark.parametrize("recompute", [False, True])
def test_only_adapters_are_trained_and_along_the_plain_gradient(architecture, recompute):
    case = adapted(architecture)
    rollout = rollout_of(case)
    torch.testing.assert_close(
        log_probs(case.policy, PROMPTS, rollout, TEMPERATURE), rollout.log_probs, rtol=0, atol=2e-5
    )
    advantages = np.random.default_rng(0).normal(size=(4, 5))
    before = {name: p.clone() for name, p in case.policy.model.named_parameters()}
    learner = Learner(case.policy, CONFIG | {"learning_rate": 1.0, "gradient_checkpointing": recompute})
    learner.step(PROMPTS, rollout, advantages, 1)
    moved = {n: before[n] - p for n, p in case.policy.model.named_parameters() if not torch.equal(p, before[n])}
    wanted = plain_gradient(case, rollout, advantages)
    assert set(moved) == set(case.policy.trained)
    assert distance(moved, {name: wanted[name] for name in moved}) < 1e-4
    assert all(".lora_" in key for key in learner.state())
    assert not any(p.requires_grad for p in case.policy.model.parameters())


def test_without_its_adapters_a_policy_is_its_base_and_then_itself_again():
    case, plain = adapted("qwen2"), make("qwen2")
    rollout = rollout_of(case)
    own = log_probs(case.policy, PROMPTS, rollout, TEMPERATURE)
    with lora.base_of(case.policy.model):
        base = log_probs(case.policy, PROMPTS, rollout, TEMPERATURE)
    assert torch.equal(base, log_probs(plain.policy, PROMPTS, rollout, TEMPERATURE))
    assert (base - own).abs().max() > 0.01
    assert torch.equal(own, log_probs(case.policy, PROMPTS, rollout, TEMPERATURE))
    assert not any(p.requires_grad for p in case.policy.model.parameters())


def test_adapters_of_a_bfloat16_model_are_float32_and_sampler_and_trainer_agree():
    case = make("llama")
    model = case.policy.model.to(torch.bfloat16)
    lora.attach(model, LoraSettings(rank=2, targets=["q_proj"]))
    assert {p.dtype for p in case.policy.trained.values()} == {torch.float32}
    assert set(n.split(".")[4] for n in case.policy.trained) == {"q_proj"}
    rollout = sample(case.policy, PROMPTS, uniforms(np.random.SeedSequence(0).spawn(4), 4, 4), TEMPERATURE)
    assert rollout.log_probs.dtype == torch.float32
    found = log_probs(case.policy, PROMPTS, rollout, TEMPERATURE)
    assert (found - rollout.log_probs).abs().max() < 0.1
    assert causal_lm.trained_facts(case.policy) == {"trained_parameters": "lora (256, float32)"}


# Through the experiments.


def cells(model_dir: Any, **changes: Any) -> Cell:
    model = ModelConfig(name="random", path=str(model_dir), lora=LoraSettings(rank=2))
    settings = dict(
        model=model, task=TaskConfig(name="arithmetic", num_questions=4, operand_max=3), budget=16, group_sizes=[4],
        iterations=3, checkpoints=[3], prompt_pool=12, eval_samples=2, completions_per_prompt=6, predict_seeds=[0],
        learning_rate=0.01, kl_coefficient=0.1, save_seconds=0.0, max_new_tokens=3, device="cpu",
    )  # fmt: skip
    config = TrainConfig(**(settings | changes))
    validate(config)
    return plan(config)[0]


def test_a_training_run_with_adapters(model_dir, tmp_path):
    """The reference of the penalty is the base in the same memory; states hold adapters only; G* is the adapters'."""
    cell = cells(model_dir)
    assert cell.config["model"]["lora"] == {"rank": 2, "alpha": None, "targets": None}
    run = language_train._Run.start(cell, tmp_path, lambda *_: None)
    assert run.reference is run.policy
    (tmp_path / "b").mkdir()
    rows, facts = training.run(cell, tmp_path / "b", lambda *_: None)
    count = sum(p.numel() for p in run.policy.trained.values())
    assert facts["trained_parameters"] == f"lora ({count}, float32)" and facts["dtype"] == "float32"
    bare = causal_lm.load(ModelConfig(name="random", path=str(model_dir)), "cpu")
    assert facts["weights_hash"] == causal_lm.weights_hash(bare.model)
    divergence = rows[rows["metric"] == "kl_divergence"].set_index("iteration")["value"]
    assert divergence[1] == pytest.approx(0, abs=1e-6) and divergence[3] > 0
    assert {"c1", "c3", "optimal_group_size"} <= set(rows["metric"])
    state = load_file(tmp_path / "b" / f"{language_train.STATE}.safetensors")
    assert {key for key in state if "/" in key and ".lora_" not in key} == set()
    estimate = training.estimate(cell)
    assert estimate.memory_bytes > 0
    # An interrupted run goes on to the same rows.
    with safe_open(tmp_path / "b" / f"{language_train.STATE}.safetensors", framework="pt") as file:
        assert file.metadata()["cell"] == cell.id
    again, _ = training.run(cell, tmp_path / "b", lambda *_: None)
    assert again["value"].equals(rows["value"])


def test_checkpointing_changes_neither_the_id_nor_a_number(model_dir, tmp_path):
    found = []
    for name, wanted in (("a", False), ("b", True)):
        cell = cells(model_dir, gradient_checkpointing=wanted, iterations=2, checkpoints=[2])
        (tmp_path / name).mkdir()
        found.append((cell.id, training.run(cell, tmp_path / name, lambda *_: None)[0]))
    assert found[0][0] == found[1][0]
    assert found[0][1].equals(found[1][1])


@pytest.mark.parametrize("which", ["last_layer", "lora"])
@pytest.mark.parametrize("method", ["components", "monte_carlo"])
def test_the_error_of_some_parameters_gradient(model_dir, tmp_path, which, method):
    """The cell, the rows' model and the manifest say so; the full gradient's error is another and larger one."""
    common = dict(
        task=TaskConfig(name="arithmetic", num_questions=10, operand_max=3), methods=[method], group_sizes=[4],
        replicates=3, completions_per_prompt=6, max_new_tokens=2, device="cpu",
    )  # fmt: skip
    model = ModelConfig(name="random", path=str(model_dir))
    whole = mse_eval.plan(MseEvalConfig(model=model, **common))[0]
    assert "score_params" not in whole.config and "lora" not in whole.config["model"]
    part = replace(model, lora=LoraSettings(rank=2)) if which == "lora" else model
    config = MseEvalConfig(model=part, score_params=which, **common)
    validate(config)
    cell = mse_eval.plan(config)[0]
    assert cell.id != whole.id and cell.config["score_params"] == which
    rows, facts = {}, {}
    for name, one in (("whole", whole), ("part", cell)):
        (tmp_path / name).mkdir()
        rows[name], facts[name] = language_mse.run(one, tmp_path / name, lambda *_: None)
    policy = causal_lm.load(part, "cpu")
    count = sum(p.numel() for p in chosen_parameters(policy.model, which).values())
    assert facts["part"]["score_parameters"] == f"{which} ({count})"
    assert facts["whole"]["score_parameters"] == f"all ({causal_lm.load(model, 'cpu').num_parameters})"
    assert set(rows["part"]["model"]) == {f"random ({which} scores)"}
    errors = {n: r[(r["metric"] == "mse") & (r["estimator"] == "vanilla")]["value"].item() for n, r in rows.items()}
    assert 0 < errors["part"] < errors["whole"]
    assert mse_eval.estimate(cell).memory_bytes < mse_eval.estimate(whole).memory_bytes


# Configuration.


def test_cells_without_adapters_are_as_old_as_the_models():
    assert list(model_settings(ModelConfig())) == [
        "name", "kind", "path", "revision", "template", "chat", "dtype", "trust_remote_code", "family", "family_args",
    ]  # fmt: skip
    assert model_settings(ModelConfig(lora=LoraSettings(rank=0))) == model_settings(ModelConfig())


LANGUAGE = ModelConfig(name="m", path="DIR")


@pytest.mark.parametrize(
    ("lora_settings", "message"),
    [
        (LoraSettings(rank=-1), "model.lora.rank=-1 is too small"),
        (LoraSettings(rank=10**6), "model.lora.rank=1000000 is too large"),
        (LoraSettings(alpha=3.0), "without a rank; add model.lora.rank=8"),
        (LoraSettings(rank=2, alpha=0.0), "model.lora.alpha=0 is not between"),
        (LoraSettings(rank=2, targets=[]), "model.lora.targets is empty"),
    ],
)
def test_adapters_that_cannot_be_are_refused(lora_settings, message):
    with pytest.raises(UserError, match=message):
        validate_model(replace(LANGUAGE, lora=lora_settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_params": "heads"}, "unknown score_params 'heads'"),
        ({"score_params": "lora"}, "model.lora.rank=null do not go together"),
        ({"score_params": "all", "model": replace(LANGUAGE, lora=LoraSettings(rank=4))}, "rank=4 do not go together"),
        (
            {"score_params": "last_layer", "model": ModelConfig(name="t", kind="tabular", family="curved"),
             "task": TaskConfig(name="bandit")},
            "means nothing to a tabular policy",
        ),
    ],
)  # fmt: skip
def test_scores_that_cannot_be_are_refused(changes, message):
    common = {"model": LANGUAGE, "task": TaskConfig(name="arithmetic")}
    with pytest.raises(UserError, match=message):
        validate(MseEvalConfig(**(common | changes)))


def test_targets_that_a_model_lacks_are_named():
    with pytest.raises(UserError, match=r"targets=\['query'\].*names no layers of Qwen2ForCausalLM.*down_proj.*q_proj"):
        lora.attach(make("qwen2").policy.model, LoraSettings(rank=2, targets=["query"]))


def test_without_peft_there_is_one_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    model = make("qwen2").policy.model
    with pytest.raises(UserError, match=r"pip install 'grpo-repro\[lora\]'"):
        lora.attach(model, LoraSettings(rank=2))
    use_grouped_attention(model)
