"""``mptrain -m`` and ``mptrain resume SWEEP``: nothing starts before everything is valid, and all is told at the end."""

import json
import re
from pathlib import Path

import pytest

from tests import jobs_that_end as jobs

SMALL = ("dataset.image_size=8", "dataset.train_samples=64")


@pytest.fixture
def sweeping(terminal, monkeypatch):
    """A terminal whose sweeps run jobs that end at once."""
    monkeypatch.setattr("mptrain.study.commands.sweep.PROGRAM", jobs.program())
    return terminal


def test_every_point_has_a_directory_of_its_own_below_the_sweeps_folder(sweeping):
    assert sweeping("-m", *SMALL, "precision=fp32,bf16", "scaler=static", "scaler.scale=9", "seed=0,9") == 0
    assert sweeping.err.count("warning: ") == 1
    assert "4/4 points valid\n" in sweeping.out
    [folder] = re.findall(
        r"^sweep=(outputs/sweeps/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{4})$", sweeping.out, re.MULTILINE
    )
    names = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    assert names == [
        "000-precision=fp32,seed=0", "001-precision=fp32,seed=9", "002-precision=bf16,seed=0", "003-precision=bf16,seed=9",
    ]  # fmt: skip


def test_a_terminal_is_told_that_points_are_being_checked(sweeping, monkeypatch):
    wrong = ("-m", "precision=fp32,fp16_static", "scaler.scale=8")
    assert sweeping(*wrong) == 2
    assert "checking" not in sweeping.err
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert sweeping(*wrong) == 2
    assert "checking 2 points ..." in sweeping.err


def test_nothing_starts_when_one_point_is_wrong(sweeping, tmp_path):
    assert sweeping("-m", "precision=fp32,fp16_static", "scaler.scale=8") == 2
    assert "error: point 1/2 (precision=fp32): unknown key 'scaler.scale'" in sweeping.err
    assert not list(tmp_path.iterdir())


def test_a_mode_that_the_device_cannot_run_stops_the_sweep_before_its_first_point(sweeping, tmp_path):
    assert sweeping("-m", "precision=fp32,tf32", "device=cpu") == 3
    assert sweeping.err.startswith("error: point 2/2 (precision=tf32): precision=tf32 on cpu")
    assert not list(tmp_path.iterdir())


def test_jobs_print_lines_and_failed_ones_are_reported_with_their_logs(sweeping):
    assert sweeping("-m", *SMALL, f"seed={jobs.DONE},{jobs.NUMERICS},{jobs.KILLED}", "run.name=mine") == 7
    table = sweeping.out.split("#  point")[1]
    assert table.split("\n")[0].split() == ["status", "metric", "(test)", "skipped", "run"]
    for row in (
        r"0\s+seed=0\s+done\s+top1=0.0000\s+1\s+000-seed=0",
        r"1\s+seed=1\s+failed \(4\)\s+001-seed=1",
        r"1\s+only overflows\s+outputs/mine/001-seed=1.log",
        r"2\s+killed by SIGKILL \(out of memory\?\)\s+outputs/mine/002-seed=4.log",
    ):
        assert re.search(f"^{row}$", table, re.MULTILINE)
    lines = [line for line in sweeping.out.splitlines() if line.startswith("job=")]
    assert lines[0] == "job=1/3 run=000-seed=0 status=running"
    assert re.fullmatch(r"job=1/3 run=000-seed=0 status=done exit=0 seconds=\d+\.\d test_top1=0.0000", lines[1])
    assert re.fullmatch(
        r'job=2/3 run=001-seed=1 status=failed exit=4 seconds=\d+\.\d reason="only overflows"', lines[3]
    )
    assert all(letter.isprintable() or letter == "\n" for letter in sweeping.out)
    assert not re.search(r" +$", sweeping.out, re.MULTILINE)
    assert sweeping.out.endswith("\nto run the rest: mptrain resume outputs/mine\n")


