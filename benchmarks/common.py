"""What the benchmarks share: interleaved timing, peak memory, prompts and the bundled policy."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from grpo_repro.config import load_choice
from grpo_repro.policies import causal_lm
from grpo_repro.tasks import load_task

DEMONSTRATIONS = "12+7=19\n20+3-15=8\n14*3=42\n24/6=4\n15-(10+9)=-4\n"


class Skipped(Exception):
    """A benchmark cannot run here; the message says what it lacks."""


@dataclass(frozen=True)
class Result:
    """One line of `results.json`.

    Attributes:
        name: What was measured, with its unit.
        ours: This project.
        theirs: The alternative.
        ratio: How many times better ours is (or, for memory and widths, ours over theirs).
        target: What was asked of the ratio, such as ">= 4".
    """

    name: str
    ours: float
    theirs: float
    ratio: float
    target: str

    def as_dict(self) -> dict[str, float | str]:
        """Plain data for JSON."""
        return asdict(self)


def faster(name: str, ours: float, theirs: float, target: str) -> Result:
    """A line for times: the ratio is theirs over ours."""
    return Result(f"{name} [ms]", round(1e3 * ours, 2), round(1e3 * theirs, 2), round(theirs / ours, 2), target)


def smaller(name: str, ours: float, theirs: float, target: str) -> Result:
    """A line for sizes: the ratio is ours over theirs."""
    return Result(name, round(ours, 4), round(theirs, 4), round(ours / theirs, 3), target)


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median wall time of each function, run in turns so that a busy machine hurts all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_memory(function: Callable[[], object]) -> float:
    """Growth of the process's peak resident memory while a function runs, in MiB (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide what is taken now
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _status("VmRSS")
    function()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def bundled() -> causal_lm.CausalLM:
    """The bundled base policy."""
    return causal_lm.load(load_choice("model", "bundled-base"), "cpu")


def prompts(policy: causal_lm.CausalLM, count: int, shortest: int, longest: int, prefix: str) -> list[list[int]]:
    """Questions of the default task behind a prefix, with prompts of `shortest` to `longest` tokens."""
    task = load_task(replace(load_choice("task", "arithmetic"), num_questions=500))
    encoded = [policy.encode(prefix + question.text) for question in task.questions]
    chosen = [prompt for prompt in encoded if shortest <= len(prompt) <= longest][:count]
    assert len(chosen) == count, f"only {len(chosen)} prompts of {shortest}-{longest} tokens"
    return chosen
