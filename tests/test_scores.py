"""Scores from factors against one backward pass for each completion, in float64, through the plain model."""

from __future__ import annotations

import copy
from functools import lru_cache

import numpy as np
import pytest
import torch
from small_models import ARCHITECTURES, Case, every_architecture, make, padded
from torch import Tensor

from grpo_repro.engine import factors, scores
from grpo_repro.engine.factors import Factors, Use
from grpo_repro.engine.scores import ScoreProducts, Scorer, unique_completions

PROMPTS = {"long": [5, 6, 9, 11, 3, 8, 4, 4], "one": [8], "padding": [0, 5, 0, 6, 9]}
# The last two repeat others; lengths 1 to 6; token 0, the padding token, is an ordinary one here.
COMPLETIONS = [
    (5, 9, 2), (7,), (10, 11, 12, 13, 14, 15), (0, 0, 3, 2), (22, 21, 20, 19, 18, 17), (5, 9, 1, 4), (4, 2), (7,),
    (5, 9, 2),
]  # fmt: skip
TEMPERATURE = 0.8
WEIGHTS = np.random.default_rng(0).normal(size=(3, len(COMPLETIONS)))

shared_or_not = pytest.mark.parametrize("worth", [0.0, float("inf")], ids=["shared", "together"])


@lru_cache
def reference(architecture: str, prompt: str, untied: bool = False) -> tuple[Case, Tensor, Tensor]:
    """The case, every completion's score and its log-probability, by one backward pass each."""
    case = make(architecture)
    return case, *backward_passes(case, PROMPTS[prompt], COMPLETIONS)


