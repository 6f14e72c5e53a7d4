"""A package of the user's, outside of the repository, trains by configuration alone: its model, its data, its task."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
from small_runs import environment, run_command

FILES = {
    "theirs/__init__.py": "",
    "theirs/net.py": """
        from torch import nn

        class Net(nn.Module):
            def __init__(self, *, num_classes: int, in_channels: int, width: int = 8):
                super().__init__()
                self.body = nn.Sequential(nn.Conv2d(in_channels, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
                self.head = nn.Linear(width, num_classes)

            def forward(self, images):
                return self.head(self.body(images).flatten(1))

        class Line(nn.Module):
            def __init__(self, *, features: int):
                super().__init__()
                self.layer = nn.Linear(features, 1)

            def forward(self, inputs):
                return self.layer(inputs).squeeze(1)
        """,
    "theirs/data.py": """
        import torch
        from mptrain.dataset import Batch
        from mptrain.dataset.draws import sample_order
        from mptrain.dataset.faults import Faults

        class Rows:
            in_memory = True
            skipped = 0

            def __init__(self, count, features):
                self.faults = Faults()
                generator = torch.Generator().manual_seed(count)
                self.inputs = torch.randn(count, features, generator=generator)
                self.targets = self.inputs @ torch.arange(1.0, features + 1)

            def __len__(self):
                return len(self.inputs)

            def order(self, seed, epoch, *, shuffle):
                return sample_order(len(self), seed, epoch, shuffle=shuffle)

            def fetch(self, indices, epoch, seed):
                return Batch(self.inputs[indices], self.targets[indices])

        class Table:
            name, workers, test = "table", 0, None

            def __init__(self, features: int = 4):
                self.features = features
                self.train, self.val = Rows(256, features), Rows(64, features)

            def facts(self):
                return {"features": self.features}

            def in_words(self):
                return f"{self.features} columns"

            def prepare(self, batch, device, memory_format):
                return batch.to(device)
        """,
    "theirs/regression.py": """
        from dataclasses import dataclass
        from torch.nn import functional as F
        from mptrain.task import Objective, Task

        @dataclass(frozen=True)
        class Regress(Task):
            metric = "loss"
            higher_is_better = False
            term = "rows"

            def objectives(self):
                return (Objective("main", ("",), self.loss),)

            def loss(self, model, batch):
                return F.mse_loss(model(batch.inputs).float(), batch.targets)

            def measure(self, model, batch):
                return {"loss": F.mse_loss(model(batch.inputs).float(), batch.targets, reduction="sum").double()}

            def summarise(self, sums, terms):
                return {"loss": sums["loss"] / terms}
        """,
    "conf/model/theirs.yaml": """
        # @package _global_
        # A network of the user's.
        model:
          _target_: theirs.net.Net
          width: 12
          defaults: {lr: {sgd: 0.05}}
        """,
    "conf/model/line.yaml": """
        # @package _global_
        # One linear layer, with its task and data.
        defaults:
          - override /task: regress
          - override /dataset: table
          - _self_
        model:
          _target_: theirs.net.Line
          defaults: {lr: {sgd: 0.01}}
        """,
    "conf/task/regress.yaml": "# Regression.\n_target_: theirs.regression.Regress\n",
    "conf/dataset/table.yaml": "# Rows of numbers.\n_target_: theirs.data.Table\nfeatures: 4   # columns\n",
}


@pytest.fixture
def theirs(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    python_path = f"{environment()['PYTHONPATH']}:{tmp_path}"

    def run(*words):
        return run_command(*words, cwd=tmp_path, PYTHONPATH=python_path)

    return run


ALLOWED = ("--config-dir", "conf", "extensions.allow=[theirs.*]")


@pytest.mark.parametrize("precision", ["amp_dynamic", "fp16_dynamic"])
def test_a_model_of_theirs_trains_on_our_data(theirs, tmp_path, precision):
    done = theirs(*ALLOWED, "model=theirs", f"precision={precision}", "train.epochs=2", "run.name=r")
    assert done.returncode == 0, done.stderr
    assert theirs("resume", "outputs/r", "train.epochs=3").returncode == 0
    exported = theirs("export", "outputs/r")
    assert exported.returncode == 0, exported.stderr
    weights = torch.load(tmp_path / "outputs/r/export/last-float32.pt", weights_only=True)
    assert weights["body.0.weight"].shape == (12, 1, 3, 3)


def test_a_model_a_data_set_and_a_task_of_theirs_train_together(theirs, tmp_path):
    done = theirs(*ALLOWED, "model=line", "precision=fp16_dynamic", "train.epochs=30", "run.name=r")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "outputs/r/summary.json").read_text())
    assert summary["metric"] < 0.01  # the line is learned; 30 before
    assert summary["term"] == "rows"
    assert "rows/s" in done.stdout
    assert "4 columns" in done.stdout


def test_parts_that_do_not_go_together_are_refused_with_what_is_missing(theirs):
    done = theirs(*ALLOWED, "model=line", "dataset=digits")
    assert done.returncode == 2
    assert "model.features is required by theirs.net.Line" in done.stderr
    done = theirs(*ALLOWED, "model=cnn", "dataset=table", "task=regress")
    assert done.returncode == 2
    assert "model=cnn needs num_classes, in_channels, which dataset=table does not have: it has features" in done.stderr


def test_what_is_not_allowed_is_not_imported(theirs):
    done = theirs("--config-dir", "conf", "model=theirs")
    assert done.returncode == 2
    assert "extensions.allow=[theirs.*]" in done.stderr


def test_what_a_task_or_data_set_of_theirs_lacks_is_named_before_anything_is_written(theirs, tmp_path):
    task, data = tmp_path / "theirs/regression.py", tmp_path / "theirs/data.py"
    task.write_text(task.read_text().replace("def summarise", "def sumarise"))
    done = theirs(*ALLOWED, "model=line")
    assert done.returncode == 2
    assert "task: theirs.regression.Regress made a Regress without summarise" in done.stderr
    data.write_text(data.read_text().replace("def in_words", "def words"))
    done = theirs(*ALLOWED, "model=line")
    assert "dataset: theirs.data.Table made a Table without in_words" in done.stderr
    assert "mptrain/dataset/source.py" in done.stderr
    assert not (tmp_path / "outputs").exists()
