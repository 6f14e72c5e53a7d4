from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from sacrebleu.metrics import BLEU
from torch import nn

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.text.subwords import BEGIN, END, PAD
from mptrain.workloads.translation.task import Translate
from tests.loops import each

WORDS = ["", "", "", "", "the", "loss", "is", "scaled", "by", "a", "power", "of", "two"]


def decode(numbers):
    numbers = numbers[: numbers.index(END)] if END in numbers else numbers
    return " ".join(WORDS[number] for number in numbers if number > END)


def task(**changed):
    return Translate(target_vocabulary_size=len(WORDS), decode=decode, decode_source=decode, **changed)


class Says(nn.Module):
    """Answers with the logits it was told, and translates each sentence into the one it was told."""

    def __init__(self, logits=None, sentences=()):
        super().__init__()
        self.logits = logits
        self.sentences = sentences
        self.given = None

    def forward(self, source, source_lengths, given):
        self.given = (source, source_lengths, given)
        return self.logits

    def encode(self, source, source_lengths):
        return {"row": torch.arange(len(source)), "place": torch.zeros(len(source), dtype=torch.int64)}

    def step(self, tokens, state):
        logits = torch.zeros(len(tokens), len(WORDS))
        for at, (row, place) in enumerate(zip(state["row"].tolist(), state["place"].tolist(), strict=True)):
            said = self.sentences[row]
            logits[at, said[place] if place < len(said) else END] = 30.0
        return logits, {"row": state["row"], "place": state["place"] + 1}


def batch_of(*targets):
    width = max(map(len, targets))
    rows = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in targets])
    counts = tuple(map(len, targets))
    return Batch(rows.clone(), rows, counts, {"source_lengths": torch.tensor(counts)})


TARGETS = ([4, 5, END], [6, END], [END])
LOGITS = torch.randn(3, 3, len(WORDS), generator=torch.Generator().manual_seed(0)) * 3


def by_hand(smoothing=0.0):
    """The loss of each sample's tokens, without torch's cross-entropy."""
    rows = LOGITS.double().log_softmax(-1)
    return [
        [
            -(1 - smoothing) * rows[sample, place, token].item() - smoothing * rows[sample, place].mean().item()
            for place, token in enumerate(tokens)
        ]
        for sample, tokens in enumerate(TARGETS)
    ]


@each("smoothing", [0.0, 0.1])
@each("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_trap_04_the_loss_is_a_float32_mean_without_padding(dtype, smoothing):
    loss = task(label_smoothing=smoothing).loss(Says(LOGITS.to(dtype)), batch_of(*TARGETS))
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    expected = sum(map(sum, by_hand(smoothing))) / 6
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert loss.item() == pytest.approx(expected, rel=tolerance)


def test_logits_of_padding_get_no_gradient_and_change_nothing():
    logits = LOGITS.clone().requires_grad_()
    task(label_smoothing=0.1).loss(Says(logits), batch_of(*TARGETS)).backward()
    for sample, tokens in enumerate(TARGETS):
        assert (logits.grad[sample, : len(tokens)] != 0).all()
        assert not logits.grad[sample, len(tokens) :].any()


def test_trap_04_the_sum_over_8192_half_tokens_is_finite():
    logits = (torch.randn(64, 128, 13) * 30).half()
    targets = torch.randint(4, 13, (64, 128))
    batch = Batch(targets, targets, (128,) * 64, {"source_lengths": torch.full((64,), 128)})
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).item()
    assert task().loss(Says(logits), batch).item() == pytest.approx(expected, rel=1e-5)


def test_the_model_is_given_the_beginning_and_all_but_the_end():
    model, batch = Says(LOGITS), batch_of(*TARGETS)
    task().loss(model, batch)
    source, lengths, given = model.given
    assert torch.equal(source, batch.inputs)
    assert lengths.tolist() == [3, 2, 1]
    assert given.tolist() == [[BEGIN, 4, 5], [BEGIN, 6, END], [BEGIN, END, PAD]]


