"""The same training has the same curve in all formats, and what cannot be read is said by file and line."""

from __future__ import annotations

import json
import math
import os
import re

import numpy as np
import pytest
from small_runs import TINY, run_in_process

from mptrain.comparison.logs.curves import read_curve
from mptrain.comparison.logs.question import Question
from mptrain.comparison.logs.runs import read_curves
from mptrain.runlog import read_run
from mptrain.system.errors import DataError, MptrainError

LOSSES = [2.5, 1.25, 0.75, 0.5]
STEPS = [10, 20, 30, 40]


def csv_file(folder):
    path = folder / "log.csv"
    path.write_text("step,loss,lr\n" + "".join(f"{at},{loss},0.1\n" for at, loss in zip(STEPS, LOSSES, strict=True)))
    return path


def json_lines(folder):
    rows = [{"global_step": at, "loss": loss} for at, loss in zip(STEPS, LOSSES, strict=True)]
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:2], {"global_step": 25, "other": 1}, *rows[2:]]))
    return path


def transformers_folder(folder):
    pytest.importorskip("transformers")
    from transformers import TrainerState

    rows = [{"step": at, "loss": loss, "epoch": at / 40} for at, loss in zip(STEPS, LOSSES, strict=True)]
    state = TrainerState(log_history=[*rows, {"step": 40, "eval_loss": 9.0}])
    inner = folder / "out" / "checkpoint-40"
    inner.mkdir(parents=True)
    state.save_to_json(str(inner / "trainer_state.json"))
    return folder / "out"


def lightning_folder(folder):
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(str(folder), name="", version="v")
    for at, loss in zip(STEPS, LOSSES, strict=True):
        logger.log_metrics({"loss": loss}, step=at)
        logger.log_metrics({"val_loss": 7.0}, step=at)  # rows of which one cell is empty
    logger.save()
    return folder / "v"


def tensorboard_folder(folder):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(folder / "tb")) as writer:
        for at, loss in zip(STEPS, LOSSES, strict=True):
            writer.add_scalar("loss", loss, at)
    return folder / "tb"


def resumed_tensorboard_folder(folder):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for first, last in ((0, 3), (2, 4)):
        with tensorboard.SummaryWriter(str(folder / "tb"), filename_suffix=f".{first}") as writer:
            for at, loss in list(zip(STEPS, LOSSES, strict=True))[first:last]:
                writer.add_scalar("loss", loss, at)
    return folder / "tb"


def mlflow_folder(folder):
    metrics = folder / "mlruns" / "0" / "abc" / "metrics"
    metrics.mkdir(parents=True)
    (metrics / "loss").write_text("".join(f"1700000000 {loss} {at}\n" for at, loss in zip(STEPS, LOSSES, strict=True)))
    return metrics.parent


def mlflow_database(folder):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    with mlflow.start_run() as run:
        for at, loss in zip(STEPS, LOSSES, strict=True):
            mlflow.log_metric("loss", loss, step=at)
    return folder / "mlflow.db" / run.info.run_id


