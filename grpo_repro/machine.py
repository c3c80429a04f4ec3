"""The device that a plan is for: what it holds and how fast it is; a GPU that is not there can be assumed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

CPU_THREAD_FLOPS = 3e10
"""Flops per second that one CPU thread reaches in float32 on the matrices of a small model, as measured."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, from its maker's data sheet.

    Attributes:
        memory_gib: Memory that programs can take, GiB.
        half: Peak rate of dense matrix products in bfloat16 or float16, flops per second.
        single: The same in float32 (TF32 off, as torch has it), flops per second.
    """

    memory_gib: float
    half: float
    single: float


GPUS = {
    "A100-40GB": Gpu(39.4, 312e12, 19.5e12),
    "A100-80GB": Gpu(79.1, 312e12, 19.5e12),
    "H100": Gpu(79.1, 989e12, 67e12),
    "H200": Gpu(139.8, 989e12, 67e12),
    "L40S": Gpu(44.4, 362e12, 91.6e12),
    "RTX-4090": Gpu(23.5, 165e12, 82.6e12),
}
"""GPUs that a plan can assume, and whose rate is known where they are detected."""


@dataclass(frozen=True)
class Machine:
    """One device of a plan.

    Attributes:
        name: What a person calls it.
        on_gpu: Whether it is a GPU.
        memory_bytes: What it holds; None where that is unknown.
        gpu: Its rates, if it is a GPU.
        utilization: Share of the peak rate that is assumed.
        assumed: Whether it was named by `assumed_gpu` and is not here.
    """

    name: str = "CPU"
    on_gpu: bool = False
    memory_bytes: int | None = None
    gpu: Gpu | None = None
    utilization: float = 1.0
    assumed: bool = False

    def flops(self, dtype: str, threads: int) -> float:
        """Flops per second that are expected of it.

        Args:
            dtype: Type of the weights.
            threads: Of torch, on a CPU.
        """
        if self.gpu is None:
            return CPU_THREAD_FLOPS * threads
        return self.utilization * (self.gpu.half if dtype in ("bfloat16", "float16") else self.gpu.single)

    def describe(self) -> str:
        """Name, memory and rate in words."""
        memory = "unknown memory" if self.memory_bytes is None else f"{self.memory_bytes / 2**30:.4g} GiB"
        if self.gpu is None:
            return f"{self.name}, {memory}, {CPU_THREAD_FLOPS:.0e} flops/s for each thread"
        rate = f"{self.gpu.half / 1e12:.4g} (bfloat16) or {self.gpu.single / 1e12:.4g} (float32) peak TFLOP/s"
        return f"1 {self.name}{' (assumed)' if self.assumed else ''}, {memory}, {rate} at {self.utilization:.0%}"


CPU = Machine()
"""A processor whose memory is not looked at."""


def machine_for(config: Any, planning: bool = False) -> Machine:
    """Find the device that a configuration means.

    Args:
        config: Typed configuration of an experiment.
        planning: Whether nothing is run, so that a GPU may be assumed.

    Returns:
        The GPU that torch sees, else the one that is assumed, else this machine's processor; with the memory that
        `device_memory_gib` names, if it does.
    """
    found = _device(config, planning)
    memory = getattr(config, "device_memory_gib", None)
    return found if memory is None else replace(found, memory_bytes=int(memory * 2**30))


def _device(config: Any, planning: bool) -> Machine:
    device = getattr(config, "device", "cpu")
    model = getattr(config, "model", None)
    if device == "cpu" or (model is not None and model.kind == "tabular"):
        return cpu()
    import torch

    if torch.cuda.is_available():
        return _detected(device, config.utilization)
    if planning and config.assumed_gpu is not None:
        gpu = GPUS[config.assumed_gpu]
        return Machine(config.assumed_gpu, True, int(gpu.memory_gib * 2**30), gpu, config.utilization, assumed=True)
    return cpu()


def cpu() -> Machine:
    """This machine's processor."""
    from grpo_repro.manifest import total_memory  # which imports pandas; the names of GPUs alone are quick

    return Machine(f"CPU ({os.cpu_count()} cores)", memory_bytes=total_memory())


def _detected(device: str, utilization: float) -> Machine:
    import torch

    index = int(device.partition(":")[2] or 0)
    found = torch.cuda.get_device_properties(min(index, torch.cuda.device_count() - 1))
    gib = found.total_memory / 2**30
    # The longest name first: one kind comes with two sizes of memory, of which the nearer one is meant.
    alike = [gpu for name, gpu in GPUS.items() if name.replace("-", " ").split()[0] in found.name.replace("-", " ")]
    alike += [gpu for name, gpu in GPUS.items() if name == "RTX-4090" and "4090" in found.name]
    known = min(alike, key=lambda gpu: abs(gpu.memory_gib - gib)) if alike else GPUS["A100-80GB"]
    name = found.name if alike else f"{found.name} (rate taken to be an A100's)"
    return Machine(name, True, found.total_memory, known, utilization)
