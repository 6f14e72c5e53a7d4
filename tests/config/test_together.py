"""Parts that do not go together are refused in two lines, before a run has a directory."""

from __future__ import annotations

import pytest

from mptrain.cli.main import main

PICTURES = "dataset=digits does not have: it has num_classes, class_names, in_channels, image_size"
SPEECH = "dataset=tone_words does not have: it has vocabulary_size, feature_size, sample_rate, decode"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("task=detect dataset=digits", f"task=detect needs boxes, which {PICTURES}"),
        ("task=transcribe dataset=digits", f"task=transcribe needs decode, which {PICTURES}"),
        ("task=enhance dataset=digits", f"task=enhance needs upscale, which {PICTURES}"),
        ("task=audio dataset=digits", f"task=audio needs levels, sample_rate, which {PICTURES}"),
        ("task=language dataset=digits", f"task=language needs vocabulary_size, which {PICTURES}"),
        ("task=translate dataset=python_docs", "task=translate needs target_vocabulary_size, decode_source, which"),
        ("task=classify dataset=python_docs", "task=classify needs num_classes, which"),
        ("task=gan dataset=python_docs", "model=cnn needs num_classes, in_channels, which"),
        ("model=cnn dataset=tone_words", f"task=classify needs num_classes, which {SPEECH}"),
        ("model=cnn dataset=digit_scenes", "task=classify does not go with dataset=digit_scenes, which has boxes"),
        ("model=dcgan dataset=digit_scenes", "task=gan does not go with dataset=digit_scenes, which has boxes"),
        ("model=ssd_small dataset=digits", f"task=detect needs boxes, which {PICTURES}"),
        ("model=edsr_small dataset=digits", f"task=enhance needs upscale, which {PICTURES}"),
        ("model=wavenet_small dataset=tone_words", f"task=audio needs levels, which {SPEECH}"),
        ("model=deepspeech2_small dataset=digits", f"task=transcribe needs decode, which {PICTURES}"),
        (
            "model=char_lstm dataset=tone_words",
            "task=language does not go with dataset=tone_words, which has sample_rate",
        ),
    ],
)
def test_parts_that_do_not_go_together_leave_no_run_behind(words, said, tmp_path, capsys):
    assert main([*words.split(), f"run.root={tmp_path}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0].startswith(f"error: {said}")
    assert len(err.splitlines()) == 2
    assert list(tmp_path.iterdir()) == []
