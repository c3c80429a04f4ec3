"""Algorithm 2 on tabular policies: expectations by enumeration of every group, against gradients by autograd."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from test_tabular_train import cell_of, gaps, run

from grpo_repro import stats
from grpo_repro.algorithm2 import Options
from grpo_repro.estimators import ESTIMATORS, normalized
from grpo_repro.experiments import tabular_train, training
from grpo_repro.policies import tabular, tabular_algorithm2, tabular_runs
from grpo_repro.policies.families import Family, build_family
from grpo_repro.policies.tabular_algorithm2 import ascent, divergence, iterate
from grpo_repro.policies.tabular_runs import Draw

KAPPA = 0.3
SIZE = {"contexts": 3, "actions": 3, "dimension": 2}


def small() -> tuple[Family, np.ndarray, np.ndarray]:
    """A family, the parameters that are sampled from, and those after a step; its own are the reference."""
    family = build_family("softmax", SIZE)
    return family, family.theta + np.array([0.5, -0.8]), family.theta + np.array([0.9, -0.3])


def every_group(family: Family, theta: np.ndarray, group: int) -> tuple[np.ndarray, Draw]:
    """Probability of every context with every group of G (action, reward) outcomes, and each as a run of its own."""
    policy = tabular.TabularPolicy(family, theta)
    outcomes = list(itertools.product(range(3), range(2)))
    q = family.reward_probs
    chances = np.array([[policy.probs[x, a] * (q[x, a] if z else 1 - q[x, a]) for a, z in outcomes] for x in range(3)])
    groups = np.array(list(itertools.product(range(6), repeat=group)))
    counts = np.stack([np.bincount(g, minlength=6) for g in groups])
    context = np.repeat(np.arange(3), len(groups))
    weights = family.context_probs[context] * chances[:, groups].prod(2).ravel()
    many = np.tile(theta, (len(context), 1))
    pi = tabular_runs.probs(family, many)
    w = tabular_runs.scores(family, many, pi)
    return weights, Draw(many, pi, w, context[:, None], np.tile(counts, (3, 1)).reshape(-1, 1, 3, 2))


def expected(family: Family, old: np.ndarray, theta: np.ndarray, group: int, name: str, options: Options) -> np.ndarray:
    weights, batch = every_group(family, old, group)
    return weights @ ascent(family, np.tile(theta, (len(weights), 1)), batch, name, options)


def gradient_of(family: Family, theta: np.ndarray, forward: float = 0.0, backward: float = 0.0) -> np.ndarray:
    """Autograd of J - forward KL(pi || pi_ref) - backward KL(pi_ref || pi)."""
    phi, offset, q, f = (
        torch.from_numpy(x) for x in (family.features, family.offset, family.reward_probs, family.context_probs)
    )
    log_ref = torch.log_softmax(offset + phi @ torch.from_numpy(family.theta), -1)
    parameter = torch.from_numpy(theta.copy()).requires_grad_()
    log_pi = torch.log_softmax(offset + phi @ parameter, -1)
    value = (log_pi.exp() * q).sum(-1)
    value = value - forward * (log_pi.exp() * (log_pi - log_ref)).sum(-1)
    value = value - backward * (log_ref.exp() * (log_ref - log_pi)).sum(-1)
    (f @ value).backward()
    return parameter.grad.numpy()


@pytest.mark.parametrize("name", ["vanilla", "grpo", "oracle"])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_expected_step_is_the_gradient_of_the_penalised_return(name, group):
    """k1 in the reward with KL(pi || pi_ref), k3 with KL(pi_ref || pi), and neither with the other."""
    if name == "grpo" and group == 1:
        return
    family, theta, _ = small()
    for kind, goal in (("k1-in-reward", {"forward": KAPPA}), ("k3", {"backward": KAPPA})):
        options = Options(kl_coefficient=KAPPA, kl_estimator=kind)
        wanted = gradient_of(family, theta, **goal)
        np.testing.assert_allclose(expected(family, theta, theta, group, name, options), wanted, atol=1e-12)
    assert np.abs(gradient_of(family, theta, KAPPA) - gradient_of(family, theta, 0.0, KAPPA)).max() > 1e-3


@pytest.mark.parametrize("name", ["vanilla", "grpo", "optimal"])
def test_expected_step_of_a_moved_policy_is_its_own_gradient(name):
    """The ratio turns an expectation under pi_old into one under pi; its inverse does not."""
    family, old, theta = small()
    options = Options(minibatches=2)
    np.testing.assert_allclose(expected(family, old, theta, 2, name, options), gradient_of(family, theta), atol=1e-12)
    weights, batch = every_group(family, old, 2)
    many = np.tile(theta, (len(weights), 1))
    ratio = tabular_runs.probs(family, many) / batch.probs
    w = tabular_runs.scores(family, many, tabular_runs.probs(family, many))
    totals = batch.totals(batch.weights(family, name))
    for power, equal in ((1, True), (0, False), (-1, False)):
        found = weights @ tabular_runs.along(totals * ratio**power, w, 2)
        assert (np.abs(found - gradient_of(family, theta)).max() < 1e-12) == equal


def test_expected_normalised_step_has_a_factor_of_each_context():
    """E[se] / Var(Z | x) g(x), outside it the penalty; se over G instead of G - 1 would be another number."""
    family, theta, _ = small()
    policy = tabular.TabularPolicy(family, theta)
    for group in (2, 3):
        deviation = np.array(
            [
                sum(
                    np.prod([v if z else 1 - v for z in rewards]) * np.std(rewards, ddof=1)
                    for rewards in itertools.product((0, 1), repeat=group)
                )
                for v in policy.value
            ]
        )
        factor = deviation / (policy.value * (1 - policy.value))
        wanted = (policy.context_probs * factor) @ policy.gradients
        found = expected(family, theta, theta, group, "grpo", Options(normalize=True))
        np.testing.assert_allclose(found, wanted, atol=1e-12)
        for kind, penalty in (("k1-in-reward", (KAPPA, 0.0)), ("k3", (0.0, KAPPA))):
            options = Options(normalize=True, kl_coefficient=KAPPA, kl_estimator=kind)
            less = gradient_of(family, theta, *penalty) - gradient_of(family, theta)
            np.testing.assert_allclose(
                expected(family, theta, theta, group, "grpo", options), wanted + less, atol=1e-12
            )


@pytest.mark.parametrize("kind", ["k3", "k1-in-reward"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("moved", [False, True])
def test_sums_over_counts_are_sums_over_completions(kind, normalize, moved):
    """The written surrogate, completion by completion, by autograd; several prompts of several runs."""
    family, old, new = small()
    theta = new if moved else old
    options = Options(normalize, 1, KAPPA, kind)
    contexts = np.array([[0, 2, 2, 1], [1, 1, 0, 2]])
    batch = tabular_runs.draw(family, np.tile(old, (2, 1)), contexts, 4, np.random.default_rng(3))
    found = ascent(family, np.tile(theta, (2, 1)), batch, "grpo", options)
    phi, offset = torch.from_numpy(family.features), torch.from_numpy(family.offset)
    log_old, log_ref = (torch.log_softmax(offset + phi @ torch.from_numpy(x), -1) for x in (old, family.theta))
    for s, row in enumerate(contexts):
        parameter = torch.from_numpy(theta.copy()).requires_grad_()
        log_pi = torch.log_softmax(offset + phi @ parameter, -1)
        goal = torch.zeros((), dtype=torch.float64)
        for x, counts in zip(row, batch.counts[s], strict=True):
            places = [(a, z) for a in range(3) for z in range(2) for _ in range(counts[a, z])]
            a, z = np.array(places).T
            advantages = ESTIMATORS["grpo"](z.astype(float), np.zeros(()), np.zeros(()))
            if normalize:
                advantages = normalized(advantages, z.astype(float))
            ratio = (log_old - log_ref)[x, a].numpy()
            others = (ratio.sum() - ratio) / 3
            if kind == "k1-in-reward":
                advantages = advantages - KAPPA * (ratio - others)
            goal = goal + (torch.from_numpy(advantages) * (log_pi - log_old)[x, a].exp()).sum()
            if kind == "k3":
                r = (log_ref - log_pi)[x, a]
                goal = goal - KAPPA * (r.exp() - r - 1).sum()
        (goal / 16).backward()
        np.testing.assert_allclose(found[s], parameter.grad.numpy(), atol=1e-13)


def test_without_an_option_it_is_algorithm_1_bit_for_bit():
    family, theta, _ = small()
    many, contexts = np.tile(theta, (6, 1)), np.random.default_rng(0).integers(3, size=(6, 5))
    for name in ESTIMATORS:
        wanted = tabular_runs.gradient_estimate(family, many, contexts, 4, name, np.random.default_rng(1))
        batch = tabular_runs.draw(family, many, contexts, 4, np.random.default_rng(1))
        np.testing.assert_array_equal(ascent(family, many, batch, name, Options()), wanted)
        moved = iterate(family, many, contexts, 4, name, Options(), lambda d: 0.5 * d, np.random.default_rng(1))
        np.testing.assert_array_equal(moved, many + 0.5 * wanted)


def test_minibatches_go_through_the_prompts_in_order_each_from_where_the_last_ended():
    family, theta, _ = small()
    many, contexts = np.tile(theta, (7, 1)), np.random.default_rng(0).integers(3, size=(7, 6))
    options = Options(True, 3, KAPPA, "k3")
    found = iterate(family, many, contexts, 4, "grpo", options, lambda d: 0.5 * d, np.random.default_rng(1))
    batch = tabular_runs.draw(family, many, contexts, 4, np.random.default_rng(1))
    place = many.copy()
    for k in (0, 2, 4):
        part = replace(batch, contexts=contexts[:, k : k + 2], counts=batch.counts[:, k : k + 2])
        place = place + 0.5 * ascent(family, place, part, "grpo", options)
    np.testing.assert_array_equal(found, place)
    once = iterate(family, many, contexts, 4, "grpo", replace(options, minibatches=1), lambda d: 0.5 * d,
                   np.random.default_rng(1))  # fmt: skip
    assert np.abs(once - found).max() > 1e-3


def test_a_probability_of_zero_is_no_obstacle():
    """Actions that no number can tell from impossible have no completions, and no ratio."""
    family = build_family("softmax", SIZE)
    far = np.tile(family.theta + 3000.0, (2, 1))
    assert (tabular_runs.probs(family, far) == 0).any()
    batch = tabular_runs.draw(family, far, np.array([[0, 1, 2]] * 2), 4, np.random.default_rng(0))
    for kind in ("k3", "k1-in-reward"):
        options = Options(False, 1, 1e-3, kind)
        with np.errstate(over="raise", invalid="raise"):
            assert np.isfinite(ascent(family, far + 0.01, batch, "grpo", options)).all()
    assert np.isfinite(divergence(family, far)).all()


def test_divergence_is_exact():
    family, theta, _ = small()
    policy, start = (tabular.TabularPolicy(family, x) for x in (theta, family.theta))
    wanted = policy.context_probs @ (policy.probs * np.log(policy.probs / start.probs)).sum(1)
    found = divergence(family, np.stack([theta, family.theta]))
    assert found == pytest.approx([wanted, 0.0], abs=1e-14)


# Whole runs.

OPTIONS: dict[str, Any] = dict(normalize=True, minibatches=2, kl_coefficient=0.05, kl_estimator="k1-in-reward")


def rows_of(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    return rows[rows["metric"] == metric].set_index("iteration")


def test_rows_have_the_divergence_where_there_is_a_penalty(tmp_path, monkeypatch):
    seen = []
    measure = tabular_train._measure

    def record(family: Family, theta: np.ndarray, penalized: bool) -> np.ndarray:
        seen.append(divergence(family, theta))
        return measure(family, theta, penalized)

    monkeypatch.setattr(tabular_train, "_measure", record)
    rows = run(cell_of(iterations=4, checkpoints=[0, 4], learning_rate=3.0, **OPTIONS), tmp_path / "work")
    found = rows_of(rows, "kl_divergence")
    assert found.loc[0, ["value", "ci_low", "ci_high"]].tolist() == pytest.approx([0.0] * 3, abs=1e-14)
    interval = stats.mean_interval(seen[1], 0.95)
    assert found.loc[4, ["ci_low", "value", "ci_high"]].tolist() == [interval.low, interval.value, interval.high]
    assert 0 < interval.low and found.loc[4, "count"] == 50
    without = run(cell_of(iterations=4, minibatches=2), tmp_path / "without")
    assert "kl_divergence" not in set(without["metric"])


@pytest.mark.parametrize("kind", ["k3", "k1-in-reward"])
def test_a_larger_penalty_keeps_runs_nearer(kind, tmp_path):
    ends = []
    for kappa in (1e-9, 0.1, 1.0):
        cell = cell_of(iterations=30, budget=64, learning_rate=1.0, kl_coefficient=kappa, kl_estimator=kind)
        ends.append(rows_of(run(cell, tmp_path / str(kappa)), "kl_divergence").loc[30, "value"])
    assert ends[0] > 1.5 * ends[1] > 3 * ends[2] > 0


def test_interrupted_anywhere_it_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """Also in the middle of an iteration, between two minibatches of one of several blocks of runs."""
    monkeypatch.setattr(tabular_train, "NUMBERS", 2**12)
    cell = cell_of(iterations=4, checkpoints=[0, 2], **OPTIONS)
    whole = run(cell, tmp_path / "whole")
    calls = [0]

    def cut(*arguments: Any) -> np.ndarray:
        calls[0] += 1
        if calls[0] in (3, 24, 45):
            raise KeyboardInterrupt
        return ascent(*arguments)

    monkeypatch.setattr(tabular_algorithm2, "ascent", cut)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(cell, tmp_path / "cut")
    pd.testing.assert_frame_equal(run(cell, tmp_path / "cut"), whole, check_exact=True)


def test_numbers_of_algorithm_1_are_those_recorded_before_there_were_options(tmp_path):
    cell = cell_of(iterations=4, checkpoints=[4])
    assert cell.id == "a5075e621994"
    assert gaps(run(cell, tmp_path / "work"), 4)[:3] == pytest.approx(
        [0.006801539860582628, 0.012154770640766976, 0.008412246478795682], rel=1e-9
    )


def test_estimated_cost_grows_with_the_minibatches():
    one, four = (training.estimate(cell_of(minibatches=m)).seconds for m in (1, 4))
    assert four > one
