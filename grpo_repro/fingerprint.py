"""Where a model's files are and what they hold, without importing torch."""

from __future__ import annotations

from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo_repro.config import ModelConfig, TaskConfig
from grpo_repro.errors import UserError
from grpo_repro.schema import WORDED_TASKS, LoraSettings

HASHED_BYTES = 1 << 28
"""Files up to this size (256 MiB) are identified by their content, larger ones by name, size and time."""


def resolve_path(config: ModelConfig) -> str:
    """Directory or hub id of a model; ``bundled:NAME`` is a folder of this package.

    Raises:
        UserError: If no path is given, or a bundled name is unknown.
    """
    if not config.path:
        raise UserError(f"model {config.name or 'hf'} has no path; add model.path=DIRECTORY (or a hub id)")
    if config.path.startswith("bundled:"):
        from grpo_repro import bundled

        return str(bundled.path(config.path.removeprefix("bundled:")))
    return config.path


def model_fingerprint(config: ModelConfig) -> str | None:
    """Identify the files of a local model, so that other weights in the same place are another cell.

    Args:
        config: The model.

    Returns:
        16 hex digits; None for a hub id, which `revision` identifies.

    Raises:
        UserError: If the model has no path or the files cannot be read.
    """
    folder = Path(resolve_path(config)).expanduser()
    if not folder.is_dir():
        return None
    digest = sha256()
    try:
        for path in sorted(p for p in folder.iterdir() if p.suffix in {".json", ".safetensors", ".model"}):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} ".encode())
            if stat.st_size <= HASHED_BYTES:
                digest.update(path.read_bytes())
            else:
                digest.update(str(stat.st_mtime_ns).encode())
    except OSError as error:
        raise UserError(f"cannot read the files of model {folder}: {error.strerror}; check its permissions") from error
    return digest.hexdigest()[:16]


def model_settings(config: ModelConfig) -> dict[str, Any]:
    """What a cell holds of its model; without adapters their keys stay out, and ids are as old as the models.

    >>> "lora" in model_settings(ModelConfig())
    False
    """
    settings = asdict(config)
    if not config.lora.rank:
        del settings["lora"]
    return settings


def model_of(settings: dict[str, Any]) -> ModelConfig:
    """Take `model_settings` back.

    >>> model_of(model_settings(ModelConfig(lora=LoraSettings(rank=4)))).lora.rank
    4
    """
    return ModelConfig(**settings | {"lora": LoraSettings(**settings.get("lora") or {})})


_WORDED_ONLY = ("hub", "subset", "revision", "instruction", "format_reward", "deadline")


def task_settings(config: TaskConfig) -> dict[str, Any]:
    """What a cell holds of its task; keys of worded tasks stay out of the others' ids, which are older than they."""
    settings = asdict(config)
    return settings if config.name in WORDED_TASKS else {k: v for k, v in settings.items() if k not in _WORDED_ONLY}


def task_fingerprint(config: TaskConfig) -> tuple[TaskConfig, dict[str, str]]:
    """Identify the data of a worded task, so that other data in the same place are another cell.

    Args:
        config: The task.

    Returns:
        The task with its number of questions (0 means all, and is replaced by their number), and the hash of the data
        as `data` of a cell; nothing for tasks that make their own questions.

    Raises:
        UserError: If the data cannot be read.
    """
    if config.name not in WORDED_TASKS:
        return config, {}
    from grpo_repro.tasks import load_task

    loaded = load_task(config)
    return replace(config, num_questions=len(loaded.questions)), {"data": loaded.data_hash}
