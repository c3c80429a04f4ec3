"""One training iteration against TRL's GRPOTrainer, and the update's peak memory at two group sizes.

Both sides train the same randomly initialised decoder: same weights, prompts, N and G, no KL term, AdamW, float32, and
completions of exactly 8 tokens. Such a policy is nearly uniform, so that practically all completions differ: merging
equal completions, which helps a trained policy, does nothing here.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import huggingface_hub.constants
import numpy as np
import torch
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from transformers.utils import logging

from benchmarks.common import DEMONSTRATIONS, Result, Skipped, bundled, faster, peak_memory, prompts, smaller
from grpo_repro.engine.attention import use_grouped_attention
from grpo_repro.engine.sample import Rollout, sample, uniforms
from grpo_repro.engine.update import Learner, accumulate_gradient
from grpo_repro.policies.causal_lm import CausalLM

COMPLETIONS, GROUP, LENGTH, STEPS = 1024, 16, 8, 6  # the first of the steps is not counted
RATE = 1e-6  # small, so that the policy stays as it is
LONG = 2 * DEMONSTRATIONS + DEMONSTRATIONS[:18]
# Shortest and longest prompt, prefix, and TRL's batch per pass: on a CPU the fastest of those tried (16 to 1024).
CASES = {"short": (12, 17, "14*3=42\n", 256), "long": (100, 150, LONG, 128)}
MICRO_BATCH, SMALL_MICRO_BATCH = 256, 64


def new_model() -> Qwen2ForCausalLM:
    """A decoder of 0.89 million random parameters for the bundled tokenizer; the same at every call."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=20, hidden_size=128, intermediate_size=448, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


class Ours:
    """This project's iteration: sample, decode, reward, update."""

    def __init__(self, case: str, count: int, group: int, micro_batch: int) -> None:
        model = new_model().requires_grad_(False)
        use_grouped_attention(model)
        self.policy: CausalLM = dataclasses.replace(bundled(), model=model, eos_ids=())
        self.group, self.iteration, self.distinct = group, 0, 0.0
        self.prompts = prompts(self.policy, count, *CASES[case][:3])
        config = {
            "optimizer": "adamw", "learning_rate": RATE, "schedule": "constant", "warmup": 0, "iterations": 1,
            "weight_decay": 0.0, "clip_norm": None, "temperature": 1.0, "micro_batch": micro_batch,
        }  # fmt: skip
        self.learner = Learner(self.policy, config)

    def sample(self) -> tuple[Rollout, np.ndarray]:
        """Completions of the policy and their advantages."""
        seeds = np.random.SeedSequence(self.iteration).spawn(len(self.prompts))
        rollout = sample(self.policy, self.prompts, uniforms(seeds, self.group, LENGTH))
        self.policy.tokenizer.batch_decode(rollout.tokens.flatten(0, 1))  # TRL decodes for the reward, too
        rewards = (rollout.tokens.sum(-1) % 2).double().numpy()
        return rollout, rewards - rewards.mean(1, keepdims=True)

    def step(self) -> None:
        """One iteration."""
        self.iteration += 1
        rollout, advantages = self.sample()
        self.learner.step(self.prompts, rollout, advantages, self.iteration)
        self.distinct = sum(len(group.unique(dim=0)) for group in rollout.tokens) / rollout.tokens[..., 0].numel()


