"""The gradient of one iteration against autograd of the plain loss, and the steps along it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Case, completions, every_architecture, make, seeds

from grpo_repro.engine.distinct import chunks, merge
from grpo_repro.engine.sample import Rollout, sample, uniforms
from grpo_repro.engine.schedule import learning_rate
from grpo_repro.engine.update import Learner, accumulate_gradient
from grpo_repro.errors import UserError
from grpo_repro.estimators import ESTIMATORS

PROMPTS = [[3, 4, 5], [6], [8, 9, 10, 11, 12, 13], [5, 5]]
TEMPERATURE = 0.8
CONFIG: dict[str, Any] = dict(
    optimizer="sgd", learning_rate=0.5, schedule="constant", warmup=0, iterations=10, weight_decay=0.0, clip_norm=None,
    temperature=TEMPERATURE, micro_batch=16,
)  # fmt: skip


def rollout_of(case: Case, group: int = 5, length: int = 4, seed: int = 1) -> Rollout:
    return sample(case.policy, PROMPTS, uniforms(seeds(seed, len(PROMPTS)), group, length), TEMPERATURE)


def gradient(case: Case, rollout: Rollout, advantages: np.ndarray, micro_batch: int) -> dict[str, torch.Tensor]:
    model = case.policy.model
    model.requires_grad_(True)
    model.zero_grad()
    accumulate_gradient(case.policy, PROMPTS, rollout, advantages, TEMPERATURE, micro_batch)
    model.requires_grad_(False)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_gradient(case: Case, rollout: Rollout, advantages: np.ndarray) -> dict[str, torch.Tensor]:
    """Autograd of -(1/(BG)) sum A log pi, each completion in a forward pass of its own, nothing shared or skipped."""
    case.plain.requires_grad_(True)
    case.plain.zero_grad()
    loss = torch.zeros(())
    for b, prompt in enumerate(PROMPTS):
        for i, length in enumerate(rollout.lengths[b].tolist()):
            tokens = rollout.tokens[b, i, :length].tolist()
            loss = loss - advantages[b, i] / advantages.size * case.log_probs(prompt, tokens, TEMPERATURE).sum()
    loss.backward()
    return {name: p.grad for name, p in case.plain.named_parameters()}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert set(found) == set(wanted)
    difference = math.sqrt(sum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted))
    return difference / math.sqrt(sum(float(wanted[name].double().square().sum()) for name in wanted))


@every_architecture
def test_gradient_is_that_of_the_plain_loss_at_every_micro_batch(architecture):
    """Ragged prompts (one of a single token), ragged completions, a group of zero advantages."""
    case = make(architecture)
    rollout = rollout_of(case)
    assert len(set(rollout.lengths.flatten().tolist())) > 1
    advantages = np.random.default_rng(0).normal(size=(4, 5))
    advantages[1] = 0.0
    wanted = plain_gradient(case, rollout, advantages)
    for micro_batch in (1, 2, 7, 256):
        assert distance(gradient(case, rollout, advantages, micro_batch), wanted) < 1e-5


def test_skipped_groups_and_merged_completions_change_nothing():
    """The rewards are binary, so that most weights are zero, and every completion is in the batch twice."""
    case = make("qwen2")
    once = rollout_of(case, group=4)
    twice = Rollout(*(torch.cat([x, x], 1) for x in (once.tokens, once.mask, once.log_probs, once.finished)))
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.0] * 4, [0.0, 0.0, 1.0, 0.0]])
    rewards = np.concatenate([rewards, rewards], 1)
    advantages = ESTIMATORS["grpo"](rewards, np.zeros(4), np.zeros(4))
    assert (advantages[1:3] == 0).all()
    batch = merge(twice, advantages)
    assert set(batch.prompt.tolist()) == {0, 3}
    assert len(batch.weights) <= 8
    assert distance(gradient(case, twice, advantages, 64), plain_gradient(case, twice, advantages)) < 1e-5


def test_no_weight_at_all_leaves_a_gradient_of_zero():
    case = make("llama")
    rollout = rollout_of(case)
    learner = Learner(case.policy, CONFIG)
    before = learner.state()
    assert learner.step(PROMPTS, rollout, np.zeros((4, 5)), 1) == 0.0
    assert all(torch.equal(value, before[name]) for name, value in learner.state().items())


def test_parts_hold_every_row_once_and_no_more_than_the_micro_batch():
    rng = np.random.default_rng(3)
    for micro_batch in (1, 3, 8, 64):
        rewards = rng.normal(size=(4, 5))
        batch = merge(rollout_of(make("qwen2"), seed=micro_batch), rewards)
        parts = chunks(batch, [len(prompt) for prompt in PROMPTS], micro_batch)
        rows = [row for part in parts for prompt in part for row in prompt]
        assert sorted(rows) == list(range(len(batch.weights)))
        for part in parts:
            owners = [{int(batch.prompt[row]) for row in prompt} for prompt in part]
            assert all(len(owner) == 1 for owner in owners)
            assert len(part) == 1 or len(part) * max(len(prompt) for prompt in part) <= micro_batch


def test_expected_gradient_over_every_group_is_that_of_the_return():
    """G = 2 completions of two tokens over a small vocabulary: every pair, weighted by its exact probability."""
    case = make("qwen2", vocab=4, eos=(2,), noise=0.3)
    prompt = [3, 1]
    found = completions(case, prompt, 2, TEMPERATURE)
    texts = list(found)
    probs = np.array([found[text] for text in texts])
    z = np.array([float(text[0] == 1) for text in texts])
    tokens = torch.tensor([list(text) + [0] * (2 - len(text)) for text in texts])
    mask = torch.tensor([[k < len(text) for k in range(2)] for text in texts])
    total: dict[str, Any] = {}
    # sum over pairs of P(i) P(j) times the update = one update of "advantages" that hold the weights.
    pair = np.zeros((len(texts), len(texts)))
    for i in range(len(texts)):
        for j in range(len(texts)):
            advantages = ESTIMATORS["grpo"](np.array([[z[i], z[j]]]), np.zeros(1), np.zeros(1))[0]
            pair[i, i] += probs[i] * probs[j] * advantages[0] / 2
            pair[j, j] += probs[i] * probs[j] * advantages[1] / 2
    weights = pair.sum(1)[None] * len(texts)
    everything = Rollout(tokens[None], mask[None], torch.zeros(mask[None].shape), torch.ones(1, len(texts)).bool())
    model = case.policy.model
    model.requires_grad_(True)
    model.zero_grad()
    accumulate_gradient(case.policy, [prompt], everything, weights, TEMPERATURE)
    total = {name: -p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.requires_grad_(False)
    case.plain.requires_grad_(True)
    value = torch.zeros(())
    for text, reward in zip(texts, z, strict=True):
        value = value + reward * case.log_probs(prompt, list(text), TEMPERATURE).sum().exp()
    value.backward()
    assert distance(total, {name: p.grad for name, p in case.plain.named_parameters()}) < 1e-5


@pytest.mark.parametrize(("optimizer", "clip"), [("sgd", None), ("sgd", 0.01), ("adamw", 1.0)])
def test_steps_are_those_of_torch_on_the_plain_gradient(optimizer, clip):
    case = make("qwen2")
    rate = {"sgd": 0.5, "adamw": 0.01}[optimizer]
    changes = {"optimizer": optimizer, "clip_norm": clip, "schedule": "inverse", "learning_rate": rate}
    config = CONFIG | changes | {"weight_decay": 0.1}
    learner = Learner(case.policy, config)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    case.plain.requires_grad_(True)
    other = kind(case.plain.parameters(), lr=1.0, weight_decay=0.1)
    for iteration in (1, 2, 3):
        rollout = rollout_of(case, seed=iteration)
        advantages = np.random.default_rng(iteration).normal(size=(4, 5))
        grads = plain_gradient(case, rollout, advantages)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        assert learner.step(PROMPTS, rollout, advantages, iteration) == pytest.approx(norm, rel=1e-4)
        for parameter in case.plain.parameters():
            parameter.grad.mul_(min(1.0, clip / norm) if clip else 1.0)
        other.param_groups[0]["lr"] = rate / iteration
        other.step()
        weights = {name: p for name, p in case.policy.model.named_parameters()}
        for name, parameter in case.plain.named_parameters():
            # On average: Adam divides by the size of each gradient, and where that is near zero, rounding is a step.
            assert (weights[name] - parameter).abs().mean() < 1e-5


def test_a_restored_learner_goes_on_as_if_nothing_had_happened():
    results = []
    for stop in (False, True):
        case = make("qwen2")
        learner = Learner(case.policy, CONFIG | {"optimizer": "adamw"})
        for iteration in (1, 2, 3):
            if stop and iteration == 3:
                state, case = learner.state(), make("qwen2", seed=5)
                learner = Learner(case.policy, CONFIG | {"optimizer": "adamw"})
                learner.restore(state)
            advantages = np.random.default_rng(iteration).normal(size=(4, 5))
            learner.step(PROMPTS, rollout_of(case, seed=iteration), advantages, iteration)
        results.append(learner.state())
    assert set(results[0]) == set(results[1])
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_a_gradient_that_is_not_finite_is_one_message():
    case = make("qwen2")
    rollout = rollout_of(case)
    with pytest.raises(UserError, match="gradient of iteration 7 is not finite.*lower learning_rate"):
        Learner(case.policy, CONFIG).step(PROMPTS, rollout, np.full((4, 5), 1e38) * np.arange(5) * 10, 7)


def test_learning_rates():
    common = {"learning_rate": 2.0, "warmup": 0, "iterations": 4}
    rates = {name: [learning_rate(common | {"schedule": name}, i) for i in (1, 2, 3, 4)] for name in
             ("constant", "inverse", "cosine")}  # fmt: skip
    assert rates["constant"] == [2.0] * 4
    assert rates["inverse"] == [2.0, 1.0, 2 / 3, 0.5]
    assert rates["cosine"] == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)])
    warm = [learning_rate(common | {"schedule": "constant", "warmup": 2}, i) for i in (1, 2, 3)]
    assert warm == [1.0, 2.0, 2.0]
