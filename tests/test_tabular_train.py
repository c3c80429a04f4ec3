"""Many tabular runs at once: exact expectations, Lemma 6's recursion, pools, resuming."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from grpo_repro import ustat
from grpo_repro.cells import Cell
from grpo_repro.config import ModelConfig, TaskConfig
from grpo_repro.errors import UserError
from grpo_repro.estimators import ESTIMATORS
from grpo_repro.experiments import tabular_train, training
from grpo_repro.policies import tabular, tabular_algorithm2, tabular_runs
from grpo_repro.policies.families import build_family
from grpo_repro.schema import GroupSizeConfig

NAMES = ("vanilla", "grpo", "oracle", "optimal")


def quiet(done: int, total: int, what: str) -> None:
    pass


def cell_of(family: str = "curved", args: dict[str, Any] | None = None, **changes: Any) -> Cell:
    model = ModelConfig(name="tabular", kind="tabular", family=family, family_args=args or {"asymmetry": 0.4})
    base = GroupSizeConfig(
        model=model, task=TaskConfig(name="bandit"), group_sizes=[4], budget=16, seeds=[0], replicates=50,
        iterations=20, save_seconds=0.0,
    )  # fmt: skip
    return training.plan(replace(base, **changes))[0]


def run(cell: Cell, folder: Path, progress: Any = quiet) -> pd.DataFrame:
    folder.mkdir(exist_ok=True)
    return training.run(cell, folder, progress)[0]


def gaps(rows: pd.DataFrame, iteration: int) -> np.ndarray:
    found = rows[(rows["metric"] == "suboptimality_gap") & (rows["iteration"] == iteration)]
    return found.sort_values("replicate")["value"].to_numpy()


@pytest.mark.parametrize("family", ["softmax", "curved", "three-actions", "likely-right"])
def test_exact_quantities_are_those_of_the_closed_forms(family):
    built = build_family(family, {})
    theta = built.theta + 0.3 * np.random.default_rng(0).normal(size=(5, len(built.theta)))
    pi = tabular_runs.probs(built, theta)
    w = tabular_runs.scores(built, theta, pi)
    c1, c3 = tabular_runs.components(built, theta)
    for s, own in enumerate(theta):
        policy = tabular.TabularPolicy(built, own)
        np.testing.assert_allclose(pi[s], policy.probs, atol=1e-14)
        np.testing.assert_allclose(w[s], policy.scores, atol=1e-13)
        assert tabular_runs.expected_return(built, theta)[s] == pytest.approx(policy.expected_return, abs=1e-14)
        assert (c1[s], c3[s]) == pytest.approx((policy.c1, policy.c3), rel=1e-11)
        optimal = tabular_runs.baseline(built, "optimal", pi, w)[s]
        np.testing.assert_allclose(optimal, policy.optimal_baseline, atol=1e-13)


def test_weights_of_counts_are_the_advantages_of_completions():
    rng = np.random.default_rng(1)
    actions, rewards = rng.integers(3, size=(40, 5)), rng.integers(2, size=(40, 5))
    counts = np.zeros((40, 3, 2), dtype=int)
    np.add.at(counts, (np.arange(40)[:, None], actions, rewards), 1)
    constants = rng.random(40)
    for name in NAMES:
        advantages = ESTIMATORS[name](rewards.astype(float), constants, constants)
        wanted = np.zeros((40, 3))
        np.add.at(wanted, (np.arange(40)[:, None], actions), advantages)
        given = constants if name in ("oracle", "optimal") else np.zeros(40)
        np.testing.assert_allclose(tabular_runs.action_weights(counts, name, given), wanted, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [2, 3])
def test_expected_update_over_every_group_is_the_gradient(name, group, monkeypatch):
    """Every context and every group of (action, reward) outcomes, through the code that trains."""
    family = build_family("softmax", {"contexts": 3, "actions": 3, "dimension": 2})
    policy = tabular.TabularPolicy(family, family.theta)
    outcomes = list(itertools.product(range(3), range(2)))
    total = np.zeros(2)
    for context in range(3):
        q = family.reward_probs[context]
        chances = np.array([policy.probs[context, a] * (q[a] if z else 1 - q[a]) for a, z in outcomes])
        groups = np.array(list(itertools.product(range(6), repeat=group)))
        counts = np.stack([np.bincount(g, minlength=6) for g in groups])
        monkeypatch.setattr(tabular_runs, "draw_counts", lambda joint, size, rng, counts=counts: counts)
        theta = np.tile(family.theta, (len(groups), 1))
        contexts = np.full((len(groups), 1), context)
        found = tabular_runs.gradient_estimate(family, theta, contexts, group, name, np.random.default_rng(0))
        total += family.context_probs[context] * (chances[groups].prod(1) @ found)
    np.testing.assert_allclose(total, policy.gradient, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [2, 16])  # completion by completion, and by multinomials
def test_mean_and_error_of_minibatches_are_the_theorems(name, group):
    family = build_family("softmax", {"contexts": 5, "actions": 4, "dimension": 3})
    policy = tabular.TabularPolicy(family, family.theta)
    draws, prompts = 20_000, 3
    rng = np.random.default_rng(5)
    contexts = np.searchsorted(np.cumsum(family.context_probs)[:-1], rng.random((draws, prompts)), side="right")
    found = tabular_runs.gradient_estimate(family, np.tile(family.theta, (draws, 1)), contexts, group, name, rng)
    error = found.std(0, ddof=1) / np.sqrt(draws)
    assert (np.abs(found.mean(0) - policy.gradient) < 4 * error).all()
    squared = ((found - policy.gradient) ** 2).sum(1)
    within = float(policy.context_probs @ ustat.mse(policy.components, group, name))
    wanted = (policy.c1 + within) / prompts
    assert abs(squared.mean() - wanted) < 4 * squared.std(ddof=1) / np.sqrt(draws)


def noise_covariance(policy: tabular.TabularPolicy, group: int) -> np.ndarray:
    """Covariance of one prompt's grpo estimate, exact: Theorem 2 and Proposition 3 as matrices."""
    f, pi, w, g = policy.context_probs, policy.probs, policy.scores, policy.gradients
    variance = policy.reward_probs * (1 - 2 * policy.value[:, None]) + policy.value[:, None] ** 2  # E[(Z - V)^2 | x, a]
    within = np.einsum("x,xai,xaj->ij", f, g[:, None], g[:, None])
    fisher = np.einsum("x,xa,x,xai,xaj->ij", f, pi, policy.reward_variance, w, w)
    first = np.einsum("x,xa,xa,xai,xaj->ij", f, pi, variance, w, w) - within
    between = within - np.outer(policy.gradient, policy.gradient)
    return between + first / group + (fisher + within) / (group * (group - 1))


