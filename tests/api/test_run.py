"""Runs from Python: network, predictions, curves, lists and comparisons."""

from __future__ import annotations

import contextlib
import inspect
import random
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from PIL import Image

import mptrain
from mptrain import shelves
from mptrain.engine.weights_io import read_weights
from mptrain.run.evaluation import export_run
from mptrain.system.errors import DataError, MptrainError, StorageError, UsageError
from tests.report.folders import make_run
from tests.small_runs import TINY, environment, run_in_process


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for precision in ("fp32", "fp16_dynamic"):
            for seed in range(2):
                words = (
                    f"precision={precision}",
                    f"seed={seed}",
                    f"run.name={precision}-{seed}",
                    "train.ema_decay=0.9",
                )
                mptrain.train(*TINY, *words, "threads=1", show=False)
    return folder


@pytest.fixture(autouse=True)
def _folder(trained, monkeypatch):
    monkeypatch.chdir(trained)


@pytest.mark.long
def test_a_network_has_the_weights_that_are_exported(tmp_path):
    run = mptrain.open_run("fp16_dynamic-0")
    for average in (True, False):
        done = export_run("outputs/fp16_dynamic-0", "last", torch.float32, average=average, output=tmp_path / "w.pt")
        expected = read_weights(done.path)
        model = run.model(average=average)
        assert not model.training
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    run.export(tmp_path / "x.safetensors")
    assert all(
        torch.equal(value, run.model().state_dict()[name])
        for name, value in read_weights(tmp_path / "x.safetensors").items()
    )


def test_a_picture_is_predicted_and_an_unusable_one_raises(tmp_path):
    run = mptrain.open_run("fp32-1")
    Image.fromarray(torch.full((8, 8), 100, dtype=torch.uint8).numpy()).save(tmp_path / "a.png")
    (answer,) = run.predict(tmp_path / "a.png")
    pixels = torch.full((1, 1, 8, 8), 100 / 255)
    logits = run.model()((pixels - 0.3046) / 0.3756)
    assert answer["probability"] == pytest.approx(logits.softmax(1).max().item(), rel=1e-4)
    (tmp_path / "b.png").write_text("x")
    with pytest.raises(DataError, match="it is no picture of a known format"):
        run.predict([tmp_path / "a.png", tmp_path / "b.png"])


def test_runs_are_listed_shown_and_plotted():
    found = mptrain.runs()
    assert [run.paths.root.name for run in found] == ["fp16_dynamic-1", "fp16_dynamic-0", "fp32-1", "fp32-0"]
    assert [run.overrides[-1] for run in mptrain.runs("outputs", "precision=fp32", "seed=1")] == ["threads=1"]
    assert "<dd>done</dd>" in found[0]._repr_html_()
    assert "status done, steps 18" in repr(found[0])
    figure = found[0].plot("loss", "grad_norm", "loss_scale")
    assert len(figure.figure.axes) == 3
    assert "loss scale" in figure._repr_svg_()
    for name in ("los", "main", "learner", ["loss"]):
        with pytest.raises(UsageError, match=r"steps have no .*, and evaluations neither"):
            found[0].plot(name)
    with pytest.raises(UsageError, match="steps have no learner loss"):
        found[0].plot(learner="loss")
    with pytest.raises(UsageError, match="a pattern is a list"):
        mptrain.runs("outputs", ["seed=1"])


def test_metrics_of_evaluations_are_plotted_by_split():
    run = mptrain.open_run("fp32-0")
    figure = run.plot("top1", "val_loss", "test_top1", "train_loss", "loss")
    measured = [event for event in run.events() if event["event"] == "evaluation"]
    val = [(event["step"], event["metrics"]["top1"]) for event in measured if event["split"] == "val"]
    both, val_loss, test, train, loss = figure.charts
    assert [(curve.name, len(curve.x)) for curve in both.series] == [("val", 3), ("test", 1)]
    assert list(zip(both.series[0].x, both.series[0].y, strict=True)) == val
    assert [curve.name for curve in val_loss.series] == ["val"]
    assert test.series[0].y == both.series[1].y == (run.summary["metric"],)
    assert list(train.series[0].y) == [epoch.train_loss for epoch in run.epochs()]
    assert len(loss.series[0].x) == 18
    assert ">val<" in figure.svg
    for name, near in (("topp1", "top1"), ("vall_loss", "val_loss"), ("grad_nrom", "grad_norm")):
        with pytest.raises(UsageError) as refused:
            run.plot(name)
        assert refused.value.hint == f"did you mean {near}?"
    with pytest.raises(UsageError) as refused:
        run.plot("zzz")
    assert {"train_loss", "val_top1", "loss_scale"} <= {*re.split(r"[ ,]+", refused.value.hint)}