class Alternate(TrainerCallback):
    """Times TRL's steps and runs one of ours between each two; compares the first gradient."""

    def __init__(self, ours: Ours | None) -> None:
        self.ours = ours
        self.times: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
        self.batch: tuple[list[str], list[list[int]]] = ([], [])

    def reward(self, prompts: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        """The same reward as ours: is the sum of the token ids odd?"""
        assert {len(tokens) for tokens in completion_ids} == {LENGTH}
        self.batch = (prompts, completion_ids)
        return [float(sum(tokens) % 2) for tokens in completion_ids]

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Start the first step's clock."""
        self.start = _now()

    def on_pre_optimizer_step(self, *_: object, model: torch.nn.Module | None = None, **__: object) -> None:
        """At the first step both have the same weights: TRL's gradient must be ours of its completions, over 8."""
        if self.ours is None or self.times["theirs"]:
            return
        assert model is not None
        policy, texts = self.ours.policy, self.batch[0][::GROUP]
        tokens = torch.tensor(self.batch[1]).view(len(texts), GROUP, LENGTH)
        rewards = (tokens.sum(-1) % 2).double().numpy()
        whole = torch.ones_like(tokens, dtype=torch.bool)
        rollout = Rollout(tokens, whole, torch.zeros(tokens.shape), whole[..., 0])
        encoded = [policy.tokenizer(text)["input_ids"] for text in texts]  # the texts are whole prompts already
        with self.ours.learner._trainable():
            accumulate_gradient(policy, encoded, rollout, rewards - rewards.mean(1, keepdims=True))
        ours, theirs = (
            torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (policy.model, model)
        )
        error = float((ours / LENGTH - theirs).norm() / theirs.norm())
        assert error < 1e-3, f"the gradients differ by {error:.2g}"
        self.start = _now()  # the first step is not counted anyway

    def on_step_end(self, *_: object, **__: object) -> None:
        """Stop TRL's clock, time one iteration of ours, start TRL's next."""
        middle = _now()
        self.times["theirs"].append(_since(self.start, middle))
        if self.ours is not None:
            self.ours.step()
            self.times["ours"].append(_since(middle, _now()))
        self.start = _now()

    def median(self, side: str, clock: int) -> float:
        """Median time of one side's counted steps; clock 0 is the wall's, 1 the processor's."""
        return statistics.median(pair[clock] for pair in self.times[side][1:])


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    return end[0] - start[0], end[1] - start[1]


def trainer(case: str, steps: int, folder: str, callback: Alternate) -> Any:
    """TRL's trainer at its fastest on a CPU.

    As it makes one update for each batch of completions, it takes the log-probabilities of the sampling policy from the
    update's own pass (`old_per_token_logps` is None) and computes nothing twice.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    logging.set_verbosity_error()
    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    shortest, longest, prefix, batch = CASES[case]
    policy = bundled()
    chosen = prompts(policy, COMPLETIONS // GROUP, shortest, longest, prefix)
    # TRL always has an end token: one that the model has no logit for never comes.
    policy.tokenizer.add_special_tokens({"eos_token": "<never>"})
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=steps,
        per_device_train_batch_size=batch, gradient_accumulation_steps=COMPLETIONS // batch, num_iterations=1,
        num_generations=GROUP, max_completion_length=LENGTH, temperature=1.0, top_p=1.0, top_k=0, beta=0.0,
        loss_type="dr_grpo", scale_rewards="none", disable_dropout=True, optim="adamw_torch", learning_rate=RATE,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    texts = [policy.tokenizer.decode(tokens) for tokens in chosen]
    data = Dataset.from_dict({"prompt": texts})
    made = GRPOTrainer(
        new_model(), callback.reward, config, data, processing_class=policy.tokenizer, callbacks=[callback]
    )
    made.remove_callback(PrinterCallback)
    return made


def _compare(case: str, title: str, target: str) -> list[Result]:
    callback = Alternate(Ours(case, COMPLETIONS // GROUP, GROUP, MICRO_BATCH))
    with tempfile.TemporaryDirectory() as folder:
        trainer(case, STEPS, folder, callback).train()
    assert callback.ours is not None
    distinct = f"{callback.ours.distinct:.0%} of completions distinct"
    lines = []
    for clock, (what, goal) in enumerate([(f"{title}, {distinct}", target), (f"{title}, processor time", "reported")]):
        ours, theirs = callback.median("ours", clock), callback.median("theirs", clock)
        lines.append(faster(f"training iteration, {what}, vs TRL", ours, theirs, goal))
    return lines


def run() -> list[Result]:
    """Time and memory of one iteration.

    Raises:
        Skipped: If TRL is not installed.
    """
    missing = [name for name in ("trl", "accelerate", "datasets") if find_spec(name) is None]
    if missing:
        raise Skipped(f"{', '.join(missing)} not installed; pip install -c constraints.txt -e .[bench]")
    results = _compare("short", "prompts of 12-17 tokens", ">= 2.5")
    results += _compare("long", "prompts of 100-150 tokens", ">= 8")
    memory = {job: _memory_of(job) for job in MEMORY}
    name = f"peak memory of the update, N = {COMPLETIONS}, micro-batch {SMALL_MICRO_BATCH}, G = 256 vs G = 4 [MiB]"
    results.append(smaller(name, memory["large"], memory["small"], "reported"))
    name = f"peak memory of the update, B = 4, micro-batch {SMALL_MICRO_BATCH}, G = 256 vs G = 16 [MiB]"
    results.append(smaller(name, memory["large"], memory["few"], "reported"))
    for case in CASES:
        name = f"peak memory of one iteration, {case} prompts, vs TRL's [MiB]"
        results.append(smaller(name, memory[f"ours-{case}"], memory[f"theirs-{case}"], "reported"))
    return results


def _update_memory(count: int, group: int) -> float:
    ours = Ours("short", count, group, SMALL_MICRO_BATCH)
    rollout, advantages = ours.sample()
    # One small update first: what torch sets up at its first use is no part of the question.
    few = Rollout(rollout.tokens[:2, :2], rollout.mask[:2, :2], rollout.log_probs[:2, :2], rollout.finished[:2, :2])
    ours.learner.step(ours.prompts[:2], few, np.array([[1.0, -1.0]] * 2), 1)
    return peak_memory(lambda: ours.learner.step(ours.prompts, rollout, advantages, 2))


def _iteration_memory(case: str, ours: bool) -> float:
    if ours:
        return peak_memory(Ours(case, COMPLETIONS // GROUP, GROUP, MICRO_BATCH).step)
    with tempfile.TemporaryDirectory() as folder:
        return peak_memory(trainer(case, 1, folder, Alternate(None)).train)


MEMORY: dict[str, Callable[[], float]] = {
    "small": lambda: _update_memory(COMPLETIONS // 4, 4),
    "large": lambda: _update_memory(COMPLETIONS // 256, 256),
    "few": lambda: _update_memory(COMPLETIONS // 256, 16),
    "ours-short": lambda: _iteration_memory("short", True),
    "theirs-short": lambda: _iteration_memory("short", False),
    "ours-long": lambda: _iteration_memory("long", True),
    "theirs-long": lambda: _iteration_memory("long", False),
}


def _memory_of(job: str) -> float:
    """Peak memory in a process of its own, so that no other run's freed memory hides it."""
    command = [sys.executable, "-m", "benchmarks.training", job]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(MEMORY[sys.argv[1]]())
