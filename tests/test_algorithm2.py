"""Algorithm 2 on language models: gradients against autograd of the written surrogate, and runs that are cut off."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from random_model import Interruption, save_random_model
from small_models import Case, completions, every_architecture, make
from test_language_train import cell_of, made, quiet
from test_update import CONFIG, PROMPTS, TEMPERATURE, distance, rollout_of

from grpo_repro.algorithm2 import Options
from grpo_repro.config import ModelConfig
from grpo_repro.engine import update
from grpo_repro.engine.distinct import merge
from grpo_repro.engine.sample import Rollout
from grpo_repro.engine.update import Learner, accumulate_gradient, log_probs
from grpo_repro.errors import UserError
from grpo_repro.experiments import training
from grpo_repro.experiments.language_train import _advantages, _Run
from grpo_repro.kl import reward_penalty
from grpo_repro.policies import causal_lm
from grpo_repro.schema import TrainingConfig

KAPPA = 0.7
Gradient = dict[str, torch.Tensor]


def moved_from(case: Case, seed: int, size: float = 0.05) -> Case:
    """The same architecture with weights a little way off."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain, own = copy.deepcopy(case.plain), copy.deepcopy(case.policy.model)
        for (name, parameter), other in zip(plain.named_parameters(), own.parameters(), strict=True):
            assert parameter.shape == other.shape, name
            other.data += size * torch.randn_like(other)
            parameter.data.copy_(other.data)
    return Case(replace(case.policy, model=own), plain)


def engine_gradient(
    case: Case, rollout: Rollout, advantages: np.ndarray, micro_batch: int = 64, **extra: Any
) -> Gradient:
    model = case.policy.model
    model.requires_grad_(True)
    model.zero_grad()
    accumulate_gradient(case.policy, PROMPTS, rollout, advantages, TEMPERATURE, micro_batch, **extra)
    model.requires_grad_(False)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def written_gradient(
    case: Case, rollout: Rollout, advantages: np.ndarray, prompts: list[list[int]] = PROMPTS, *,
    old: Case | None = None, reference: Case | None = None, kappa: float = 0.0, power: int = 1,
) -> Gradient:  # fmt: skip
    """Autograd of -(1/(BG)) sum A (pi/pi_old) - kappa (r - log r - 1), r = pi_ref/pi, each completion on its own."""
    case.plain.requires_grad_(True)
    case.plain.zero_grad()
    loss = torch.zeros(())
    for b, prompt in enumerate(prompts):
        for i, length in enumerate(rollout.lengths[b].tolist()):
            tokens = rollout.tokens[b, i, :length].tolist()
            log_pi = case.log_probs(prompt, tokens, TEMPERATURE)
            log_old = (old or case).log_probs(prompt, tokens, TEMPERATURE).detach()
            gain = advantages[b, i] * torch.exp(power * (log_pi - log_old)).sum()
            if reference is not None:
                log_r = reference.log_probs(prompt, tokens, TEMPERATURE).detach() - log_pi
                gain = gain - kappa * (torch.exp(log_r) - log_r - 1).sum()
            loss = loss - gain / advantages.size
    loss.backward()
    return {name: p.grad.clone() for name, p in case.plain.named_parameters()}


def some_advantages(seed: int = 0) -> np.ndarray:
    advantages = np.random.default_rng(seed).normal(size=(4, 5))
    advantages[1] = 0.0
    return advantages


@every_architecture
def test_reference_log_probs_are_those_of_plain_passes_at_every_micro_batch(architecture):
    case, other = make(architecture), make(architecture, seed=3)
    rollout = rollout_of(case)
    for micro_batch in (1, 2, 7, 256):
        found = log_probs(other.policy, PROMPTS, rollout, TEMPERATURE, micro_batch)
        assert not found.requires_grad and (found[~rollout.mask] == 0).all()
        for b, prompt in enumerate(PROMPTS):
            for i, length in enumerate(rollout.lengths[b].tolist()):
                with torch.no_grad():
                    wanted = other.log_probs(prompt, rollout.tokens[b, i, :length].tolist(), TEMPERATURE)
                torch.testing.assert_close(found[b, i, :length], wanted, atol=2e-5, rtol=2e-5)
    own = log_probs(case.policy, PROMPTS, rollout, TEMPERATURE)
    torch.testing.assert_close(own, rollout.log_probs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("moved", "kappa"), [(False, KAPPA), (True, 0.0), (True, KAPPA)])