@pytest.mark.parametrize("schedule", ["constant", "inverse"])
def test_the_gap_follows_the_recursion_of_lemma_6(schedule, tmp_path):
    """Near the optimum J is quadratic and the noise constant: mean and covariance of theta have exact recursions.

    theta' = (I + b H) theta + b noise, so E gap = -tr(H E[theta theta'])/2, with H the Hessian and the covariance of
    the estimate at the optimum, in closed form. The true J departs from its quadratic by kappa^3 z^6 / 48 only. With
    mu, L the least and largest eigenvalues of -H and L b <= 1, Lemma 6 bounds the gap at every n; its M, the largest
    MSE, is that at the optimum, which is larger than at the start.
    """
    args = {"asymmetry": 0.4, "contexts": 16, "dimension": 2, "rank": 2, "theta_scale": 0.5, "seed": 2}
    budget, group, last = 512, 4, 20
    family = build_family("curved", args)
    start, best = (tabular.TabularPolicy(family, theta) for theta in (family.theta, np.zeros(2)))
    mu, smooth = np.linalg.eigvalsh(-best.hessian)
    rate = 0.95 / smooth if schedule == "inverse" else 0.3 / smooth
    assert schedule == "constant" or 1 / (2 * mu) < rate  # what Lemma 6 asks of beta / i
    cell = cell_of("curved", args, schedule=schedule, learning_rate=float(rate), budget=budget, group_sizes=[group],
                   replicates=1000, iterations=last, checkpoints=[1, 2, 5, 10])  # fmt: skip
    rows = run(cell, tmp_path / "work")
    noise, early = (noise_covariance(policy, group) / (budget // group) for policy in (best, start))
    largest = max(np.trace(noise), np.trace(early))
    second, bound = np.outer(family.theta, family.theta), start.suboptimality_gap
    for n in range(1, last + 1):
        beta = rate if schedule == "constant" else rate / n
        step = np.eye(2) + beta * best.hessian
        second = step @ second @ step.T + beta**2 * noise
        bound = (1 - 2 * mu * beta + smooth * mu * beta**2) * bound + smooth * beta**2 * largest / 2
        if n in (1, 2, 5, 10, last):
            found = gaps(rows, n)
            error = found.std(ddof=1) / np.sqrt(len(found))
            wanted = -np.trace(best.hessian @ second) / 2
            assert abs(found.mean() - wanted) < 4 * error + 0.02 * wanted  # 2%: J and the noise are not quite so
            assert found.mean() < bound + 4 * error


@pytest.mark.parametrize("schedule", ["constant", "inverse", "cosine"])
@pytest.mark.parametrize("clip", ["null", "0.5"])
def test_steps_are_the_rates_of_the_schedule(schedule, clip, tmp_path, monkeypatch):
    """With a known gradient v every iterate is known: theta_0 + v times the sum of the rates, v clipped to its norm."""
    cell = cell_of(schedule=schedule, learning_rate=0.3, clip_norm=None if clip == "null" else clip, iterations=4,
                   checkpoints=[1, 2])  # fmt: skip
    family, best = tabular_train.check(ModelConfig(**cell.config["model"]))
    v = np.linspace(-1.0, 1.0, len(family.theta))
    monkeypatch.setattr(tabular_algorithm2, "ascent", lambda family, theta, *rest: np.tile(v, (len(theta), 1)))
    rows = run(cell, tmp_path / "work")
    wanted = {"constant": [1, 1, 1, 1], "inverse": [1, 1 / 2, 1 / 3, 1 / 4],
              "cosine": [1, (1 + np.sqrt(0.5)) / 2, 1 / 2, (1 - np.sqrt(0.5)) / 2]}[schedule]  # fmt: skip
    length = 1.0 if clip == "null" else 0.5 / np.linalg.norm(v)
    for n in (1, 2, 4):
        theta = family.theta + 0.3 * sum(wanted[:n]) * length * v
        expected = best - tabular.TabularPolicy(family, theta).expected_return
        np.testing.assert_allclose(gaps(rows, n), expected, atol=1e-13)


def test_a_vanishing_c1_gives_an_infinite_size():
    family = build_family("three-actions", {"theta_scale": 0.0})
    c1, c3 = tabular_runs.components(family, np.zeros((2, len(family.theta))))
    assert (c1 == 0).all() and (c3 > 0).all()


def test_rows_are_gaps_of_every_run_and_summaries_over_runs(tmp_path):
    cell = cell_of(iterations=4, checkpoints=[0, 4])
    rows = run(cell, tmp_path / "work")
    family, best = tabular_train.check(ModelConfig(**cell.config["model"]))
    start = tabular.TabularPolicy(family, family.theta)
    np.testing.assert_allclose(gaps(rows, 0), start.suboptimality_gap, atol=1e-14)
    shown = rows[rows["replicate"].isna()].set_index(["metric", "iteration"])
    assert shown.loc[("value", 4), "value"] == pytest.approx(best - gaps(rows, 4).mean(), abs=1e-12)
    star = 1 + np.sqrt(start.c3 / start.c1)
    assert shown.loc[("optimal_group_size", 0), ["ci_low", "value", "ci_high"]].tolist() == pytest.approx([star] * 3)
    later = shown.loc[("optimal_group_size", 4)]
    assert later["ci_low"] < later["value"] < later["ci_high"]
    assert set(rows["count"]) == {1, 50}


@pytest.mark.parametrize("changes", [{}, {"prompt_pool": 6}, {"prompt_pool": 6, "prompt_order": "epochs"}])
def test_interrupted_anywhere_it_goes_on_bit_for_bit(changes, tmp_path, monkeypatch):
    monkeypatch.setattr(tabular_train, "NUMBERS", 2**12)  # several blocks of runs
    cell = cell_of(iterations=6, **changes)
    whole = run(cell, tmp_path / "whole")
    stops = 0
    for at in (0, 1, 3, 4, 5):

        def stop(done: int, total: int, what: str, at: int = at) -> None:
            if done == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(cell, tmp_path / "cut", stop)
        stops += 1
    pd.testing.assert_frame_equal(run(cell, tmp_path / "cut"), whole, check_exact=True)
    assert stops == 5


def test_pools_and_epochs():
    family = build_family("curved", {"asymmetry": 0.4})
    drawn = {
        order: np.concatenate(
            [tabular_train.draw_contexts(cell_of(prompt_pool=8, prompt_order=order), family, i) for i in range(1, 5)], 1
        )
        for order in ("iid", "epochs")
    }
    # B = 4: four iterations are two passes over a pool of 8 (a multiset of contexts).
    first, second = np.sort(drawn["epochs"][:, :8], 1), np.sort(drawn["epochs"][:, 8:], 1)
    np.testing.assert_array_equal(first, second)
    assert (drawn["epochs"][:, :8] != drawn["epochs"][:, 8:]).any(1).mean() > 0.9  # a fresh order in each pass
    for run_drawn, pool in zip(drawn["iid"], first, strict=True):
        assert set(run_drawn) <= set(pool)  # both orders have the same pool
    assert len({tuple(row) for row in first}) > 40  # one pool for each run
    wide = cell_of(prompt_pool=3, prompt_order="epochs", budget=32)  # B = 8 > 3
    rows = tabular_train.draw_contexts(wide, family, 1)
    np.testing.assert_array_equal(np.sort(rows[:, :3], 1), np.sort(rows[:, 3:6], 1))


def test_every_block_and_iteration_has_its_own_randomness(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular_train, "NUMBERS", 2**12)  # several blocks of runs
    seen = []

    def record(family, theta, contexts, group_size, rng):
        seen.append((len(theta), rng.random()))
        return tabular_runs.draw(family, theta, contexts, group_size, rng)

    monkeypatch.setattr(tabular_algorithm2, "draw", record)
    run(cell_of(iterations=3, checkpoints=[3]), tmp_path / "work")
    assert len(seen) > 6 and sum(size for size, _ in seen) == 3 * 50
    assert len({number for _, number in seen}) == len(seen)


def test_contexts_follow_their_distribution_anew_in_every_iteration():
    family = replace(build_family("curved", {"contexts": 4}), context_probs=np.array([0.1, 0.2, 0.3, 0.4]))
    cell = cell_of(replicates=5000, budget=8, group_sizes=[2])
    first, second = (tabular_train.draw_contexts(cell, family, i) for i in (1, 2))
    shares = np.bincount(first.ravel(), minlength=4) / first.size
    spread = np.sqrt(family.context_probs * (1 - family.context_probs) / first.size)
    assert (np.abs(shares - family.context_probs) < 4 * spread).all()
    equal = float((family.context_probs**2).sum())  # chance that two independent draws agree
    assert abs((first == second).mean() - equal) < 4 * np.sqrt(equal * (1 - equal) / first.size)


def test_contexts_are_shared_over_group_sizes():
    family = build_family("curved", {})
    many, few = (tabular_train.draw_contexts(cell_of(group_sizes=[g]), family, 7) for g in (2, 8))
    np.testing.assert_array_equal(many[:, :2], few)


def test_no_iterations_no_rate_and_divergence(tmp_path):
    assert set(run(cell_of(iterations=0), tmp_path / "none")["iteration"]) == {0}
    still = run(cell_of(learning_rate=0.0, iterations=3), tmp_path / "still")
    np.testing.assert_array_equal(gaps(still, 3), gaps(still, 0))
    clipped = run(cell_of(learning_rate=1e3, clip_norm="1e-9", iterations=3), tmp_path / "clipped")
    np.testing.assert_allclose(gaps(clipped, 3), gaps(clipped, 0), atol=1e-5)  # three steps of length 1e-6 at most
    with pytest.raises(UserError, match=r"diverges at iteration 1 with learning rate 1e\+200; lower learning_rate"):
        run(cell_of(learning_rate=1e200), tmp_path / "far")


def test_a_family_without_a_known_best_return_is_refused():
    with pytest.raises(UserError, match="best return of family softmax .* not known.*model.family=curved"):
        cell_of("softmax", {"contexts": 64})
