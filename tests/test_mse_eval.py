"""The MSE experiment: its three methods against each other and the truth, identity, interruption."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from random_model import Interruption, save_random_model
from safetensors.torch import load_file, save_file
from small_models import completions as every_completion
from small_models import padded
from transformers import AutoModelForCausalLM

from grpo_repro import results, ustat
from grpo_repro.bundled import path as bundled_path
from grpo_repro.cells import Cell
from grpo_repro.config import BUNDLED_MODELS, ModelConfig, MseEvalConfig, TaskConfig, load_choice
from grpo_repro.engine import samplers
from grpo_repro.engine.scores import Scorer
from grpo_repro.errors import UserError
from grpo_repro.experiments import language_mse, mse_eval
from grpo_repro.experiments.mse_rows import replicate_mse
from grpo_repro.experiments.state import Checkpoint
from grpo_repro.policies import causal_lm, tabular
from grpo_repro.stats import quantile
from grpo_repro.tasks import bandit, load_task

torch.set_num_threads(1)
ESTIMATORS = ("vanilla", "grpo", "oracle", "optimal")


def quiet(done: int, total: int, what: str) -> None:
    assert 0 <= done <= total


def measured(cell: Cell, folder: Path) -> pd.DataFrame:
    folder.mkdir(parents=True, exist_ok=True)
    rows, extras = mse_eval.run(cell, folder, quiet)
    assert set(rows["metric"]) <= set(results.METRICS)
    results.to_table(cell, rows)  # the schema takes them
    assert extras["completions"] == (0 if cell.config["method"] == "exact" else mse_eval.completions(cell.config))
    return rows


def overall(rows: pd.DataFrame, metric: str, keys: tuple[str, ...] = ()) -> dict[Any, tuple[float, float, float]]:
    """(value, low, high) of a metric over all prompts, by estimator and group size where asked for."""
    if "prompt_id" in rows:
        rows = rows[rows["prompt_id"].isna()]
    found = rows[rows["metric"] == metric]
    columns = found[["value", "ci_low", "ci_high"]].itertuples(index=False, name=None)
    names = found[list(keys)].itertuples(index=False, name=None) if keys else [metric] * len(found)
    return dict(zip(names, columns, strict=True))


BY_ESTIMATOR = ("estimator", "group_size")


def error(interval: tuple[float, float, float], degrees: int | float) -> float:
    """Standard error behind a 95% interval."""
    return (interval[2] - interval[1]) / 2 / quantile(0.95, degrees)


# Tabular policies.


def tabular_config(**changes: Any) -> MseEvalConfig:
    model = ModelConfig(name="tabular", kind="tabular", family="softmax")
    base = MseEvalConfig(
        model=model, task=TaskConfig(name="bandit", num_questions=200), group_sizes=[4, 16],
        completions_per_prompt=48, replicates=400, methods=["exact", "components", "monte_carlo"],
    )  # fmt: skip
    return replace(base, **changes)


@pytest.mark.parametrize("family", ["softmax", "constant-norm", "likely-right"])
def test_methods_agree_on_a_tabular_policy(family, tmp_path):
    model = ModelConfig(name="tabular", kind="tabular", family=family)
    cells = mse_eval.plan(tabular_config(model=model))
    assert [cell.config["method"] for cell in cells] == ["exact", "components", "monte_carlo"]
    exact, components, replicates = (measured(cell, tmp_path) for cell in cells)
    truth = overall(exact, "mse", BY_ESTIMATOR)
    assert list(truth) == [(name, group) for name in ESTIMATORS for group in (4, 16)]
    for key, (value, low, high) in truth.items():
        assert low == value == high
        pooled = overall(components, "mse", BY_ESTIMATOR)[key]
        repeated = overall(replicates, "mse", BY_ESTIMATOR)[key]
        assert abs(pooled[0] - value) < 4 * error(pooled, np.inf), key
        assert abs(repeated[0] - value) < 4 * error(repeated, 399), key
        assert error(pooled, np.inf) < 0.1 * value
    for metric in ("c1", "c2", "c3", "gradient_sq_norm", "vanilla_variance", "optimal_variance", "score_sq_norm",
                   "reward_variance", "value"):  # fmt: skip
        found = overall(components, metric)[metric]
        value = overall(exact, metric)[metric][0]
        assert abs(found[0] - value) < 4 * error(found, 99), metric
    best = overall(components, "optimal_group_size")["optimal_group_size"]
    assert best[1] <= overall(exact, "optimal_group_size")["optimal_group_size"][0] <= best[2]


def test_exact_rows_are_those_of_the_drawn_contexts(tmp_path):
    config = tabular_config(methods=["exact"], task=TaskConfig(name="bandit", num_questions=7, seed=3))
    rows = measured(mse_eval.plan(config)[0], tmp_path)
    task = bandit.load(config.task, config.model)
    terms = tabular.build("softmax").components
    for (name, group), (value, _, _) in overall(rows, "mse", BY_ESTIMATOR).items():
        each = [ustat.mse(terms, int(group), name)[x] for x in task.contexts]
        assert value == pytest.approx(sum(each) / 49, rel=1e-12)
    values = rows[rows["prompt_id"].notna() & (rows["metric"] == "value")]
    assert values["value"].tolist() == terms.value[task.contexts].tolist()


def test_replicate_mse_is_unbiased_for_the_sum_of_variances():
    rng = np.random.default_rng(0)
    scales = np.array([1.0, 2.0, 0.5])
    found = [replicate_mse(rng.normal(size=(8, 3)) * scales + 7, 0.95).value for _ in range(4000)]
    assert np.mean(found) == pytest.approx((scales**2).sum(), abs=4 * np.std(found) / 4000**0.5)


# Plan and identity.


def test_cells_are_told_apart_by_what_changes_numbers_alone(tmp_path):
    base = tabular_config(methods=["components"])
    plain = {cell.id for cell in mse_eval.plan(base)}
    assert len(plain) == 2  # exact comes along
    for same in (dict(results_dir=str(tmp_path)), dict(threads=1), dict(device="cpu"), dict(dry_run=True)):
        assert {cell.id for cell in mse_eval.plan(replace(base, **same))} == plain
    others: list[dict[str, Any]] = [
        dict(seeds=[1]), dict(group_sizes=[4]), dict(estimators=["grpo"]), dict(confidence=0.9),
        dict(task=TaskConfig(name="bandit", num_questions=201)),
        dict(model=replace(base.model, family_args={"seed": 1})),
    ]  # fmt: skip
    for other in others:
        assert not {cell.id for cell in mse_eval.plan(replace(base, **other))} & plain, other
    # What a method does not use is no part of its cells.
    exact, pooled = mse_eval.plan(base)
    changed = mse_eval.plan(replace(base, completions_per_prompt=50, replicates=7))
    assert changed[0].id == exact.id and changed[1].id != pooled.id
    assert mse_eval.plan(replace(base, replicates=7))[1].id == pooled.id
    assert mse_eval.plan(replace(base, temperature=0.5, micro_batch=3))[1].id == pooled.id


def test_seeds_and_methods_make_cells_and_misfits_are_refused():
    cells = mse_eval.plan(tabular_config(seeds=[0, 1, 5]))
    assert [(c.config["seed"], c.config["method"]) for c in cells] == list(
        itertools.product((0, 1, 5), ("exact", "components", "monte_carlo"))
    )
    assert len({cell.id for cell in cells}) == 9
    with pytest.raises(UserError, match="plays task=bandit"):
        mse_eval.plan(tabular_config(task=TaskConfig(name="arithmetic")))
    language = load_choice("model", BUNDLED_MODELS[0])
    with pytest.raises(UserError, match="exact needs a tabular model"):
        mse_eval.plan(tabular_config(model=language, task=TaskConfig(name="arithmetic")))


def test_estimate_counts_the_completions():
    pooled, repeated = mse_eval.plan(tabular_config())[1:]
    assert mse_eval.estimate(pooled).completions == 200 * 48
    assert mse_eval.estimate(repeated).completions == 200 * (48 + 400 * 20)


# A random causal language model.


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def language_config(folder: Path, **changes: Any) -> MseEvalConfig:
    ranges = dict(operand_min=0, operand_max=4, factor_min=1, factor_max=4)
    base = MseEvalConfig(
        model=ModelConfig(name="random", path=str(folder)),
        task=TaskConfig(name="arithmetic", num_questions=12, **ranges), group_sizes=[4, 16],
        completions_per_prompt=512, replicates=200, max_new_tokens=2, temperature=0.9, micro_batch=64, device="cpu",
    )  # fmt: skip
    return replace(base, **changes)


def cell_of(config: MseEvalConfig, method: str) -> Cell:
    return next(cell for cell in mse_eval.plan(config) if cell.config["method"] == method)


@lru_cache
def enumerated(folder: Path) -> tuple[ustat.Components, np.ndarray]:
    """Exact terms of every question and its expected gradient, from every completion of up to two tokens."""
    config = language_config(folder)
    policy, task = causal_lm.load(config.model, "cpu"), load_task(config.task)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    from small_models import Case

    terms, gradients = [], []
    for question in task.questions:
        prompt = policy.encode(question.text)
        law = every_completion(Case(policy, plain), prompt, 2, config.temperature)
        p = np.array(list(law.values()))
        assert p.sum() == pytest.approx(1, abs=1e-6)
        z = np.array([task.reward(policy.decode(tokens), question) for tokens in law])
        with Scorer(policy, config.temperature) as scorer:
            found = scorer.products(prompt, *padded(list(law)), (p * z)[None])
        norm, g2, value = found.sq_norms, float((found.sums.double() ** 2).sum()), float(p @ z)
        weighted, total = float(p @ (norm * z)), float(p @ norm)
        first = weighted * (1 - 2 * value) + value**2 * total - g2
        terms.append(
            (value, total, value * (1 - value), g2, weighted - g2, first, total * value * (1 - value) + g2,
             weighted - weighted**2 / total - g2)
        )  # fmt: skip
        gradients.append(found.sums[0].double().numpy())
    return ustat.Components(*np.array(terms).T), np.array(gradients)


@pytest.fixture(scope="module")
def language_rows(model_dir, tmp_path_factory) -> dict[str, pd.DataFrame]:
    config = language_config(model_dir)
    return {
        method: measured(cell_of(config, method), tmp_path_factory.mktemp(method))
        for method in ("components", "monte_carlo")
    }


def test_components_and_replicates_agree_with_every_completion_of_a_language_model(model_dir, language_rows):
    """Each method against the truth by enumeration, then against each other, in joint standard errors.

    The replicates' baselines come from a pool of K = 512, which adds F Var(V_hat)/G to the error of `oracle` and
    `optimal`: the estimate of that excess (`baseline_error_mse`) is taken off, and for `oracle` is itself compared
    with its exact mean F sigma^2/(K G).
    """
    terms, _ = enumerated(model_dir)
    assert (terms.value > 0.1).sum() >= 4  # there is an error to measure
    pooled = overall(language_rows["components"], "mse", BY_ESTIMATOR)
    repeated = overall(language_rows["monte_carlo"], "mse", BY_ESTIMATOR)
    excess = overall(language_rows["monte_carlo"], "baseline_error_mse", BY_ESTIMATOR)
    assert set(excess) == {(name, group) for name in ("oracle", "optimal") for group in (4, 16)}
    for (name, group), found in pooled.items():
        truth = ustat.mse(terms, int(group), name).mean() / 12
        added = excess.get((name, group), (0.0, 0.0, 0.0))
        other = repeated[name, group]
        joint = np.hypot(error(found, np.inf), error(other, 199))
        assert max(error(found, np.inf), error(other, 199)) < 0.1 * truth  # so that the comparisons tell something
        assert abs(found[0] - truth) < 4 * error(found, np.inf), (name, group)
        assert abs(other[0] - added[0] - truth) < 4 * error(other, 199), (name, group)
        assert abs(other[0] - added[0] - found[0]) < 4 * joint, (name, group)
        if name == "oracle":
            exact = (terms.score_sq_norm * terms.reward_variance).mean() / 512 / group / 12
            assert abs(added[0] - exact) < 4 * error(added, 11), group


def test_components_of_a_language_model_equal_enumeration(model_dir, language_rows):
    """c1, c2, c3 are over prompts: the truth of these 12 questions differs by what their sampling explains.

    Terms that are means over questions are compared with the exact mean of the same questions, the noise of the
    completions being less than the interval over prompts. c1 of the set is E||g||^2 less the mean of <g_i, g_j> over
    different questions.
    """
    terms, gradients = enumerated(model_dir)
    inner = gradients @ gradients.T
    between = inner.diagonal().mean() - (inner.sum() - inner.trace()) / (12 * 11)
    truth = {
        "value": terms.value.mean(), "score_sq_norm": terms.score_sq_norm.mean(),
        "reward_variance": terms.reward_variance.mean(), "vanilla_variance": terms.vanilla.mean(),
        "optimal_variance": terms.optimal.mean(), "c2": terms.first_order.mean(), "c3": terms.second_order.mean(),
        "c1": between, "gradient_sq_norm": (inner.sum() - inner.trace()) / (12 * 11),
    }  # fmt: skip
    for metric, value in truth.items():
        found = overall(language_rows["components"], metric)[metric]
        assert abs(found[0] - value) < 4 * error(found, 11), metric
    per_prompt = language_rows["components"]
    values = per_prompt[per_prompt["prompt_id"].notna()]["value"].to_numpy()
    spread = np.sqrt(terms.reward_variance / 512)
    assert np.all(np.abs(values - terms.value) < 4.5 * spread + 1e-12)


def test_pool_of_a_language_model_equals_that_of_its_score_vectors(model_dir, tmp_path, monkeypatch):
    """Every number of the pool and of the groups' gradients, from the vectors of the very same completions."""
    rollouts, seen = [], []
    draw, use = samplers.sample, language_mse.component_rows
    monkeypatch.setattr(samplers, "sample", lambda *args: rollouts.append(draw(*args)) or rollouts[-1])
    monkeypatch.setattr(language_mse, "component_rows", lambda _, found: seen.append(found) or use(_, found))
    config = language_config(model_dir, completions_per_prompt=16, micro_batch=3)
    measured(cell_of(config, "components"), tmp_path)
    pool, groups = seen[0].pool, seen[0].groups
    policy, task = causal_lm.load(config.model, "cpu"), load_task(config.task)
    tokens, mask = (torch.cat([getattr(r, name) for r in rollouts]) for name in ("tokens", "mask"))
    assert len(tokens) == 12 and pool.rewards.sum() > 5
    vectors = []
    with Scorer(policy, config.temperature) as scorer:
        for i, question in enumerate(task.questions):
            found = scorer.products(policy.encode(question.text), tokens[i], mask[i], np.eye(16))
            vectors.append(found.sums.double().numpy())
            rewards = [
                task.reward(policy.decode(t[m].tolist()), question) for t, m in zip(tokens[i], mask[i], strict=True)
            ]
            assert pool.rewards[i].tolist() == rewards
    w = np.array(vectors)
    expected = ustat.Pool.from_gram(w @ w.transpose(0, 2, 1), pool.rewards)
    for f in fields(ustat.Pool):
        truth = getattr(expected, f.name)
        np.testing.assert_allclose(
            getattr(pool, f.name), truth, rtol=0, atol=2e-5 * np.abs(truth).max(), err_msg=f.name
        )
    gradients = np.einsum("mk,mkd->md", ustat.group_gradient_weights(pool.rewards), w)
    assert groups.index.tolist() == list(range(12))
    for found, truth in (
        (groups.sq_norms, (gradients**2).sum(1)),
        (groups.with_total, gradients @ gradients.sum(0)),
    ):
        np.testing.assert_allclose(found, truth, rtol=0, atol=2e-5 * np.abs(truth).max())


