"""Causal language models as policies: loading, prompts, end tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from grpo_repro.config import ModelConfig
from grpo_repro.engine.attention import use_grouped_attention
from grpo_repro.engine.layers import ADAPTER, chosen_parameters
from grpo_repro.errors import UserError
from grpo_repro.policies import lora
from grpo_repro.policies.model_files import check_chat, check_loaded, located, not_loaded


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

    @property
    def score_params(self) -> str:
        """Which parameters training moves: `lora` for a model with adapters, else `all`."""
        return "lora" if lora.has_adapters(self.model) else "all"

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """These parameters, by name."""
        return chosen_parameters(self.model, self.score_params)

    def encode(self, question: str) -> list[int]:
        """Turn a question into prompt tokens: one BOS if the tokenizer adds one, whatever the template holds; no EOS.

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
        tokens = self._framed(tokens)
        vocabulary = self.model.config.vocab_size
        if tokens and max(tokens) >= vocabulary:
            raise UserError(
                f"the tokenizer makes token {max(tokens)} of {text[:40]!r}, the model has {vocabulary} tokens; "
                "they do not belong together"
            )
        return tokens

    def _framed(self, tokens: list[int]) -> list[int]:
        """Give a prompt exactly one BOS where the tokenizer adds one, and take off an EOS that it added at the end."""
        added = list(self.tokenizer("")["input_ids"])
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if eos is not None and added[-1:] == [eos] and tokens[-1:] == [eos] and not (self.chat or added == [bos]):
            tokens = tokens[:-1]
        if bos is None or added[:1] != [bos] and tokens[:2] != [bos, bos]:
            return tokens
        start = next((place for place, token in enumerate(tokens) if token != bos), len(tokens))
        return [bos, *tokens[start:]]

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn a completion's tokens into text, special tokens left out."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


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


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the warnings of transformers to itself."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


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
    path = located(config)
    where = device_of(device)
    common: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    dtype = config.dtype if config.dtype != "auto" else ("float32" if where == "cpu" else "bfloat16")
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        loader: Any = AutoModelForCausalLM.from_pretrained  # its return type depends on output_loading_info
        # What does not fit is told by `check_loaded`, in one line instead of a table.
        settings = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        with _quietly():
            model, report = loader(path, dtype=dtype, **settings, **common)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, SafetensorError, ...
        raise not_loaded(config, path, error) from error
    check_loaded(path, model, report)
    check_chat(path, tokenizer, config)
    if config.lora.rank:
        lora.attach(model, config.lora)
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
    """What is known of a model without its weights: number of parameters, tokenizer, transformers' configuration."""

    parameters: int
    tokenizer: Any
    described: Any


def shape(config: ModelConfig) -> Shape:
    """Read a model's size and tokenizer, without its weights.

    Raises:
        UserError: If there is no such model.
    """
    path = located(config)
    common: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        described = AutoConfig.from_pretrained(path, **common)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)
    except Exception as error:
        raise not_loaded(config, path, error) from error
    check_chat(path, tokenizer, config)
    return Shape(sum(p.numel() for p in model.parameters()), tokenizer, described)


def trained_facts(policy: CausalLM) -> dict[str, str]:
    """What a manifest says of the parameters that training moves: which, how many, in what type."""
    trained = policy.trained.values()
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in trained})
    return {"trained_parameters": f"{policy.score_params} ({sum(p.numel() for p in trained)}, {', '.join(kinds)})"}


def weights_hash(model: PreTrainedModel) -> str:
    """First 16 hex digits of the SHA-256 over names, shapes and values of all weights, adapters left out."""
    digest = sha256()
    weights = {name.replace(".base_layer.", "."): x for name, x in model.state_dict().items() if ADAPTER not in name}
    for name, value in sorted(weights.items()):
        digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
