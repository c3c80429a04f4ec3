"""Small causal language models of several architectures with random weights, and their plain forward."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_repro.engine.attention import use_grouped_attention
from grpo_repro.policies.causal_lm import CausalLM

torch.set_num_threads(1)

COMMON: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def _qwen2(vocab: int) -> Any:
    # Biases on queries, keys and values; two heads share a key head; tied embeddings with a padding row.
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=vocab, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, **COMMON)
    )


def _llama(vocab: int) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab, num_key_value_heads=1, tie_word_embeddings=False, mlp_bias=True, **COMMON)
    )


def _gemma(vocab: int) -> Any:
    # Norms (1 + w) x, embeddings scaled by sqrt(width), tied, with a padding row.
    return GemmaForCausalLM(GemmaConfig(vocab_size=vocab, num_key_value_heads=1, head_dim=16, pad_token_id=0, **COMMON))


def _gemma2(vocab: int) -> Any:
    # Soft caps on attention and output, and a window of four tokens in every other layer.
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=vocab, num_key_value_heads=2, head_dim=16, sliding_window=4, query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0, final_logit_softcapping=3.0, pad_token_id=0, **COMMON,
        )
    )  # fmt: skip


def _gemma3(vocab: int) -> Any:
    # Norms on queries and keys; local and global layers turn at different frequencies.
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=vocab, num_key_value_heads=2, head_dim=16, sliding_window=4, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"], pad_token_id=0, **COMMON,
        )
    )  # fmt: skip


def _qwen3(vocab: int) -> Any:
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=vocab, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, **COMMON)
    )


def _mistral(vocab: int) -> Any:
    return MistralForCausalLM(
        MistralConfig(vocab_size=vocab, num_key_value_heads=2, sliding_window=3, tie_word_embeddings=False, **COMMON)
    )


ARCHITECTURES = {
    "qwen2": _qwen2,
    "llama": _llama,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "qwen3": _qwen3,
    "mistral": _mistral,
}


@dataclass(frozen=True)
class Case:
    """A policy of the engine and a plain transformers model of the same weights, in eager attention."""

    policy: CausalLM
    plain: Any

    def log_probs(self, prompt: list[int], tokens: list[int], temperature: float) -> Tensor:
        """log pi(y_t | x, y_<t) of one completion by one plain forward pass, alone and without padding."""
        ids = torch.tensor([prompt + tokens])
        logits = self.plain(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits / temperature, -1)
        return table.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def make(
    name: str,
    vocab: int = 23,
    seed: int = 0,
    noise: float = 0.15,
    eos: tuple[int, ...] = (2, 7),
    tokenizer: Any = None,
) -> Case:
    """Build a model with initial weights plus noise everywhere, so that no norm is 1 and no bias 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ARCHITECTURES[name](vocab).float().eval()
        for parameter in model.parameters():
            parameter.data += noise * torch.randn_like(parameter)
    model.requires_grad_(False)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    use_grouped_attention(model)
    return Case(CausalLM(model, tokenizer, eos, pad_id=0), plain)


def completions(case: Case, prompt: list[int], length: int, temperature: float) -> dict[tuple[int, ...], float]:
    """Exact probability of every completion of at most `length` tokens, by plain forward passes."""
    vocab = case.plain.config.vocab_size
    found: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    for step in range(length):
        prefixes = list(open_)
        ids = torch.tensor([prompt + list(prefix) for prefix in prefixes])
        with torch.no_grad():
            logits = case.plain(ids, use_cache=False).logits[:, -1].double()
        probs = torch.softmax(logits / temperature, -1).numpy()
        following: dict[tuple[int, ...], float] = {}
        for (row, prefix), token in itertools.product(enumerate(prefixes), range(vocab)):
            ends = token in case.policy.eos_ids or step + 1 == length
            (found if ends else following)[(*prefix, token)] = open_[prefix] * float(probs[row, token])
        open_ = following
    return found


def padded(completions_: list[tuple[int, ...]], extra: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and mask of completions, padded on the right (by `extra` columns more than needed)."""
    longest = max(len(c) for c in completions_) + extra
    tokens = torch.zeros(len(completions_), longest, dtype=torch.long)
    mask = torch.zeros(len(completions_), longest, dtype=torch.bool)
    for row, completion in enumerate(completions_):
        tokens[row, : len(completion)] = torch.tensor(completion)
        mask[row, : len(completion)] = True
    return tokens, mask


def seeds(number: int, count: int) -> list[np.random.SeedSequence]:
    return np.random.SeedSequence(number).spawn(count)


every_architecture = pytest.mark.parametrize("architecture", list(ARCHITECTURES))
