"""Sampling against plain transformers forward passes and against the exact law of every completion."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from small_models import Case, completions, every_architecture, make, seeds

from grpo_repro.engine.sample import Rollout, pad_left, sample, uniforms
from grpo_repro.errors import UserError

PROMPTS = [[5, 6, 9, 11, 3], [8, 1], [4, 4, 4, 12, 13, 14, 15, 16, 17, 18, 19], [10], [3, 20, 21, 22, 5, 6]]


def drawn(case: Case, prompts: list[list[int]], group: int, length: int, temperature: float = 0.8, seed: int = 1):
    return sample(case.policy, prompts, uniforms(seeds(seed, len(prompts)), group, length), temperature)


def listed(rollout: Rollout, prompt: int) -> list[tuple[int, ...]]:
    """The completions of a prompt without padding."""
    pairs = zip(rollout.tokens[prompt].tolist(), rollout.lengths[prompt].tolist(), strict=True)
    return [tuple(tokens[:length]) for tokens, length in pairs]


# Log-probabilities.


@every_architecture
@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_log_probs_equal_a_plain_forward_pass(architecture, temperature):
    case = make(architecture)
    rollout = drawn(case, PROMPTS, group=8, length=7, temperature=temperature)
    for i, prompt in enumerate(PROMPTS):
        for g, tokens in enumerate(listed(rollout, i)):
            expected = case.log_probs(prompt, list(tokens), temperature)
            found = rollout.log_probs[i, g, : len(tokens)]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            assert not rollout.log_probs[i, g, len(tokens) :].any()


@every_architecture
def test_neither_batch_nor_order_nor_padding_changes_a_completion(architecture):
    case = make(architecture)
    numbers = uniforms(seeds(3, len(PROMPTS)), 8, 6)
    together = sample(case.policy, PROMPTS, numbers, 0.8)
    order = [3, 0, 4, 2, 1]
    reordered = sample(case.policy, [PROMPTS[i] for i in order], numbers[order], 0.8)
    for place, i in enumerate(order):
        alone = sample(case.policy, [PROMPTS[i]], numbers[[i]], 0.8)
        for other, row in ((reordered, place), (alone, 0)):
            assert torch.equal(other.tokens[row], together.tokens[i])
            assert torch.equal(other.mask[row], together.mask[i])
            assert torch.equal(other.finished[row], together.finished[i])
            torch.testing.assert_close(other.log_probs[row], together.log_probs[i], rtol=0, atol=1e-5)
    fewer = sample(case.policy, PROMPTS[:1], numbers[:1, :5], 0.8)
    assert torch.equal(fewer.tokens[0], together.tokens[0, :5])


def test_longer_padding_of_the_prompt_changes_nothing():
    case = make("gemma2")
    numbers = uniforms(seeds(5, 2), 6, 5)
    alone = sample(case.policy, [PROMPTS[1]], numbers[:1], 0.8)
    padded = sample(case.policy, [PROMPTS[1], [3] * 60], numbers, 0.8)
    assert torch.equal(padded.tokens[0], alone.tokens[0])
    torch.testing.assert_close(padded.log_probs[0], alone.log_probs[0], rtol=0, atol=1e-5)
    tokens, mask = pad_left([PROMPTS[1], [3] * 4], 0, torch.device("cpu"))
    assert tokens.tolist() == [[0, 0, 8, 1], [3, 3, 3, 3]]
    assert mask.tolist() == [[False, False, True, True], [True] * 4]


def test_a_longer_limit_only_continues():
    case = make("llama")
    numbers = uniforms(seeds(6, 2), 10, 9)
    long = sample(case.policy, PROMPTS[:2], numbers, 0.8)
    short = sample(case.policy, PROMPTS[:2], np.ascontiguousarray(numbers[..., :4]), 0.8)
    assert torch.equal(short.tokens, long.tokens[..., :4])
    torch.testing.assert_close(short.log_probs, long.log_probs[..., :4], rtol=0, atol=1e-6)


# Ends.


@every_architecture
def test_every_end_token_ends_and_counts(architecture):
    case = make(architecture, vocab=9, eos=(2, 5, 7))
    rollout = drawn(case, [[4, 3]] * 3, group=60, length=5)
    last = set()
    for i in range(3):
        for g, tokens in enumerate(listed(rollout, i)):
            assert not set(tokens[:-1]) & {2, 5, 7}
            assert bool(rollout.finished[i, g]) == (tokens[-1] in (2, 5, 7))
            assert rollout.finished[i, g] or len(tokens) == 5
            assert rollout.mask[i, g].tolist() == [t < len(tokens) for t in range(5)]
            assert not rollout.tokens[i, g, len(tokens) :].any()
            assert (rollout.log_probs[i, g, : len(tokens)] < 0).all()
            last.add(tokens[-1])
    assert {2, 5, 7} <= last


def test_without_end_tokens_every_completion_is_full():
    case = make("qwen2", eos=())
    rollout = drawn(case, PROMPTS[:2], group=5, length=4)
    assert rollout.mask.all() and not rollout.finished.any()


# Distribution.

PROMPT = [4, 3]


@pytest.fixture(scope="module", params=["qwen2", "gemma2"])
def tiny(request) -> tuple[Case, Rollout, dict[tuple[int, ...], float]]:
    """Twenty thousand completions of one prompt, and the exact law of completions of up to three tokens."""
    case = make(request.param, vocab=6, seed=2, noise=0.3, eos=(2, 5))
    rollout = drawn(case, [PROMPT, [1, 4, 3, 0], PROMPT], group=20_000, length=3, temperature=0.7)
    return case, rollout, completions(case, PROMPT, 3, 0.7)


def chi_square(counts: Counter, law: dict, number: int) -> float:
    """P-value, outcomes with an expectation below five put together."""
    assert not set(counts) - set(law)
    expected = np.array([number * p for p in law.values()])
    observed = np.array([counts[key] for key in law], dtype=float)
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def test_frequencies_follow_the_exact_law(tiny):
    _, rollout, law = tiny
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
    assert len(law) > 60
    for row in (0, 2):
        assert chi_square(Counter(listed(rollout, row)), law, 20_000) > 1e-3


def test_the_law_of_another_temperature_is_told_apart(tiny):
    case, rollout, _ = tiny
    assert chi_square(Counter(listed(rollout, 0)), completions(case, PROMPT, 3, 0.8), 20_000) < 1e-6


def test_completions_of_a_group_are_independent(tiny):
    """Pairs of a group's completions, which share rows while they agree, against the product of the law."""
    _, rollout, law = tiny
    found = listed(rollout, 0)
    first = [tokens[0] for tokens in found]
    marginal = Counter({token: sum(p for key, p in law.items() if key[0] == token) for token in set(first)})
    pairs = Counter(zip(first[::2], first[1::2], strict=True))
    product = {(a, b): p * q for a, p in marginal.items() for b, q in marginal.items()}
    assert chi_square(pairs, product, 10_000) > 1e-3
    # Whole completions agree within a pair as often as independent ones do.
    agree = sum(a == b for a, b in zip(found[::2], found[1::2], strict=True))
    expected = sum(p * p for p in law.values())
    assert abs(agree - 10_000 * expected) < 4 * np.sqrt(10_000 * expected * (1 - expected))
    # Two groups of the same prompt, in one batch, agree no more often either.
    agree = sum(a == b for a, b in zip(found, listed(rollout, 2), strict=True))
    assert abs(agree - 20_000 * expected) < 4 * np.sqrt(20_000 * expected * (1 - expected))


