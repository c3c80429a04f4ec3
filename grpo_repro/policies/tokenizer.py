"""Character tokenizer of the bundled policies: one token per character, saved as `tokenizer.json`."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, NEWLINE = "<pad>", "<eos>", "\n"
CHARACTERS = NEWLINE + "0123456789+-*/()="
VOCABULARY = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
PAD_ID, EOS_ID, NEWLINE_ID = VOCABULARY[PAD], VOCABULARY[EOS], VOCABULARY[NEWLINE]


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one id per character of the arithmetic task, `<pad>` = 0 and `<eos>` = 1.

    It is byte-level BPE without merges: transformers' `AutoTokenizer` turns the tokenizer of any Qwen2 model
    into one of that kind, so this is the one that it leaves as it is. Padding goes on the left, so that a
    batch can be continued. Characters outside the vocabulary are dropped: the models never saw one.

    Returns:
        A fast tokenizer; no token is added around a text.
    """
    # The name of the newline's byte in a byte-level vocabulary.
    vocabulary = {"\u010a" if token == NEWLINE else token: index for token, index in VOCABULARY.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
