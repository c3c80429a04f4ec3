"""Logits in parts and layers that are run again: the same gradients and scores, in memory that does not grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import every_architecture, make, padded
from test_scores import COMPLETIONS, WEIGHTS, assert_equal_to, reference
from test_update import PROMPTS, TEMPERATURE, distance, gradient, plain_gradient, rollout_of

from grpo_repro.engine import logits
from grpo_repro.engine.attention import GroupedCache, last_hidden, prefill
from grpo_repro.engine.check import self_check
from grpo_repro.engine.layers import decoder_layers, recomputed
from grpo_repro.engine.scores import Scorer
from grpo_repro.engine.update import accumulate_gradient, log_probs
from grpo_repro.errors import UserError


@every_architecture
@pytest.mark.parametrize("positions", [1, 3])
def test_gradients_with_logits_in_parts_are_those_of_the_plain_loss(architecture, positions, monkeypatch):
    """Soft caps, scaled embeddings and tied output layers too; completions end at different places."""
    monkeypatch.setattr(logits, "LOGITS", 23 * positions)
    case = make(architecture)
    rollout = rollout_of(case)
    advantages = np.random.default_rng(0).normal(size=(4, 5))
    wanted = plain_gradient(case, rollout, advantages)
    for micro_batch in (2, 256):
        assert distance(gradient(case, rollout, advantages, micro_batch), wanted) < 1e-5


@every_architecture
def test_the_trainer_gives_the_log_probabilities_that_the_sampler_gave(architecture, monkeypatch):
    """Prompts of different lengths, padded on the left; two end tokens; another temperature than 1."""
    case = make(architecture)
    rollout = rollout_of(case, group=6, length=5)
    assert len(set(rollout.lengths.flatten().tolist())) > 1
    for limit in (1 << 25, 23 * 2):
        monkeypatch.setattr(logits, "LOGITS", limit)
        for micro_batch in (1, 5, 256):
            found = log_probs(case.policy, PROMPTS, rollout, TEMPERATURE, micro_batch)
            torch.testing.assert_close(found, rollout.log_probs, rtol=0, atol=2e-5)


@every_architecture
@pytest.mark.parametrize("worth", [0.0, float("inf")], ids=["shared", "together"])
def test_scores_of_the_output_layer_in_smaller_batches_change_nothing(architecture, worth, monkeypatch):
    monkeypatch.setattr(logits, "LOGITS", 23 * 13)
    case, vectors, values = reference(architecture, "long")
    tokens, mask = padded(COMPLETIONS)
    with Scorer(case.policy, TEMPERATURE, worth_sharing=worth) as scorer:
        assert scorer._at_once(tokens.shape[1]) == 2 < len(COMPLETIONS)
        assert_equal_to(scorer.products([5, 6, 9, 11, 3, 8, 4, 4], tokens, mask, WEIGHTS), vectors, values, WEIGHTS)


def test_the_decoder_is_left_as_it_was():
    case = make("gemma2")
    cache = GroupedCache(torch.ones(1, 3, dtype=torch.bool))
    prefill(case.policy.model, torch.tensor([[3, 4, 5]]), cache)
    hidden = last_hidden(case.policy.model, torch.tensor([[6, 7]]), cache)
    assert logits._head(case.policy.model, hidden[0]).shape == (2, 23)
    assert "forward" not in vars(case.policy.model.get_decoder())
    with recomputed(case.policy.model):
        assert all("forward" in vars(block) for block in decoder_layers(case.policy.model))
    assert not any("forward" in vars(block) for block in decoder_layers(case.policy.model))
    self_check(case.policy, [3, 4, 5])


@every_architecture
def test_layers_that_are_run_again_change_no_bit_of_the_gradient(architecture):
    case = make(architecture)
    rollout = rollout_of(case)
    advantages = np.random.default_rng(0).normal(size=(4, 5))
    found = []
    for recompute in (False, True):
        model = case.policy.model.requires_grad_(True)
        model.zero_grad()
        accumulate_gradient(case.policy, PROMPTS, rollout, advantages, TEMPERATURE, 7, recompute=recompute)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_an_architecture_without_named_layers_is_refused():
    with pytest.raises(UserError, match="layers of Linear are not known.*gradient_checkpointing=false"):
        decoder_layers(torch.nn.Linear(2, 2))


# Memory: the largest resident size of a process of its own, less what it had before.


def peak(**job: object) -> float:
    """MiB that a job takes at its peak above the loaded model; large tensors are given back as they are freed."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "memory_job.py"), json.dumps(job)],
        capture_output=True, text=True, timeout=300, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["update", "scores", "last_layer"])
def test_memory_is_flat_in_the_group_size_and_the_micro_batch(what):
    """A vocabulary of 150,000: all logits of the largest job take 32 x 8 x 150,000 x 4 bytes = 146 MiB, several times.

    The control is the same job with all logits at once.
    """
    small = peak(what=what, group=8, micro_batch=8, length=8)
    for micro_batch in (8, 32):
        assert peak(what=what, group=32, micro_batch=micro_batch, length=8) < 1.2 * small + 20
    assert peak(what=what, group=32, micro_batch=32, length=8, logits=1 << 40) > 2.5 * small


@pytest.mark.slow
def test_layers_that_are_run_again_take_less():
    deep = dict(what="update", group=32, micro_batch=32, length=64, vocabulary=50, layers=24)
    assert peak(**deep, recompute=True) < 0.5 * peak(**deep)
