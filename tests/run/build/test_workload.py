"""Parts that do not go together are refused in two lines, before a run has a directory."""

from __future__ import annotations

import pytest
from PIL import Image

from mptrain.cli.main import main
from mptrain.config.catalogue import Catalogue, configs_folder

PICTURES = (
    "dataset=digits does not have: it has num_classes, num_outputs, class_names, in_channels, image_size, input_shape"
)
SPEECH = "dataset=tone_words does not have: it has vocabulary_size, feature_size, sample_rate, decode"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("task=detect dataset=digits", f"task=detect needs boxes, which {PICTURES}"),
        ("task=translate dataset=python_docs", "task=translate needs target_vocabulary_size, decode_source, which"),
        ("task=classify dataset=python_docs", "task=classify needs num_classes, which"),
        ("task=gan dataset=python_docs", "model=cnn needs num_classes, in_channels, which"),
        (
            "model=cnn dataset=tone_words dataset.train_samples=8 dataset.val_samples=4",
            f"task=classify needs num_classes, which {SPEECH}",
        ),
        ("model=cnn dataset=digit_scenes", "task=classify does not work with dataset=digit_scenes, which has boxes"),
        ("model=edsr_small dataset=digits", f"task=enhance needs upscale, which {PICTURES}"),
        (
            "model=wavenet_small dataset=tone_words dataset.train_samples=8 dataset.val_samples=4",
            f"task=audio needs levels, which {SPEECH}",
        ),
        ("model=deepspeech2_small dataset=digits", f"task=transcribe needs decode, which {PICTURES}"),
        (
            "model=char_lstm dataset=tone_words",
            "task=language does not work with dataset=tone_words, which has sample_rate",
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "model=edsr_small dataset=digits",
            "task=enhance works with dataset=photo_folder, photos; dataset=digits works with task=classify, gan; ",
        ),
        ("model=cnn dataset=python_docs task=gan", "model=cnn works with dataset=cifar10, "),
        (
            "model=cnn dataset=tone_words dataset.train_samples=8 dataset.val_samples=4",
            "task=classify works with dataset=cifar10, ",
        ),
        ("task.label_smoothing=0 dataset=digit_scenes", "task=classify works with dataset=cifar10, "),
    ],
)
def test_what_would_go_together_is_said(words, said, tmp_path, capsys):
    assert main([*words.split(), f"run.root={tmp_path}"]) == 2
    assert f"hint: {said}" in capsys.readouterr().err


def test_a_classifier_is_not_trained_on_images_without_classes(tmp_path, capsys):
    for number in range(4):
        Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / f"{number}.png")
    words = ["model=cnn", "dataset=image_folder", f"dataset.root={tmp_path}", "dataset.image_size=8"]
    assert main([*words, f"run.root={tmp_path / 'runs'}"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "task=classify needs num_classes" in error
    assert "ROOT/CLASS" in hint


def test_data_sets_name_tasks_that_there_are_and_every_model_s_own_choice_is_among_them():
    groups, defaults = (catalogue := Catalogue([configs_folder()])).groups, catalogue.defaults
    assert all(option.tasks and {*option.tasks} <= {*groups["task"]} for option in groups["dataset"].values())
    chosen = set()
    for option in groups["model"].values():
        data = [line.split()[-1] for line in option.lines if line.strip().startswith("- override /dataset:")]
        (task,) = option.tasks or (defaults["task"],)
        assert task in groups["dataset"][(data or [defaults["dataset"]])[0]].tasks, option.name
        chosen.add(task)
    assert chosen == {*groups["task"]} - {"multilabel", "regression"}  # of model=mlp, which classifies by default
