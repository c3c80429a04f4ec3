"""The self-check: architectures whose numbers the engine would get wrong are refused before anything is measured."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel, OPTConfig, OPTForCausalLM, PreTrainedModel

from grpo_repro import bundled
from grpo_repro.config import ModelConfig, load_choice
from grpo_repro.engine import taps
from grpo_repro.engine.attention import use_grouped_attention
from grpo_repro.engine.check import self_check
from grpo_repro.errors import ResultsError, UserError
from grpo_repro.experiments.state import Checkpoint
from grpo_repro.policies import causal_lm

PROMPT = [3, 4, 5, 6, 7, 8, 9]
TINY = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def policy():
    return causal_lm.load(load_choice("model", "bundled-base"), "cpu")


def of(model: PreTrainedModel) -> causal_lm.CausalLM:
    use_grouped_attention(model)
    model.requires_grad_(False)
    return causal_lm.CausalLM(model, None, (1,), 0)


def test_the_bundled_policy_passes_and_is_left_as_it_was(policy):
    self_check(policy, PROMPT)
    assert policy.model.config._attn_implementation == "grouped"
    assert not any(p.requires_grad or p.grad is not None for p in policy.model.parameters())


@pytest.mark.parametrize(
    "model",
    [
        lambda: OPTForCausalLM(
            OPTConfig(ffn_dim=16, word_embed_proj_dim=16, **TINY)
        ),
        lambda: BertLMHeadModel(
            BertConfig(intermediate_size=16, is_decoder=True, **TINY)
        ),
    ],
    ids=["opt", "bert as a decoder"],
)  # fmt: skip
def test_architectures_that_the_engine_does_not_see_through_are_refused_by_name(model):
    with pytest.raises(UserError, match=r"(OPT|Bert)\w+ is not supported by the engine"):
        self_check(of(model().eval()), PROMPT)


def test_a_parameter_that_is_overlooked_is_found(policy, monkeypatch):
    def blind(module, inputs, grad):
        return {name: torch.zeros(len(grad), p.numel()) for name, p in module.named_parameters(recurse=False)}

    monkeypatch.setattr(taps, "_module_gradients", blind)
    with pytest.raises(UserError, match="score norms differ from a plain pass"):
        self_check(policy, PROMPT)


def copy_of_base(folder):
    for path in bundled.path("base").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_missing_tensor_is_not_filled_at_random(tmp_path):
    folder = copy_of_base(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack or misfit 1 tensors.*layers\.1\.mlp\.up_proj"):
        causal_lm.load(ModelConfig(name="gap", path=str(folder)), "cpu")


def test_a_chat_prompt_without_a_template_is_refused_without_weights(tmp_path):
    config = dataclasses.replace(load_choice("model", "bundled-base"), chat=True)
    for read in (causal_lm.shape, causal_lm.load):
        with pytest.raises(UserError, match="has no chat template"):
            read(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="torch sees 0 CUDA devices"):
        causal_lm.device_of("cuda:3")
    assert causal_lm.device_of("auto") == "cpu"


def test_a_state_of_another_form_is_not_used(tmp_path):
    checkpoint, blank = Checkpoint(tmp_path, "a cell"), {"sums": torch.zeros(2, 3), "done": torch.tensor([0, 0])}
    full = {"sums": torch.ones(2, 3), "done": torch.tensor([4, 9])}
    checkpoint.save("pool", full)
    assert torch.equal(checkpoint.restore("pool", blank)["sums"], full["sums"])
    checkpoint.save("pool", {"done": torch.zeros(1)})
    assert checkpoint.restore("pool", blank) is blank
    (tmp_path / "pool.safetensors").write_bytes(b"junk")
    assert checkpoint.restore("pool", blank) is blank


def test_a_state_that_cannot_be_saved_is_one_message_and_keeps_the_last(tmp_path):
    checkpoint = Checkpoint(tmp_path, "a cell")
    (tmp_path / ".pool.tmp").mkdir()
    with pytest.raises(ResultsError, match="cannot save the partial work"):
        checkpoint.save("pool", {"done": torch.zeros(1)})
