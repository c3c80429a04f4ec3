"""One update or one group's scores of a random model, and the memory that it takes; run by test_logits."""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_repro.engine import logits
from grpo_repro.engine.attention import use_grouped_attention
from grpo_repro.engine.sample import Rollout
from grpo_repro.engine.scores import Scorer
from grpo_repro.engine.update import accumulate_gradient
from grpo_repro.policies.causal_lm import CausalLM


def resident() -> float:
    """Resident size of this process, MiB."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


class Peak:
    """Largest resident size while it is open, read every two milliseconds."""

    def __enter__(self) -> Peak:
        self.most, self.going = 0.0, True
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def _look(self) -> None:
        while self.going:
            self.most = max(self.most, resident())
            time.sleep(0.002)

    def __exit__(self, *error: object) -> None:
        self.going = False
        self.thread.join()


def main(job: dict) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    vocabulary, group, length = job.get("vocabulary", 150_000), job["group"], job["length"]
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=job.get("layers", 2),
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True,
        )
    )  # fmt: skip
    use_grouped_attention(model)
    policy = CausalLM(model.requires_grad_(False), None, (1,), 0)
    logits.LOGITS = job.get("logits", 1 << 22)  # less than by default, for a quick test
    tokens = torch.randint(2, vocabulary, (1, group, length))
    rollout = Rollout(
        tokens, torch.ones_like(tokens, dtype=torch.bool), torch.zeros(tokens.shape), torch.ones(1, group).bool()
    )
    weights = np.random.default_rng(0).normal(size=(1, group))
    prompt = [3, 4, 5, 6]
    if job["what"] == "update":
        for parameter in model.parameters():
            parameter.requires_grad_(True)
            parameter.grad = torch.zeros_like(parameter)
    before = resident()
    with Peak() as peak:
        if job["what"] == "update":
            accumulate_gradient(
                policy,
                [prompt],
                rollout,
                weights,
                micro_batch=job["micro_batch"],
                recompute=job.get("recompute", False),
            )
        else:
            kind = "all" if job["what"] == "scores" else job["what"]
            with Scorer(policy, micro_batch=job["micro_batch"], score_params=kind) as scorer:
                scorer.products(prompt, tokens[0], rollout.mask[0], weights)
    return peak.most - before


if __name__ == "__main__":
    print(main(json.loads(sys.argv[1])))
