"""Squared score norms of 64 completions against vmap(grad) and against a loop of backward passes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from transformers import AutoModelForCausalLM

from benchmarks.common import Result, bundled, faster, interleaved, peak_memory, prompts, smaller
from grpo_repro import bundled as bundled_package
from grpo_repro.engine.sample import sample, uniforms
from grpo_repro.engine.scores import Scorer, unique_completions

COMPLETIONS, LENGTH, PROMPTS = 64, 8, 8


class Setup:
    """Completions that the bundled policy sampled for a few prompts, and three ways to take their score norms."""

    def __init__(self) -> None:
        self.policy = bundled()
        self.prompts = prompts(self.policy, PROMPTS, 6, 17, "")
        seeds = np.random.SeedSequence(0).spawn(PROMPTS)
        self.rollout = sample(self.policy, self.prompts, uniforms(seeds, COMPLETIONS, LENGTH))
        self.scorer = Scorer(self.policy).__enter__()
        self.other = AutoModelForCausalLM.from_pretrained(bundled_package.path("base"), dtype="float32").eval()
        self.parameters = {name: p.detach() for name, p in self.other.named_parameters()}
        self.distinct = [len(unique_completions(t, m)[0]) for t, m in self.groups()]

    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """Tokens and masks of each prompt's completions, cut to the longest."""
        pairs = zip(self.rollout.tokens, self.rollout.mask, strict=True)
        return [(t[:, : int(m.sum(1).max())], m[:, : int(m.sum(1).max())]) for t, m in pairs]

    def ours(self, merge: bool = True) -> list[np.ndarray]:
        """This project; `merge` computes equal completions once, as every experiment does."""
        found = []
        for prompt, (tokens, mask) in zip(self.prompts, self.groups(), strict=True):
            if not merge:
                found.append(self.scorer.products(prompt, tokens, mask).sq_norms)
                continue
            distinct, distinct_mask, index = unique_completions(tokens, mask)
            found.append(self.scorer.products(prompt, distinct, distinct_mask).sq_norms[index])
        return found

    def _log_prob(self, parameters: dict[str, Tensor], tokens: Tensor, mask: Tensor, prompt: int) -> Tensor:
        out = functional_call(self.other, parameters, (tokens[None],), {"use_cache": False}).logits[0, prompt - 1 : -1]
        chosen = torch.log_softmax(out, -1).gather(-1, tokens[prompt:, None])[:, 0]
        return torch.where(mask, chosen, 0.0).sum()

    def vmap(self) -> list[np.ndarray]:
        """Per-sample gradients by `torch.func.vmap(grad)` over the completions."""
        found = []
        for prompt, (tokens, mask) in zip(self.prompts, self.groups(), strict=True):
            whole = torch.cat([torch.tensor(prompt).expand(len(tokens), -1), tokens], 1)
            per_sample = vmap(grad(self._log_prob), (None, 0, 0, None))(self.parameters, whole, mask, len(prompt))
            found.append(sum(g.flatten(1).square().sum(1) for g in per_sample.values()).numpy())
        return found

    def loop(self) -> list[np.ndarray]:
        """One backward pass for each completion, padding left out."""
        found = []
        for prompt, (tokens, mask) in zip(self.prompts, self.groups(), strict=True):
            norms = []
            for row, inside in zip(tokens, mask, strict=True):
                self.other.zero_grad()
                whole = torch.tensor(prompt + row[inside].tolist())
                out = self.other(whole[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
                torch.log_softmax(out, -1).gather(-1, whole[len(prompt) :, None]).sum().backward()
                norms.append(sum(float(p.grad.square().sum()) for p in self.other.parameters()))
            found.append(np.array(norms))
        return found

    def fastest_vmap(self) -> tuple[str, float]:
        """Vmap has no rule for the fused attention on the CPU: take the faster of the two implementations."""
        times = {}
        for implementation in ("sdpa", "eager"):
            self.other.set_attn_implementation(implementation)
            times[implementation] = interleaved({"vmap": self.vmap}, repeats=3)["vmap"]
        best = min(times, key=times.__getitem__)
        return best, times[best]


def run() -> list[Result]:
    """Times as they come in an experiment (equal completions merged), the same unmerged, and peak memory."""
    setup = Setup()
    best, _ = setup.fastest_vmap()
    setup.other.set_attn_implementation(best)
    for ours, theirs in zip(setup.ours(), setup.vmap(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6 * float(theirs.max()))
    functions: dict[str, Callable[[], object]] = {
        "ours": setup.ours, "unmerged": lambda: setup.ours(merge=False), "vmap": setup.vmap, "loop": setup.loop,
    }  # fmt: skip
    times = {name: value / PROMPTS for name, value in interleaved(functions, repeats=5).items()}
    distinct = f"{np.mean(setup.distinct):.0f} distinct"
    memory = {name: _memory_of(name, best) for name in ("ours", "unmerged", "vmap")}
    return [
        faster(f"score norms, 64 completions ({distinct}), vs vmap(grad)", times["ours"], times["vmap"], ">= 4"),
        faster("the same vs a loop of backward passes", times["ours"], times["loop"], ">= 12"),
        faster("the same, equal completions not merged, vs vmap(grad)", times["unmerged"], times["vmap"], "reported"),
        faster("the same, not merged, vs a loop", times["unmerged"], times["loop"], "reported"),
        smaller("peak memory of score norms vs vmap(grad) [MiB]", memory["ours"], memory["vmap"], "<= 0.333"),
        smaller("the same, not merged [MiB]", memory["unmerged"], memory["vmap"], "reported"),
    ]


def _memory_of(name: str, implementation: str) -> float:
    """Peak memory in a process of its own, so that no other run's freed memory hides it."""
    command = [sys.executable, "-m", "benchmarks.score_norms", name, implementation]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _child(name: str, implementation: str) -> None:
    setup = Setup()
    setup.other.set_attn_implementation(implementation)
    chosen = {"ours": setup.ours, "unmerged": lambda: setup.ours(merge=False), "vmap": setup.vmap}[name]
    print(peak_memory(chosen))


if __name__ == "__main__":
    _child(*sys.argv[1:])
