"""Estimates of memory and time: by hand, against each other, and for machines that are not here."""

from __future__ import annotations

from dataclasses import replace

from grpo_repro.config import ModelConfig, MseEvalConfig, TaskConfig
from grpo_repro.experiments import cost
from grpo_repro.experiments.language_cost import memory_parts
from grpo_repro.machine import GPUS, Machine, machine_for
from grpo_repro.sizes import ModelSize, size_of, sizes_table

SEVEN = ModelSize(**sizes_table()["Qwen/Qwen2.5-Math-7B"], source="")
H100 = Machine("H100", True, 79 * 2**30, GPUS["H100"], 0.25)
RUN = {
    "model": {"dtype": "auto", "kind": "causal_lm"}, "task": {"num_questions": 100}, "max_new_tokens": 100,
    "micro_batch": 4, "budget": 256, "group_size": 8, "optimizer": "adamw", "predict": False, "prompt_pool": 100,
    "normalize": False, "minibatches": 1, "kl_coefficient": 0.0,
}  # fmt: skip


def test_memory_by_hand():
    parts = memory_parts(RUN, SEVEN, 200, H100)
    count = 7_615_616_512
    assert parts["self-check"] == 20 * count and parts["weights"] == 4 * count
    sampled = cost.sampling_bytes(SEVEN, 4, 64, 100, 8, 200)
    assert sampled["cache"] == 2 * 512 * 4 * 28 * (64 * 100 + 8 * 200)
    backward = cost.backward_bytes(SEVEN, 2, 1000, 300, 400)
    layer = 2 * (14 * 3584 + 4 * 512 + 4 * 18944) + 16 * 28 * 300
    assert backward == {"activations": 1000 * 28 * layer, "logits": 16 * 152064 * 400}
    assert cost.backward_bytes(SEVEN, 2, 1000, 300, 400, True)["activations"] == 1000 * (layer + 28 * 2 * 3584)


def test_adapters_train_few_parameters_of_a_half_size_model():
    adapters = RUN | {"model": {"dtype": "auto", "kind": "causal_lm", "lora": {"rank": 16}}}
    assert cost.trained(adapters, SEVEN) == 40_370_176  # what peft attaches to every linear layer at rank 16
    parts = memory_parts(adapters, SEVEN, 200, H100)
    assert parts["weights"] == 2 * SEVEN.parameters + 4 * 40_370_176
    assert parts["optimiser"] == 8 * 40_370_176
    assert cost.trained(RUN | {"score_params": "last_layer"}, SEVEN) == 233_057_792 - 4_608


def test_a_device_is_detected_assumed_or_named():
    config = MseEvalConfig(task=TaskConfig(name="arithmetic"), assumed_gpu="A100-40GB", utilization=0.5)
    planned = machine_for(config, planning=True)
    assert (planned.on_gpu, planned.assumed, planned.memory_bytes) == (True, True, int(39.4 * 2**30))
    assert planned.flops("bfloat16", 1) == 0.5 * 312e12 and planned.flops("float32", 1) == 0.5 * 19.5e12
    assert "A100-40GB (assumed)" in planned.describe()
    assert not machine_for(config).on_gpu  # a run has what there is
    assert not machine_for(replace(config, device="cpu"), planning=True).on_gpu
    assert machine_for(replace(config, device_memory_gib=3.0), planning=True).memory_bytes == 3 * 2**30


def test_a_bundled_models_size_is_read_from_its_files():
    found, tokenizer = size_of(ModelConfig(name="bundled-base", path="bundled:base"))
    assert found.parameters == 409_056 and found.source == "config.json of bundled:base"
    assert tokenizer is not None