def test_length_of_completions_counts_the_end_token(language_rows):
    length = overall(language_rows["components"], "completion_length")["completion_length"]
    assert 1 < length[0] < 2


# Interruption.


@pytest.mark.parametrize("method", ["components", "monte_carlo"])
def test_interrupted_cells_give_the_rows_of_uninterrupted_ones_bit_for_bit(method, model_dir, tmp_path, monkeypatch):
    """Cut off again and again, at random questions, the state saved after every batch of questions."""
    monkeypatch.setattr(Checkpoint, "save_sometimes", Checkpoint.save)
    config = language_config(model_dir, completions_per_prompt=16, replicates=4, group_sizes=[2, 4], micro_batch=2)
    cell = cell_of(config, method)
    whole, extras = mse_eval.run(cell, _made(tmp_path / "whole"), quiet)
    rng, cuts, left = np.random.default_rng(0), 0, _made(tmp_path / "cut")
    while True:
        # 12 calls for components, 24 for the replicates; every run gets a few questions further.
        progress = Interruption(at=int(rng.integers(3, 8)))
        try:
            rows, resumed = mse_eval.run(cell, left, progress)
            break
        except KeyboardInterrupt:
            cuts += 1
            assert list(left.iterdir())
    assert cuts >= 2
    pd.testing.assert_frame_equal(rows, whole, check_exact=True)
    assert resumed == extras


