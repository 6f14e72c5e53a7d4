"""Continued texts: those of reading all again for every token, whatever texts are beside them, without unknown tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.language import task as language
from mptrain.workloads.language.models.causal_lm import causal_lm
from mptrain.workloads.language.models.lstm import lstm_language_model
from mptrain.workloads.language.models.transformer import transformer_language_model
from mptrain.workloads.language.task import Language, continued
from tests.loops import each

VOCABULARY, MOST, COUNT = 23, 16, 12
LENGTHS = [9, 2, 17, 5, 9, 3, 16, 1]


def transformer(**more):
    return transformer_language_model(vocabulary_size=VOCABULARY, sequence_length=MOST, width=16, heads=2, **more)


def lstm(**more):
    return lstm_language_model(vocabulary_size=VOCABULARY, embedding_size=8, hidden_size=12, layers=2, **more)


def of_library(name):
    return causal_lm(name=name, vocabulary_size=VOCABULARY, sequence_length=MOST, width=16, heads=2)


KINDS = {
    "transformer": transformer,
    "lstm": lstm,
    "lanes": lambda: lstm(lanes=3),
    "adaptive": lambda: lstm(softmax="adaptive", cutoffs=(6, 12)),
    "sampled": lambda: lstm(softmax="sampled", samples=5, projection=4),
    "gpt2": lambda: of_library("gpt2"),
    "llama": lambda: of_library("llama"),
    "mamba": lambda: of_library("mamba"),
}
ALL = [pytest.param(kind, marks=pytest.mark.long if kind in ("llama", "mamba") else ()) for kind in KINDS]


def made(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(4)  # new networks say nearly the same after every text
    return model


def texts_of(lengths=LENGTHS, vocabulary=VOCABULARY):
    source = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocabulary, (length,), generator=source) for length in lengths]


def together(model, texts, **more):
    lengths = torch.tensor([len(text) for text in texts])
    return continued(model, pad_sequence(texts, batch_first=True), COUNT, MOST, lengths, **{"seed": 1, **more})


@pytest.mark.parametrize("kind", ALL)
def test_the_likeliest_tokens_are_those_by_hand(kind):
    model, texts = made(kind), texts_of()
    assert model.next_logits is not None
    for text, written in zip(texts, together(model, texts, temperature=0).tolist(), strict=True):
        numbers = text.tolist()
        for _ in range(COUNT):
            numbers.append(int(model(torch.tensor([numbers[-MOST:]]))[0, -1].argmax()))
        assert numbers[len(text) :] == written
    assert len(set(together(model, texts, temperature=0).flatten().tolist())) > 3


@pytest.mark.parametrize("kind", ALL)
def test_a_text_gets_the_same_tokens_alone_and_among_others(kind):
    model, texts = made(kind), texts_of()
    drawn = together(model, texts)
    assert drawn.tolist() == [together(model, [text])[0].tolist() for text in texts]
    assert drawn.tolist() == together(model, texts[::-1]).flip(0).tolist()
    assert drawn.tolist() != together(model, texts, seed=2).tolist()


class Remembers(nn.Module):
    """Says that the number after the last one follows, and remembers what it was asked to read."""

    def __init__(self, keeps=True) -> None:
        super().__init__()
        self.read = []
        if not keeps:
            self.next_logits = None

    def forward(self, tokens):
        self.read.append(tuple(tokens.shape))
        return nn.functional.one_hot((tokens + 1) % 100, 100).float() * 1000

    def next_logits(self, tokens, state):
        assert (state is None) or tokens.shape[1] == 1
        return self(tokens)[:, -1], "state"


def test_only_new_tokens_are_read_until_positions_move():
    texts = [torch.arange(length) for length in (12, 14, 15)]
    model = Remembers()
    assert together(model, texts)[:, 0].tolist() == [12, 14, 15]
    assert model.read == [(3, 12), *[(3, 1)] * 4, *[(3, MOST)] * 7, (2, MOST), (2, MOST), (1, MOST)]
    model = Remembers(keeps=False)  # texts are read only for a token of their own
    assert together(model, texts)[:, 11].tolist() == [23, 25, 26]
    assert model.read[:4] == [(1, 12), (1, 13), (2, 14), (3, 15)]
    assert sum(rows for rows, _ in model.read) == 3 * COUNT


def batch_of(texts):
    inputs, targets = (
        pad_sequence([text[part] for text in texts], batch_first=True) for part in (slice(-1), slice(1, None))
    )
    return Batch(inputs, targets, tuple(len(text) - 1 for text in texts))


class Decode:
    unknown = 0

    def __call__(self, numbers):
        return " ".join(map(str, numbers))


@each("temperature", [0.0, 1.0])
def test_the_unknown_token_is_never_written(temperature):
    class Unsure(Remembers):
        def forward(self, tokens):
            logits = torch.zeros(*tokens.shape, 7)
            logits[..., 0], logits[..., 5:] = 50, 60  # the unknown one, and two beyond the vocabulary
            return logits if len(tokens) < 3 else logits * torch.nan  # nothing can be drawn either

    task = Language(vocabulary_size=5, decode=Decode(), temperature=temperature, length=40)
    for count in (2, 3):
        answers = task.predict(Unsure(), batch_of(texts_of([5] * count, 5)))
        written = {number for answer in answers for number in answer["continuation"].split()}
        assert written == ({"1"} if temperature == 0 else {"1", "2", "3", "4"})
    only = Language(vocabulary_size=1, decode=Decode())
    assert "continuation" not in only.predict(transformer(), batch_of([torch.zeros(4, dtype=torch.int64)] * 2))[0]


@each("keeps", [True, False])
def test_answers_are_in_the_order_of_the_texts_whatever_has_room(monkeypatch, keeps):
    texts, model = texts_of([4, 30, 2, 11, 4, 29, 3, 12, 10, 2]), made("transformer")
    if not keeps:
        model.next_logits = None
    texts = [text[-MOST - 1 :] for text in texts]
    task = Language(vocabulary_size=VOCABULARY, sequence_length=MOST, decode=Decode(), length=6)
    expected = [task.predict(model, batch_of([text]))[0] for text in texts]
    for room in (2**14, 40, 1):
        monkeypatch.setattr(language, "TOKENS", room)
        monkeypatch.setattr(language, "SCORES", room * VOCABULARY)
        groups = list(task._groups([len(text) - 1 for text in texts], keeps=keeps))
        assert sorted(row for rows in groups for row in rows) == list(range(10))
        assert len(groups) == {2**14: 2, 40: 5, 1: 10}[room]
        found = task.predict(model, batch_of(texts))
        assert [answer["continuation"] for answer in found] == [answer["continuation"] for answer in expected]
        for answer, alone in zip(found, expected, strict=True):
            assert answer["loss"] == pytest.approx(alone["loss"], rel=1e-5)