class TestMetrics:
    REFERENCES = ([4, 5, 6, 7, 8, 9, 10, 11, 12, END], [4, 5, 6, 7, END], [9, 10, 11, 12, END], [END])
    SAID = ([4, 5, 6, 7, 8, 9, 10, 5], [4, 5, 6, 7], [], [4, 5])

    def measured(self, **changed):
        width = max(map(len, self.REFERENCES))
        model = Says(torch.zeros(4, width, len(WORDS)), self.SAID)
        batch = batch_of(*self.REFERENCES)
        return task(**changed).measure(model, batch), batch.terms

    @pytest.mark.parametrize("beam", [1, 4])
    def test_bleu_is_what_sacrebleu_says_of_the_whole_split(self, beam):
        sums, terms = self.measured(beam=beam)
        assert all(value.shape == (4,) and value.dtype == torch.float64 for value in sums.values())
        assert sums["exact"].tolist() == [0.0, 1.0, 0.0, 0.0]
        assert sums["loss"].tolist() == pytest.approx([count * math.log(13) for count in (10, 5, 5, 1)])
        metrics = task(beam=beam).summarise({name: value.sum().item() for name, value in sums.items()}, terms)
        metric = BLEU()
        hypotheses, references = ([decode(list(row)) for row in rows] for rows in (self.SAID, self.REFERENCES))
        assert metrics["bleu"] == pytest.approx(metric.corpus_score(hypotheses, [references]).score, abs=1e-9)
        assert 30 < metrics["bleu"] < 90
        assert metric.get_signature().format().rsplit("|", 1)[0] == "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp"
        assert metrics["exact"] == 0.25
        assert metrics["perplexity"] == pytest.approx(13.0)

    def test_bleu_by_hand(self):
        """Seven of eight words, six of seven pairs, and so on; the length penalty of 8 words for 9."""
        sums = task().measure(Says(torch.zeros(1, 10, 13), self.SAID[:1]), batch_of(self.REFERENCES[0]))
        metrics = task().summarise({name: value.item() for name, value in sums.items()}, 10)
        precisions = math.exp(sum(map(math.log, (7 / 8, 6 / 7, 5 / 6, 4 / 5))) / 4)
        assert metrics["bleu"] == pytest.approx(100 * precisions * math.exp(1 - 9 / 8))
        sums = task(bleu_tokenizer="char").measure(
            Says(torch.zeros(1, 10, 13), self.SAID[:1]), batch_of(self.REFERENCES[0])
        )
        letters = task(bleu_tokenizer="char").summarise({name: value.item() for name, value in sums.items()}, 10)
        assert letters["bleu"] != metrics["bleu"]

    @pytest.mark.parametrize("said", [(), (9,)])
    def test_silence_and_nonsense_have_a_bleu_of_0(self, said):
        sums = task().measure(Says(torch.zeros(1, 4, 13), [said]), batch_of([4, 5, 6, END]))
        assert task().summarise({name: value.item() for name, value in sums.items()}, 4)["bleu"] == 0.0

    def test_without_a_beam_nothing_is_translated(self, monkeypatch):
        monkeypatch.setattr(Says, "step", lambda *given: pytest.fail("translated"))
        sums, terms = self.measured(beam=0)
        assert set(sums) == {"loss", "sentences"}
        metrics = task(beam=0).summarise({name: value.sum().item() for name, value in sums.items()}, terms)
        assert set(metrics) == {"loss", "perplexity"}
        assert task(beam=0).exhibits(Says(), batch_of(*TARGETS)) == {}


def test_a_translation_is_at_most_as_long_as_its_source_allows():
    endless = Says(None, [[4] * 99] * 3)
    said = task(length_factor=2.0, length_extra=3).translations(endless, batch_of(*TARGETS))
    assert [len(text.split()) for text in said] == [9, 7, 5]


def test_eight_sentences_are_shown_with_their_references():
    sentences = [[4, 5], [6, 7]] * 10
    shown = task().exhibits(Says(None, sentences), batch_of(*([[8, 9, END]] * 20)))["translations"]
    assert shown.columns == ("source", "reference", "model")
    assert 4 <= len(shown.rows) <= 8
    assert shown.rows[1] == ("by a", "by a", "is scaled")