def test_an_unreadable_state_is_done_again(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "save_sometimes", Checkpoint.save)
    cell = cell_of(language_config(model_dir, completions_per_prompt=8, micro_batch=1), "components")
    whole, _ = mse_eval.run(cell, _made(tmp_path / "whole"), quiet)
    broken = _made(tmp_path / "broken")
    with pytest.raises(KeyboardInterrupt):
        mse_eval.run(cell, broken, Interruption(at=9))
    (broken / "pool.safetensors").write_bytes(b"torn")
    rows, _ = mse_eval.run(cell, broken, quiet)
    pd.testing.assert_frame_equal(rows, whole, check_exact=True)


def test_rows_do_not_depend_on_where_results_go_or_on_what_is_unrelated(model_dir, tmp_path):
    config = language_config(model_dir, completions_per_prompt=8, replicates=3)
    for method in ("components", "monte_carlo"):
        first = measured(cell_of(config, method), tmp_path / f"{method}-a")
        moved = replace(config, results_dir=str(tmp_path / "elsewhere"), threads=1, dry_run=True)
        second = measured(cell_of(moved, method), tmp_path / f"{method}-b")
        pd.testing.assert_frame_equal(first, second, check_exact=True)


def test_seeds_differ_and_repeat(model_dir, tmp_path):
    config = language_config(model_dir, completions_per_prompt=8, seeds=[0, 1], methods=["components"])
    zero, one = (measured(cell, tmp_path / cell.id) for cell in mse_eval.plan(config))
    again = measured(mse_eval.plan(config)[0], tmp_path / "again")
    pd.testing.assert_frame_equal(zero, again, check_exact=True)
    assert not np.array_equal(zero["value"], one["value"])