def test_gradient_is_that_of_the_written_surrogate_at_every_micro_batch(moved, kappa):
    """Ragged prompts and completions, a group of zero advantages, a policy that is not the one sampled from."""
    old = make("qwen2")
    case, other = moved_from(old, 1) if moved else old, moved_from(old, 2)
    rollout, advantages = rollout_of(old), some_advantages()
    reference = log_probs(other.policy, PROMPTS, rollout, TEMPERATURE) if kappa else None
    plain = {"old": old if moved else None, "reference": other if kappa else None, "kappa": kappa}
    wanted = written_gradient(case, rollout, advantages, **plain)
    for micro_batch in (1, 2, 7, 256):
        found = engine_gradient(case, rollout, advantages, micro_batch, moved=moved, reference=reference,
                                coefficient=kappa)  # fmt: skip
        assert distance(found, wanted) < 1e-5
    wrong = [plain | {"kappa": -kappa}] if kappa else []
    wrong += [plain | {"power": -1}, plain | {"old": None}] if moved else []
    for variant in wrong:
        assert distance(found, written_gradient(case, rollout, advantages, **variant)) > 1e-2
    if kappa:  # the ratio inverted in the penalty, as it is printed
        swapped = log_probs(case.policy, PROMPTS, rollout, TEMPERATURE) * 2 - reference
        found = engine_gradient(case, rollout, advantages, moved=moved, reference=swapped, coefficient=kappa)
        assert distance(found, wanted) > 1e-2


def test_equal_completions_are_run_once_and_count_as_often_as_they_are():
    old = make("qwen2")
    case, other = moved_from(old, 1), moved_from(old, 2)
    once = rollout_of(old)
    twice = Rollout(*(torch.cat([x, x], 1) for x in (once.tokens, once.mask, once.log_probs, once.finished)))
    advantages = np.random.default_rng(1).normal(size=(4, 10))
    reference = log_probs(other.policy, PROMPTS, twice, TEMPERATURE)
    batch = merge(twice, advantages, True, reference)
    assert len(batch.prompt) <= 20 and float(batch.shares.sum()) == pytest.approx(1.0)
    found = engine_gradient(case, twice, advantages, moved=True, reference=reference, coefficient=KAPPA)
    wanted = written_gradient(case, twice, advantages, old=old, reference=other, kappa=KAPPA)
    assert distance(found, wanted) < 1e-5


