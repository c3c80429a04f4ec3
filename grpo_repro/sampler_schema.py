"""The schema of the samplers: their names, and the keys of vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLERS = ("torch", "vllm")
SAMPLER_DTYPES = ("auto", "float32", "bfloat16", "float16")
MOST_GPUS = 64


@dataclass
class VllmConfig:
    """How `sampler=vllm` runs.

    Attributes:
        tensor_parallel_size: GPUs (processes on a CPU) that share the sampler's copy of the weights.
        memory_fraction: Share of the memory of each GPU (of the machine on a CPU) that vLLM takes.
        dtype: Type of the sampler's weights; `auto` is the trainer's.
        sleep: Whether vLLM gives its GPU memory back while the policy is scored or updated: needed where both are on
            one GPU, a waste of time where they are not. A CPU has nothing to give back.
    """

    tensor_parallel_size: int = 1
    memory_fraction: float = 0.3
    dtype: str = "auto"
    sleep: bool = True
