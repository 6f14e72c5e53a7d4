"""Words dialled in tones: made up on the spot, the same in every run."""

from __future__ import annotations

import pytest
import torch

from mptrain.workloads.speech.datasets.tone_words import make_tone_words, text_of, wave_of


def test_utterances_follow_from_their_place_alone():
    assert text_of(0, 5) == text_of(0, 5) != text_of(0, 6)
    assert text_of(1, 5) != text_of(0, 5)
    assert torch.equal(wave_of("ab c", 0, 5, 1.0), wave_of("ab c", 0, 5, 1.0))
    few, more = make_tone_words(train_samples=3), make_tone_words(train_samples=5)
    assert few.train.utterances == more.train.utterances[:3]


def test_each_letter_is_its_pair_of_tones():
    for place, letter in enumerate("ap"):
        wave = wave_of(letter, 0, 0, 1e-9).double()
        spectrum = torch.fft.rfft(wave, 4000).abs()
        loudest = sorted((int(spectrum[:1000].argmax()), 1000 + int(spectrum[1000:].argmax())))
        assert loudest == pytest.approx([[697, 1209], [941, 1633]][place], rel=0.05)


def test_no_default_transcript_is_too_long_for_its_frames():
    dataset = make_tone_words(train_samples=200)
    assert (dataset.train.skipped, dataset.val.skipped, dataset.test.skipped) == (0, 0, 0)
    assert (len(dataset.train), len(dataset.val), len(dataset.test)) == (200, 200, 400)
    assert dataset.facts()["vocabulary_size"] == 18
    assert dataset.card()["labels"][0] == "<blank>"
    few = make_tone_words(train_samples=2, val_samples=0, test_samples=0)
    assert (few.val, few.test) == (None, None)


def test_as_many_transcripts_come_again_as_is_said():
    known = {text_of(0, index) for index in range(1200)}
    shares = [
        sum(text_of(part, index) in known for index in range(count)) / count for part, count in ((1, 200), (2, 400))
    ]
    assert shares == [0.105, 0.12]
    said = make_tone_words.__doc__
    assert "10.5 % of the\n    validation transcripts and 12 % of the test transcripts" in said