def test_evaluations_alone_are_plotted_and_a_run_without_records_has_nothing_to_plot(tmp_path):
    make_run(tmp_path / "a", steps=0, metric=0.5)
    (chart,) = mptrain.open_run(tmp_path / "a").plot("top1").charts
    assert [curve.name for curve in chart.series] == ["test"]
    with pytest.raises(UsageError, match="steps have no loss_scale, and evaluations neither"):
        mptrain.open_run(tmp_path / "a").plot("loss_scale")
    make_run(tmp_path / "b", steps=0, status="failed")
    with pytest.raises(StorageError, match="has no step"):
        mptrain.open_run(tmp_path / "b").plot()


def test_an_evaluation_with_missing_fields_is_left_out_of_a_figure_and_said(tmp_path):
    root = make_run(tmp_path / "a", steps=20, metric=0.5)
    with (root / "events.jsonl").open("a") as file:
        file.write('{"event": "evaluation", "split": "val", "step": 30}\n')
        file.write('{"event": "evaluation", "split": "val", "step": 40, "metrics": {"top1": null}}\n')
    with pytest.warns(UserWarning, match="an evaluation has missing or invalid fields and is left out"):
        (chart,) = mptrain.open_run(root).plot("val_top1").charts
    assert [len(curve.x) for curve in chart.series] == [2]


def test_a_run_shows_itself_without_secrets_and_markup(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    run = mptrain.open_run(make_run(tmp_path / "<b>", steps=3, words=("run.root=hunter2hunter2",)))
    assert "<dd>run.root=${oc.env:MY_TOKEN}</dd>" in run._repr_html_()
    assert "&lt;b&gt;" in run._repr_html_()
    assert "\n" not in repr(run)


def test_every_error_shows_its_hint_in_a_traceback(monkeypatch):
    run = mptrain.open_run("fp32-0")
    monkeypatch.setitem(sys.modules, "pandas", None)
    calls = (lambda: run.columns("step"), mptrain.runs().to_dataframe, lambda: run.model("seed=1", best=1, averag=2))
    for call in calls:
        with pytest.raises(MptrainError) as refused:
            call()
        shown = traceback.format_exception(refused.value)
        assert refused.value.hint
        if sys.version_info >= (3, 11):
            assert shown[-1] == f"hint: {refused.value.hint}\n"


def test_completion_offers_the_names_for_programs_and_their_signatures():
    names = [name for name in dir(mptrain) if not name.startswith("__")]
    assert names == sorted({*shelves.FUNCTIONS, *shelves.MODULES})
    for name in dir(mptrain):
        getattr(mptrain, name)
    assert next(iter(inspect.signature(mptrain.train).parameters)) == "overrides"
    assert "data" in inspect.signature(mptrain.train).parameters


def test_runs_are_compared():
    found = mptrain.compare(*mptrain.runs(), margin=0.9)
    assert {one.arm.name: len(one.arm.runs) for one in found.arms} == {"fp32": 2, "fp16_dynamic": 2}
    with pytest.raises(UsageError, match="either runs or logs"):
        mptrain.compare()
    with pytest.raises(UsageError, match="margin='1%' is no number") as error:
        mptrain.compare(logs={"a": "x", "b": "y"}, metric="loss", margin="1%")
    assert error.value.hint == "write margin=0.01"
    for odd, what in ((mptrain.runs(), "a RunList"), ({"a": ["fp32-0"]}, "a dict"), (["fp32-0"], "a list")):
        with pytest.raises(UsageError, match=f"compare was given {what} in place of a run") as error:
            mptrain.compare("fp32-0", odd)
        assert error.value.hint.startswith("give the runs themselves: compare(*runs)")
    with pytest.raises(UsageError, match="target is about logs"):
        mptrain.compare("fp32-0", "fp32-1", target=1)


@pytest.mark.process
def test_the_package_and_its_runs_are_read_without_torch():
    program = (
        "import sys, time; begin = time.perf_counter(); import mptrain; took = time.perf_counter() - begin;"
        "run = mptrain.open_run('fp32-0'); repr(run); run.columns('steps'); print(took, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True, timeout=60
    )
    took, imports_torch = done.stdout.split()
    assert float(took) < 0.05
    assert imports_torch == "False"


def test_type_checkers_know_every_name():
    stub = Path(mptrain.__file__).with_suffix(".pyi").read_text()
    assert set(re.findall(r"import \w+ as (\w+)", stub)) == {*shelves.FUNCTIONS, *shelves.MODULES}


def test_packages_for_programs_need_no_import_of_their_own():
    program = (
        "import mptrain, sys; assert 'torch' not in sys.modules; import torch; "
        "layer = torch.nn.Linear(2, 2).bfloat16(); "
        "mptrain.optimizer.stochastic(torch.optim.SGD(layer.parameters(), lr=0.1)).step()"
    )
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True, timeout=60)


