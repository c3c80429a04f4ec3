"""The bundled policies, and the documents and training that make them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_repro import bundled
from grpo_repro.config import load_choice
from grpo_repro.engine.sample import sample, uniforms
from grpo_repro.errors import UserError
from grpo_repro.policies import causal_lm, pretrain
from grpo_repro.policies.accuracy import sampled_accuracy, sampled_values
from grpo_repro.policies.documents import (
    LINES,
    QUESTION_WEIGHT,
    Corpus,
    Line,
    draw_document,
    draw_rows,
    error_rate,
    train_questions,
)
from grpo_repro.policies.tokenizer import CHARACTERS, EOS_ID, NEWLINE_ID, PAD_ID, character_tokenizer
from grpo_repro.tasks.arithmetic import KINDS, Ranges, generate, split_of

DEMONSTRATIONS = "12+7=19\n20+3-15=8\n14*3=42\n24/6=4\n15-(10+9)=-4\n"
TINY = pretrain.Shape(hidden=32, layers=2, heads=4, key_value_heads=2, mlp=64)
SMALL = Ranges(1, 14, 1, 8)
CLEAN, NOISY, MIXED = (Corpus(share, SMALL, SMALL) for share in (1.0, 0.0, 0.3))
QUICK = pretrain.Phase(steps=60, corpus=CLEAN, learning_rate=3e-3, rows=16, length=48)


def quiet(done: int, total: int, text: str) -> None:
    """Progress that says nothing."""


def documents(corpus: Corpus, number: int) -> list[list[Line]]:
    rng = np.random.default_rng(7)
    return [draw_document(rng, corpus) for _ in range(number)]


@pytest.mark.parametrize("name", bundled.NAMES)
def test_a_bundled_model_loads_and_is_small(name: str) -> None:
    folder = bundled.path(name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.num_parameters() <= 500_000
    assert model.config.model_type == "qwen2" and model.config.tie_word_embeddings
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert set(GenerationConfig.from_pretrained(folder).eos_token_id) == {NEWLINE_ID, EOS_ID}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, EOS_ID)
    assert len(tokenizer) == model.config.vocab_size


def test_the_bundled_folder_is_at_most_four_megabytes() -> None:
    folder = bundled.path("base").parent
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 4_000_000


def test_an_unknown_bundled_model_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="no bundled model 'big'"):
        bundled.path("big")
    with pytest.raises(UserError, match="no recipe for model 'big'"):
        pretrain.build("big", Path("unused"), 0, quiet)


def test_instruct_needs_a_base(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="build base first"):
        pretrain.build("instruct", tmp_path / "out", 0, quiet, base=tmp_path)


@pytest.mark.parametrize("where", ["fresh", *bundled.NAMES])
def test_the_tokenizer_returns_every_text_of_the_task(where: str) -> None:
    if where == "fresh":
        tokenizer = character_tokenizer()
    else:
        tokenizer = AutoTokenizer.from_pretrained(bundled.path(where))
    assert tokenizer.decode(tokenizer(CHARACTERS).input_ids) == CHARACTERS
    assert len(tokenizer(CHARACTERS).input_ids) == len(CHARACTERS)
    for question in generate(200, "test", 0, Ranges()):
        text = f"{question.text}={question.answer}\n"
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text) and tokenizer.decode(ids) == text
    batch = tokenizer(["1+1=", "12+12="], padding=True)
    assert batch.input_ids[0][:2] == [PAD_ID, PAD_ID] and batch.attention_mask[0] == [0, 0, 1, 1, 1, 1]


def test_an_answer_ends_at_the_newline() -> None:
    policy = causal_lm.load(load_choice("model", "bundled-base"), "cpu")
    rollout = sample(policy, [policy.encode("12+7")], uniforms(np.random.SeedSequence(0).spawn(1), 64, 8))
    rows = zip(rollout.tokens[0].tolist(), rollout.lengths[0].tolist(), strict=True)
    texts = [policy.tokenizer.decode(tokens[:length]) for tokens, length in rows]
    ended = [text for text in texts if text.endswith("\n")]
    assert len(ended) > 60
    assert all(text.count("\n") == 1 for text in ended)


def test_demonstrations_are_right_and_of_the_train_split() -> None:
    assert load_choice("model", "bundled-icl").template == DEMONSTRATIONS + "{question}="
    for line in DEMONSTRATIONS.splitlines():
        question, answer = line.split("=")
        ranges = Ranges(1, 20, 1, 10)
        found = next(q for kind in KINDS for q in train_questions(kind, ranges) if q.text == question)
        assert found.answer == answer


def test_clean_documents_are_always_right() -> None:
    lines = [line for document in documents(CLEAN, 500) for line in document]
    assert not any(line.wrong for line in lines)
    assert all(line.written == line.question.answer for line in lines)


def test_noisy_documents_err_at_the_stated_rate() -> None:
    lines = [line for document in documents(NOISY, 3000) for line in document]
    for kind in KINDS:
        rates = np.array(
            [error_rate(line.question.text, NOISY.error_slope) for line in lines if line.question.kind == kind]
        )
        wrong = sum(line.wrong for line in lines if line.question.kind == kind)
        # Sum of independent Bernoulli draws with known probabilities.
        assert abs(wrong - rates.sum()) < 4 * np.sqrt((rates * (1 - rates)).sum() + 1e-9)
    assert all(line.wrong == (line.written != line.question.answer) for line in lines)


def test_the_share_of_clean_documents_is_the_stated_one() -> None:
    # A long document without an error is clean but for a probability below 1e-4.
    long = [document for document in documents(MIXED, 6000) if sum(len(x.question.text) for x in document) > 60]
    clean = sum(not any(line.wrong for line in document) for document in long)
    assert stats.binomtest(clean, len(long), 0.3).pvalue > 1e-3


def test_a_guess_is_never_the_truth() -> None:
    lines = [line for document in documents(NOISY, 3000) for line in document if line.wrong]
    assert {line.written for line in lines} == {"0", "1"}
    usual = [line for line in lines if line.question.answer not in ("0", "1")]
    zeros = sum(line.written == "0" for line in usual)
    assert stats.binomtest(zeros, len(usual), 0.8).pvalue > 1e-3
    assert all(line.written != line.question.answer for line in lines)


def test_no_test_question_is_ever_in_a_document() -> None:
    test_texts = {q.text for q in generate(500, "test", 0, Ranges())}
    corpora = {phase.corpus for phases in pretrain.RECIPES.values() for phase in phases}
    assert len(corpora) == 5
    for corpus in corpora:
        texts = {line.question.text for document in documents(corpus, 3000) for line in document}
        assert len(texts) > 5000
        assert not texts & test_texts
        assert {split_of(text) for text in texts} == {"train"}


def test_rows_start_with_a_document_and_weigh_answers() -> None:
    tokens, weights = draw_rows(np.random.default_rng(0), 40, 96, MIXED)
    assert tokens.shape == weights.shape == (40, 96)
    tokenizer = character_tokenizer()
    for ids, loss in zip(tokens, weights, strict=True):
        for text in tokenizer.decode(ids).split("<eos>")[:-1]:
            lines = text.splitlines()
            assert LINES[0] <= len(lines) <= LINES[1]
            assert all(line.count("=") == 1 for line in lines)
        answered = False
        for token, weight in zip(ids, loss, strict=True):
            assert weight == pytest.approx(1.0 if answered else QUESTION_WEIGHT)
            answered = (answered or token == CHARACTERS.index("=") + 2) and token != NEWLINE_ID


def test_training_lowers_the_loss_and_repeats_bit_for_bit() -> None:
    runs = []
    for seed in (3, 3, 4):
        with pretrain.one_thread():
            model = pretrain.new_model(TINY, seed)
            losses = pretrain.train(model, QUICK, np.random.default_rng(seed), quiet)
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        runs.append((losses, hashlib.sha256(weights).hexdigest()))
    assert np.mean(runs[0][0][-10:]) < 0.75 * np.mean(runs[0][0][:3])
    assert runs[0] == runs[1]
    assert runs[0][1] != runs[2][1]


def test_a_build_repeats_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = (pretrain.Phase(6, CLEAN, 1e-3, rows=4), pretrain.Phase(4, MIXED, 1e-3, rows=4))
    monkeypatch.setattr(pretrain, "RECIPES", {"base": phases, "instruct": phases[1:]})
    seen: list[tuple[int, int]] = []
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for run in ("a", "b"):
        pretrain.build("base", tmp_path / run, 5, lambda done, total, _: seen.append((done, total)))
        pretrain.build("instruct", tmp_path / f"{run}i", 5, quiet, base=tmp_path / run)
    assert torch.equal(before, torch.get_rng_state())
    assert seen == [(6, 10), (10, 10)] * 2
    for suffix in ("", "i"):
        files = [(tmp_path / f"{run}{suffix}" / "model.safetensors").read_bytes() for run in ("a", "b")]
        assert files[0] == files[1]
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != files[0]


def test_sampled_accuracy_is_the_mean_of_sampled_values() -> None:
    questions = generate(25, "test", 0, Ranges())
    values = sampled_values(bundled.path("instruct"), "{question}=", questions, 8, 1)
    accuracy = sampled_accuracy(bundled.path("instruct"), "{question}=", questions, 8, 1)
    assert set(accuracy) == {*KINDS, "all"}
    assert accuracy["all"] == pytest.approx((values.mean(), values.std(ddof=1) / 5))
    assert np.all((values * 8) % 1 == 0) and 0 < values.mean() < 1


def test_policies_are_ordered_and_demonstrations_help() -> None:
    questions = generate(150, "test", 0, Ranges())
    base, instruct, in_context = (
        sampled_values(bundled.path(name), prefix + "{question}=", questions, 16, 0)
        for name, prefix in (("base", ""), ("instruct", ""), ("instruct", DEMONSTRATIONS))
    )
    for weaker, stronger in ((base, instruct), (instruct, in_context)):
        gain = stronger - weaker
        assert gain.mean() > 3 * gain.std(ddof=1) / len(gain) ** 0.5
