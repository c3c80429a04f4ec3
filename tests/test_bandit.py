"""The bandit: contexts as questions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from grpo_repro.config import ModelConfig, TaskConfig
from grpo_repro.errors import UserError
from grpo_repro.tasks import bandit


def test_bandit_asks_contexts_drawn_from_their_distribution():
    model = ModelConfig(name="tabular", kind="tabular", family="softmax", family_args={"contexts": 5})
    config = TaskConfig(name="bandit", num_questions=2000)
    task = bandit.load(config, model)
    assert task.name == "bandit"
    assert [question.id for question in task.questions] == [str(i) for i in range(2000)]
    q, probs = task.policy.reward_probs, task.policy.context_probs
    for x, question in zip(task.contexts[:50], task.questions[:50], strict=True):
        assert task.reward(question.answer, question) == q[x].max()
        assert [task.reward(f" {a}\n", question) for a in range(8)] == q[x].tolist()
        assert task.reward("8", question) == task.reward("-1", question) == task.reward("", question) == 0
    counts = np.bincount(task.contexts, minlength=5)
    assert chisquare(counts, 2000 * probs).pvalue > 1e-3
    again, other = bandit.load(config, model), bandit.load(replace(config, seed=1), model)
    assert (again.contexts == task.contexts).all() and (other.contexts != task.contexts).any()


def test_the_data_hash_tells_families_apart():
    model = ModelConfig(name="tabular", kind="tabular", family="softmax", family_args={"contexts": 5})
    task = bandit.load(TaskConfig(name="bandit"), model)
    assert bandit.load(TaskConfig(name="bandit"), model).data_hash == task.data_hash
    other = replace(model, family_args={"contexts": 5, "seed": 1})
    assert bandit.load(TaskConfig(name="bandit"), other).data_hash != task.data_hash


def test_bandit_refuses_what_it_cannot_use():
    model = ModelConfig(name="tabular", kind="tabular", family="softmax")
    with pytest.raises(UserError, match="model=tabular"):
        bandit.load(TaskConfig(name="bandit"))
    with pytest.raises(UserError, match="model=tabular"):
        bandit.load(TaskConfig(name="bandit"), ModelConfig(name="hf"))
    with pytest.raises(UserError, match="task.operand_max=20 does not apply"):
        bandit.load(TaskConfig(name="bandit", operand_max=20), model)
