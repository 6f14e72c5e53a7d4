"""Contract of every task: its objectives, its metric, its file, and the library that it needs."""

from __future__ import annotations

import inspect
import sys

import pytest
import yaml

from mptrain.system.errors import EnvironmentRefused
from mptrain.workloads.audio_generation.task import RawAudio
from mptrain.workloads.classification.task import Classify, MultiLabel
from mptrain.workloads.detection.task import Detect
from mptrain.workloads.enhancement.task import Enhance
from mptrain.workloads.gan.task import Gan
from mptrain.workloads.language.task import Language
from mptrain.workloads.regression.task import Regression
from mptrain.workloads.sound.recordings import read_recording, recording_seconds
from mptrain.workloads.speech.task import Transcribe
from mptrain.workloads.text.subwords import learn
from mptrain.workloads.translation.task import Translate
from tests.loops import each
from tests.small_runs import parts_of

SCALE = {"num_outputs": 1, "target_mean": (0.0,), "target_std": (1.0,)}
TRANSLATION = {"target_vocabulary_size": 13, "decode": str, "decode_source": str}
#: By option: class, facts, metric, if more of it is better, term, and learners with what they train.
MAIN = {"main": ("",)}
TASKS = {
    "audio": (RawAudio, {"levels": 3, "sample_rate": 8000}, "bits", False, "levels", MAIN),
    "classify": (Classify, {"num_classes": 3}, "top1", True, "samples", MAIN),
    "detect": (Detect, {"num_classes": 3, "boxes": "pixels"}, "map50", True, "images", MAIN),
    "enhance": (Enhance, {"upscale": 1}, "psnr", True, "samples", MAIN),
    "gan": (Gan, {}, None, False, "samples", {"discriminator": ("discriminator",), "generator": ("generator",)}),
    "language": (Language, {"vocabulary_size": 3}, "perplexity", False, "tokens", MAIN),
    "multilabel": (MultiLabel, {"num_outputs": 2, "label_counts": (3, 4)}, "map", True, "samples", MAIN),
    "regression": (Regression, SCALE, "rmse", False, "samples", MAIN),
    "transcribe": (Transcribe, {"decode": str}, "cer", False, "utterances", MAIN),
    "translate": (Translate, TRANSLATION, "perplexity", False, "tokens", MAIN),
}


@each("name", TASKS)
def test_a_task_names_its_learners_in_order_and_its_metric(name):
    kind, facts, metric, higher, term, learners = TASKS[name]
    task = kind(**facts)
    found = [(objective.learner, objective.modules) for objective in task.objectives()]
    assert found == list(learners.items())
    assert (task.metric, task.higher_is_better, task.term) == (metric, higher, term)


def test_every_file_gives_the_defaults_of_its_task(pytestconfig):
    files = {path.stem: path for path in (pytestconfig.rootpath / "configs/task").glob("*.yaml")}
    assert files.keys() == TASKS.keys()
    for name, path in files.items():
        kind = TASKS[name][0]
        keys = yaml.safe_load(path.read_text())
        assert keys.pop("_target_") == f"{kind.__module__}.{kind.__name__}"
        for key, value in keys.items():
            default = inspect.signature(kind).parameters[key].default
            assert value == default or value == f"${{oc.select:model.defaults.{key},{default}}}", (name, key)


def recordings(tmp_path):
    for read in (read_recording, recording_seconds):
        (tmp_path / "a.flac").write_bytes(b"fLaC")
        with pytest.raises(EnvironmentRefused):
            read(tmp_path / "a.flac")
    read_recording(tmp_path / "a.flac")


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("pycocotools", "detection", lambda _: Detect(num_classes=3, boxes="pixels")),
        ("skimage", "enhancement", lambda _: Enhance(upscale=1)),
        ("jiwer", "speech", lambda _: Transcribe(decode=str)),
        ("soundfile", "speech", recordings),
        ("sacrebleu", "translation", lambda _: Translate(**TRANSLATION)),
        ("sentencepiece", "translation", lambda _: learn("t", ["a text"], "bpe", 50)),
        ("timm", "timm", lambda _: parts_of("model=timm", "precision=fp32")),
        ("transformers", "transformers", lambda _: parts_of("model=causal_lm", "precision=fp32")),
        ("transformers", "transformers", lambda _: parts_of("model=sequence_classifier", "dataset.train_samples=8")),
    ],
)
def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, module, extra, use):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EnvironmentRefused, match=module) as refused:
        use(tmp_path)
    assert refused.value.hint == f"pip install 'mptrain[{extra}]'"


def test_what_needs_no_library_works_without_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    assert Translate(**TRANSLATION, beam=0).beam == 0
