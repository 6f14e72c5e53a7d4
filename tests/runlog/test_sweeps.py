import csv
import json
from dataclasses import replace

import pytest

from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_state import write_summary
from mptrain.runlog.sweeps import Sweep, SweepJob, SweepPaths, is_sweep, read_sweep, varied_keys, write_sweep
from mptrain.system.errors import StorageError

FORMULAS = ("=1+1", "+1+1", "-1+1", "@SUM(1)", "\t=1", "\uff1d1")


def sweep_in(folder, *jobs, **more):
    return Sweep(folder, "sweep", ("seed=0,1",), ("/conf",), "train", 2, jobs, **more)


def job(number, **more):
    return SweepJob(number, f"{number:03d}-seed={number}", ("a=1", f"seed={number}"), (f"seed={number}",), **more)


def rows(folder):
    with SweepPaths(folder).csv.open() as stream:
        return list(csv.DictReader(stream))


def done(folder, number, learners=("main",), **numbers):
    root = RunPaths(folder / f"{number:03d}-seed={number}").root
    root.mkdir()
    one = {"updates": 9, "skipped": 1, "skip_rate": 0.1, "scale": {"first": 8.0, "min": 4.0, "max": 8.0, "last": 4.0}}
    write_summary(RunPaths(root).summary, {"learners": dict.fromkeys(learners, one), **numbers})
    return job(number, status="done", code=0, seconds=1.5)


def test_a_sweep_comes_back_as_it_was_also_from_elsewhere(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    jobs = job(0, arm="fp32", status="done", code=0), job(1, reason='"oh" ünd')
    sweep = sweep_in(old, *jobs, plan={"margin": 0.5})
    assert not is_sweep(old)
    write_sweep(sweep)
    assert is_sweep(old)
    assert read_sweep(old) == sweep
    old.rename(new)
    assert read_sweep(new) == replace(sweep, folder=new)
    fields = json.loads((new / "sweep.json").read_text())
    assert fields["schema"] == 2
    fields["jobs"][0]["colour"] = fields["colour"] = "blue"  # as of a later version
    (new / "sweep.json").write_text(json.dumps(fields))
    assert read_sweep(new).jobs == jobs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "perhaps"}, 'jobs.0.status="perhaps"'), ({"number": 3}, "number 3"), ({"name": "../x"}, "out of the folder"),
        ({"name": "x\0"}, "control characters"), ({"name": "x\ud800"}, "control characters"), ({"name": "x" * 252}, "255 bytes"),
        ({"name": ".git"}, "starts with '.'"), ({"varied": "seed=0"}, 'jobs.0.varied="seed=0"'), ({"overrides": None}, "overrides"),
        ({"kind": "other"}, 'kind="other"'), ({"parallel": 0}, "parallel is 0"), ({"plan": []}, "plan"), ({"schema": 3}, "schema 3"),
    ],
)  # fmt: skip
def test_a_damaged_or_newer_file_is_refused(tmp_path, change, message):
    write_sweep(sweep_in(tmp_path, job(0)))
    path = tmp_path / "sweep.json"
    fields = json.loads(path.read_text())
    (fields["jobs"][0] if change.keys() <= fields["jobs"][0].keys() else fields).update(change)
    path.write_text(json.dumps(fields))
    with pytest.raises(StorageError, match=message):
        read_sweep(tmp_path)


def test_no_json_and_no_sweep_are_storage_errors(tmp_path):
    with pytest.raises(StorageError, match=r"is not a sweep: it has no sweep\.json"):
        read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(StorageError, match=r"sweep\.json is damaged"):
        read_sweep(tmp_path)


