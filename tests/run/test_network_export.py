"""Networks leave runs as programs that give the same answers without mptrain, or are refused in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from mptrain.cli.main import main
from mptrain.config.compose import compose
from mptrain.run import network_export
from mptrain.run.evaluation import export_run
from mptrain.run.network_export import export_network
from mptrain.run.resume import launch
from mptrain.system.errors import ConfigError, NumericsError, StorageError
from tests.small_runs import TINY, environment, parts_of, run_in_process

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.long

AVERAGED = (*TINY, "precision=fp16_dynamic", "train.ema_decay=0.9", "optimizer.lr=0.3", "run.name=r")

OUTSIDE = """
import sys, numpy, torch
file, inputs, answers = sys.argv[1:]
given = numpy.load(inputs)
if file.endswith(".onnx"):
    import onnxruntime
    session = onnxruntime.InferenceSession(file)
    run = lambda some: session.run(None, {"input": some})[0]
else:
    network = torch.export.load(file).module()
    run = lambda some: network(torch.from_numpy(some)).detach().numpy()
numpy.save(answers, numpy.concatenate([run(given), *(run(given[size:size + size]) for size in (1, 2, 5))]))
assert "mptrain" not in sys.modules
"""


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(*words):
    return launch(compose(words), lambda opening: []).root


def evaluated(words, dtype=torch.float32, average=True):
    """A batch that an evaluation prepares, and what the run's network, with the weights of its state dict, answers."""
    words = [word for word in words if not word.startswith(("precision", "train.ema", "run.name"))]
    parts, _ = parts_of(*words, "precision=fp32")
    weights = export_run("r", dtype=dtype, average=average, output=None).path
    model = parts.model.to(dtype)
    model.load_state_dict(torch.load(weights, weights_only=True))
    batch = parts.prepare(next(parts.loaders["test"].batches(0))).cast(dtype)
    with torch.no_grad():
        return batch.inputs, model.eval()(batch.inputs)


