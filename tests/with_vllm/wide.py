"""Settings of the engine that the tests share."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "sampler": "vllm", "vllm_dtype": "auto", "temperature": 0.8, "max_new_tokens": 6, "micro_batch": 64,
    "vllm_machine": {"tensor_parallel_size": 1, "memory_fraction": 0.05, "sleep": True},
}  # fmt: skip
LONG = [5, 6, 7, 8, 9, 10, 3, 4] * 9
"""A prompt of two cache blocks and more."""
