"""Completions by a real vLLM engine: their law, their log-probabilities, and the weights that they come from."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from small_models import Case, completions, seeds
from wide import CONFIG, LONG

from grpo_repro.config import load_choice
from grpo_repro.engine import vllm_engine
from grpo_repro.engine.agreement import Agreement, compare
from grpo_repro.engine.sample import Rollout, greedy
from grpo_repro.engine.vllm_sampler import VllmSampler
from grpo_repro.errors import NotFinite, RunError, UserError
from grpo_repro.policies import causal_lm

PROMPTS = [[5, 6, 9, 11, 3], [8], LONG, [4, 4, 4, 12, 13, 14], LONG[:40] + [3]]


def listed(rollout: Rollout, prompt: int) -> list[tuple[int, ...]]:
    pairs = zip(rollout.tokens[prompt].tolist(), rollout.lengths[prompt].tolist(), strict=True)
    return [tuple(tokens[:length]) for tokens, length in pairs]


def largest_error(case: Case, rollout: Rollout, prompts: list[list[int]], temperature: float) -> float:
    """Largest difference of the rollout's log-probabilities from plain transformers passes."""
    errors = [0.0]
    for i, prompt in enumerate(prompts):
        for g, tokens in enumerate(listed(rollout, i)):
            found = rollout.log_probs[i, g, : len(tokens)]
            errors.append(float((found - case.log_probs(prompt, list(tokens), temperature)).abs().max()))
    return max(errors)


def p_value(case: Case, rollout: Rollout, prompt: list[int], temperature: float) -> float:
    """Chi-square test of a group of completions against the exact law of every completion."""
    group, length = rollout.tokens.shape[1:]
    exact = completions(case, prompt, length, temperature)
    counts = Counter(listed(rollout, 0))
    assert set(counts) <= set(exact)
    common = [c for c, p in exact.items() if group * p >= 10]
    observed = np.array([counts[c] for c in common])
    expected = np.array([group * exact[c] for c in common])
    rest = group - observed.sum(), group - expected.sum()
    return float(stats.chisquare(np.append(observed, rest[0]), np.append(expected, rest[1])).pvalue)


@pytest.mark.parametrize(("prompt", "temperature"), [(LONG, 0.8), ([8], 1.5)])
def test_completions_follow_the_policy(pair, prompt, temperature):
    """20,000 completions of two tokens, against the exact probability of every one of them."""
    case, sampler = pair
    rollout = sampler.sample([prompt], seeds(1, 1), 20_000, 2, temperature)
    p = p_value(case, rollout, prompt, temperature)
    print(f"chi-square p = {p:.3f} at temperature {temperature}")
    assert p > 1e-3
    assert p_value(case, rollout, prompt, temperature * 1.1) < 1e-3  # it would see a wrong temperature


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_log_probs_are_those_of_the_distribution_sampled_from(pair, temperature):
    case, sampler = pair
    rollout = sampler.sample(PROMPTS, seeds(2, len(PROMPTS)), 16, 6, temperature)
    error = largest_error(case, rollout, PROMPTS, temperature)
    print(f"largest difference of log-probabilities: {error:.2g}")
    assert error < 1e-3
    assert (rollout.log_probs[~rollout.mask] == 0).all()
    agreement = Agreement()
    own = compare(case.policy, PROMPTS, rollout, temperature, 64, agreement)
    assert agreement.tokens == int(rollout.mask.sum())
    assert agreement.largest == float((own.log_probs - rollout.log_probs).abs().max()) < 1e-3
    assert agreement.mean <= agreement.largest


def test_every_end_token_ends_and_counts(pair):
    case, sampler = pair
    rollout = sampler.sample(PROMPTS, seeds(3, len(PROMPTS)), 200, 6, 1.5)
    last = rollout.tokens.gather(-1, (rollout.lengths - 1)[..., None])[..., 0]
    ends = torch.isin(last, torch.tensor(case.policy.eos_ids))
    assert len(case.policy.eos_ids) == 2
    assert {int(t) for t in last[ends].unique()} == set(case.policy.eos_ids)
    assert (rollout.finished == ends).all()
    assert (rollout.lengths[~ends] == 6).all()
    before = torch.arange(6) < (rollout.lengths - 1)[..., None]
    assert not torch.isin(rollout.tokens[before], torch.tensor(case.policy.eos_ids)).any()
    assert (rollout.tokens[~rollout.mask] == case.policy.pad_id).all()