def test_second_tokens_are_independent_of_the_company_given_the_first(tiny):
    """Pairs whose first tokens agree follow one row and then part: second tokens must be independent."""
    _, rollout, law = tiny
    found = listed(rollout, 0)
    mass = Counter()
    for key, p in law.items():
        mass[key[:1]] += p * (len(key) > 1)
    head = max((key for key in mass), key=mass.__getitem__)
    second = Counter()
    for key, p in law.items():
        if key[:1] == head and len(key) > 1:
            second[key[1]] += p
    total = sum(second.values())
    going = [tokens[1] for tokens in found if tokens[:1] == head and len(tokens) > 1]
    pairs = Counter(zip(going[: len(going) // 2 * 2 : 2], going[1::2], strict=False))
    product = {(a, b): p * q / total**2 for a, p in second.items() for b, q in second.items()}
    assert sum(pairs.values()) > 500
    assert chi_square(pairs, product, sum(pairs.values())) > 1e-3


# Random numbers.


def test_same_seeds_same_tokens_other_seeds_other_tokens():
    case = make("llama")
    first, again, other = (drawn(case, PROMPTS, 8, 5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.log_probs, again.log_probs)
    assert not torch.equal(first.tokens, other.tokens)


def test_the_global_generators_are_neither_read_nor_moved():
    case = make("llama")
    torch.manual_seed(0)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = drawn(case, PROMPTS, 4, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    torch.manual_seed(99)
    assert torch.equal(drawn(case, PROMPTS, 4, 4).tokens, first.tokens)


def test_uniforms_of_a_prompt_depend_on_its_seed_alone():
    many = uniforms(seeds(0, 4), 3, 5)
    assert np.array_equal(uniforms(seeds(0, 4)[2:3], 3, 5)[0], many[2])
    assert len(np.unique(many)) == many.size
    assert stats.kstest(uniforms(seeds(1, 50), 20, 10).ravel(), "uniform").pvalue > 1e-3


def test_inverse_distribution_function_at_the_ends():
    case = make("qwen2", vocab=6)
    lowest = sample(case.policy, [PROMPT], np.zeros((1, 1, 1)), 1.0)
    highest = sample(case.policy, [PROMPT], np.full((1, 1, 1), np.nextafter(1, 0)), 1.0)
    assert (lowest.tokens.item(), highest.tokens.item()) == (0, 5)


# Refusals.


def test_an_empty_prompt_and_broken_weights_are_refused():
    case = make("qwen2")
    with pytest.raises(UserError, match="no tokens"):
        drawn(case, [[3], []], 2, 2)
    next(iter(case.policy.model.parameters())).data[3] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        drawn(case, [[3, 4]], 2, 2)
