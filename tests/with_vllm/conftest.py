"""A small model whose heads vLLM's CPU attention knows, and one engine for all tests that can share it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
from random_model import save_random_model
from small_models import Case
from wide import CONFIG, LONG

from grpo_repro.config import ModelConfig
from grpo_repro.engine.vllm_sampler import VllmSampler
from grpo_repro.policies import causal_lm
from grpo_repro.sampler_options import installed


def pytest_collection_modifyitems(items):
    if not installed():
        skip = pytest.mark.skip(reason="vLLM is not installed here: make test-vllm")
        for item in items:
            if "with_vllm" in str(item.path):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory) -> Path:
    """Heads of 32; its generation config asks for greedy decoding, which no sampler may listen to."""
    folder = save_random_model(
        tmp_path_factory.mktemp("wide"), seed=5, hidden_size=64, num_attention_heads=2, max_position_embeddings=256
    )
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"top_k": 1, "temperature": 0.1, "do_sample": True}))
    return folder


@pytest.fixture(scope="session")
def loaded(wide_model) -> tuple[causal_lm.CausalLM, VllmSampler]:
    model = ModelConfig(name="wide", path=str(wide_model), dtype="float32")
    policy = causal_lm.load(model, "cpu")
    return policy, VllmSampler.start(policy, model, CONFIG, [LONG])


@pytest.fixture
def pair(loaded) -> tuple[Case, VllmSampler]:
    """The policy beside a plain copy of it, and its sampler; the weights are put back afterwards."""
    policy, sampler = loaded
    before = copy.deepcopy(policy.model.state_dict())
    plain = copy.deepcopy(policy.model)
    plain.set_attn_implementation("eager")
    yield Case(replace(policy), plain), sampler
    policy.model.load_state_dict(before)
    sampler.policy_moved()
