"""Sampling against `generate(num_return_sequences=16)` of transformers."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import DEMONSTRATIONS, Result, bundled, faster, interleaved, prompts
from grpo_repro import bundled as bundled_package
from grpo_repro.engine.sample import pad_left, sample, uniforms

PROMPTS, GROUP, LENGTH = 64, 16, 8


def run() -> list[Result]:
    """64 prompts x 16 completions of exactly 8 tokens (no end token), short and long prompts."""
    policy = dataclasses.replace(bundled(), eos_ids=())
    other = AutoModelForCausalLM.from_pretrained(bundled_package.path("base"), dtype="float32").eval()
    other.generation_config.eos_token_id = None
    long = 2 * DEMONSTRATIONS + DEMONSTRATIONS[:18]
    cases = {
        "short prompts (12-17 tokens)": (prompts(policy, PROMPTS, 12, 17, "14*3=42\n"), ">= 2.5"),
        "long prompts (100-150 tokens)": (prompts(policy, PROMPTS, 100, 150, long), ">= 6"),
    }
    results = []
    for name, (chosen, target) in cases.items():
        tokens, mask = pad_left(chosen, policy.pad_id, policy.device)
        seeds = np.random.SeedSequence(0).spawn(PROMPTS)

        def ours(chosen: list[list[int]] = chosen, seeds: list = seeds) -> object:
            return sample(policy, chosen, uniforms(seeds, GROUP, LENGTH))

        def theirs(tokens: torch.Tensor = tokens, mask: torch.Tensor = mask) -> object:
            return other.generate(
                tokens, attention_mask=mask.long(), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                max_new_tokens=LENGTH, num_return_sequences=GROUP, pad_token_id=policy.pad_id,
            )  # fmt: skip

        assert ours().tokens.shape == (PROMPTS, GROUP, LENGTH)  # type: ignore[attr-defined]
        assert theirs().shape[1] - tokens.shape[1] == LENGTH  # type: ignore[attr-defined]
        times = interleaved({"ours": ours, "theirs": theirs}, repeats=7)
        results.append(faster(f"sampling, {name}, vs generate", times["ours"], times["theirs"], target))
    return results