def wandb_folder(folder):
    wandb = pytest.importorskip("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        run = wandb.init(mode="offline", dir=str(folder), project="some")
        for at, loss in zip(STEPS, LOSSES, strict=True):
            run.log({"loss": loss, "note": "x" * 20_000}, step=at)  # records over several blocks
            run.log({"other": 1})
        run.finish()
        wandb.teardown()  # its process has written all
    return next(folder.glob("wandb/offline-run-*"))


@pytest.mark.filterwarnings("ignore")  # of trackers
@pytest.mark.parametrize(
    ("form", "written"),
    [
        ("CSV", csv_file),
        ("JSONL", json_lines),
        ("transformers", transformers_folder),
        ("Lightning CSVLogger", lightning_folder),
        ("TensorBoard", tensorboard_folder),
        ("MLflow", mlflow_folder),
        ("MLflow", mlflow_database),
        ("Weights & Biases", wandb_folder),
    ],
)
def test_all_formats_have_the_same_numbers(form, written, tmp_path):
    curve = read_curve(written(tmp_path), "loss")
    assert (curve.form, curve.steps.tolist(), curve.values.tolist()) == (form, STEPS, LOSSES)
    assert (curve.given_up, curve.counted, len(curve.digest)) == (0, False, 64)


def test_a_run_of_mptrain_has_its_training_losses_and_its_evaluations(tmp_path):
    done = run_in_process(*TINY, "run.name=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "outputs" / "run")
    curve = read_curve(run.paths.root, "loss")
    assert (curve.form, curve.values.tolist()) == ("mptrain", [one.loss for one in run.steps()])
    told = [one for one in run.events() if one["event"] == "evaluation" and one["split"] == "val"]
    curve = read_curve(run.paths.root, "val_top1")
    assert curve.values.tolist() == [one["metrics"]["top1"] for one in told]
    with pytest.raises(DataError, match="has no top1"):
        read_curve(run.paths.root, "top1")


def test_values_without_steps_are_counted(tmp_path):
    (tmp_path / "plain.csv").write_text("loss\n2\n1\n")
    curve = read_curve(tmp_path / "plain.csv", "loss")
    assert (curve.steps.tolist(), curve.counted) == ([1, 2], True)


def test_event_files_of_a_resumed_run_are_one_curve(tmp_path):
    curve = read_curve(resumed_tensorboard_folder(tmp_path), "loss")
    assert (curve.steps.tolist(), curve.values.tolist(), curve.given_up) == (STEPS, LOSSES, 1)


def test_a_resume_replaces_the_values_from_there_on_and_nan_is_kept(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("\n ,\nstep,loss\n1,3\n2,2\n4,nan\n5,9\n3,1.5\n5,inf\n")
    curve = read_curve(path, "loss")
    assert (curve.steps.tolist(), curve.given_up) == ([1, 2, 3, 5], 2)
    assert curve.values.tolist() == [3, 2, 1.5, np.inf]


def test_a_last_line_may_lack_its_break_if_no_number_of_it_can_be_cut_off(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss,note\n1,0.25,x\n2,0.125,y")
    assert read_curve(tmp_path / "a.csv", "loss").values.tolist() == [0.25, 0.125]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "step,loss\n1,2\n2\n", "a.csv, line 3: it has 1 cells; the header has 2"),
        ("a.csv", "step,loss\n1,2\nx,3\n", "a.csv, line 3: step is 'x', not a number"),
        ("a.csv", "step,loss\n1.5,3\n", "a.csv, line 2: step is '1.5', not a whole number"),
        ("a.csv", "step,loss\n1,2\n2,high\n", "a.csv, line 3: loss is 'high', not a number"),
        ("a.csv", "step,lss\n1,2\n", "a.csv has no loss"),
        ("a.csv", "", "a.csv has no loss"),
        ("a.csv", "step,loss\n", "a.csv has no value of loss"),
        ("a.csv", "step,loss\n1,0.25\n2,0.1", "a.csv, line 3: no line break ends it"),
        ("a.csv", "loss,step\n0.25,1\n0.125,1", "a.csv, line 3: no line break ends it"),
        ("a.csv", "step,loss\n1,4\n5,3\n2,3.5\n", "a.csv ends at step 2, after it had reached 5"),
        ("a.csv", "step;loss\n1;2\n", "a.csv is separated by semicolons"),
        ("a.csv", "step\tloss\n1\t2\n", "a.csv is separated by tabs"),
        ("a.csv", "s\0t\0e\0p\0,\0l\0o\0s\0s\0\n", "a.csv is not UTF-8"),
        ("a.csv", "step,loss,loss\n1,2,3\n", "a.csv has 2 columns 'loss'"),
        ("a.csv", "step, loss\n1, 2\n2, 1_0\n", "a.csv, line 3: loss is ' 1_0', not a number"),
        ("a.jsonl", '{"step": 1, "loss": true}\n', "a.jsonl, line 1: loss is True, not a number"),
        ("a.jsonl", '{"step": 1, "loss": 1' + "0" * 400 + "}\n", "a.jsonl, line 1: loss is 1000"),
        ("a.csv", "Step,run - loss,run - loss__MIN,run - loss__MAX\n1,2,1,3\n", "a chart's export"),
        ("a.jsonl", '{"step": 1, "loss": 2}\nnot json\n', "a.jsonl, line 2: it is not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl, line 1: it is no object"),
        ("a.jsonl", '{"step": 1, "loss": {}}\n', "a.jsonl, line 1: loss is {}, not a number"),
        ("a.json", "{", "a.json is not JSON"),
        ("a.json", '[{"step": 1, "loss": 2},\n\n3]', "a.json, entry 2: it is no object"),
        ("a.json", "{}", "a.json has no list of rows"),
        ("a.txt", "1 2\n", "a.txt is no log that can be read"),
    ],
)
def test_what_is_wrong_is_said_by_file_and_line(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=re.escape(said)):
        read_curve(tmp_path / name, "loss")


def test_a_last_line_that_a_killed_process_left_is_ignored(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert read_curve(tmp_path / "a.jsonl", "loss").values.tolist() == [2.0]


WRITTEN = {
    "CSV": csv_file,
    "JSONL": json_lines,
    "transformers": transformers_folder,
    "Lightning": lightning_folder,
    "TensorBoard": tensorboard_folder,
    "MLflow": mlflow_folder,
    "MLflow's database": mlflow_database,
    "wandb": wandb_folder,
}


@pytest.mark.filterwarnings("ignore")  # of trackers
@pytest.mark.parametrize("form", WRITTEN)
def test_a_damaged_log_is_read_or_refused_and_raises_nothing_else(form, tmp_path):
    written = WRITTEN[form](tmp_path)
    whole = read_curve(written, "loss")
    file = written if written.is_file() else written.parent if form.endswith("database") else None
    for one in [file] if file else [one for one in written.rglob("*") if one.is_file()]:
        before, draws = one.read_bytes(), np.random.default_rng(0)
        damaged = [before[: int(at)] for at in np.linspace(0, len(before), 12)]
        for at in draws.integers(0, max(1, len(before)), 20):
            damaged.append(before[:at] + draws.bytes(3) + before[at + 3 :])
        for text in damaged:
            one.write_bytes(text)
            try:
                curve = read_curve(written, "loss")
            except MptrainError:
                continue
            assert len(curve.steps) == len(curve.values) <= len(whole.values) + 20
        one.write_bytes(before)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "events.out.tfevents.1", "a.wandb"])
def test_special_files_are_refused_and_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(MptrainError):
        read_curve(tmp_path / name, "loss")


def test_the_newest_checkpoint_is_that_of_the_last_step_not_of_the_last_copy(tmp_path):
    for step in (1000, 500, "best"):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        rows = [{"step": at, "loss": 1 / at} for at in (250, 500, 1000) if step == "best" or at <= step]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert read_curve(tmp_path, "loss").steps[-1] == 1000


def test_a_path_that_exists_is_no_pattern(tmp_path):
    for name in ("x[0].csv", "x0.csv"):
        (tmp_path / name).write_text(f"step,loss\n1,{len(name)}\n2,{len(name)}\n")
    question = Question("loss", "equivalent", 0.01, math.nan, "last", paired=False, looks=1, lower_is_better=True)
    for name in ("x[0].csv", "x0.csv"):
        ((_, curve),) = read_curves([str(tmp_path / name)], question)
        assert [*curve.values] == [len(name)] * 2
