"""Attention in which the completions of a group read one shared copy of their prompt's keys and values.

The G completions of a prompt see the same prompt. Copying its cache G times costs memory and, at every decoding
step, bandwidth. Here the queries of a whole group are one matrix that multiplies the single cached prompt, and
only the completions' own keys and values are kept per completion. The result is the usual softmax attention over
prompt and completion together; only the order of summation differs.

The function is registered with transformers under the name ``grouped`` and works with any decoder whose
attention goes through transformers' attention interface (Qwen2, Llama, Mistral, Gemma, ...): grouped-query
heads, soft-capped logits and sliding windows included. It keeps keys and values itself, so no cache object of
transformers is involved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from grpo_repro.errors import UserError

NAME = "grouped"


@dataclass
class GroupedCache:
    """Keys and values of ``prompts`` prompts and of ``rows`` completions for each.

    Attributes:
        prompt_mask: which prompt positions hold a token, bool, ``[prompts, prompt_len]``.
        prompt_keys, prompt_values: per layer, ``[prompts, kv_heads, prompt_len, head_dim]``, rotated.
        keys, values: per layer, the completions' own, ``[prompts * rows, kv_heads, length, head_dim]``.
        plain: use elementary operations throughout, so that a batched backward pass (vmap) works.
        append: keep the completions' keys and values for a following step (decoding).
    """

    prompt_mask: Tensor
    plain: bool = False
    append: bool = False
    prompt_keys: dict[int, Tensor] = field(default_factory=dict)
    prompt_values: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    prefilled: bool = False

    @property
    def prompt_lengths(self) -> Tensor:
        """Number of tokens of each prompt, ``[prompts]``."""
        return self.prompt_mask.sum(1)

    def prompt_positions(self) -> Tensor:
        """Position of each prompt token, ``[prompts, prompt_len]``; padding gets 0 (and is masked)."""
        return (self.prompt_mask.cumsum(1) - 1).clamp_min(0)

    def select(self, index: Tensor) -> None:
        """Reorder, repeat or drop completions: new row i continues old row ``index[i]``."""
        for store in (self.keys, self.values):
            for layer in store:
                store[layer] = store[layer].index_select(0, index)


def _soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _bias(allowed: Tensor, like: Tensor) -> Tensor:
    """0 where attention is allowed, else the lowest finite number (a fully padded row stays finite)."""
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(allowed, zero, torch.finfo(like.dtype).min)


def _within(query_pos: Tensor, key_pos: Tensor, window: int | None) -> Tensor:
    """Causal and, if a window is given, sliding: ``[..., queries, keys]``."""
    distance = query_pos.unsqueeze(-1) - key_pos.unsqueeze(-2)
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


def _prefill(
    cache: GroupedCache, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
) -> Tensor:
    positions = cache.prompt_positions()
    allowed = _within(positions, positions, window) & cache.prompt_mask[:, None, :]
    # Padding on the left would otherwise see nothing and divide 0 by 0.
    allowed = allowed | torch.eye(allowed.shape[-1], dtype=torch.bool, device=allowed.device)
    bias = _bias(allowed, query)[:, None]
    if not cache.plain and cap is None:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=grouped)
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    logits = query.reshape(batch, kv_heads, -1, dim) @ key.transpose(-1, -2)
    logits = _soft_cap(logits.reshape(batch, heads, length, length) * scale, cap) + bias
    weights = torch.softmax(logits, -1, dtype=torch.float32).to(query.dtype)
    return (weights.reshape(batch, kv_heads, -1, length) @ value).reshape(batch, heads, length, dim)


def _extend(
    cache: GroupedCache, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None,
    cap: float | None,
) -> Tensor:  # fmt: skip
    past = cache.keys[layer].shape[2] if layer in cache.keys else 0
    if past:
        key = torch.cat([cache.keys[layer], key], 2)
        value = torch.cat([cache.values[layer], value], 2)
    if cache.append:
        cache.keys[layer], cache.values[layer] = key, value
    empty = key.new_zeros(len(cache.prompt_mask), key.shape[1], 0, key.shape[3])  # a prompt of length 0
    prompt_key, prompt_value = cache.prompt_keys.get(layer, empty), cache.prompt_values.get(layer, empty)
    prompts, kv_heads, prompt_len, dim = prompt_key.shape
    batch, heads, length, _ = query.shape
    rows, share = batch // prompts, heads // kv_heads
    # [prompts, kv_heads, rows * share * length, dim]: the group's queries as one matrix.
    grouped = query.reshape(prompts, rows, kv_heads, share * length, dim).transpose(1, 2)
    grouped = grouped.reshape(prompts, kv_heads, rows * share * length, dim)
    on_prompt = (grouped @ prompt_key.transpose(-1, -2)).reshape(prompts, kv_heads, rows, share, length, prompt_len)
    own = query.reshape(batch, kv_heads, share * length, dim) @ key.transpose(-1, -2)
    own = own.reshape(prompts, rows, kv_heads, share, length, past + length).transpose(1, 2)
    logits = _soft_cap(torch.cat([on_prompt, own], -1) * scale, cap) + _extend_bias(cache, past, length, window, query)
    weights = torch.softmax(logits, -1, dtype=torch.float32).to(query.dtype)
    from_prompt = weights[..., :prompt_len].reshape(prompts, kv_heads, rows * share * length, prompt_len) @ prompt_value
    from_prompt = from_prompt.reshape(prompts, kv_heads, rows, share * length, dim).transpose(1, 2)
    from_own = weights[..., prompt_len:].transpose(1, 2).reshape(batch, kv_heads, share * length, past + length) @ value
    return (from_prompt.reshape(batch, heads, length, dim)) + from_own.reshape(batch, heads, length, dim)


def _extend_bias(cache: GroupedCache, past: int, length: int, window: int | None, like: Tensor) -> Tensor:
    """``[prompts, 1, 1, 1, length, prompt_len + past + length]``."""
    device = like.device
    own_pos = torch.arange(past + length, device=device)
    query_pos = cache.prompt_lengths[:, None] + own_pos[past:]
    see_prompt = _within(query_pos, cache.prompt_positions(), window) & cache.prompt_mask[:, None, :]
    see_own = _within(own_pos[past:], own_pos, window).expand(len(query_pos), -1, -1)
    return _bias(torch.cat([see_prompt, see_own], -1), like)[:, None, None, None]


def grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, grouped: GroupedCache | None = None, sliding_window: int | None = None,
    softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of transformers' interface over a shared prompt; see the module's docstring.

    Args:
        module: the attention layer; its ``layer_idx`` names the cache entry.
        query: ``[batch, heads, length, head_dim]``, rotated.
        key: ``[batch, kv_heads, length, head_dim]``, rotated.
        value: ``[batch, kv_heads, length, head_dim]``.
        attention_mask: ignored; masks follow from the cache.
        scaling: factor of the logits.
        grouped: the cache; prompts are stored in it at the first pass, completions read it later.
        sliding_window: keys further back are not seen; None for all.
        softcap: logits are squashed to cap * tanh(logits / cap); None for no cap.

    Returns:
        The heads' outputs ``[batch, length, heads, head_dim]`` and no weights.
    """
    assert grouped is not None, "the grouped attention needs its cache: call it through engine.attention.forward"
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if grouped.prefilled:
        out = _extend(grouped, layer, query, key, value, scale, sliding_window, softcap)
    else:
        grouped.prompt_keys[layer], grouped.prompt_values[layer] = key, value
        out = _prefill(grouped, query, key, value, scale, sliding_window, softcap)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Switch a model to the grouped attention and to evaluation mode (no dropout), for good.

    Raises:
        UserError: If the architecture does not go through transformers' attention interface.
    """
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise UserError(
            f"{type(model).__name__} does not use transformers' attention interface ({error}); "
            "choose a decoder such as Qwen2, Llama, Mistral or Gemma"
        ) from error
    model.eval()


def prefill(model: PreTrainedModel, tokens: Tensor, cache: GroupedCache) -> Tensor:
    """Run the prompts once and keep their keys and values.

    Args:
        model: a causal language model after `use_grouped_attention`.
        tokens: ``[prompts, prompt_len]``, padded on the left.
        cache: a fresh cache with the matching ``prompt_mask``.

    Returns:
        Logits after the last prompt token, ``[prompts, vocabulary]``.
    """
    out = model(
        input_ids=tokens, position_ids=cache.prompt_positions(), use_cache=False, grouped=cache, logits_to_keep=1
    )
    cache.prefilled = True
    return out.logits[:, -1]


def extend(model: PreTrainedModel, tokens: Tensor, cache: GroupedCache, past: int = 0, keep: int = 0) -> Tensor:
    """Run completions behind their cached prompts.

    Args:
        model: a causal language model after `use_grouped_attention`.
        tokens: ``[prompts * rows, length]``, the rows of a prompt adjacent.
        cache: the cache after `prefill`.
        past: how many tokens of each completion the cache already holds.
        keep: compute logits for the last ``keep`` tokens only; 0 for all.

    Returns:
        Logits ``[prompts * rows, keep or length, vocabulary]``.
    """
    positions = _positions(tokens, cache, past)
    out = model(input_ids=tokens, position_ids=positions, use_cache=False, grouped=cache, logits_to_keep=keep)
    return out.logits


def last_hidden(model: PreTrainedModel, tokens: Tensor, cache: GroupedCache) -> Tensor:
    """Run completions behind their cached prompts as `extend` does, up to what the output layer reads.

    Returns:
        The decoder's last hidden states, ``[prompts * rows, length, width]``.
    """
    decoder = model.get_decoder()
    positions = _positions(tokens, cache, 0)
    return decoder(input_ids=tokens, position_ids=positions, use_cache=False, grouped=cache).last_hidden_state


def _positions(tokens: Tensor, cache: GroupedCache, past: int) -> Tensor:
    rows = len(tokens) // len(cache.prompt_mask)
    start = cache.prompt_lengths.repeat_interleave(rows)[:, None] + past
    return start + torch.arange(tokens.shape[1], device=tokens.device)