def test_without_weight_a_completion_is_dropped_unless_there_is_a_penalty():
    case = make("qwen2")
    rollout, advantages = rollout_of(case), np.zeros((4, 5))
    assert len(merge(rollout, advantages).prompt) == len(merge(rollout, advantages, True).prompt) == 0
    assert set(merge(rollout, advantages, False, rollout.log_probs).prompt.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(("power", "right"), [(1, True), (-1, False), (0, False)])
def test_minibatches_are_steps_of_torch_on_the_written_surrogate(power, right):
    """Two steps of two prompts: the first without a ratio, the second with it and at the same learning rate."""
    start, other = make("qwen2"), make("qwen2", seed=4)
    rollout, advantages = rollout_of(start), np.random.default_rng(2).normal(size=(4, 5))
    place, norms = moved_from(start, 0, 0.0), []
    for number, part in enumerate((slice(0, 2), slice(2, 4))):
        own = moved_from(place, 0, 0.0) if power == 0 else start  # without any ratio pi_old is pi
        grads = written_gradient(
            place, rollout.part(part), advantages[part], PROMPTS[part], old=own, reference=other, kappa=0.1,
            power=power if number and power else 1,
        )  # fmt: skip
        norms.append(np.sqrt(sum(float(g.double().square().sum()) for g in grads.values())))
        with torch.no_grad():
            for (name, parameter), copied in zip(
                place.plain.named_parameters(), place.policy.model.parameters(), strict=True
            ):
                parameter -= 0.5 / 3 * grads[name]
                copied.copy_(parameter)
    case = moved_from(start, 0, 0.0)
    learner = Learner(case.policy, CONFIG | {"minibatches": 2, "kl_coefficient": 0.1, "schedule": "inverse"})
    norm = learner.step(PROMPTS, rollout, advantages, 3, log_probs(other.policy, PROMPTS, rollout, TEMPERATURE))
    before = dict(start.plain.named_parameters())
    found = {name: p.detach() - before[name] for name, p in case.policy.model.named_parameters()}
    wanted = {name: p.detach() - before[name] for name, p in place.plain.named_parameters()}
    assert (distance(found, wanted) < 1e-4) == right
    assert (norm == pytest.approx(np.mean(norms), rel=1e-4)) == right


@pytest.mark.parametrize("stated", [{}, {"normalize": True}])
def test_one_minibatch_without_a_penalty_is_algorithm_1_bit_for_bit(stated, monkeypatch):
    """The backward pass of before there were options, on the same forward pass."""
    ends = []
    for before in (True, False):
        case = make("qwen2")
        if before:

            def backward(piece: Any, batch: Any, coefficient: float) -> None:
                weights = torch.where(piece.real, batch.weights[piece.index], 0.0).to(torch.float32)
                (-weights[:, None] * piece.log_probs).sum().backward()

            monkeypatch.setattr(update, "_completions_backward", backward)
        else:
            monkeypatch.undo()
        learner = Learner(case.policy, CONFIG | {"optimizer": "adamw"} | stated)
        for iteration in (1, 2, 3):
            learner.step(PROMPTS, rollout_of(case, seed=iteration), some_advantages(iteration), iteration)
        ends.append(learner.state())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_advantages_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    rewards, ratio = rng.integers(2, size=(6, 4)).astype(float), rng.normal(size=(6, 4))
    rewards[0], rewards[1] = 1.0, 0.0
    for normalize in (False, True):
        for kind in ("k3", "k1-in-reward"):
            found = _advantages("grpo", rewards, ratio, Options(normalize, 1, KAPPA, kind))
            for b in range(6):
                deviation = np.std(rewards[b], ddof=1)
                for i in range(4):
                    others = [j for j in range(4) if j != i]
                    wanted = rewards[b, i] - rewards[b, others].mean()
                    if normalize:
                        wanted = wanted / deviation if deviation else 0.0
                    if kind == "k1-in-reward":
                        wanted -= KAPPA * (ratio[b, i] - ratio[b, others].mean())
                    assert found[b, i] == pytest.approx(wanted, abs=1e-12)
    alone = _advantages(
        "vanilla", rewards[:, :1], ratio[:, :1], Options(kl_coefficient=2.0, kl_estimator="k1-in-reward")
    )
    np.testing.assert_allclose(alone, rewards[:, :1] - 2.0 * ratio[:, :1])


def test_expected_step_over_every_group_is_the_gradient_of_the_penalised_return():
    """k1 in the reward, G = 2 completions of two tokens over a small vocabulary: grad of J - kappa KL(pi || pi_ref)."""
    case, other, prompt = make("qwen2", 4, eos=(2,), noise=0.3), make("qwen2", 4, 1, eos=(2,), noise=0.3), [3, 1]
    texts = list(found := completions(case, prompt, 2, TEMPERATURE))
    probs, theirs = np.array(list(found.values())), completions(other, prompt, 2, TEMPERATURE)
    ratio = np.log(probs) - np.log([theirs[text] for text in texts])
    z = np.array([float(text[0] == 1) for text in texts])
    first, second = (x.ravel() for x in np.indices((len(texts), len(texts))))
    options = Options(kl_coefficient=KAPPA, kl_estimator="k1-in-reward")
    pairs = np.stack([first, second], 1)
    advantages = _advantages("grpo", z[pairs], ratio[pairs], options)
    weights = np.zeros(len(texts))
    np.add.at(weights, pairs, (probs[pairs].prod(1)[:, None] * advantages) / 2)
    tokens = torch.tensor([list(text) + [0] * (2 - len(text)) for text in texts])
    mask = torch.tensor([[k < len(text) for k in range(2)] for text in texts])
    every = Rollout(tokens[None], mask[None], torch.zeros(mask[None].shape), torch.ones(1, len(texts)).bool())
    model = case.policy.model.requires_grad_(True)
    accumulate_gradient(case.policy, [prompt], every, weights[None] * len(texts), TEMPERATURE)
    step = {name: -p.grad for name, p in model.named_parameters() if p.grad is not None}
    case.plain.requires_grad_(True)
    value = torch.zeros(())
    for text, reward in zip(texts, z, strict=True):
        log_p = case.log_probs(prompt, list(text), TEMPERATURE).sum()
        value = value + log_p.exp() * (reward - KAPPA * (log_p - float(np.log(theirs[text]))))
    value.backward()
    assert distance(step, {name: p.grad for name, p in case.plain.named_parameters()}) < 1e-5
    assert ((probs[pairs].prod(1)[:, None] * reward_penalty(ratio[pairs])).sum()) == pytest.approx(0.0, abs=1e-12)


def test_options_have_the_defaults_of_the_schema():
    assert Options() == Options.of(vars(TrainingConfig()))


# Whole runs.

OPTIONS: dict[str, Any] = dict(normalize=True, minibatches=2, kl_coefficient=0.05)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def divergences(rows: pd.DataFrame) -> pd.Series:
    return rows[rows["metric"] == "kl_divergence"].set_index("iteration")["value"]


@pytest.mark.parametrize("kind", ["k3", "k1-in-reward"])
def test_a_run_is_cut_off_anywhere_and_gives_the_same_rows(kind, model_dir, tmp_path, monkeypatch):
    """Between iterations and, by an error in a second minibatch, in the middle of one."""
    cell = cell_of(model_dir, iterations=5, checkpoints=[0, 3], log_every=1, kl_estimator=kind, **OPTIONS)
    whole, extras = training.run(cell, made(tmp_path / "whole"), quiet)
    work, calls, move = made(tmp_path / "cut"), [0], Learner._move

    def cut(self: Learner, iteration: int) -> float:
        calls[0] += 1
        if calls[0] in (4, 8):  # the second of its iteration
            raise KeyboardInterrupt
        return move(self, iteration)

    monkeypatch.setattr(Learner, "_move", cut)
    for stop in (quiet, quiet, Interruption(at=1)):
        with pytest.raises(KeyboardInterrupt):
            training.run(cell, work, stop)
    rows, resumed = training.run(cell, work, quiet)
    pd.testing.assert_frame_equal(rows, whole, check_exact=True)
    assert resumed == extras
    assert list(divergences(rows).index) == [1, 2, 3, 4, 5]
    assert abs(divergences(rows)[1]) < 1e-5 and set(whole["metric"]) >= {"gradient_norm", "accuracy"}


def test_the_reference_is_what_the_files_hold_also_when_a_run_is_resumed(model_dir, tmp_path):
    cell, work = cell_of(model_dir, iterations=3, checkpoints=[0], kl_coefficient=0.1), made(tmp_path / "work")
    training.run(cell, work, quiet)
    again = _Run.start(cell, work, quiet)
    assert again.done == 3 and again.reference is not None
    loaded = causal_lm.load(ModelConfig(name="random", path=str(model_dir)), "cpu")
    trained = again.policy.model.state_dict()
    for name, value in again.reference.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name])
    assert any(not torch.equal(value, trained[name]) for name, value in loaded.model.state_dict().items())
    assert not any(p.requires_grad for p in again.reference.model.parameters())
    assert _Run.start(cell_of(model_dir), made(tmp_path / "other"), quiet).reference is None


