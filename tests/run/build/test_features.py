"""From the words task.classifier=... to what a classifier sees."""

from __future__ import annotations

import json

import pytest
import torch

from mptrain.config.compose import compose
from mptrain.engine.evaluate import evaluate
from mptrain.runlog import RunDirectory, RunState
from mptrain.system.errors import CheckpointError, ConfigError
from mptrain.system.files import read_text
from tests.small_runs import loop_of, parts_of

CLASSIFIER = ("model=cnn", "model.widths=[4,6]", "dataset.train_samples=96", "train.epochs=1", "precision=amp_dynamic")
PAIR = ("model=dcgan", "model.width=2", "model.latent=4", "dataset.image_size=16", "dataset.train_samples=64",
        "dataset.val_samples=24", "precision=fp16_dynamic")  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of a classifier."""
    root = tmp_path_factory.mktemp("runs")
    loop = loop_of(root, *CLASSIFIER)
    loop.run()
    paths = loop.storage.paths
    paths.config.write_text(compose(CLASSIFIER).yaml)
    paths.data.write_text(json.dumps(loop.parts.data_card()))
    loop.storage.writer.close()
    RunDirectory(paths).write_state(RunState(id="run", argv=(), command=""))
    return loop


def test_a_run_gives_its_network_weights_and_preparation(trained):
    parts, _ = parts_of(*PAIR, f"task.classifier={trained.storage.paths.root}")
    assert (parts.task.metric, parts.task.features.labelled) == ("frechet", True)
    stored = trained.parts.dataset.val.fetch(range(8), 0, 0)
    inputs = trained.parts.prepare_float32(stored).inputs
    with torch.no_grad():
        expected = trained.parts.model.eval()(inputs)
    # The pair has the same digits, enlarged to 16 pixels; the classifier wants 8 of them.
    small = stored.inputs.float() / 127.5 - 1
    _, logits = parts.task.features.extract(small)
    assert torch.allclose(logits, expected, atol=1e-4)


def test_the_score_stands_in_an_evaluation_is_the_same_each_time_and_the_network_is_no_part_of_the_model(trained):
    parts, _ = parts_of(*PAIR, f"task.classifier={trained.storage.paths.root}")
    plain, _ = parts_of(*PAIR)
    assert parts.model.state_dict().keys() == plain.model.state_dict().keys()
    one, other = (evaluate(parts, parts.loaders["val"], "val", 0, 0, stop=lambda: False).record for _ in range(2))
    without = evaluate(plain, plain.loaders["val"], "val", 0, 0, stop=lambda: False).record
    assert one.metrics == other.metrics
    assert one.metrics["frechet"] > 0
    assert 0 <= one.metrics["classifier_top1"] <= 1
    assert {name: one.metrics[name] for name in without.metrics} == without.metrics  # the noise of a loss is its own


def test_train_makes_a_classifier_of_the_same_data_when_it_is_first_used(monkeypatch):
    from mptrain.run.build import workload as build_workload

    asked = []

    def note(dataset, device):
        asked.append(dataset.name)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 10))

    monkeypatch.setattr(build_workload, "train_classifier", note)
    parts, _ = parts_of(*PAIR, "task.classifier=train")
    assert asked == []
    record = evaluate(parts, parts.loaders["val"], "val", 0, 0, stop=lambda: False).record
    assert asked == ["digits"]
    assert record.metrics["frechet"] > 0
    evaluate(parts, parts.loaders["val"], "val", 0, 0, stop=lambda: False)
    assert asked == ["digits"]


def test_a_run_that_does_not_say_how_pictures_become_inputs_is_refused(trained, monkeypatch):
    paths = trained.storage.paths
    card = json.loads(paths.data.read_text())
    for broken in ("", json.dumps({**card, "preparation": {}}), json.dumps({"name": "text"})):
        monkeypatch.setattr("mptrain.run.build.workload.read_text", _reading(paths.data, broken))
        with pytest.raises(ConfigError, match=r"data\.json"):
            parts_of(*PAIR, f"task.classifier={paths.root}")
        monkeypatch.undo()


def test_weights_that_do_not_fit_the_configuration_are_refused(trained, monkeypatch):
    paths = trained.storage.paths
    wider = paths.config.read_text().replace("- 6", "- 7")
    assert wider != paths.config.read_text()
    monkeypatch.setattr(RunDirectory, "read_config", lambda directory: wider)
    with pytest.raises(CheckpointError, match="do not fit"):
        parts_of(*PAIR, f"task.classifier={paths.root}")


def _reading(changed, text):
    return lambda path: text if path == changed else read_text(path)


def test_a_task_without_features_knows_no_classifier():
    with pytest.raises(ConfigError, match=r"task\.classifier"):
        compose(["model=cnn", "+task.classifier=train"])


def test_data_without_classes_cannot_train_a_classifier():
    from mptrain.run.build.workload import build_features

    class Nameless:
        name = "nameless"

        def facts(self):
            return {"in_channels": 1}

    with pytest.raises(ConfigError, match="needs num_classes"):
        build_features("train", compose(PAIR), Nameless())


@pytest.mark.parametrize("part", ["answer", "error"])
def test_a_run_that_does_not_answer_with_classes_is_refused_before_anything_is_trained(trained, monkeypatch, part):
    def forward(self, images):
        if part == "error":
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return [{"boxes": images}]

    monkeypatch.setattr(torch.nn.Sequential, "forward", forward)
    with pytest.raises(ConfigError, match="one logit per class"):
        parts_of(*PAIR, f"task.classifier={trained.storage.paths.root}")
