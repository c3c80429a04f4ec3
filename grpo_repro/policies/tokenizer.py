"""Character tokenizer of the bundled policies: one token per character, saved as `tokenizer.json`."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, NEWLINE = "<pad>", "<eos>", "\n"
CHARACTERS = NEWLINE + "0123456789+-*/()="
VOCABULARY = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
PAD_ID, EOS_ID, NEWLINE_ID = VOCABULARY[PAD], VOCABULARY[EOS], VOCABULARY[NEWLINE]


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one id per character of the arithmetic task, `<pad>` = 0 and `<eos>` = 1.

    Padding goes on the left, so that a batch can be continued. A character outside the vocabulary becomes
    `<pad>`: the models never saw one.

    Returns:
        A fast tokenizer; no token is added around a text.
    """
    tokenizer = Tokenizer(models.WordLevel(dict(VOCABULARY), unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