@pytest.mark.parametrize("kind", ["k3", "k1-in-reward"])
def test_a_larger_penalty_keeps_the_policy_nearer(kind, model_dir, tmp_path):
    ends = []
    for kappa in (1e-9, 1.0):
        cell = cell_of(model_dir, iterations=8, checkpoints=[0], log_every=1, kl_coefficient=kappa, kl_estimator=kind,
                       budget=128, group_sizes=[8])  # fmt: skip
        ends.append(float(divergences(training.run(cell, made(tmp_path / str(kappa)), quiet)[0])[8]))
    assert ends[0] > 2 * abs(ends[1])


def test_without_a_penalty_there_is_no_divergence(model_dir, tmp_path):
    rows, _ = training.run(cell_of(model_dir, iterations=2, minibatches=4), made(tmp_path / "work"), quiet)
    assert divergences(rows).empty and set(rows["metric"]) >= {"reward_mean", "gradient_norm"}


def test_the_reference_is_counted(model_dir):
    one, two = (training.estimate(cell_of(model_dir, kl_coefficient=kappa)) for kappa in (0.0, 0.1))
    assert two.memory_bytes - one.memory_bytes == 4 * causal_lm.shape(ModelConfig(path=str(model_dir))).parameters
    assert two.seconds > one.seconds


def test_a_ratio_out_of_bounds_is_one_message():
    case = make("qwen2")
    rollout = rollout_of(case)
    far = replace(rollout, log_probs=rollout.log_probs - 200.0)
    with pytest.raises(UserError, match="gradient of iteration 1 is not finite.*lower learning_rate"):
        Learner(case.policy, CONFIG | {"minibatches": 2}).step(PROMPTS, far, some_advantages(), 1)
