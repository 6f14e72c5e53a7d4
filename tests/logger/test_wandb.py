"""What W&B is told; and, where it is installed, that it understands."""

import importlib.util
import json
import math
import types

import pytest

from mptrain.logger import TrackerProcess, WandB
from mptrain.logger.base import TrackedRun
from mptrain.system.records import EvalRecord, EventRecord, ProgressRecord, StepRecord
from tests.small_runs import Kept


def step(number, overflow=False):
    return StepRecord("main", number, number, 0, 0.5, 1024.0, overflow, overflow, math.inf, 0.1)


class FakeRun:
    def __init__(self):
        self.rows, self.metrics, self.summary, self.exit_code = [], [], {}, None
        self.config = types.SimpleNamespace(update=self._update)
        self.updates = []

    def _update(self, tree, allow_val_change):
        self.updates.append((tree, allow_val_change))

    def define_metric(self, name, **options):
        self.metrics.append((name, options))

    def log(self, row):
        self.rows.append(row)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    fake = types.ModuleType("wandb")
    fake.asked, fake.runs = [], []

    def init(**options):
        fake.asked.append(options)
        fake.runs.append(FakeRun())
        return fake.runs[-1]

    fake.init = init
    fake.Settings = lambda **options: options
    fake.Image = lambda path: f"picture {path}"
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    return fake


def tracked(tmp_path, from_step=0):
    return TrackedRun("2026/mine", tmp_path, tmp_path / "samples", {"optimizer": {"lr": 0.1}}, from_step)


def test_the_run_is_described_as_the_options_say(tmp_path, wandb):
    WandB(project="p", entity="team", mode="offline", tags=("a", "b")).open(tracked(tmp_path))
    [asked] = wandb.asked
    assert (asked["project"], asked["entity"], asked["mode"], asked["tags"]) == ("p", "team", "offline", ("a", "b"))
    assert (asked["name"], asked["dir"]) == ("2026/mine", str(tmp_path))
    assert asked["settings"] == {"console": "off"}
    assert wandb.runs[0].updates == [({"optimizer": {"lr": 0.1}}, True)]


def test_another_attempt_goes_on_with_the_same_run_and_another_run_does_not(tmp_path, wandb):
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        WandB().open(tracked(tmp_path / folder))
    first, second, other = (asked["id"] for asked in wandb.asked)
    assert first == second != other
    assert all(asked["resume"] == "allow" for asked in wandb.asked)


def test_rows_carry_the_step_as_their_own_axis(tmp_path, wandb):
    tracker = WandB(every_steps=2).open(tracked(tmp_path))
    tracker.take(ProgressRecord(30, 40, 0, 1, 100.0, "samples", 0.1, 10, 1.0, "training"))
    for number in (1, 2, 3):
        tracker.take(step(number, overflow=number == 3))
    tracker.take(EvalRecord("val", 3, 1, 10, {"top1": 0.5}))
    tracker.take(EventRecord("warning", 3, {"message": "x"}))
    [run] = wandb.runs
    assert ("*", {"step_metric": "step"}) in run.metrics
    assert [row["step"] for row in run.rows] == [30, 2, 3, 3]  # never W&B's own step, which cannot go back
    assert run.rows[1]["train/loss"] == 0.5
    assert run.rows[3] == {"step": 3, "val/top1": 0.5}


def test_pictures_are_logged(tmp_path, wandb):
    tracker = WandB().open(tracked(tmp_path))
    tracker.take(EventRecord("samples", 9, {"files": ["grid-0001.png"]}))
    picture = f"picture {tmp_path / 'samples' / 'grid-0001.png'}"
    assert wandb.runs[0].rows == [{"step": 9, "samples/grid": picture}]


def test_a_run_that_is_done_has_final_numbers_and_one_that_is_not_counts_as_failed(tmp_path, wandb):
    for done in (True, False):
        tracker = WandB().open(tracked(tmp_path))
        if done:
            tracker.take(EventRecord("summary", 9, {"metric": 0.9, "scale": {"last": 8.0}, "device": "cpu"}))
        tracker.close()
    finished, failed = wandb.runs
    assert (finished.exit_code, finished.summary) == (0, {"final/metric": 0.9, "final/scale.last": 8.0})
    assert (failed.exit_code, failed.summary) == (1, {})


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_real_one_keeps_a_run_offline(tmp_path):
    heard = Kept()
    for from_step in (0, 20):
        run = tracked(tmp_path, from_step)
        sink = TrackerProcess(WandB(mode="offline", close_seconds=120.0), run, tmp_path / "logger.log", heard)
        for number in range(from_step + 1, from_step + 31):
            sink.take(step(number))
        sink.take(EventRecord("summary", from_step + 30, {"metric": 0.5}))
        sink.close()
    identity = (tmp_path / "wandb" / "run_id").read_text().strip()
    assert heard.records == [], (tmp_path / "logger.log").read_text()
    files = list((tmp_path / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 2
    assert all(file.stat().st_size > 1000 for file in files)
    said = (tmp_path / "logger.log").read_text()
    assert json.dumps(identity)[1:-1] in said
