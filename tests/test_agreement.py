"""The correction for another engine's distribution, against exact gradients; what a run does with a foreign sampler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from random_model import Interruption, save_random_model
from small_models import completions, make, padded, seeds

from grpo_repro.config import ModelConfig, TaskConfig
from grpo_repro.engine import samplers, vllm_engine
from grpo_repro.engine.agreement import Agreement, compare, importance_weights
from grpo_repro.engine.sample import Rollout
from grpo_repro.engine.samplers import TorchSampler
from grpo_repro.engine.update import accumulate_gradient, log_probs
from grpo_repro.engine.vllm_sampler import VllmSampler
from grpo_repro.errors import NotFinite, UserError
from grpo_repro.experiments import mse_eval, training
from grpo_repro.experiments.state import Checkpoint
from grpo_repro.schema import GroupSizeConfig, MseEvalConfig

PROMPT = [3, 4, 5]
HOTTER = 1.4
"""The foreign engine's temperature, relative to the trainer's: a bias that is seen."""


def every_completion(case) -> tuple[Rollout, torch.Tensor, torch.Tensor, np.ndarray]:
    """All completions of two tokens, with log mu and log pi of each token, and mu of each."""
    listed = list(completions(case, PROMPT, 2, 1.0))
    tokens, mask = padded(listed)
    shape = Rollout(tokens[None], mask[None], torch.zeros(1, *tokens.shape), torch.ones(1, len(tokens)).bool())
    own, foreign = (log_probs(case.policy, [PROMPT], shape, t) for t in (1.0, HOTTER))
    exact = completions(case, PROMPT, 2, HOTTER)
    return shape, foreign, own, np.array([exact[c] for c in listed])


def gradient(case, rollout: Rollout, advantages: np.ndarray) -> torch.Tensor:
    policy = case.policy
    policy.model.requires_grad_(True)
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    accumulate_gradient(policy, [PROMPT], rollout, advantages)
    policy.model.requires_grad_(False)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()]).double()


def test_weights_without_truncation_remove_the_bias_and_a_cap_truncates_as_stated():
    """E_mu[w Z W] = E_pi[Z W] summed over every completion of a small policy."""
    case = make("qwen2", vocab=9)
    rollout, foreign, own, mu = every_completion(case)
    assert mu.sum() == pytest.approx(1)
    z = np.random.default_rng(0).normal(size=len(mu))
    pi = np.array(list(completions(case, PROMPT, 2, 1.0).values()))
    true, biased = (gradient(case, rollout, (len(mu) * p * z)[None]) for p in (pi, mu))
    weights = importance_weights(foreign, own, cap=1e6)
    np.testing.assert_allclose(weights[0], pi / mu, rtol=1e-4)
    corrected = gradient(case, rollout, len(mu) * mu * z * weights)
    assert float((corrected - true).norm() / true.norm()) < 1e-4
    assert float((biased - true).norm() / true.norm()) > 0.05
    capped = importance_weights(foreign, own, cap=1.2)
    np.testing.assert_allclose(capped[0], np.minimum(pi / mu, 1.2), rtol=1e-4)
    assert (weights > 1.2).any() and (weights < 1).any()


def test_agreement_is_that_of_the_sampled_tokens():
    case = make("llama", vocab=9)
    rollout, foreign, own, _ = every_completion(case)
    sampled = replace(rollout, log_probs=foreign)
    found = Agreement()
    found.add(sampled.part(slice(0, 1)), own)
    difference = (foreign - own)[rollout.mask].abs().double()
    assert found.mean == pytest.approx(float(difference.mean()))
    assert found.largest == pytest.approx(float(difference.max()))
    assert found.tokens == int(rollout.mask.sum())
    assert Agreement.from_numbers(found.numbers()) == found
    same = Agreement()
    again = compare(case.policy, [PROMPT], replace(rollout, log_probs=own), 1.0, 7, same)
    torch.testing.assert_close(again.log_probs, own, atol=1e-5, rtol=0)
    assert same.largest < 1e-5
    with pytest.raises(UserError, match=r"more than 0\.01: they do not compute the same policy"):
        compare(case.policy, [PROMPT], sampled, 1.0, 7, Agreement())
    with pytest.raises(NotFinite):
        Agreement().add(replace(sampled, log_probs=foreign * float("nan")), own)


# A run with a foreign sampler, whose differences are known.


class Foreign(TorchSampler):
    """Samples as torch does, and reports log-probabilities that are off by .004, in turns up and down."""

    foreign = True

    def sample(self, *arguments: Any) -> Rollout:
        rollout = super().sample(*arguments)
        sign = 1 - 2 * (torch.arange(rollout.tokens.shape[1]) % 2)
        return replace(rollout, log_probs=rollout.log_probs + 0.004 * sign[:, None] * rollout.mask)


def quiet(done: int, total: int, what: str) -> None:
    pass


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def foreign(monkeypatch):
    monkeypatch.setattr(samplers, "make", lambda policy, *rest: Foreign(policy))


def base(folder: Path) -> dict[str, Any]:
    task = TaskConfig(name="arithmetic", num_questions=12, operand_min=0, operand_max=4, factor_min=1, factor_max=4)
    return {
        "model": ModelConfig(name="random", path=str(folder)), "task": task, "max_new_tokens": 2, "device": "cpu",
        "micro_batch": 16,
    }  # fmt: skip


def trained(folder: Path, work: Path, **changes: Any) -> pd.DataFrame:
    config = GroupSizeConfig(
        **base(folder), group_sizes=[4], budget=32, seeds=[0], predict_seeds=[], iterations=4, checkpoints=[0],
        prompt_pool=12, log_every=2, learning_rate=1e-2, **changes,
    )  # fmt: skip
    work.mkdir()
    return training.run(training.plan(config)[0], work, quiet)[0]


def test_training_logs_the_agreement_of_each_window(model_dir, tmp_path, foreign):
    rows = trained(model_dir, tmp_path / "work")
    for name in ("sampler_log_prob_difference", "sampler_log_prob_difference_max"):
        found = rows[rows["metric"] == name].set_index("iteration")
        assert list(found.index) == [2, 4]
        np.testing.assert_allclose(found["value"], 0.004, atol=1e-5)
        assert ((found["count"] >= 64) & (found["count"] <= 128)).all()  # two iterations of 32 completions


def test_training_goes_by_the_trainers_log_probs(model_dir, tmp_path, monkeypatch):
    """Two minibatches and a penalty read log pi_old: a run whose sampler reports others is the same run."""
    options = {"minibatches": 2, "kl_coefficient": 0.1}
    plain = trained(model_dir, tmp_path / "plain", **options)
    monkeypatch.setattr(samplers, "make", lambda policy, *rest: Foreign(policy))
    other = trained(model_dir, tmp_path / "other", **options)
    other = other[~other["metric"].str.startswith("sampler")].reset_index(drop=True)
    np.testing.assert_allclose(plain["value"], other["value"], rtol=1e-4, atol=1e-6)


def test_mse_eval_reports_the_agreement_of_its_pools(model_dir, tmp_path, foreign):
    config = MseEvalConfig(
        **base(model_dir), estimators=["grpo"], group_sizes=[4], methods=["components"], completions_per_prompt=8
    )
    rows, extras = mse_eval.run(mse_eval.plan(config)[0], tmp_path, quiet)
    found = rows.set_index("metric").loc[["sampler_log_prob_difference", "sampler_log_prob_difference_max"]]
    np.testing.assert_allclose(found["value"], 0.004, atol=1e-5)
    assert (found["count"] == extras["tokens"]).all()


def test_an_interrupted_pool_forgets_no_comparison(model_dir, tmp_path, foreign, monkeypatch):
    """Cut off in the pools, then in the replicates: the agreement is still that of all tokens."""
    monkeypatch.setattr(Checkpoint, "save_sometimes", Checkpoint.save)
    config = MseEvalConfig(
        **(base(model_dir) | {"micro_batch": 1}), estimators=["grpo"], group_sizes=[2, 4], methods=["monte_carlo"],
        completions_per_prompt=8, replicates=3,
    )  # fmt: skip
    cell = mse_eval.plan(config)[0]
    for at in (7, 15, 10):
        with pytest.raises(KeyboardInterrupt):
            mse_eval.run(cell, tmp_path, Interruption(at))
    rows, extras = mse_eval.run(cell, tmp_path, quiet)
    assert int(rows.set_index("metric").loc["sampler_log_prob_difference", "count"]) == extras["tokens"]


# The engine's order of calls, without an engine.


class Recorder:
    """Stands for vLLM's LLM: it notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append(name if name != "collective_rpc" else arguments[0])
            return True

        return call


