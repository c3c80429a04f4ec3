"""Sampling by vLLM: continuous batching, paged keys and values, prompts' caches shared, several GPUs.

Every completion is a request of its own with a seed of its own, so that equal settings give equal completions as far as
vLLM's kernels allow: their rounding depends on what else is in the batch, so seeds are best effort.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_repro.config import ModelConfig
from grpo_repro.engine import vllm_engine
from grpo_repro.engine.agreement import Agreement, compare
from grpo_repro.engine.sample import Rollout
from grpo_repro.errors import NotFinite, RunError, UserError
from grpo_repro.fingerprint import resolve_path
from grpo_repro.policies.causal_lm import CausalLM

TRIED = 4
"""Completions of the first prompt that are compared before anything is measured."""


class VllmSampler:
    """Samples from a policy whose weights it pushes into a vLLM engine before the first batch after each change.

    Args:
        policy: The trainer's copy of the policy.
        engine: The engine, of the same architecture.
    """

    foreign = True

    def __init__(self, policy: CausalLM, engine: vllm_engine.Engine) -> None:
        self.policy, self.engine, self.stale = policy, engine, True
        self.facts: dict[str, Any] = {
            "sampler": f"{vllm_engine.version()}, {engine.settings.dtype}, "
            f"tensor_parallel_size={engine.settings.tensor_parallel_size}; its seeds are best effort"
        }

    @classmethod
    def start(
        cls, policy: CausalLM, model: ModelConfig, config: Mapping[str, Any], prompts: Sequence[Sequence[int]]
    ) -> VllmSampler:
        """Start or take over an engine, and compare it with the trainer on a few completions; see `samplers.make`."""
        if any(len(prompt) == 0 for prompt in prompts):
            raise _no_tokens()
        kind, named = config["vllm_dtype"], resolve_path(model)
        local = Path(named).expanduser()
        settings = vllm_engine.Settings(
            path=str(local) if local.exists() else named, revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=str(policy.model.dtype).removeprefix("torch.") if kind == "auto" else kind,
            longest=max(len(prompt) for prompt in prompts) + config["max_new_tokens"], **config["vllm_machine"],
        )  # fmt: skip
        made = cls(policy, vllm_engine.running(settings))
        seeds = [np.random.SeedSequence(0)]
        rollout = made.sample(prompts[:1], seeds, TRIED, config["max_new_tokens"], config["temperature"])
        made.rest()
        compare(policy, prompts[:1], rollout, config["temperature"], config["micro_batch"], Agreement())
        return made

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[np.random.SeedSequence], group_size: int, length: int,
        temperature: float = 1.0,
    ) -> Rollout:  # fmt: skip
        """See `samplers.Sampler.sample`."""
        own = [{"seed": int(word >> 1)} for s in seeds for word in s.generate_state(group_size, np.uint64)]
        return self._generate(prompts, own, length, temperature)

    def greedy(self, prompts: Sequence[Sequence[int]], length: int) -> Rollout:
        """See `samplers.Sampler.greedy`."""
        return self._generate(prompts, [{}] * len(prompts), length, 0.0)

    def policy_moved(self) -> None:
        """The weights are pushed before the next batch."""
        self.stale = True

    def rest(self) -> None:
        """See `samplers.Sampler.rest`."""
        self.engine.sleep()

    def _generate(
        self, prompts: Sequence[Sequence[int]], own: Sequence[Mapping[str, Any]], length: int, temperature: float
    ) -> Rollout:
        """One completion for each of `own`, which hold what is different between them; equally many per prompt."""
        if any(len(prompt) == 0 for prompt in prompts):
            raise _no_tokens()
        self.engine.wake()
        if self.stale:
            self._push()
        group = len(own) // len(prompts)
        common = {
            "temperature": temperature, "max_tokens": length, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logprobs": 0,
            "flat_logprobs": True, "detokenize": False, "ignore_eos": True,
            # All end tokens alike: `ignore_eos` leaves out the one that vLLM would take from the model's files.
            "stop_token_ids": list(self.policy.eos_ids),
        }  # fmt: skip
        repeated = [prompt for prompt in prompts for _ in range(group)]
        outputs = self.engine.generate(repeated, [common | dict(one) for one in own])
        return self._rollout(outputs, (len(prompts), group, length))

    def _push(self) -> None:
        kind: torch.dtype = getattr(torch, self.engine.settings.dtype)
        self.engine.push({name: x.detach().to(kind) for name, x in self.policy.model.named_parameters()})
        self.stale = False

    def _rollout(self, outputs: Sequence[Any], shape: tuple[int, int, int]) -> Rollout:
        """Pad vLLM's ragged outputs to `shape`; the token that ended a completion is one of its tokens."""
        count, length = len(outputs), shape[-1]
        tokens, log_probs = np.full((count, length), self.policy.pad_id), np.zeros((count, length), dtype=np.float32)
        lengths, finished = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
        for row, output in enumerate(outputs):
            if output.finish_reason not in ("stop", "length"):
                raise RunError(f"vLLM ended a completion by {output.finish_reason!r}; run the same command again")
            lengths[row], finished[row] = len(output.token_ids), output.finish_reason == "stop"
            tokens[row, : lengths[row]] = output.token_ids
            log_probs[row, : lengths[row]] = output.logprobs.logprobs
        if not np.isfinite(log_probs).all():
            raise NotFinite("the model's logits are not finite; check its weights and dtype (try float32)")
        device = self.policy.device

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        mask = np.arange(length) < lengths[:, None]
        return Rollout(
            tensor(tokens).view(shape), tensor(mask).view(shape), tensor(log_probs).view(shape),
            tensor(finished).view(shape[:2]),
        )  # fmt: skip


def _no_tokens() -> UserError:
    return UserError("a prompt has no tokens; give it a template that adds some")