def test_the_table_has_the_final_numbers_of_jobs_that_are_done(tmp_path):
    numbers = {"metric": 0.5, "metric_name": "top1", "metric_split": "test", "train_seconds": 3.0, "peak_memory": 7}
    first = done(tmp_path, 0, **numbers)
    sweep = sweep_in(tmp_path, first, job(1, status="failed", code=-9, reason="killed, by SIGKILL"))
    write_sweep(sweep)
    one, two = rows(tmp_path)
    assert (one["number"], one["status"], one["exit"], one["seed"]) == ("0", "done", "0", "0")
    assert (one["metric"], one["metric_name"], one["metric_split"]) == ("0.5", "top1", "test")
    assert [one[f"scale_{which}"] for which in ("first", "min", "max", "last")] == ["8.0", "4.0", "8.0", "4.0"]
    assert (one["updates"], one["skipped"], one["skip_rate"], one["peak_memory"]) == ("9", "1", "0.1", "7")
    assert (two["exit"], two["metric"], two["reason"]) == ("-9", "", "killed, by SIGKILL")
    assert "arm" not in one
    write_summary(RunPaths(tmp_path / first.name).summary, {"metric": 0.75})  # as by an attempt that went on
    write_sweep(sweep)
    assert rows(tmp_path)[0]["metric"] == "0.75"


def test_several_learners_have_columns_of_their_own_and_arms_are_named(tmp_path):
    write_sweep(sweep_in(tmp_path, done(tmp_path, 0, learners=("generator", "critic")), job(1, arm="fp16")))
    one, two = rows(tmp_path)
    assert (one["generator.updates"], one["critic.scale_min"]) == ("9", "4.0")
    assert "updates" not in one
    assert two["arm"] == "fp16"


def test_keys_that_points_add_or_remove_are_columns(tmp_path):
    words = (("d=1", "+a.b=1", "~c"), ("d=1", "+a.b=2"))
    write_sweep(sweep_in(tmp_path, *(SweepJob(at, f"{at:03d}", one, one[1:]) for at, one in enumerate(words))))
    assert [row["a.b"] for row in rows(tmp_path)] == ["1", "2"]
    assert [row["c"] for row in rows(tmp_path)] == ["", ""]
    assert "d" not in rows(tmp_path)[0]


def test_a_key_with_the_same_value_everywhere_is_no_column_and_the_last_word_counts(tmp_path):
    points = [SweepJob(at, f"{at:03d}", ("p=a", "q=1", f"p={at}"), ("q=1", f"p={at}")) for at in range(2)]
    write_sweep(sweep_in(tmp_path, *points))
    assert varied_keys(points) == ["p"]
    assert [row["p"] for row in rows(tmp_path)] == ["0", "1"]


def test_text_that_a_spreadsheet_would_compute_is_written_as_text(tmp_path):
    formulas = [f"'{formula}" for formula in FORMULAS]
    jobs = [SweepJob(at, f"{at:03d}", (f"dataset.name={text}",), (), reason=text) for at, text in enumerate(FORMULAS)]
    write_sweep(sweep_in(tmp_path, *jobs))
    assert [row["dataset.name"] for row in rows(tmp_path)] == [row["reason"] for row in rows(tmp_path)] == formulas


def test_numbers_with_a_sign_stay_numbers_in_a_spreadsheet(tmp_path):
    values = ("-0.5", "+3", "-1e-3", "-inf", "1")
    jobs = [SweepJob(at, f"{at:03d}", (f"a={value}",), (), code=-9) for at, value in enumerate(values)]
    write_sweep(sweep_in(tmp_path, *jobs))
    assert [row["a"] for row in rows(tmp_path)] == list(values)
    assert {row["exit"] for row in rows(tmp_path)} == {"-9"}


def test_the_interval_of_a_metric_stands_beside_it(tmp_path):
    numbers = {"metric": 0.9, "metric_name": "top1", "metric_split": "test", "intervals": {"top1": (0.88, 0.92)}}
    write_sweep(sweep_in(tmp_path, done(tmp_path, 0, **numbers), job(1)))
    assert [(row["metric_low"], row["metric_high"]) for row in rows(tmp_path)] == [("0.88", "0.92"), ("", "")]
