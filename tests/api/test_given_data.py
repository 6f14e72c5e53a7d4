"""Tensors, arrays and frames that a program gives: as from files, evaluated, answered and trained on again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mptrain
from mptrain.system.errors import ConfigError, DataError, UsageError
from tests.small_runs import run_in_process

pandas = pytest.importorskip("pandas")

WORDS = (
    "model=mlp",
    "model.hidden=[8]",
    "train.epochs=2",
    "train.batch_size=16",
    "threads=1",
    "precision=fp16_dynamic",
)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def frame(count=96, seed=0):
    draws = np.random.default_rng(seed)
    size, town = draws.normal(size=count), draws.choice(["a", "b", "c"], count)
    return pandas.DataFrame(
        {"size": size, "town": town, "price": 1e5 + 2e4 * size + 3e4 * (town == "b"), "id": range(count)}
    )


def losses(run):
    return [step.loss for step in run.steps()]


def test_a_frame_trains_as_the_file_that_it_is_written_to(tmp_path):
    words = (*WORDS, "task=regression", "dataset.ignore=[id]")
    run = mptrain.train(*words, "run.name=frame", data=frame(), target="price", show=False)
    frame().to_csv("rows.csv", index=False)
    done = run_in_process(
        *words, "dataset=table", "dataset.path=rows.csv", "dataset.target=price", "run.name=file", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(mptrain.open_run("file"))
    new = frame(5, seed=3).drop(columns="price")
    answers = run.predict(new)
    assert len(answers) == 5
    assert run.predict(new.iloc[2].to_dict()) == [answers[2]]
    assert run.predict(new.to_dict("records")) == answers == mptrain.open_run("file").predict(new)
    new.to_csv("new.csv", index=False)
    done = run_in_process("predict", "file", "new.csv", "--jsonl", cwd=tmp_path)
    assert done.stdout.count('"value"') == 5
    other = run.evaluate({"test": frame(40, seed=4)})
    assert [record.samples for record in other.records] == [40]
    assert other.metrics == mptrain.open_run("file").evaluate(frame(40, seed=4)).metrics
    frame(40, seed=4).to_csv("other.csv", index=False)
    assert mptrain.open_run("file").evaluate("dataset.path=other.csv").metrics == other.metrics
    opened = mptrain.open_run("frame")
    with pytest.raises(ConfigError, match=r"dataset\.path is not set") as refused:
        opened.evaluate()
    assert "mptrain.open_run(RUN, data=frame)" in refused.value.hint
    assert opened.resume(epochs=3, data=frame(), show=False).state.attempts[-1].to_step == 15
    with pytest.raises(mptrain.MptrainError):
        opened.resume(epochs=4, data=frame(seed=9), show=False)  # of another encoding


def test_parts_of_frames_and_a_column_that_is_no_column():
    with pytest.raises(DataError, match="train has no column prize") as refused:
        mptrain.train(*WORDS, data=frame(), target="prize", show=False)
    assert "did you mean price?" in refused.value.hint
    data = {"train": frame(), "valid": frame(20, 1), "test": frame(20, 2)}
    run = mptrain.train(*WORDS, "task=regression", "dataset.ignore=[id]", data=data, target="price", show=False)
    assert run.summary["metric_split"] == "test"
    with pytest.raises(UsageError, match="val is a list, and other parts are DataFrames"):
        mptrain.train(*WORDS, data={"train": frame(), "val": [1]}, target="price", show=False)
    columns = frame()[["size", "id"]], (frame()["size"] > 0).astype(int)  # as scikit-learn takes them
    assert mptrain.train(*WORDS, data=(columns, columns), show=False).summary["metric_name"] == "top1"


def labelled(count, seed, outputs=3):
    inputs = np.random.default_rng(seed).normal(size=(count, 6)).astype("float32")
    return inputs, inputs[:, :outputs] > 0


@pytest.mark.parametrize("task", ["classify", "regression", "multilabel"])
def test_arrays_are_answered_exported_and_evaluated_without_the_training_data(task, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    made = {
        "classify": lambda x, y: (x, y.sum(1)),
        "regression": lambda x, y: (x, 1e6 * x[:, :2] + 3e6),
        "multilabel": lambda x, y: (x, y),
    }[task]
    data = {part: made(*labelled(64, seed)) for seed, part in enumerate(("train", "val", "test"))}
    mptrain.train(*WORDS, f"task={task}", "run.name=run", data=data, show=False)
    run = mptrain.open_run("run")  # another program, which has none of the data
    inputs = data["test"][0]
    answers = run.predict(inputs)
    assert answers == run.predict(list(inputs)) == run.predict(torch.from_numpy(inputs))
    assert run.predict(inputs[3]) == [answers[3]]
    assert run.evaluate(data).metrics == pytest.approx(run.summary["test"])
    network = run.model()(torch.from_numpy(inputs)).detach().numpy()
    file = onnxruntime.InferenceSession(str(run.export("net.onnx")))
    name = file.get_inputs()[0].name
    np.testing.assert_allclose(file.run(None, {name: inputs})[0], network, rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match=r"it is float32 \[5\], and the network takes float32 \[6\]"):
        run.predict(inputs[:, :5])
    with pytest.raises(DataError, match=r"the samples are \[5\], and the run was trained on \[6\]"):
        run.evaluate((inputs[:, :5], data["test"][1]))


def test_the_classes_of_a_run_are_those_of_its_own_data():
    x = torch.randn(60, 4)
    run = mptrain.train(*WORDS, data=((x, torch.arange(60) % 4), (x, torch.arange(60) % 4)), show=False)
    two = run.evaluate((x, torch.arange(60) % 2), by_class=True)  # of the first two classes
    assert two.by_class.class_names == ("0", "1", "2", "3")
    assert sum(map(sum, two.by_class.matrix)) == 60
    with pytest.raises(DataError, match="a target is class 4, and the run has 4 classes, from 0"):
        run.evaluate((x, torch.arange(60) % 5))
    with pytest.raises(UsageError, match="evaluate takes data as one argument"):
        run.evaluate(x, torch.arange(60) % 4)
    assert run.confusion((x, torch.arange(60) % 4)).split == "test"


def test_targets_in_another_unit_are_refused(tmp_path):
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    y = 100 + 3 * x[:, 0]
    words, parts = (*WORDS, "task=regression", "run.name=run"), {"val": (x[60:], y[60:])}
    run = mptrain.train(*words, data={"train": (x[:60], y[:60]), **parts}, show=False)
    other = {"train": (x[:60], 3 * y[:60]), **parts}
    opened = mptrain.open_run("run", data=other)
    for ask in (opened.evaluate, lambda: opened.resume(epochs=3, show=False)):
        with pytest.raises(mptrain.MptrainError, match="target_mean of the training targets is"):
            ask()
    assert run.evaluate(parts).metrics == run.evaluate().metrics  # in the unit of the run


def test_data_of_another_kind_than_the_run_was_trained_on_are_refused():
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    run = mptrain.train(*WORDS, data=((x, y), (x, y)), show=False)
    named = torch.utils.data.TensorDataset(x, y)
    named.classes = ["1", "0", "2"]
    run.evaluate((x.double().numpy(), y))
    for data, error, said in (
        ((x, y.float()), DataError, "the targets are float32, and the run was trained on int64"),
        ((x.long(), y), DataError, "the inputs are int64, and the run was trained on float32"),
        ((x, torch.eye(3)[y]), DataError, r"the targets are \[3\], and the run was trained on \[\]"),
        (named, DataError, "the names are 1, 0, 2, and those of the run 0, 1, 2"),
        (frame(), UsageError, "the run was trained on from_python, and data is a DataFrame"),
    ):
        with pytest.raises(error, match=said):
            run.evaluate(data)
    pictures = mptrain.train("model=mlp", "dataset.train_samples=64", "train.epochs=1", "threads=1", show=False)
    with pytest.raises(UsageError, match="the run was trained on digits, and data is a tuple"):
        pictures.evaluate((torch.rand(30, 1, 8, 8), torch.arange(30) % 10))
    table = mptrain.train(*WORDS, "task=regression", "dataset.ignore=[id]", data=frame(), target="price", show=False)
    with pytest.raises(UsageError, match="the run was trained on a table"):
        table.evaluate((x, y))
    unknown = pandas.DataFrame({"size": [1.0], "town": ["Paris"]})
    assert "of no category" in table.predict(unknown)[0]["remark"]


def test_more_outputs_than_classes_are_answered_by_number_and_have_no_matrix():
    x, y = torch.randn(64, 12), torch.arange(64) % 2
    run = mptrain.train("train.epochs=1", "threads=1", model=torch.nn.Linear(12, 50), data=((x, y), (x, y)), show=False)
    assert {answer["class"] for answer in run.predict(x)} <= {str(number) for number in range(50)}
    with pytest.raises(UsageError, match=r"the network says class .*, and the data have 2 classes"):
        run.confusion()
    with pytest.raises(UsageError, match="steps have no acc"):
        run.plot("acc")