def test_callers_keep_their_random_numbers(tmp_path):
    Image.fromarray(torch.full((8, 8), 100, dtype=torch.uint8).numpy()).save(tmp_path / "a.png")
    run = mptrain.open_run("fp32-0")
    (tmp_path / "b.png").write_text("x")
    for use in (
        lambda: run.predict(tmp_path / "a.png"),
        lambda: run.predict(tmp_path / "b.png"),
        run.model,
        lambda: run.export(tmp_path / "x.pt"),
    ):
        states = random.getstate(), torch.get_rng_state().tolist()
        with contextlib.suppress(DataError):
            use()
        assert (random.getstate(), torch.get_rng_state().tolist()) == states


def test_a_margin_of_nothing_is_refused():
    with pytest.raises(UsageError, match="is not positive"):
        mptrain.compare("fp32-0", "fp16_dynamic-0", margin=0.0)


def test_inputs_that_are_no_paths_are_refused_by_name(tmp_path):
    run = mptrain.open_run("fp32-0")
    with pytest.raises(UsageError, match="an input is int, not a text or a path"):
        run.predict(3)
    with pytest.raises(UsageError, match="an input is Tensor, not a text or a path"):
        run.predict([torch.zeros(8, 8)])
    with pytest.raises(UsageError, match=r"b\.png is no KEY=VALUE"):
        run.predict("a.png", "b.png")
    for name in "ab":
        Image.fromarray(torch.full((8, 8), 100, dtype=torch.uint8).numpy()).save(tmp_path / f"{name}.png")
    assert len(run.predict(tmp_path)) == 2
    with pytest.raises(UsageError, match="no records called step"):
        run.columns("step")


@pytest.mark.long
def test_a_file_of_texts_is_read_and_its_name_is_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.tsv").write_text(
        "".join(f"{'ab'[n % 2]}\tword{n % 5} {['yes', 'no'][n % 2]}\n" for n in range(40))
    )
    words = ("model=sequence_classifier", "dataset=labelled_text", "dataset.path=data.tsv", "dataset.min_count=1")
    run = mptrain.train(*words, "train.epochs=1", "train.batch_size=8", "run.name=texts", show=False)
    (tmp_path / "t.txt").write_text("word1 yes\n\nword2 no\n")
    assert run.predict(Path("t.txt")) == run.predict(["word1 yes", "word2 no"])
    (tmp_path / "odd.txt").write_bytes(b"word1\n\xff\nword2\n")
    done = run_in_process("predict", "texts", "odd.txt", "none.txt", "t.txt", cwd=tmp_path)
    assert (done.returncode, len(done.stdout.splitlines())) == (6, 4)
    assert r"warning: \udcff: it is not UTF-8" in done.stderr
    assert "warning: there is no file none.txt" in done.stderr
    assert "2 inputs of 6 cannot be used" in done.stderr
    (tmp_path / "blank.txt").write_text("\n \n")
    faults = {
        "odd.txt": r"\\udcff: it is not UTF-8",
        "none.txt": r"there is no file none\.txt",
        "blank.txt": "has no text",
    }
    for name, said in faults.items():
        with pytest.raises(DataError, match=said):
            run.predict(Path(name))
    with pytest.raises(UsageError, match=r"t\.txt is a file, and this run answers texts"):
        run.predict("t.txt")
