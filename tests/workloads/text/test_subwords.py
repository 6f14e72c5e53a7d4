from __future__ import annotations

import base64
import json

import pytest

from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.text.subwords import BEGIN, END, PAD, UNKNOWN, learn

TEXTS = ["the loss is scaled", "the scale is halved", "a step is skipped", "", "ein Schritt wird übersprungen"] * 5


@pytest.mark.parametrize("pieces", ["bpe", "unigram", "char"])
def test_a_text_comes_back_as_it_was(pieces):
    vocabulary = learn("t", TEXTS, pieces, 60)
    for text in TEXTS:
        assert vocabulary.decode(vocabulary.encode([text])[0]) == text


def test_the_same_text_gives_the_same_vocabulary():
    assert learn("t", TEXTS, "bpe", 50).model == learn("t", TEXTS, "bpe", 50).model
    assert learn("t", TEXTS, "bpe", 50).model != learn("t", TEXTS, "bpe", 45).model


def test_what_stands_behind_the_end_and_padding_say_nothing():
    vocabulary = learn("t", TEXTS, "bpe", 50)
    numbers, empty, unknown = vocabulary.encode(["a step", "", "日"])
    assert (numbers[-1], empty, UNKNOWN in unknown) == (END, [END], True)
    assert "日" not in vocabulary.decode(unknown)
    assert vocabulary.decode([*numbers, *numbers, PAD]) == "a step"
    assert vocabulary.decode([BEGIN, *numbers[:-1], PAD, PAD]) == "a step"
    assert vocabulary.decode([]) == ""


def test_a_vocabulary_is_no_larger_than_the_text_makes_it():
    assert len(learn("t", TEXTS, "word", 10_000)) < 40
    assert len(learn("t", TEXTS, "bpe", 45)) == 45


def test_one_too_small_is_refused_with_the_size_that_is_needed():
    with pytest.raises(ConfigError, match=r"dataset.vocabulary=10 is too small for the characters of t") as refused:
        learn("t", TEXTS, "bpe", 10)
    needed = int(refused.value.hint.split("=")[1].split()[0])
    assert len(learn("t", TEXTS, "bpe", needed)) == needed
    with pytest.raises(DataError, match="t has no text"):
        learn("t", ["", ""], "bpe", 50)


def test_the_portable_form_is_all_that_sentencepiece_needs():
    import sentencepiece

    vocabulary = learn("t", TEXTS, "bpe", 50)
    carried = json.loads(json.dumps(vocabulary.portable()))
    elsewhere = sentencepiece.SentencePieceProcessor(model_proto=base64.b64decode(carried))
    assert elsewhere.encode("a step is halved") == vocabulary.encode(["a step is halved"])[0][:-1]
    assert [elsewhere.id_to_piece(number) for number in range(50)] == vocabulary.pieces()