def test_a_named_sweep_is_the_same_folder_where_resume_says_so(sweeping):
    words = ("-m", *SMALL, f"seed={jobs.DONE},{jobs.NUMERICS}", "run.name=mine")
    assert sweeping(*words) == 7
    assert sweeping(*words) == 6
    assert sweeping.err.startswith(
        "error: there is a sweep in outputs/mine\nhint: resume it: mptrain resume outputs/mine"
    )
    assert sweeping(*words, "run.resume=auto", "--jobs", "2") == 7
    assert "job=1/2" not in sweeping.out
    assert "job=2/2" in sweeping.out


def test_resume_runs_what_is_not_done_by_sweep_json_alone(sweeping):
    conf = Path("conf/model")
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("_target_: mptrain.workloads.classification.models.perceptron.mlp\n")
    words = ("-m", "--config-dir", "conf", *SMALL, "model=mine", "seed=0,1,9", "run.name=mine")
    assert sweeping(*words) == 7, sweeping.err
    assert sweeping("resume", "mine", "--jobs=2") == 7, sweeping.err
    assert "1/1 missing points valid, 2 done before\n" in sweeping.out
    folder = Path("conf").absolute()
    assert f"warning: outputs/mine/sweep.json loads config files from --config-dir {folder}\n" in sweeping.err
    assert [line.split()[0] for line in sweeping.out.splitlines() if "status=running" in line] == ["job=2/3"]
    assert json.loads(Path("outputs/mine/sweep.json").read_text())["parallel"] == 2


def test_the_code_that_a_sweep_brings_along_is_confirmed_by_who_resumes_it_before_it_is_imported(sweeping):
    assert sweeping("-m", *SMALL, "seed=1,9", "run.name=mine") == 7
    path = Path("outputs/mine/sweep.json")
    content = json.loads(path.read_text())
    for job in content["jobs"]:
        job["overrides"] += ["extensions.allow=[nobodys.*]", "model._target_=nobodys.Net"]
    path.write_text(json.dumps(content))
    for other in ((), ("extensions.allow=[theirs.*]",)):
        assert sweeping("resume", "mine", *other) == 2
        refusal, hint = sweeping.err.splitlines()
        word = "extensions.allow=[nobodys.*]"
        assert refusal == f"error: outputs/mine/sweep.json runs code from outside mptrain: {word}"
        assert hint == f"hint: if you trust that code, write mptrain resume outputs/mine '{word}'"
    assert sweeping("resume", "mine", word) == 2
    assert "runs code from outside" not in sweeping.err
    assert "importing nobodys failed" in sweeping.err


def test_a_sweep_that_is_done_is_shown_and_named_by_its_folder(sweeping, monkeypatch):
    assert sweeping("-m", *SMALL, "seed=0,9", "run.name=mine") == 0
    assert sweeping("resume", "outputs/mine") == 0
    assert sweeping.out.startswith("outputs/mine is already done\n")
    assert "job=" not in sweeping.out
    assert "001-seed=9" in sweeping.out
    assert sweeping("resume", "mine", "train.epochs=3") == 2
    assert "outputs/mine is a sweep" in sweeping.err
    assert "hint: change one run: mptrain resume outputs/mine/RUN train.epochs=3" in sweeping.err
    assert sweeping("resume", "last", "--jobs", "2") == 2
    assert "--jobs applies only to sweeps" in sweeping.err
    monkeypatch.setattr("mptrain.cli.commands.run_folder", lambda run, overrides: run)  # nothing was trained
    assert sweeping("resume", "outputs/mine/000-seed=0", "train.epochs=3") == 0
    assert sweeping.resumed == [("outputs/mine/000-seed=0", ["train.epochs=3"])]
    assert sweeping("resume", "seed=0") == 2
    assert "resume needs a run directory" in sweeping.err
    Path("outputs/mine/sweep.json").write_text("{")
    assert sweeping("resume", "mine") == 6
    assert "error: outputs/mine/sweep.json is damaged" in sweeping.err
