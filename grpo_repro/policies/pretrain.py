"""How the bundled policies are made (`grpo model build base|instruct`), and how well they answer.

`base` first learns the skill from clean documents, then the habits of documents most of which are noisy: it
knows more than it shows. `instruct` is `base` fine-tuned on a milder mixture. The in-context policy is
`instruct` with demonstrations in its template. One thread and explicit generators make a build
bit-reproducible on one machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from grpo_repro import bundled
from grpo_repro.errors import UserError
from grpo_repro.policies.accuracy import sampled_accuracy
from grpo_repro.policies.documents import Corpus, draw_rows
from grpo_repro.policies.tokenizer import EOS_ID, NEWLINE_ID, PAD_ID, VOCABULARY, character_tokenizer
from grpo_repro.tasks.arithmetic import KINDS, Ranges

__all__ = ["RECIPES", "Phase", "Shape", "build", "new_model", "sampled_accuracy", "train", "weighted_loss"]

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Phase:
    """One stretch of training with its own warm-up and cosine decay.

    Args:
        steps: optimiser steps.
        corpus: the documents.
        learning_rate: the peak.
        rows: rows per step.
        length: tokens per row.
        final: learning rate at the end, as a share of the peak.
    """

    steps: int
    corpus: Corpus
    learning_rate: float
    rows: int = 32
    length: int = 64
    final: float = 0.0


@dataclass(frozen=True)
class Shape:
    """Size of the network; the default has 0.41 M parameters."""

    hidden: int = 96
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    mlp: int = 256


# Among left factors up to 99 each digit is met in many products: what a small model learns there carries
# over to products that it has not seen, while those within the task's ranges it only learns by heart.
WIDE = Ranges(operand_max=99)
PRODUCTS = KINDS + ("multiplication", "division") * 3
RECIPES: dict[str, tuple[Phase, ...]] = {
    "base": (
        # The skill, on the task's ranges, then on wide products.
        Phase(4000, Corpus(1.0), 3e-3, final=0.1),
        Phase(1200, Corpus(1.0, products=WIDE, kinds=PRODUCTS), 2e-3, final=0.1),
        # To read the quality off the lines before: worth most where a noisy document is nearly always wrong.
        Phase(1000, Corpus(0.5, products=WIDE, error_slope=1.0), 1.5e-3, rows=48, length=48, final=0.1),
        # The habits: longer questions go wrong more often.
        Phase(300, Corpus(0.35, products=WIDE), 5e-4, length=96),
    ),
    "instruct": (Phase(150, Corpus(0.68, products=WIDE), 5e-4, length=96),),
}


def new_model(shape: Shape, seed: int) -> Qwen2ForCausalLM:
    """A fresh Qwen2-architecture model: tied embeddings, grouped queries, character vocabulary."""
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    # On rows of 64-96 tokens eager attention trains a third faster on a CPU than the fused kernel.
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def learning_rate(phase: Phase, step: int) -> float:
    """Linear warm-up (5% of the phase, at most 100 steps), then cosine decay to `final` times the peak."""
    warmup = max(1, min(100, phase.steps // 20))
    if step < warmup:
        return phase.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, phase.steps - warmup)
    return phase.learning_rate * (phase.final + (1 - phase.final) * 0.5 * (1 + math.cos(math.pi * progress)))


def weighted_loss(model: Qwen2ForCausalLM, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token, averaged with the weights of the targets.

    Args:
        model: the network.
        tokens: (rows, length) int64.
        weights: (rows, length) float32, of each token as a target.
    """
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    target_weights = weights[:, 1:].flatten()
    return (losses * target_weights).sum() / target_weights.sum()


def train(
    model: Qwen2ForCausalLM,
    phase: Phase,
    rng: np.random.Generator,
    progress: Progress,
) -> list[float]:
    """Train in place with AdamW on freshly drawn documents.

    Args:
        model: the network.
        phase: what to train on, how long and how fast.
        rng: source of the documents.
        progress: called with (steps done, steps in all, text).

    Returns:
        The loss of each step.
    """
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98))
    losses: list[float] = []
    model.train()
    for step in range(phase.steps):
        drawn = draw_rows(rng, phase.rows, phase.length, phase.corpus)
        loss = weighted_loss(model, *(torch.from_numpy(array) for array in drawn))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if len(losses) % 50 == 0 or len(losses) == phase.steps:
            progress(len(losses), phase.steps, f"loss {np.mean(losses[-50:]):.4f}")
    model.eval()
    return losses


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: sums are then made in one order, and the other core is left to the user."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def save(model: Qwen2ForCausalLM, out: Path) -> None:
    """Write a transformers directory: float16 weights that load as float32, tokenizer, both stops."""
    model.generation_config = GenerationConfig(
        eos_token_id=[NEWLINE_ID, EOS_ID], pad_token_id=PAD_ID, do_sample=True, top_k=0, max_new_tokens=8
    )
    model.half().save_pretrained(out)
    character_tokenizer().save_pretrained(out)
    # transformers loads in the dtype that the configuration names, whatever that of the file.
    config = out / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float16"', '"dtype": "float32"'))
    # safetensors writes for the owner alone; in a wheel every user must be able to read.
    (out / "model.safetensors").chmod(0o644)


def _shift(progress: Progress, before: int, total: int, step: int, _: int, text: str) -> None:
    progress(before + step, total, text)


def build(name: str, out: Path, seed: int, progress: Progress, base: Path | None = None) -> dict[str, Any]:
    """Train a bundled policy from a seed and save it.

    Args:
        name: "base" or "instruct".
        out: directory to write.
        seed: of the initial weights and of the documents.
        progress: called with (steps done, steps in all, text).
        base: directory of the base model that "instruct" starts from; the bundled one if None.

    Returns:
        `seconds`, `steps`, `parameters` and the final `loss`.

    Raises:
        UserError: unknown name, or no base model to start from.
    """
    if name not in RECIPES:
        raise UserError(f"no recipe for model {name!r}; choose one of: {', '.join(RECIPES)}")
    start = time.perf_counter()
    with one_thread():
        if name == "base":
            model = new_model(Shape(), seed)
        else:
            source = base or bundled.path("base")
            if not (source / "config.json").is_file():
                raise UserError(f"{name} is fine-tuned from base, and {source} holds no model; build base first")
            loader: Any = Qwen2ForCausalLM.from_pretrained  # its return type depends on output_loading_info
            model, loaded = loader(
                source, dtype=torch.float32, attn_implementation="eager", use_safetensors=True, output_loading_info=True
            )
            if loaded["missing_keys"]:
                raise UserError(f"{source} is no Qwen2 model ({len(loaded['missing_keys'])} tensors are missing)")
        losses: list[float] = []
        total = sum(phase.steps for phase in RECIPES[name])
        for number, phase in enumerate(RECIPES[name], start=1):
            rng = np.random.default_rng(np.random.SeedSequence([seed, number]))
            report = partial(_shift, progress, len(losses), total)
            losses += train(model, phase, rng, report)
        save(model, out)
    return {
        "seconds": time.perf_counter() - start,
        "steps": len(losses),
        "parameters": model.num_parameters(),
        "loss": float(np.mean(losses[-50:])),
    }
