"""Transcription: the loss against all paths written out, error rates by hand, and what no path can spell."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.sound.recordings import Alphabet
from mptrain.workloads.speech.task import Transcribe, beam_search, collapsed

ALPHABET = Alphabet("abc ")
TASK = Transcribe(decode=ALPHABET.text)


class Fixed(nn.Module):
    """Answers with logits that it was given."""

    def __init__(self, logits, lengths=None):
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.lengths = torch.tensor(lengths or [logits.shape[1]] * len(logits))

    def forward(self, inputs, lengths):
        return self.logits, self.lengths


def batch_of(*texts):
    numbers = [ALPHABET.numbers(text) for text in texts]
    targets = torch.zeros(len(texts), max(1, *map(len, numbers)), dtype=torch.int64)
    for row, given in zip(targets, numbers, strict=True):
        row[: len(given)] = torch.tensor(given, dtype=torch.int64)
    more = {"lengths": torch.ones(len(texts), dtype=torch.int64), "target_lengths": torch.tensor([*map(len, numbers)])}
    return Batch(torch.zeros(len(texts), 1, 1), targets, extras=more)


def said(*paths):
    """Logits that are all but certain of these paths, of which ``-`` is the blank."""
    length = max(map(len, paths))
    logits = torch.zeros(len(paths), length, len(ALPHABET))
    for row, path in enumerate(paths):
        for place, letter in enumerate(path):
            logits[row, place, 0 if letter == "-" else ALPHABET.numbers(letter)[0]] = 20.0
    return Fixed(logits, [len(path) for path in paths])


def by_hand(logits, text):
    """Minus the logarithm of the sum of the probabilities of all paths that spell a text."""
    chances, wanted = logits.softmax(1).double(), ALPHABET.numbers(text)
    total = 0.0
    for path in itertools.product(range(logits.shape[1]), repeat=len(logits)):
        if collapsed(path) == wanted:
            total += math.prod(float(chances[place, number]) for place, number in enumerate(path))
    return -math.log(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_trap_04_the_loss_is_that_of_all_paths_written_out(dtype):
    logits = (3 * torch.randn(4, 5, 5)).to(dtype)
    texts = ("ab", "aa", "", "c a")
    expected = [by_hand(rows.float(), text) for rows, text in zip(logits, texts, strict=True)]
    loss = TASK.loss(Fixed(logits), batch_of(*texts))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(sum(expected) / 4, rel=1e-4)
    sums = TASK.measure(Fixed(logits), batch_of(*texts))
    assert sums["loss"].tolist() == pytest.approx(expected, rel=1e-4)
    assert all(value.shape == (4,) and value.dtype == torch.float64 for value in sums.values())


@pytest.mark.parametrize(("text", "repeats"), [("abc", 0), ("aab", 1), ("aaa", 2), ("", 0)])
def test_equal_logits_cost_what_the_ways_to_spell_say(text, repeats):
    frames = 9
    ways = math.comb(frames - repeats + len(text), 2 * len(text))
    loss = TASK.loss(Fixed(torch.zeros(1, frames, 5)), batch_of(text))
    assert loss.item() == pytest.approx(frames * math.log(5) - math.log(ways), rel=1e-5)


def test_frames_behind_the_end_get_no_gradient():
    model = Fixed(torch.randn(2, 8, 5), [8, 3])
    texts = batch_of("abc", "ab")
    TASK.loss(model, texts).backward()
    assert model.logits.grad[0].any(1).all()
    assert not model.logits.grad[1, 3:].any()


def test_logits_at_the_limits_of_half_have_a_finite_gradient():
    model = Fixed(torch.tensor([[[6e4, -6e4, 0.0, 0.0, 0.0]] * 6]).half())
    loss = TASK.loss(model, batch_of("ab"))
    loss.backward()
    assert loss.isfinite()
    assert model.logits.grad.isfinite().all()


def test_a_transcript_that_no_path_spells_is_counted():
    model, both = Fixed(torch.randn(3, 3, 5)), batch_of("ab", "aab", "abca")
    loss = TASK.loss(model, both)
    loss.backward()
    expected = by_hand(model.logits[0].detach(), "ab") / 3
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert not model.logits.grad[1:].any()
    sums = {name: value.sum().item() for name, value in TASK.measure(model, both).items()}
    assert TASK.summarise(sums, 3)["unspellable"] == pytest.approx(2 / 3)
    fitting = {name: value.sum().item() for name, value in TASK.measure(model, batch_of("ab", "aa", "")).items()}
    assert "unspellable" not in TASK.summarise(fitting, 3)


def test_error_rates_are_edits_over_lengths_of_the_whole_split():
    model = said("a-b", "ab c", "cc-c--", "---", "a")
    texts = batch_of("ab", "ab b", "ccc", "ab c", "")
    sums = TASK.measure(model, texts)
    # ab = ab; ab c for ab b: one letter, one word; cc for ccc; nothing for ab c; a for nothing
    assert sums["letter_edits"].tolist() == [0, 1, 1, 4, 1]
    assert sums["letters"].tolist() == [2, 4, 3, 4, 0]
    assert sums["word_edits"].tolist() == [0, 1, 1, 2, 1]
    assert sums["words"].tolist() == [1, 2, 1, 2, 0]
    metrics = TASK.summarise({name: value.sum().item() for name, value in sums.items()}, 5)
    assert metrics["cer"] == pytest.approx(7 / 13)
    assert metrics["wer"] == pytest.approx(5 / 6)
    nothing = TASK.measure(said("a"), batch_of(""))
    assert TASK.summarise({name: value.sum().item() for name, value in nothing.items()}, 1)["cer"] == 1.0
    assert collapsed([0, 1, 1, 0, 1, 2, 2, 0]) == [1, 1, 2]
    assert collapsed([0, 0]) == collapsed([]) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_beam_finds_what_comparing_all_texts_finds(seed):
    frames = (2 * torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).log_softmax(1)
    chances: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(3), repeat=4):
        spelled = tuple(collapsed(path))
        chances[spelled] = chances.get(spelled, 0.0) + math.exp(
            sum(float(frames[place, number]) for place, number in enumerate(path))
        )
    assert tuple(beam_search(frames, 100)) == max(chances, key=lambda spelled: chances[spelled])


def test_the_beam_is_what_exhibits_and_metrics_come_from():
    # Each frame is most probably a blank, yet some frame is more probably an a than none.
    frames = torch.tensor([[[0.6, 0.4, 1e-9, 1e-9, 1e-9]] * 2]).log()
    texts = batch_of("a")
    wide = Transcribe(decode=ALPHABET.text, beam=4)
    assert TASK.exhibits(Fixed(frames), texts)["transcripts"].rows == (("a", ""),)
    assert wide.exhibits(Fixed(frames), texts)["transcripts"].rows == (("a", "a"),)
    assert wide.measure(Fixed(frames), texts)["letter_edits"].tolist() == [0]