def backward_passes(case: Case, prompt: list[int], completions: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    model = copy.deepcopy(case.plain).double().requires_grad_(True)
    rows, log_probs = [], []
    for completion in completions:
        model.zero_grad(set_to_none=True)
        logits = model(torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits / TEMPERATURE, -1)
        value = table.gather(-1, torch.tensor(completion)[:, None]).sum()
        value.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        rows.append(torch.cat([g.flatten() for g in grads]))
        log_probs.append(value.detach())
    return torch.stack(rows), torch.stack(log_probs)


def assert_equal_to(found: ScoreProducts, vectors: Tensor, log_probs: Tensor, weights: np.ndarray) -> None:
    """Norms to 1e-5 each; products and sums to 1e-5 of the largest of their kind."""
    norms, sums = (vectors**2).sum(1), torch.from_numpy(weights) @ vectors
    products = vectors @ sums.T
    np.testing.assert_allclose(found.sq_norms, norms, rtol=1e-5)
    np.testing.assert_allclose(found.log_probs, log_probs, rtol=1e-5)
    np.testing.assert_allclose(found.products, products, rtol=0, atol=1e-5 * products.abs().max().item())
    assert found.sums.shape == sums.shape
    for got, expected in zip(found.sums.double(), sums, strict=True):
        assert (got - expected).norm() < 1e-5 * expected.norm()


def scored(case: Case, prompt: list[int], completions=COMPLETIONS, weights=WEIGHTS, micro_batch=256, extra=0):
    tokens, mask = padded(completions, extra)
    with Scorer(case.policy, TEMPERATURE, micro_batch) as scorer:
        return scorer.products(prompt, tokens, mask, weights)


# Against autograd.


@every_architecture
@shared_or_not
@pytest.mark.parametrize("prompt", list(PROMPTS))
def test_norms_products_and_sums_equal_backward_passes(architecture, worth, prompt, monkeypatch):
    monkeypatch.setattr(scores, "WORTH_SHARING", worth)
    case, vectors, log_probs = reference(architecture, prompt)
    assert_equal_to(scored(case, PROMPTS[prompt]), vectors, log_probs, WEIGHTS)


@every_architecture
@shared_or_not
def test_neither_micro_batch_nor_padding_changes_scores(architecture, worth, monkeypatch):
    monkeypatch.setattr(scores, "WORTH_SHARING", worth)
    case, vectors, log_probs = reference(architecture, "long")
    for micro_batch, extra in ((4, 0), (1, 3), (256, 5), (len(COMPLETIONS) - 1, 1)):
        found = scored(case, PROMPTS["long"], micro_batch=micro_batch, extra=extra)
        assert_equal_to(found, vectors, log_probs, WEIGHTS)


def test_the_content_of_padding_is_never_read():
    case, vectors, log_probs = reference("qwen2", "long")
    tokens, mask = padded(COMPLETIONS, extra=2)
    noise = torch.randint(0, 23, tokens.shape, generator=torch.Generator().manual_seed(0))
    with Scorer(case.policy, TEMPERATURE) as scorer:
        found = scorer.products(PROMPTS["long"], torch.where(mask, tokens, noise), mask, WEIGHTS)
    assert_equal_to(found, vectors, log_probs, WEIGHTS)


@every_architecture
def test_heads_tied_and_untied(architecture):
    """The architectures hold both: tied matrices are counted once, with both of their uses added."""
    case, vectors, _ = reference(architecture, "long")
    names = [name for name, _ in case.policy.model.named_parameters()]
    tied = case.policy.model.get_output_embeddings().weight is case.policy.model.get_input_embeddings().weight
    assert ("lm_head.weight" in names) == (not tied)
    assert vectors.shape[1] == sum(p.numel() for p in case.policy.model.parameters())
    assert {a for a in ARCHITECTURES if a in ("llama", "qwen3", "mistral")} == {
        a for a in ARCHITECTURES if "lm_head.weight" in dict(make(a).policy.model.named_parameters())
    }


def test_the_padding_row_of_an_embedding_has_no_gradient_as_in_torch():
    """Embeddings with a padding index drop that row's gradient; the output's use of a tied row remains."""
    case, vectors, _ = reference("qwen2", "padding")
    assert case.policy.model.get_input_embeddings().padding_idx == 0
    found = scored(case, PROMPTS["padding"], weights=np.eye(len(COMPLETIONS)))
    width = case.policy.model.config.hidden_size
    row = vectors[:, :width]
    assert row.abs().max() > 0
    np.testing.assert_allclose(found.sums[:, :width], row, rtol=0, atol=1e-5 * row.abs().max().item())
    untied, vectors, _ = reference("llama", "padding")
    assert untied.policy.model.get_input_embeddings().padding_idx is None
    assert vectors[:, :width].abs().max() > 0


def test_end_token_counts_and_a_score_has_mean_zero():
    """Over every completion of one token, E W = 0: sums of p W vanish beside the norms."""
    case = make("gemma2")
    every = [(token,) for token in range(23)]
    tokens, mask = padded(every)
    with Scorer(case.policy, TEMPERATURE) as scorer:
        probs = np.exp(scorer.products(PROMPTS["long"], tokens, mask).log_probs)
        assert probs.sum() == pytest.approx(1, abs=1e-5)
        found = scorer.products(PROMPTS["long"], tokens, mask, probs[None])
    assert found.sums.norm() < 1e-5 * float(np.sqrt(found.sq_norms @ probs))


# Ways of computing the same.


@every_architecture
def test_norms_alone_and_sums_alone_equal_those_of_products(architecture):
    case, vectors, _ = reference(architecture, "long")
    tokens, mask = padded(COMPLETIONS)
    prompt = PROMPTS["long"]
    for micro_batch in (3, 256):
        with Scorer(case.policy, TEMPERATURE, micro_batch) as scorer:
            alone = scorer.products(prompt, tokens, mask)
            out = torch.ones(3, scorer.dim)
            scorer.add_sums(prompt, tokens, mask, WEIGHTS, out)
        assert alone.products.shape == (len(COMPLETIONS), 0) and alone.sums.shape == (0, scorer.dim)
        np.testing.assert_allclose(alone.sq_norms, (vectors**2).sum(1), rtol=1e-5)
        expected = 1 + torch.from_numpy(WEIGHTS) @ vectors
        assert (out.double() - expected).norm() < 1e-5 * expected.norm()


@every_architecture
def test_duplicates_merge_without_a_change(architecture):
    case, vectors, log_probs = reference(architecture, "long")
    tokens, mask = padded(COMPLETIONS, extra=2)
    distinct, kept, index = unique_completions(tokens, mask)
    assert len(distinct) == len(set(COMPLETIONS)) == 7
    assert distinct.shape[1] == 6
    merged = np.stack([np.bincount(index, w, len(distinct)) for w in WEIGHTS])
    with Scorer(case.policy, TEMPERATURE) as scorer:
        found = scorer.products(PROMPTS["long"], distinct, kept, merged)
    spread = ScoreProducts(found.sq_norms[index], found.products[index], found.sums, found.log_probs[index])
    assert_equal_to(spread, vectors, log_probs, WEIGHTS)


def test_unique_completions_tell_padding_from_a_token_of_the_same_id():
    tokens = torch.tensor([[3, 0, 0], [3, 0, 0], [3, 0, 0], [3, 5, 9]])
    mask = torch.tensor([[True, False, False], [True, True, False], [True, False, False], [True, False, False]])
    distinct, kept, index = unique_completions(tokens, mask)
    assert index[0] == index[2] == index[3] != index[1]
    assert sorted((tuple(t[m].tolist())) for t, m in zip(distinct, kept, strict=True)) == [(3,), (3, 0)]


@pytest.mark.parametrize("block", [1, 700, 5000])
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gemma2"])
def test_blocks_of_rows_change_nothing(architecture, block, monkeypatch):
    monkeypatch.setattr(factors, "BLOCK", block)
    case, vectors, log_probs = reference(architecture, "long")
    assert_equal_to(scored(case, PROMPTS["long"]), vectors, log_probs, WEIGHTS)


@every_architecture
@pytest.mark.parametrize("cheaper", [True, False], ids=["factors", "blocks"])
def test_norms_do_not_depend_on_the_path(architecture, cheaper, monkeypatch):
    """Every parameter from its factors, or every one from materialised gradients."""
    monkeypatch.setattr(
        Factors, "cheaper_from_factors", lambda self: cheaper and self.dense is None and bool(self.uses)
    )
    monkeypatch.setattr(factors, "BLOCK", 3000)
    case, vectors, _ = reference(architecture, "long")
    for weights in (None, WEIGHTS):
        found = scored(case, PROMPTS["long"], weights=weights)
        np.testing.assert_allclose(found.sq_norms, (vectors**2).sum(1), rtol=1e-5)


def test_both_paths_are_taken_by_choice_and_the_choice_is_the_cheaper():
    def made(tokens: int, rows: int, columns: int) -> Factors:
        return Factors((rows, columns), [Use(torch.zeros(2, tokens, rows), torch.zeros(2, tokens, columns))])

    assert made(4, 100, 100).cheaper_from_factors()
    assert not made(400, 10, 10).cheaper_from_factors()
    dense = made(4, 100, 100)
    dense.add_dense(torch.zeros(2, 10_000))
    assert not dense.cheaper_from_factors()


def test_factors_of_every_kind_of_use_equal_dense_gradients():
    """Two linear uses, an embedding use twice, and a dense part of one matrix; norms and blocks."""
    generator = torch.Generator().manual_seed(0)
    samples, tokens, rows, columns = 3, 5, 7, 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    uses = [
        Use(normal(samples, tokens, rows), normal(samples, tokens, columns)),
        Use(
            torch.randint(0, rows, (samples, tokens + 2), generator=generator),
            normal(samples, tokens + 2, columns),
        ),
        Use(normal(samples, 2, rows), normal(samples, 2, columns)),
        Use(torch.randint(0, rows, (samples, 3), generator=generator), normal(samples, 3, columns)),
    ]
    truth = torch.zeros(samples, rows, columns, dtype=torch.float64)
    for use in uses:
        left = torch.nn.functional.one_hot(use.left, rows) if use.one_hot else use.left
        truth += torch.einsum("str,stc->src", left.double(), use.right.double())
    factor = Factors((rows, columns), uses)
    squared = (truth**2).sum((1, 2))
    for choice in (True, False):
        one = Factors((rows, columns), uses)
        one.cheaper_from_factors = lambda choice=choice: choice  # type: ignore[method-assign]
        found = factors.sq_norms([one], samples, torch.device("cpu"))
        torch.testing.assert_close(found, squared, rtol=1e-6, atol=0)
    dense = normal(samples, rows * columns)
    factor.add_dense(dense)
    factor.add_dense(dense)
    joined = torch.cat([block for _, block in factor.blocks()], 1)
    torch.testing.assert_close(joined.double(), truth.flatten(1) + 2 * dense.double(), rtol=1e-5, atol=1e-6)


# Manners.


def test_scoring_leaves_the_model_as_it_was():
    case = make("qwen2")
    model = case.policy.model
    before = [p.clone() for p in model.parameters()]
    ids = torch.tensor([PROMPTS["long"]])
    scored(case, PROMPTS["long"])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    torch.testing.assert_close(case.plain(ids).logits, case.plain(ids).logits)


def test_scores_repeat_bit_for_bit():
    case = make("gemma")
    first, again = scored(case, PROMPTS["long"]), scored(case, PROMPTS["long"])
    assert np.array_equal(first.sq_norms, again.sq_norms) and np.array_equal(first.products, again.products)
    assert torch.equal(first.sums, again.sums)
