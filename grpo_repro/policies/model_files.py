"""A model's files: where they are, whether they are all there, and what to say when they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from grpo_repro.config import ModelConfig
from grpo_repro.errors import UserError
from grpo_repro.fingerprint import resolve_path
from grpo_repro.network import reachable, take_the_cache

NEEDED = {
    "config.json": ["config.json"],
    "weights (safetensors)": ["model.safetensors", "model.safetensors.index.json"],
    "a tokenizer": ["tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"],
}
"""What a model directory holds, and files of which one is enough."""


def located(config: ModelConfig) -> str:
    """Path of a model that is here and complete, or its hub id.

    Raises:
        UserError: If a directory is named and lacks something, before transformers fails in its own words.
    """
    path = resolve_path(config)
    local = Path(path).expanduser()
    if not local.exists() and not path.startswith((".", "/", "~")):
        if not reachable():
            take_the_cache()
        return path
    _check_directory(local)
    return str(local)


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"model directory {path} is not a directory; model.path needs a transformers directory")
    try:
        for what, names in NEEDED.items():
            if not any((path / name).is_file() for name in names):
                unsafe = what.startswith("weights") and list(path.glob("*.bin"))
                hint = "; *.bin is pickled code, which is not read: convert it with safetensors" if unsafe else ""
                raise UserError(f"model directory {path} lacks {what} (looked for {', '.join(names)}){hint}")
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"model directory {path} cannot be read ({error.strerror}); check its permissions") from error
    except ValueError as error:
        raise UserError(f"{path / 'config.json'} is not readable JSON ({error}); save the model again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path / 'config.json'} holds a {type(found).__name__} and no settings; save the model again")


def not_loaded(config: ModelConfig, path: str, error: Exception) -> UserError:
    """Return one message for whatever transformers raised."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    if "trust_remote_code" in str(error):
        return UserError(
            f"model {path} needs code of its own, which has not been run; read it, and if you trust it add "
            "model.trust_remote_code=true"
        )
    if Path(path).is_dir():
        return UserError(
            f"model {path} could not be loaded ({type(error).__name__}: {first}); model.path takes a transformers "
            "directory with config.json, safetensors weights and a tokenizer"
        )
    return UserError(
        f"model {config.name}: {path} is no directory here and could not be read from the hub ({type(error).__name__}: "
        f"{first[:160]}); either give a local folder with config.json, safetensors weights and a tokenizer: "
        f"model.path=DIR, or connect to the network (a model that was downloaded before is taken from the cache)"
    )


def check_loaded(path: str, model: PreTrainedModel, report: Any) -> None:
    """Refuse a checkpoint whose gaps transformers would fill with random weights, and weights that are no numbers."""
    gaps = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if gaps:
        raise UserError(
            f"the weights of {path} lack or misfit {len(gaps)} tensors of {type(model).__name__} ({', '.join(gaps[:3])}"
            f"{', ...' if len(gaps) > 3 else ''}); save the whole model again"
        )
    broken = [name for name, value in model.named_parameters() if not torch.isfinite(value).all()]
    if broken:
        raise UserError(
            f"the weights of {path} are not finite in {len(broken)} tensors ({', '.join(broken[:3])}"
            f"{', ...' if len(broken) > 3 else ''}); save the model again"
        )


def check_chat(path: str, tokenizer: Any, config: ModelConfig) -> None:
    """Refuse a chat prompt that the tokenizer has no template for."""
    if config.chat and not getattr(tokenizer, "chat_template", None):
        raise UserError(f"model.chat=true, but the tokenizer of {path} has no chat template; leave model.chat out")
