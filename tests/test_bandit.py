"""The bandit: contexts as questions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_repro.config import ModelConfig, TaskConfig
from grpo_repro.errors import UserError
from grpo_repro.tasks import bandit


def test_bandit_asks_each_context_once():
    model = ModelConfig(name="tabular", kind="tabular", family="softmax", family_args={"contexts": 5})
    task = bandit.load(TaskConfig(name="bandit"), model)
    assert task.name == "bandit"
    assert [question.id for question in task.questions] == ["0", "1", "2", "3", "4"]
    q = task.policy.reward_probs
    for x, question in enumerate(task.questions):
        assert task.reward(question.answer, question) == q[x].max()
        assert [task.reward(f" {a}\n", question) for a in range(8)] == q[x].tolist()
        assert task.reward("8", question) == task.reward("-1", question) == task.reward("", question) == 0
    assert bandit.load(TaskConfig(name="bandit"), model).data_hash == task.data_hash
    other = replace(model, family_args={"contexts": 5, "seed": 1})
    assert bandit.load(TaskConfig(name="bandit"), other).data_hash != task.data_hash


def test_bandit_refuses_what_it_cannot_use():
    model = ModelConfig(name="tabular", kind="tabular", family="softmax")
    with pytest.raises(UserError, match="use model=tabular"):
        bandit.load(TaskConfig(name="bandit"))
    with pytest.raises(UserError, match="use model=tabular"):
        bandit.load(TaskConfig(name="bandit"), ModelConfig(name="hf"))
    with pytest.raises(UserError, match="task.num_questions=20 does not apply"):
        bandit.load(TaskConfig(name="bandit", num_questions=20), model)
