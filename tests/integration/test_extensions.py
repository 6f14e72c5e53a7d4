"""A package of the user's, outside of the repository, trains by configuration alone: its model, its data, its task."""

from __future__ import annotations

import csv
import importlib
import json
import re
import shlex
import sys
import textwrap

import pytest
import torch

from tests.small_runs import environment, run_in_process

pytestmark = pytest.mark.process

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
        from mptrain.workloads.base import Batch
        from mptrain.workloads.base.random_streams import sample_order
        from mptrain.workloads.base.data_files import Faults

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
            name, workers = "table", 0

            def __init__(self, features: int = 4):
                self.features = features
                self.train, self.val, self.test = Rows(256, features), Rows(64, features), Rows(65, features)

            def facts(self):
                return {"features": self.features}

            def describe(self):
                return f"{self.features} columns"

            def prepare(self, batch, device, memory_format):
                return batch.to(device)
        """,
    "theirs/regression.py": """
        from dataclasses import dataclass
        from torch.nn import functional as F
        from mptrain.workloads.base import Objective, Task, Texts

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
                return {"loss": (model(batch.inputs).float() - batch.targets).double().square()}

            def summarise(self, sums, terms):
                return {"loss": sums["loss"] / terms}

            def answers(self, model, batch):
                return (model(batch.inputs).float() - batch.targets).abs().tolist()

            def score(self, answers):
                return {"largest_error": max(answers)}

            def exhibits(self, model, batch):
                found = zip(batch.targets.tolist(), model(batch.inputs).float().tolist())
                return {"rows": Texts(("target", "found"), tuple((f"{a:.2f}", f"{b:.2f}") for a, b in list(found)[:5]))}
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
          - override /dataset: columns
          - _self_
        model:
          _target_: theirs.net.Line
          defaults: {lr: {sgd: 0.01}}
        """,
    "conf/task/regress.yaml": "# Regression.\n_target_: theirs.regression.Regress\n",
    "conf/dataset/columns.yaml": "# Rows of numbers.\n_target_: theirs.data.Table\nfeatures: 4   # columns\n",
}


ALLOWED = ("--config-dir", "conf", "extensions.allow=[theirs.*]")


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Runs commands beside the package, which each of them imports anew."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    monkeypatch.syspath_prepend(str(tmp_path))
    python_path = f"{environment()['PYTHONPATH']}:{tmp_path}"

    def run(*words):
        for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        return run_in_process(*words, cwd=tmp_path, PYTHONPATH=python_path)

    return run


def test_a_model_of_theirs_trains_on_our_data(theirs, tmp_path):
    done = theirs(*ALLOWED, "model=theirs", "precision=fp16_dynamic", "train.epochs=2", "run.name=r")
    assert done.returncode == 0, done.stderr
    refused = theirs("resume", "outputs/r", "train.epochs=3")
    assert refused.returncode == 2
    assert refused.stderr.count(ALLOWED[-1]) == 2  # in the error, and in the hint that allows it
    assert theirs("resume", "outputs/r", "train.epochs=3", ALLOWED[-1]).returncode == 0
    exported = theirs("export", "outputs/r", ALLOWED[-1])
    assert exported.returncode == 0, exported.stderr
    weights = torch.load(tmp_path / "outputs/r/export/last-float32.pt", weights_only=True)
    assert weights["body.0.weight"].shape == (12, 1, 3, 3)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("self.body(images)", "self.body(images.flatten(1))", "net.py:10 in forward: RuntimeError: "),
        ("nn.Linear(width, num_classes)", "nn.LazyLinear(num_classes)", "head.weight has no shape yet"),
    ],
)
def test_an_error_in_their_code_names_its_place(theirs, tmp_path, old, new, said):
    net = tmp_path / "theirs/net.py"
    net.write_text(net.read_text().replace(old, new))
    done = theirs(*ALLOWED, "model=theirs", "train.max_steps=1")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_a_data_set_and_a_task_of_theirs_train_together(theirs, tmp_path):
    done = theirs(*ALLOWED, "model=line", "precision=fp16_dynamic", "train.epochs=30", "run.name=r")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "outputs/r/summary.json").read_text())
    assert summary["metric"] < 0.01  # the line is learned; 30 before
    low, high = summary["intervals"][summary["metric_name"]]
    assert low < summary["metric"] < high
    assert summary["test"]["largest_error"] >= summary["metric"] ** 0.5
    shown = sorted((tmp_path / "outputs/r/samples").iterdir())[-1]
    assert shown.read_text().startswith("target\tfound\n")
    evaluated = theirs("eval", "r", ALLOWED[-1])
    assert f"loss={summary['metric']:.6g}" in evaluated.stdout
    assert "loss_95=" in evaluated.stdout
    assert summary["term"] == "rows"
    assert "rows/s" in done.stdout
    assert "4 columns" in done.stdout


MODES = "fp32,amp_static,amp_dynamic,amp_bf16,fp16_static,fp16_dynamic,fp16_noscale,fp16_pure,bf16,bf16_pure"


def test_parts_of_theirs_train_in_every_precision_that_the_device_has(theirs, tmp_path):
    done = theirs("-m", *ALLOWED, "model=line", f"precision={MODES}", "train.epochs=20", "run.name=all")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "outputs/all/sweep.csv").open(newline="") as file:
        found = {row["precision"]: float(row["metric"]) for row in csv.DictReader(file)}
    assert list(found) == MODES.split(",")
    assert max(found.values()) < 0.3, found  # 30 before; half precision without master weights is the worst


def test_parts_of_theirs_go_on_as_if_nothing_had_happened(theirs, tmp_path):
    words = [*ALLOWED, "model=line", "precision=fp16_dynamic", "schedule=constant", "scaler.init_scale=1048576"]
    assert theirs(*words, "train.epochs=6", "run.name=whole").returncode == 0
    assert theirs(*words, "train.epochs=6", "train.max_steps=20", "run.name=parts").returncode == 0
    gone_on = theirs("resume", "outputs/parts", "train.max_steps=null", ALLOWED[-1])
    assert gone_on.returncode == 0, gone_on.stderr
    whole, parts = ((tmp_path / "outputs" / name / "steps.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole.count(b"\n") == 48
    assert whole == parts


def test_the_commands_that_hints_name_work_as_they_stand(theirs, tmp_path):
    words = (*ALLOWED, "model=theirs", "precision=fp16_static", "checkpoint.every_epochs=null", "log.seconds=0")
    gave_up = theirs(*words, "run.name=r", "scaler.scale=1e30", "train.max_consecutive_overflows=3")
    assert gave_up.returncode == 4, gave_up.stderr
    (line,) = re.findall(r"mptrain (diagnose outputs/r '.*?')", gave_up.stderr)
    found = theirs(*shlex.split(line))
    assert found.returncode == 0, found.stderr
    net = tmp_path / "theirs/net.py"
    stop_in_its_tenth_pass = """
        self.passes = getattr(self, "passes", 0) + 1
        if self.passes == 10:
            import os, signal
            os.kill(os.getpid(), signal.SIGTERM)
        return self.head("""
    theirs_as_it_was = net.read_text()
    net.write_text(theirs_as_it_was.replace("\n        return self.head(", stop_in_its_tenth_pass))
    stopped = theirs(*words, "run.name=s", "train.epochs=1")
    assert stopped.returncode == 75, stopped.stderr
    (line,) = re.findall(r"hint: continue with: PYTHONPATH=\S+ mptrain (.*)", stopped.stderr)
    net.write_text(theirs_as_it_was)
    again = theirs(*shlex.split(line))
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "outputs/s/steps.jsonl").read_bytes().count(b"\n") == 38


def test_what_a_task_or_data_set_of_theirs_lacks_is_named_before_anything_is_written(theirs, tmp_path):
    task, data = tmp_path / "theirs/regression.py", tmp_path / "theirs/data.py"
    task.write_text(task.read_text().replace("def summarise", "def sumarise"))
    done = theirs(*ALLOWED, "model=line")
    assert done.returncode == 2
    assert "task: theirs.regression.Regress returned a Regress without summarise" in done.stderr
    data.write_text(data.read_text().replace("def describe", "def words"))
    done = theirs(*ALLOWED, "model=line")
    assert "dataset: theirs.data.Table returned a Table without describe" in done.stderr
    assert "mptrain/workloads/base/dataset.py" in done.stderr
    assert not (tmp_path / "outputs").exists()