def test_greedy_decoding_is_that_of_torch(pair):
    case, sampler = pair
    ours, theirs = greedy(case.policy, PROMPTS, 6), sampler.greedy(PROMPTS, 6)
    assert (ours.tokens == theirs.tokens).all() and (ours.mask == theirs.mask).all()
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=1e-3, rtol=0)


def test_each_completion_has_randomness_of_its_own(pair):
    _, sampler = pair
    prompts = [[8]] * 2
    a, b, again = (sampler.sample(prompts, seeds(n, 2), 50, 6, 1.5).tokens for n in (5, 6, 5))
    assert (a == again).float().mean() > 0.99  # best effort: rounding may flip one
    for one, other in ((a, b), (a[0], a[1]), (a[0, 1:], a[1, :-1])):
        assert (one == other).all(-1).float().mean() < 0.5


def moved(case: Case, scale: float) -> None:
    """Change the policy and its plain copy alike."""
    torch.manual_seed(0)
    for mine, plain in zip(case.policy.model.parameters(), case.plain.parameters(), strict=True):
        mine.data += scale * torch.randn_like(mine)
        plain.data.copy_(mine.data)


def test_an_update_is_visible_in_the_next_completions(pair):
    case, sampler = pair
    sampler.sample(PROMPTS, seeds(4, len(PROMPTS)), 4, 6)
    moved(case, 0.05)
    stale = sampler.sample(PROMPTS, seeds(4, len(PROMPTS)), 4, 6)
    assert largest_error(case, stale, PROMPTS, 1.0) > 0.05
    with pytest.raises(UserError, match="do not compute the same policy; use sampler=torch"):
        compare(case.policy, PROMPTS, stale, 1.0, 64, Agreement())
    sampler.policy_moved()
    start = time.monotonic()
    fresh = sampler.sample(PROMPTS, seeds(4, len(PROMPTS)), 4, 6)
    print(f"push and sample: {time.monotonic() - start:.3f} s")
    assert largest_error(case, fresh, PROMPTS, 1.0) < 1e-3
    assert p_value(case, sampler.sample([LONG], seeds(7, 1), 20_000, 2), LONG, 1.0) > 1e-3


def test_a_stale_prefix_cache_would_show(pair, monkeypatch):
    """Without the reset, prompts of whole blocks read keys of the old weights; with it, they do not."""
    case, sampler = pair
    sampler.sample([LONG, [8]], seeds(8, 2), 4, 6)
    moved(case, 0.05)
    sampler.policy_moved()
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine.Engine, "reset_cache", lambda self: None)
        stale = sampler.sample([LONG, [8]], seeds(8, 2), 4, 6)
    assert largest_error(case, stale.part(slice(0, 1)), [LONG], 1.0) > 0.01
    assert largest_error(case, stale.part(slice(1, 2)), [[8]], 1.0) < 1e-3  # no whole block: nothing is cached
    sampler.policy_moved()
    fresh = sampler.sample([LONG, [8]], seeds(8, 2), 4, 6)
    assert largest_error(case, fresh, [LONG, [8]], 1.0) < 1e-3


def test_weights_that_are_not_finite_are_told(pair):
    case, sampler = pair
    next(case.policy.model.parameters()).data.fill_(float("nan"))
    sampler.policy_moved()
    with pytest.raises(NotFinite, match="not finite"):
        sampler.sample([[8]], seeds(9, 1), 4, 6)


def test_an_empty_prompt_is_refused(pair):
    with pytest.raises(UserError, match="a prompt has no tokens"):
        pair[1].sample([[]], seeds(9, 1), 4, 6)


def test_a_killed_engine_is_told_and_the_next_one_is_new(loaded):
    _, sampler = loaded
    engine = sampler.engine.llm.llm_engine.engine_core.resources.engine_manager.processes[0]
    os.kill(engine.pid, signal.SIGKILL)
    time.sleep(1)
    with pytest.raises(RunError, match="the vLLM engine has died.*goes on from the last saved state"):
        sampler.sample([[8]], seeds(9, 1), 4, 6)
    assert vllm_engine._running == []
    assert not sampler.engine.folder.exists()


def test_heads_that_the_cpu_attention_lacks_are_refused_before_it_starts():
    model = load_choice("model", "bundled-base")
    policy = causal_lm.load(model, "cpu")
    with pytest.raises(UserError, match="heads of width 24.*use sampler=torch"):
        VllmSampler.start(policy, model, CONFIG, [[5]])