def test_too_little_memory_for_the_intervals_is_refused(model_dir, tmp_path):
    config = language_config(model_dir, gradient_memory_gib=1e-4)
    with pytest.raises(UserError, match="gradient_memory_gib.*raise it"):
        mse_eval.run(cell_of(config, "components"), tmp_path, quiet)


def test_fewer_groups_of_prompts_change_intervals_over_prompts_only(model_dir, tmp_path):
    """Memory for 11 gradients instead of 12: the estimates stay, the jackknife has two questions in a group."""
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model_dir).parameters())
    many = language_config(model_dir, completions_per_prompt=8)
    cell = cell_of(many, "components")
    few = Cell(cell.experiment, cell.config | {"gradient_memory_gib": 11.5 * 4 * parameters / 2**30}, cell.label)
    # The random numbers derive from the cell's id, which must not differ for this comparison.
    original = language_mse.cell_rng
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_mse, "cell_rng", lambda seed, identity, stream: original(seed, cell.id, stream))
        first, second = measured(cell, tmp_path / "many"), measured(few, tmp_path / "few")
    np.testing.assert_allclose(second["value"], first["value"], rtol=1e-5)
    same = first["metric"].isin(["mse", "completion_length"]) | first["prompt_id"].notna()
    np.testing.assert_allclose(second["ci_low"][same], first["ci_low"][same], rtol=1e-5)
    assert not np.allclose(second["ci_low"][~same], first["ci_low"][~same], rtol=1e-5)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# A bundled policy.


