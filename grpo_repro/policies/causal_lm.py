"""Causal language models as policies: loading, prompts, end tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from grpo_repro.config import ModelConfig
from grpo_repro.engine.attention import use_grouped_attention
from grpo_repro.errors import UserError
from grpo_repro.fingerprint import resolve_path


@dataclass(frozen=True)
class CausalLM:
    """A causal language model with what is needed to prompt it and to stop it.

    Attributes:
        model: The transformers model, in evaluation mode and with the engine's grouped attention.
        tokenizer: Its tokenizer.
        eos_ids: Every token id that ends a completion.
        pad_id: A valid token id for padding; its positions are always masked.
        template: The prompt around ``{question}``.
        chat: Whether the tokenizer's chat template goes around that.
    """

    model: PreTrainedModel
    tokenizer: Any
    eos_ids: tuple[int, ...]
    pad_id: int
    template: str = "{question}"
    chat: bool = False

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go."""
        return self.model.device

    @property
    def num_parameters(self) -> int:
        """Number of parameters, shared ones once."""
        return sum(p.numel() for p in self.model.parameters())

    def encode(self, question: str) -> list[int]:
        """Turn a question into prompt tokens (one BOS if the tokenizer has one; a chat template brings its own).

        Args:
            question: The question's text.

        Returns:
            Token ids.

        Raises:
            UserError: If the tokenizer does not belong to the model.
        """
        text = self.template.replace("{question}", question)
        if self.chat:
            message = [{"role": "user", "content": text}]
            rendered = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            tokens = list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])
        else:
            tokens = list(self.tokenizer(text)["input_ids"])
        vocabulary = self.model.config.vocab_size
        if tokens and max(tokens) >= vocabulary:
            raise UserError(
                f"the tokenizer makes token {max(tokens)} of {text[:40]!r}, the model has {vocabulary} tokens; "
                "they do not belong together"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn a completion's tokens into text, special tokens left out."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _check_directory(path: Path) -> None:
    """Name what a local model directory lacks, before transformers fails in its own words."""
    needed = {
        "config.json": ["config.json"],
        "weights (safetensors)": ["model.safetensors", "model.safetensors.index.json"],
        "a tokenizer": ["tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"],
    }
    if not path.is_dir():
        raise UserError(f"model directory {path} is not a directory; model.path needs a transformers directory")
    for what, names in needed.items():
        if not any((path / name).is_file() for name in names):
            hint = "; convert *.bin with safetensors" if what.startswith("weights") and list(path.glob("*.bin")) else ""
            raise UserError(f"model directory {path} lacks {what} (looked for {', '.join(names)}){hint}")
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path / 'config.json'} is not readable JSON ({error}); save the model again") from error


def _located(config: ModelConfig) -> str:
    """Path of a model that is here and complete, or its hub id."""
    path = resolve_path(config)
    local = Path(path).expanduser()
    if not local.exists() and not path.startswith((".", "/", "~")):
        return path
    _check_directory(local)
    return str(local)


def _not_loaded(path: str, error: Exception) -> UserError:
    first = str(error).strip().splitlines()
    return UserError(
        f"model {path} could not be loaded ({type(error).__name__}: {first[0] if first else 'no message'}); "
        "model.path takes a transformers directory with config.json, safetensors weights and a tokenizer, "
        "or a hub id when there is a network"
    )


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """All end tokens that the generation config, the model config and the tokenizer name, in that order."""
    found: list[int] = []
    generation = model.generation_config if isinstance(model.generation_config, GenerationConfig) else None
    for source in (getattr(generation, "eos_token_id", None), model.config.eos_token_id, tokenizer.eos_token_id):
        for token in source if isinstance(source, (list, tuple)) else [source]:
            if token is not None and int(token) not in found:
                found.append(int(token))
    return tuple(found)


def device_of(device: str) -> str:
    """Resolve `auto` to CUDA where there is one.

    Raises:
        UserError: If a CUDA device is asked for that is not there.
    """
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if where.startswith("cuda"):
        index = int(where.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise UserError(
                f"device={device}, but torch sees {torch.cuda.device_count()} CUDA devices; use cpu or auto instead"
            )
    return where


def _check_loaded(path: str, model: PreTrainedModel, report: Any, tokenizer: Any, config: ModelConfig) -> None:
    """Refuse a checkpoint whose gaps transformers would fill with random weights, and what is no decoder."""
    gaps = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if gaps:
        raise UserError(
            f"the weights of {path} lack or misfit {len(gaps)} tensors of {type(model).__name__} ({', '.join(gaps[:3])}"
            f"{', ...' if len(gaps) > 3 else ''}); save the whole model again"
        )
    _check_chat(path, tokenizer, config)


def _check_chat(path: str, tokenizer: Any, config: ModelConfig) -> None:
    if config.chat and not getattr(tokenizer, "chat_template", None):
        raise UserError(f"model.chat=true, but the tokenizer of {path} has no chat template; leave model.chat out")


def load(config: ModelConfig, device: str = "auto") -> CausalLM:
    """Load a policy from a directory, the hub, or the package.

    Only safetensors weights are read and code that comes with a model runs only with `trust_remote_code`.

    Args:
        config: The model's configuration.
        device: `auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:N`.

    Returns:
        The policy, in evaluation mode.

    Raises:
        UserError: If the model cannot be loaded; the message says what is missing and what to do.
    """
    path = _located(config)
    where = device_of(device)
    common: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    dtype = config.dtype if config.dtype != "auto" else ("float32" if where == "cpu" else "bfloat16")
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        loader: Any = AutoModelForCausalLM.from_pretrained  # its return type depends on output_loading_info
        model, report = loader(path, dtype=dtype, use_safetensors=True, output_loading_info=True, **common)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, SafetensorError, ...
        raise _not_loaded(path, error) from error
    _check_loaded(path, model, report, tokenizer, config)
    model.to(where)
    model.requires_grad_(False)
    use_grouped_attention(model)
    # A token that the tokenizer added without a row in the embedding can be neither sampled nor looked up.
    rows = model.get_input_embeddings().num_embeddings
    eos = tuple(token for token in _eos_ids(model, tokenizer) if token < rows)
    pad = tokenizer.pad_token_id
    pad_id = int(pad) if pad is not None and pad < rows else (eos[0] if eos else 0)
    return CausalLM(model, tokenizer, eos, pad_id, config.template, config.chat)


@dataclass(frozen=True)
class Shape:
    """Size of a model, known without its weights."""

    parameters: int
    width: int
    layers: int
    positions: int
    tokenizer: Any


def shape(config: ModelConfig) -> Shape:
    """Read a model's size and tokenizer, without its weights.

    Raises:
        UserError: If there is no such model.
    """
    path = _located(config)
    common: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        described = AutoConfig.from_pretrained(path, **common)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)
    except Exception as error:
        raise _not_loaded(path, error) from error
    _check_chat(path, tokenizer, config)
    parameters = sum(p.numel() for p in model.parameters())
    names = ("hidden_size", "num_hidden_layers", "max_position_embeddings")
    width, layers, positions = (int(getattr(described, name, 0) or 0) for name in names)
    return Shape(parameters, width, layers, positions, tokenizer)


def weights_hash(model: PreTrainedModel) -> str:
    """First 16 hex digits of the SHA-256 over names, shapes and values of all weights."""
    digest = sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