@pytest.mark.process
@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.float16, "onnx"),
        (torch.float32, "torch_export"),
        pytest.param(torch.float32, "onnx", marks=pytest.mark.slow),
        pytest.param(torch.float16, "torch_export", marks=pytest.mark.slow),
    ],
)
def test_a_program_without_mptrain_gets_the_same_answers_for_any_number_of_samples(form, dtype):
    train(*AVERAGED)
    done = export_run("r", dtype=dtype, form=form)
    inputs, answers = evaluated(AVERAGED, dtype)
    np.save("inputs.npy", inputs.numpy())
    told = subprocess.run(
        [sys.executable, "-c", OUTSIDE, done.path, "inputs.npy", "answers.npy"],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    wanted = torch.cat([answers, *(answers[size : size + size] for size in (1, 2, 5))])
    found = torch.from_numpy(np.load("answers.npy"))
    assert found.dtype == dtype
    close = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(found, wanted, rtol=close, atol=close)
    raw = evaluated(AVERAGED, dtype, average=False)[1]
    assert (raw - answers).abs().max() > 10 * close  # the weights are the averages
    assert done.averaged
    assert done.network.difference <= done.network.tolerance < 0.1 * float(answers.abs().max())


def test_the_command_says_what_the_file_takes_and_leaves_the_labels_beside_it_and_inside(tmp_path):
    onnx = pytest.importorskip("onnx")
    train(*AVERAGED)
    card = json.loads((tmp_path / "outputs/r/data.json").read_text())
    said = run_in_process("export", "r", "--output", "net.onnx", "--raw", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    text = " ".join(said.stdout.split())
    assert "inputs input float32 [batch, 1, 8, 8] outputs float32 [batch, 10] checked" in text
    assert "session.run(None, {'input': input})" in text
    assert json.loads((tmp_path / "net.onnx.json").read_text()) == card
    held = {entry.key: json.loads(entry.value) for entry in onnx.load("net.onnx").metadata_props}
    assert held == {name: card[name] for name in ("labels", "preparation")}
    assert sorted(path.name for path in tmp_path.glob("net*")) == [
        "net.onnx", "net.onnx.json", "net.onnx.trained_samples",
    ]  # fmt: skip
    said = run_in_process("export", "r", "--format", "torch_export", "--fp16", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert "last-average-float16.pt2" in said.stdout
    assert "run network(input)" in " ".join(said.stdout.split())


def test_the_script_of_the_documentation_predicts_as_an_evaluation(tmp_path):
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()
    names = {}
    train(*AVERAGED)
    export_run("r", output=tmp_path / "digits.onnx")
    for script in ("predict.py", "predict_onnx.py"):
        exec(re.search(rf"```python\n(# {script}\n.*?)```", page, flags=re.DOTALL)[1], names)
    parts, _ = parts_of(*TINY)
    batch = next(parts.loaders["test"].batches(0))
    assert names["predict"](batch.inputs) == [str(int(number)) for number in evaluated(AVERAGED)[1].argmax(1)]


TEXT = (
    "model=transformer", "model.layers=1", "model.width=16", "dataset=text", "dataset.path=book.txt",
    "dataset.sequence_length=12", "train.batch_size=8", "precision=fp32", "train.max_steps=2", "run.name=r",
)  # fmt: skip


@pytest.mark.parametrize("more", [(), ("model=char_lstm", "model.embedding_size=4", "model.hidden_size=4")])
def test_a_language_model_takes_tokens_of_any_length_that_its_network_allows(tmp_path, more):
    (tmp_path / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    words = (*TEXT[3:], *more) if more else TEXT
    train(*words)
    done = export_run("r", form="onnx")
    parts, _ = parts_of(*(word for word in words if not word.startswith("run.name")))
    parts.model.load_state_dict(torch.load(export_run("r").path, weights_only=True))
    session = onnxruntime.InferenceSession(done.path)
    lengths = (12, 5, 9) if not more else (12,)
    assert done.network.inputs == {"tokens": f"int64 [batch, {'12' if more else 'any'}]"}
    for length in lengths:
        tokens = torch.randint(0, 20, (3, length))
        with torch.no_grad():
            wanted = parts.model.eval()(tokens)
        found = torch.from_numpy(session.run(None, {"tokens": tokens.numpy()})[0])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_pictures_of_any_size_are_enhanced():
    words = ("model=edsr_small", "train.batch_size=4", "train.max_steps=1")
    train(*words, "run.name=r", "precision=fp16_dynamic")
    done = export_run("r", form="torch_export")
    assert done.network.inputs == {"pictures": "float32 [batch, 3, any, any]"}
    assert torch.export.load(done.path).module()(torch.rand(2, 3, 20, 31)).shape == (2, 3, 40, 62)


class OfData(nn.Module):
    """Its way depends on the values."""

    def forward(self, pixels):
        return pixels.flatten(1) if pixels.sum() > 0 else pixels.flatten(1) + 1


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pixels):
        self.calls += 1
        return pixels.flatten(1) * self.calls


class OfFour(nn.Module):
    def forward(self, pixels):
        return pixels.reshape(4, -1) if len(pixels) == 4 else pixels.flatten(1)


class Drawing(nn.Module):
    def forward(self, pixels):
        return pixels.flatten(1) + torch.rand_like(pixels.flatten(1))


class Infinite(nn.Module):
    def forward(self, pixels):
        return pixels.flatten(1) * 1e38 * 1e38


class Hooked(nn.Module):
    """A layer whose weight is computed from parameters: by hooks, or by a parametrization."""

    def __init__(self, change):
        super().__init__()
        self.layer = change(nn.Linear(64, 10))

    def forward(self, pixels):
        return self.layer(pixels.flatten(1))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.ln_structured(layer, "weight", 0.3, 2, 1),
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
    ],
)
def test_weights_that_hooks_compute_are_exported(change):
    parts, _ = parts_of(*TINY)
    model = Hooked(change)
    found = export_network(dataclasses.replace(parts, model=model), {}, torch.float16, "torch_export", {})
    assert found.difference <= found.tolerance
    assert model.layer.weight.dtype == torch.float32


class Uncopied(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, pixels):
        return pixels.flatten(1)


class Large(nn.Module):
    def forward(self, pixels):
        return (pixels.flatten(1) + 1000) * 100


@pytest.mark.parametrize(
    ("network", "dtype", "kind", "message"),
    [
        (Uncopied, torch.float32, ConfigError, "Uncopied of task Classify cannot be exported: cannot pickle"),
        (OfData, torch.float32, ConfigError, "OfData of task Classify cannot be exported: Could not guard"),
        (Counting, torch.float32, ConfigError, "Counting of task Classify cannot be exported: its answers to the same"),
        (OfFour, torch.float32, ConfigError, "OfFour of task Classify cannot be exported: Constraints violated"),
        (
            Drawing,
            torch.float16,
            ConfigError,
            "Drawing of task Classify cannot be exported: its answers to the same input",
        ),
        (Infinite, torch.float32, NumericsError, "the network's own answers are not finite in float32"),
        (Large, torch.float16, NumericsError, "the network's own answers are not finite in float16"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(network, dtype, kind, message, capsys):
    parts, _ = parts_of(*TINY)
    with pytest.raises(kind) as raised:
        export_network(dataclasses.replace(parts, model=network()), {}, dtype, "torch_export", {})
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.hint
    assert capsys.readouterr() == ("", "")


def test_networks_that_no_single_call_runs_are_refused():
    parts, _ = parts_of("model=dcgan", "dataset.train_samples=16", "train.batch_size=8")
    with pytest.raises(ConfigError, match="task Gan calls the parts of its network, never the whole"):
        export_network(parts, {}, torch.float32, "onnx", {})


def test_a_file_with_other_answers_is_not_written(tmp_path, monkeypatch, capsys):
    train(*TINY, "run.name=r")
    whole = network_export._opened

    def opened(content, form):
        tool, run = whole(content, form)
        return tool, lambda call: [answer * 1.001 for answer in run(call)]

    monkeypatch.setattr(network_export, "_opened", opened)
    assert main(["export", "r", "--output", "net.onnx"]) == 4
    assert "answers of the exported file differ from torch's" in capsys.readouterr().err
    assert not list(tmp_path.glob("net*"))


def test_without_the_libraries_the_file_is_refused_or_checked_by_onnx_itself(tmp_path, monkeypatch, capsys):
    train(*TINY, "run.name=r")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = export_run("r", form="onnx")
    assert done.network.checked_with == "onnx.reference"
    assert done.network.difference <= done.network.tolerance
    done.path.unlink()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", "r", "--format", "onnx"]) == 3
    assert "an .onnx file needs the package onnxscript, which is not installed" in capsys.readouterr().err
    assert not done.path.exists()


def test_a_place_that_is_no_file_or_lies_in_a_run_is_refused_before_any_work(tmp_path, monkeypatch):
    root = train(*TINY, "run.name=r")
    weights = (root / "summary.json").read_bytes()
    os.mkfifo(tmp_path / "pipe.pt")
    os.mkfifo(tmp_path / "w.pt.json")
    (tmp_path / "link.pt").symlink_to(tmp_path / "elsewhere.pt")
    monkeypatch.setattr("mptrain.run.evaluation.plain_weights", None)  # it would fail at the first work
    places = {"pipe.pt": "is a named pipe", "w.pt": "w.pt.json is a named pipe", "link.pt": "is a symbolic link"}
    places |= {"outputs/r/new.pt": "lies in the run", "outputs/r/checkpoints/new.bin": "lies in the run"}
    for place, message in places.items():
        with pytest.raises(StorageError, match=message):
            export_run("r", output=tmp_path / place)
    assert (root / "summary.json").read_bytes() == weights
    assert stat.S_ISFIFO((tmp_path / "pipe.pt").stat().st_mode)
    assert not [*tmp_path.rglob("*.tmp")]