@pytest.mark.skipif(
    not (bundled_path("instruct") / "model.safetensors").is_file(), reason="the bundled weights are not built"
)
def test_components_against_monte_carlo_on_a_bundled_policy(tmp_path):
    """20 questions, K = 32, 12 replicates: within 4 joint standard errors at every G and estimator."""
    config = MseEvalConfig(
        model=load_choice("model", "bundled-instruct"), task=TaskConfig(name="arithmetic", num_questions=20),
        group_sizes=[4, 16], completions_per_prompt=32, replicates=12, device="cpu",
    )  # fmt: skip
    pooled, repeated = (measured(cell, _made(tmp_path / cell.id)) for cell in mse_eval.plan(config))
    excess = overall(repeated, "baseline_error_mse", BY_ESTIMATOR)
    scores = {}
    for key, found in overall(pooled, "mse", BY_ESTIMATOR).items():
        other, added = overall(repeated, "mse", BY_ESTIMATOR)[key], excess.get(key, (0.0, 0.0, 0.0))
        joint = np.hypot(error(found, np.inf), error(other, 11))
        scores[key] = (other[0] - added[0] - found[0]) / joint
    assert len(scores) == 8
    assert max(map(abs, scores.values())) < 4, scores


def test_a_language_model_is_the_same_cell_wherever_it_lies_and_another_with_other_weights(model_dir, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(model_dir, moved)
    here, there = (language_config(folder) for folder in (model_dir, moved))
    assert cell_of(here, "components").id == cell_of(there, "components").id
    weights = load_file(moved / "model.safetensors")
    save_file({key: value + 1e-3 for key, value in weights.items()}, moved / "model.safetensors", {"format": "pt"})
    assert cell_of(here, "components").id != cell_of(language_config(moved), "components").id