def test_on_a_shared_gpu_it_sleeps_and_wakes_before_it_is_given_weights(tmp_path):
    engine = object.__new__(vllm_engine.Engine)
    engine.settings = vllm_engine.Settings("x", None, False, "float32", 9, 1, 0.3, sleep=True)
    engine.cpu, engine.asleep, engine.folder, engine.llm = False, False, tmp_path, Recorder()
    engine.processes = []
    engine.generate = lambda prompts, params: [  # type: ignore[method-assign]
        SimpleNamespace(finish_reason="stop", token_ids=[2], logprobs=SimpleNamespace(logprobs=[-1.0])) for _ in prompts
    ]
    sampler = VllmSampler(make("qwen2").policy, engine)
    rollout = sampler.sample([[3], [4]], seeds(0, 2), 3, 2)
    assert rollout.tokens.shape == (2, 3, 2) and rollout.finished.all() and (rollout.lengths == 1).all()
    assert engine.llm.calls == ["load_pushed", "reset_prefix_cache"]
    sampler.rest()
    sampler.rest()
    sampler.policy_moved()
    sampler.sample([[3]], seeds(0, 1), 3, 2)
    assert engine.llm.calls[2:] == ["sleep", "wake_up", "load_pushed", "reset_prefix_cache"]
    assert list(tmp_path.iterdir()) == []
