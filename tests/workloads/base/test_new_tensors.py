"""Tensors and arrays are predicted from as they were trained on; others are refused by shape and kind of number."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import mptrain
from mptrain.config.compose import reload
from mptrain.run.evaluation import built
from mptrain.run.network_export import export_network
from mptrain.run.prediction import open_new_inputs, predictor
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.directory import find_run
from mptrain.system.errors import DataError
from mptrain.workloads.base.map_style import MapDataset, torch_parts
from tests.small_runs import run_in_process

CPU = torch.device("cpu")
INPUTS = np.random.default_rng(0).normal(size=(48, 5))
WORDS = (
    "model=mlp",
    "model.hidden=[8]",
    "train.batch_size=16",
    "train.epochs=2",
    "device=cpu",
    "threads=1",
    "run.name=run",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        part = (INPUTS, INPUTS.argmax(1))
        run = mptrain.train(*WORDS, data=(part, part), show=False)
    assert run.summary["metric_name"] == "top1"
    return folder / "outputs/run"


@pytest.fixture
def source(trained):
    return open_new_inputs(trained / "data.json")


def predicted(run, values):
    with predictor(str(run)) as loaded:
        return list(loaded.predict(loaded.source.inputs_in(values)))


def test_rows_are_answered_as_in_the_evaluation_whatever_holds_them(trained):
    answers = [one.answer for one in predicted(trained, INPUTS)]
    hits = sum(answer["class"] == str(row.argmax()) for answer, row in zip(answers, INPUTS, strict=True))
    assert hits / 48 == pytest.approx(mptrain.open_run(trained).summary["metric"])
    for values in (
        torch.tensor(INPUTS),
        list(INPUTS),
        iter(torch.tensor(INPUTS).float()),
        INPUTS[:, ::-1].copy()[:, ::-1],
    ):
        assert [one.answer["class"] for one in predicted(trained, values)] == [one["class"] for one in answers]
    assert [one.answer for one in predicted(trained, INPUTS[3])] == [answers[3]]


def test_an_unusable_input_is_named_and_the_others_are_answered(trained):
    given = [INPUTS[0], INPUTS[1, :4], INPUTS[2].astype(int), INPUTS[3] > 0, "text", INPUTS[4], [[1.0], [2.0, 3.0]]]
    found = predicted(trained, given)
    assert [one.given for one in found] == [f"input {number}" for number in range(7)]
    assert [one.error[:60] for one in found] == [
        "",
        "it is float64 [4], and the network takes float64 [5]",
        "it is int64 [5], and the network takes float64 [5]",
        "it is bool [5], and the network takes float64 [5]",
        "it is a text, and the network takes tensors",
        "",
        found[6].error[:60],
    ]
    assert found[6].error.startswith("its values make no array")
    with predictor(str(trained)) as loaded:
        assert next(loaded.predict(["a line"])).error == "it is a text, and the network takes tensors"


def test_a_command_line_has_no_tensors(trained):
    for words in (("a.npy",), ("-",)):
        done = run_in_process("predict", str(trained), *words, cwd=trained)
        assert done.returncode == 2
        assert "takes tensors, and neither files nor texts" in done.stderr
        assert f"mptrain.open_run('{trained}').predict(tensor)" in done.stderr


@pytest.mark.parametrize("kind", ["float64", "float32", "int64"])
@pytest.mark.parametrize("shape", [(), (4,), (3, 6, 6)])
@pytest.mark.parametrize("targets", [torch.arange(6) % 2, torch.arange(6.0), torch.eye(6)])
def test_inputs_are_prepared_as_those_of_the_run_without_its_data(kind, shape, targets, tmp_path):
    rows = (10 * torch.randn(6, *shape)).to(getattr(torch, kind))
    data = MapDataset("own", torch_parts((rows, targets)), 0)
    (tmp_path / "data.json").write_text(json.dumps({"name": "own", "inputs": "tensors", **data.card()}))
    source = open_new_inputs(tmp_path / "data.json")
    assert source.facts() == data.facts()
    expected = data.prepare(data.train.fetch(range(6), 0, 0), CPU, torch.channels_last)
    found = source.prepare(source.split(list(source.inputs_in(rows))).fetch(range(6), 0, 0), CPU, torch.channels_last)
    assert torch.equal(found.inputs, expected.inputs)
    assert found.inputs.stride() == expected.inputs.stride()
    assert (found.targets.shape, found.targets.dtype) == (expected.targets.shape, expected.targets.dtype)
    made_up = source.prepare(source.train.fetch(range(8), 0, 0), CPU, torch.channels_last).inputs
    assert (made_up.dtype, made_up.shape) == (found.inputs.dtype, (8, *shape))
    assert kind != "int64" or 0 <= made_up.min() <= made_up.max() <= max(0, rows.max())  # a greater one may be no token
    assert len(made_up.unique(dim=0)) > (1 if shape == () else 7)


def test_an_input_that_is_not_finite_in_float32_is_refused(source):
    for value in (np.nan, np.inf, 1e39):
        found = source.split(list(source.inputs_in([INPUTS[0], INPUTS[1] * value])))
        assert len(found.fetch([0, 1], 0, 0).inputs) == 1
        assert [*found.faults.unusable.values()] == ["its values have NaN or inf"]


@pytest.mark.long
def test_a_network_is_exported_without_the_data(trained, source):
    run = find_run(str(trained))
    config = reload(run.read_config(), ("precision=fp32",))
    parts = built(config, CheckpointStore(run.paths.checkpoints, config.checkpoint.keep).load("last"), source)
    exported = export_network(parts, {}, torch.float32, "torch_export", {})
    assert (exported.inputs, exported.outputs) == ({"input": "float32 [batch, 5]"}, ("float32 [batch, 5]",))


def test_a_description_that_is_damaged_is_named(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "run")
    card = json.loads((copy / "data.json").read_text())
    for change in (
        {"input_dtype": "nn"},
        {"input_dtype": 3},
        {"input_shape": [-1]},
        {"target_shape": "x"},
        {"input_shape": 5},
    ):
        (copy / "data.json").write_text(json.dumps(card | change))
        with pytest.raises(DataError, match="is damaged"):
            open_new_inputs(copy / "data.json")
