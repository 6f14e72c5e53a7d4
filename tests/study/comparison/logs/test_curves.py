"""The same training has the same curve in all formats, and what cannot be read is said by file and line."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sqlite3

import numpy as np
import pytest

from mptrain.runlog import RunState, create_run, read_run
from mptrain.study.comparison.logs import curves
from mptrain.study.comparison.logs.curves import read_curve
from mptrain.study.comparison.logs.runs import Question, read_curves
from mptrain.system.errors import DataError, MptrainError, UsageError
from tests.small_runs import TINY, run_in_process

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


def test_a_choice_that_no_row_has_is_refused_with_what_there_is(tmp_path):
    (tmp_path / "a.csv").write_text("step,split,loss\n1,train,3\n1,val,2\n")
    with pytest.raises(DataError, match=r"no row of .* has split=dev") as refused:
        read_curve(tmp_path / "a.csv", "loss", {"split": "dev"})
    assert refused.value.hint == "there, split is train, val"
    with pytest.raises(UsageError, match="has no rows with columns"):
        read_curve(mlflow_folder(tmp_path), "loss", {"split": "val"})


def test_event_files_of_processes_that_wrote_at_once_are_refused(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writers = [tensorboard.SummaryWriter(str(tmp_path / "tb"), filename_suffix=f".{rank}") for rank in (0, 1)]
    for at in (1, 2, 3):
        for rank, writer in enumerate(writers):
            writer.add_scalar("loss", 3 / at + rank, at, walltime=1e9 + at)
    for writer in writers:
        writer.close()
    with pytest.raises(DataError, match="processes that wrote at once"):
        read_curve(tmp_path / "tb", "loss")


def test_runs_of_an_experiment_of_mlflow_are_its_folders(tmp_path):
    folder = mlflow_folder(tmp_path)
    (folder.parent / "meta.yaml").write_text("name: some\n")
    question = Question("loss", "equivalent", 0.01, math.nan, "last", paired=False, looks=1, lower_is_better=True)
    assert [curve.path for _, curve in read_curves([str(folder.parent / "*")], question)] == [str(folder)]


def event(step=1, **fields):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(step=step, summary=Summary(value=[Summary.Value(tag="loss", **fields)])).SerializeToString()


def event_file(folder, *contents, name="events.out.tfevents.1.x"):
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(exist_ok=True)
    with (folder / name).open("wb") as file:
        for content in contents:
            RecordWriter(file).write(content)
    return folder


def foreign_tensors():
    """Tensors that are no single number, by what is wrong with them."""
    from tensorboard.compat.proto.tensor_pb2 import TensorProto

    def tensor(kind, *sizes, **values):
        made = TensorProto(dtype=kind, **values)
        for size in sizes:
            made.tensor_shape.dim.add(size=size)
        return made

    return {
        "a vector": tensor(1, 2, float_val=[1.0, 2.0]),
        "a shape of a terabyte": tensor(1, 1 << 38, float_val=[1.0]),
        "a negative size": tensor(1, -1, float_val=[1.0]),
        "no value": tensor(1, tensor_content=b""),
        "half a value": tensor(1, tensor_content=b"\0\0"),
        "text": tensor(7, string_val=[b"high"]),
        "an unknown kind": tensor(99),
        "a complex number": tensor(8, scomplex_val=[1.0, 2.0]),
    }


@pytest.mark.parametrize("what", ["a vector", "a shape of a terabyte", "a negative size", "no value", "half a value", "text",
                                  "an unknown kind", "a complex number"])  # fmt: skip
def test_a_tensor_that_is_no_number_is_refused(tmp_path, what):
    pytest.importorskip("tensorboard")
    with pytest.raises(DataError, match=r"events.out.tfevents.1.x, record 1: loss is .*, not a number"):
        read_curve(event_file(tmp_path / "tb", event(tensor=foreign_tensors()[what])), "loss")


def test_event_files_hold_numbers_as_torch_and_keras_write_them(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.util.tensor_util import make_tensor_proto

    keras = [event(tensor=make_tensor_proto(value)) for value in (np.float32(0.5), np.array([2], dtype=np.int64))]
    folder = event_file(tmp_path / "tb", event(2, simple_value=0.25))
    event_file(folder, keras[0], name="events.out.tfevents.0.x")
    assert read_curve(folder, "loss").values.tolist() == [0.5, 0.25]
    assert read_curve(event_file(tmp_path / "one", keras[1]), "loss").values.tolist() == [2.0]


@pytest.mark.parametrize("content", [b"no event", b"\xff" * 40, b"\x0a"])
def test_a_record_that_is_no_event_is_refused(tmp_path, content):
    pytest.importorskip("tensorboard")
    with pytest.raises(DataError, match="record 2: it is no event"):
        read_curve(event_file(tmp_path / "tb", event(simple_value=0.5), content), "loss")


def test_a_changed_byte_of_an_event_file_is_refused_and_a_missing_end_is_that_of_a_killed_process(tmp_path):
    pytest.importorskip("tensorboard")
    folder = event_file(tmp_path / "tb", *[event(simple_value=0.5)] * 3)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for cut in (1, 4, 20, 29):
        file.write_bytes(whole[:-cut])
        assert len(read_curve(folder, "loss").values) == 1  # of one step
    for at in (2, 9, 13, len(whole) - 2):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DataError, match=r"record \d: its checksum is wrong|has no"):
            read_curve(folder, "loss")


MLFLOW = "CREATE TABLE metrics (key, value, timestamp, run_uuid, step, is_nan)"


def database_of(folder, *statements):
    path = folder / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path)) as made:
        for one in statements:
            made.execute(one)
        made.commit()
    return path / "R"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("'loss', 1.0, 1, 'R', NULL, 0", "row 1: step is None, not a whole number"),
        ("'loss', 1.0, 1, 'R', 1.5, 0", "row 1: step is 1.5, not a whole number"),
        ("'loss', 1.0, 1, 'R', x'00', 0", "row 1: step is b"),
        ("'loss', 1.0, 1, 'R', 'one', 0", "row 1: step is 'one', not a number"),
        ("'loss', NULL, 1, 'R', 1, 0", "row 1: loss is None, not a number"),
        ("'loss', 'high', 1, 'R', 1, 0", "row 1: loss is 'high', not a number"),
        ("'loss', x'ff', 1, 'R', 1, 0", "row 1: loss is b"),
        ("7, 1.0, 1, 'R', 1, 0", "has no loss"),
        ("NULL, 1.0, 1, 'R', 1, 0", "has no loss"),
        ("CAST(x'ff' AS TEXT), 1.0, 1, 'R', 1, 0", "is no database of MLflow"),
    ],
)
def test_rows_of_a_database_that_are_no_numbers_are_refused(tmp_path, row, said):
    place = database_of(tmp_path, MLFLOW, f"INSERT INTO metrics VALUES ({row})")
    with pytest.raises(DataError, match=re.escape(said)):
        read_curve(place, "loss")


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT 'loss' AS key, 1.0 AS value, i AS timestamp, 'R' AS run_uuid, i AS step, 0 AS is_nan FROM n"  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "statements",
    [
        (f"CREATE VIEW metrics AS {ENDLESS}",),
        ("CREATE VIRTUAL TABLE metrics USING fts4(key, value, timestamp, run_uuid, step, is_nan)",),
        ("CREATE TABLE runs (x)",),
        (
            "CREATE TABLE metrics (key)", "PRAGMA writable_schema=ON",
            f"UPDATE sqlite_master SET sql = 'CREATE VIEW metrics AS {ENDLESS.replace(chr(39), chr(39) * 2)}'",
        ),
    ],
)  # fmt: skip
def test_only_a_table_of_metrics_is_read(tmp_path, statements):
    with pytest.raises(DataError, match=r"has no table of metrics|is no database"):
        read_curve(database_of(tmp_path, *statements), "loss")


def test_a_database_that_takes_too_long_or_has_too_many_rows_is_refused(tmp_path, monkeypatch):
    rows = f"INSERT INTO metrics {ENDLESS} LIMIT 20000"
    place = database_of(tmp_path, MLFLOW, rows)
    assert len(read_curve(place, "loss").values) == 20_000
    monkeypatch.setattr(curves, "_MOST_ROWS", 19_999)
    with pytest.raises(DataError, match="has more than 19,999 values of loss"):
        read_curve(place, "loss")
    monkeypatch.setattr(curves, "_QUERY_SECONDS", -1)
    with pytest.raises(DataError, match="does not answer within"):
        read_curve(place, "loss")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
def test_pipes_beside_a_database_are_not_waited_for(tmp_path, ending):
    place = database_of(tmp_path, MLFLOW)
    os.mkfifo(tmp_path / f"mlflow.db{ending}")
    with pytest.raises(MptrainError, match="it is a named pipe, not a file"):
        read_curve(place, "loss")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("place", ["tb/events.out.tfevents.2.y", "run/metrics/loss", "run/metrics/other"])
def test_pipes_inside_a_folder_are_refused_and_not_waited_for(tmp_path, place):
    pytest.importorskip("tensorboard")
    event_file(tmp_path / "tb", event(simple_value=0.5))
    mlflow = tmp_path / "run/metrics"
    mlflow.mkdir(parents=True)
    (mlflow / "loss").write_text("1 0.5 1\n")
    (tmp_path / place).unlink(missing_ok=True)
    os.mkfifo(tmp_path / place)
    with pytest.raises(MptrainError, match=r"it is a named pipe, not a file|has no loss"):
        read_curve(tmp_path / place.split("/", maxsplit=1)[0], "loss")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "events.out.tfevents.1", "trainer_state.json"])
def test_a_log_of_a_terabyte_of_nothing_is_refused_at_once(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError):
        read_curve(tmp_path / name, "loss")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"metrics": None}, "its metrics are no object"),
        ({"metrics": [1]}, "its metrics are no object"),
        ({"metrics": {"top1": None}}, "top1 is None, not a number"),
        ({"metrics": {"top1": {"a": []}}}, "top1 is {'a': []}, not a number"),
        ({"step": "x"}, "step is 'x', not a number"),
        ({"step": 1.5}, "step is 1.5, not a whole number"),
        ({"step": None}, "step is None, not a whole number"),
        ({"step": 10**30}, "not a whole number"),
        ({"split": ["val"]}, "has no val_top1"),
    ],
)
def test_evaluations_of_a_run_that_are_no_numbers_are_refused(tmp_path, change, said):
    run = create_run(tmp_path, "label", "run")
    run.write_state(RunState(id="run", argv=(), command="").begin())
    fields = {"event": "evaluation", "step": 1, "split": "val", "metrics": {"top1": 0.5}, **change}
    run.paths.events.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}) + "\n")
    with pytest.raises(DataError, match=re.escape(said)):
        read_curve(run.paths.root, "val_top1")
