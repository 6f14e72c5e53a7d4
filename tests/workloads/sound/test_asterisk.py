"""The Asterisk prompts: which are speech, what is said in them, and how they are divided. Files of the test's own."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from scipy.io import wavfile

from mptrain.system.errors import DataError
from mptrain.workloads.sound.recordings import SOUNDS, TRANSCRIPTS, asterisk_prompts
from mptrain.workloads.speech.datasets.asterisk_speech import load_asterisk

LIST = """; a comment: of no meaning
activated: Activated.
beep: [this is a beep]
silence/1: (1 second of silence)
join: <beep ascending>
letters/at: at [@]
not-there: Nobody said this.
spy-h323: H.323
vm-onefor: Press 1 for
a line without a colon
"""


def prompts(folder, text=LIST, seconds=1.0):
    sounds, transcripts = folder / "sounds", folder / "list.txt.gz"
    noise = np.random.default_rng(0).integers(-999, 999, int(8000 * seconds)).astype(np.int16)
    for name in ("activated", "beep", "silence/1", "join", "letters/at", "spy-h323", "vm-onefor"):
        (sounds / name).parent.mkdir(parents=True, exist_ok=True)
        wavfile.write(sounds / f"{name}.wav", 8000, noise)
    transcripts.write_bytes(gzip.compress(text.encode()))
    return sounds, transcripts


def test_prompts_are_what_is_said_without_remarks(tmp_path):
    sounds, transcripts = prompts(tmp_path)
    assert [(name, words) for name, _, words in asterisk_prompts(sounds, transcripts)] == [
        ("activated", "Activated."),
        ("letters/at", "at"),
        ("spy-h323", "H.323"),
        ("vm-onefor", "Press 1 for"),
    ]
    (tmp_path / "list.txt").write_text(LIST)
    assert asterisk_prompts(sounds, tmp_path / "list.txt") == asterisk_prompts(sounds, transcripts)


def test_what_is_not_installed_or_no_list_is_an_error(tmp_path):
    sounds, transcripts = prompts(tmp_path)
    for arguments in ((tmp_path / "no", transcripts), (sounds, tmp_path / "no")):
        with pytest.raises(DataError, match="not found: looked for") as caught:
            asterisk_prompts(*arguments)
        assert "asterisk-core-sounds-en-wav" in caught.value.hint
    for content, said in ((b"no gzip", "cannot be read"), (gzip.compress(b"other: Words.\n"), "no recording of")):
        transcripts.write_bytes(content)
        with pytest.raises(DataError, match=said):
            asterisk_prompts(sounds, transcripts)


def test_single_digits_are_spelled_and_longer_numbers_left_out(tmp_path):
    sounds, transcripts = prompts(tmp_path)
    dataset = load_asterisk(sounds=sounds, transcripts=transcripts, val_share=0.0, test_share=0.0)
    assert sorted(utterance.text for utterance in dataset.train.utterances) == ["activated", "at", "press one for"]
    assert dataset.val is None


def test_what_is_too_long_is_left_out_and_too_short_a_fault(tmp_path):
    sounds, transcripts = prompts(tmp_path)
    wavfile.write(sounds / "activated.wav", 8000, np.ones(3 * 8000, dtype=np.int16))
    choices = {"sounds": sounds, "transcripts": transcripts, "val_share": 0.0, "test_share": 0.0}
    dataset = load_asterisk(**choices, max_seconds=2.0)
    assert [utterance.name for utterance in dataset.train.utterances] != ["activated"]
    assert (len(dataset.train), dataset.train.skipped) == (2, 0)
    assert dataset.too_long == dataset.card()["too_long"] == {"train": 1}
    assert dataset.describe() == "40 bands every 10 ms, 28 letters, 1 too long"
    wavfile.write(sounds / "activated.wav", 8000, np.ones(800, dtype=np.int16))
    with pytest.raises(DataError, match="activated: its transcript of 9 letters needs 9 frames, but the network has 6"):
        load_asterisk(**choices)
    (sounds / "vm-onefor.wav").write_bytes(b"")
    dataset = load_asterisk(**choices, on_error="skip")
    assert (len(dataset.train), dataset.train.skipped) == (1, 2)


@pytest.mark.skipif(
    not (SOUNDS.exists() and TRANSCRIPTS.exists()), reason="Debian's asterisk-core-sounds-en is not there"
)
def test_debians_prompts_have_the_size_that_the_file_says():
    dataset = load_asterisk()
    parts = [dataset.train, dataset.val, dataset.test]
    texts = [{utterance.text for utterance in part.utterances} for part in parts]
    assert sum(map(len, parts)) == 535
    assert len(set.union(*texts)) == sum(map(len, texts))
    assert dataset.train.skipped == 0
