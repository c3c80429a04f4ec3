"""Predicted over measured memory and time of six cells of random models, each in a process of its own.

python -m benchmarks.measured_cost [CASE]

Memory should be within a factor of two. So should time, once divided by the ratio of `weights` (training) or of
`components` (scores), which is the speed of this CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_repro import config as schema
from grpo_repro.config import ModelConfig, TaskConfig
from grpo_repro.experiments import language_mse, language_train, mse_eval, training
from grpo_repro.machine import Machine
from grpo_repro.policies.tokenizer import EOS_ID, PAD_ID, VOCABULARY, character_tokenizer
from grpo_repro.tasks.arithmetic import ArithmeticTask

COMMON = {"task": TaskConfig(name="arithmetic", num_questions=32), "threads": 1, "device": "cpu", "prompt_pool": 32}
TRAIN = COMMON | {"iterations": 2, "checkpoints": [2], "seeds": [0], "predict_seeds": [], "eval_samples": 2}
MSE = {"task": TaskConfig(name="arithmetic", num_questions=12), "threads": 1, "device": "cpu", "replicates": 3}
CASES = {
    "update": (256, 6, 4000, TRAIN | {"budget": 256, "group_sizes": [16], "micro_batch": 64, "max_new_tokens": 32}),
    "long": (256, 4, 1000, TRAIN | {"budget": 32, "group_sizes": [8], "micro_batch": 8, "max_new_tokens": 256}),
    "weights": (768, 6, 1000, TRAIN | {"budget": 32, "group_sizes": [8], "micro_batch": 4, "max_new_tokens": 24}),
    "vocabulary": (96, 2, 60000, TRAIN | {"budget": 64, "group_sizes": [8], "micro_batch": 8, "max_new_tokens": 24}),
    "components": (256, 6, 4000, MSE | {"methods": ["components"], "micro_batch": 32, "max_new_tokens": 24}),
    "replicates": (256, 4, 4000, MSE | {"methods": ["monte_carlo"], "micro_batch": 32, "group_sizes": [4, 16]}),
}
"""Width, layers, vocabulary and settings; between them every part of the formula is the largest once."""


def save(folder: Path, width: int, layers: int, vocabulary: int) -> Path:
    """A random decoder that hardly ever ends a completion, so that its lengths are known."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=max(vocabulary, len(VOCABULARY)), hidden_size=width, intermediate_size=4 * width,
            num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1024,
            tie_word_embeddings=True, pad_token_id=PAD_ID, bos_token_id=None, eos_token_id=EOS_ID,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def resident(key: str) -> int:
    """Bytes of the process, `VmRSS` now or `VmHWM` at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def reward(self: object, completion: str, question: object) -> float:
    """Half of all completions are right, whatever they say: groups of equal rewards would need no update."""
    return float(hashlib.sha256(completion.encode()).digest()[0] % 2)


def measure(name: str) -> dict[str, float]:
    """Predicted (without the base) and measured bytes, and the like seconds."""
    width, layers, vocabulary, changes = CASES[name]
    ArithmeticTask.reward = reward  # type: ignore[method-assign]
    kind, module = (schema.MseEvalConfig, mse_eval) if "methods" in changes else (schema.GroupSizeConfig, training)
    with tempfile.TemporaryDirectory() as place:
        model = ModelConfig(name="random", path=str(save(Path(place) / "model", width, layers, vocabulary)))
        cell = module.plan(replace(kind(), model=model, results_dir=place, **changes))[0]
        estimate = module.estimate(cell, Machine())
        work = Path(place) / "work"
        work.mkdir()
        torch.set_num_threads(1)
        run = language_mse.run if "methods" in changes else language_train.run
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before, start = resident("VmRSS"), time.process_time()
        run(cell, work, lambda *_: None)
        seconds = time.process_time() - start
    return {
        "predicted_bytes": estimate.memory_bytes - estimate.parts["base"],
        "measured_bytes": resident("VmHWM") - before,
        "predicted_seconds": estimate.seconds,
        "measured_seconds": seconds,
        **{f"part {key}": value for key, value in estimate.parts.items()},
    }


def main(names: list[str]) -> None:
    """Measure one case and print it as JSON, or all and print their ratios."""
    if names:
        print(json.dumps(measure(names[0])))
        return
    for name in CASES:
        command = [sys.executable, "-m", "benchmarks.measured_cost", name]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        memory, seconds = (found[f"predicted_{what}"] / found[f"measured_{what}"] for what in ("bytes", "seconds"))
        print(f"{name}: memory {memory:.2f}, time {seconds:.2f} of what is measured", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
