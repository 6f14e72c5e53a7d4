"""Whole runs beside a tracker: it shows what is on record, and cannot change what is."""

import importlib.util
import json
import os
import signal
import subprocess
import time

import pytest

from mptrain.config.compose import Composer, compose, reload
from mptrain.run.resume import launch, resume
from mptrain.study.sweep.points import expand, validate
from mptrain.system.errors import ConfigError
from mptrain.system.records import EventRecord, StepRecord
from tests.loops import each
from tests.small_runs import TINY, Kept, command, environment

HALF = (*TINY, "precision=fp16_dynamic", "seed=3", "log.seconds=0.05")


def own(**options):
    words = [f"+logger.{name}={value}" for name, value in options.items()]
    return ("logger._target_=tests.own_trackers.Own", "extensions.allow=[tests.own_trackers.*]", *words)


def trained(root, *words, sink=None):
    """A run in process; what its display was shown is in the sink."""
    sink = sink or Kept()
    launch(compose([*HALF, f"run.root={root}", "run.name=run", *words]), lambda opening: [sink])
    return root / "run"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def warnings_of(root):
    """Return the warnings on record of a run, without that of a CPU without FP16 arithmetic."""
    messages = [event["message"] for event in lines(root / "events.jsonl") if event["event"] == "warning"]
    return [message for message in messages if not message.startswith("precision=")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return (trained(tmp_path_factory.mktemp("undisturbed")) / "steps.jsonl").read_bytes()


class FailsAt(Kept):
    """A display that fails, as a disk or a device may, at a step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def take(self, record):
        super().take(record)
        if isinstance(record, StepRecord) and record.step == self.step:
            raise RuntimeError("out of luck")


@pytest.mark.parametrize("failing", [False, True])
def test_tensorboard_shows_every_step_once_with_the_value_on_record(tmp_path, failing, undisturbed):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ("logger=tensorboard", "logger.close_seconds=60", "checkpoint.every_steps=5", "log.ring=1")
    if failing:
        with pytest.raises(RuntimeError, match="out of luck"):
            trained(tmp_path, *words, sink=FailsAt(13))
        root = tmp_path / "run"
        resume(str(root), [], lambda opening: [])
    else:
        root = trained(tmp_path, *words)
    assert (root / "steps.jsonl").read_bytes() == undisturbed
    shown = EventAccumulator(str(root / "tensorboard"), size_guidance={"scalars": 0})
    shown.Reload()
    steps = lines(root / "steps.jsonl")
    assert len(steps) == 18
    for name in ("loss", "loss_scale", "grad_norm", "lr", "overflow", "skipped"):
        curve = [(event.step, event.value) for event in shown.Scalars(f"train/{name}")]
        assert curve == [(step["step"], pytest.approx(value_of(step, name), rel=1e-6)) for step in steps], name
    evaluations = [event for event in lines(root / "events.jsonl") if event["event"] == "evaluation"]
    for split in ("val", "test"):
        curve = [(event.step, event.value) for event in shown.Scalars(f"{split}/top1")]
        expected = [(e["step"], pytest.approx(e["metrics"]["top1"])) for e in evaluations if e["split"] == split]
        assert curve == expected
    assert shown.Scalars("epoch/train_loss")[-1].step == 18
    assert "summary" in shown.Tags()["tensors"]


def value_of(step, name):
    kind = step.get("nonfinite", {}).get(name)
    return float(kind) if kind else float(step[name])


@pytest.mark.parametrize(("way", "place"), [("raises", "open"), ("blocks", "take"), ("dies", "close")])
def test_a_failing_tracker_leaves_a_finished_run_and_one_warning(tmp_path, way, place, undisturbed):
    sink = Kept()
    root = trained(tmp_path, *own(way=way, place=place, close_seconds=1.0 if way == "blocks" else 60.0), sink=sink)
    assert (root / "steps.jsonl").read_bytes() == undisturbed
    assert json.loads((root / "run.json").read_text())["status"] == "done"
    [message] = warnings_of(root)
    assert message.startswith("Own ")
    assert [e.fields["message"] for e in sink.of(EventRecord) if e.kind == "warning"] == [message]


def test_a_tracker_is_shown_the_records_of_the_run_and_its_summary_last(tmp_path, undisturbed):
    sink = Kept()
    root = trained(tmp_path, *own(close_seconds=60.0), sink=sink)
    assert warnings_of(root) == []
    taken = lines(root / "own.jsonl")
    assert [line["record"] for line in taken[:-1]] == [type(record).__name__ for record in sink.records]
    assert taken[-2]["kind"] == "summary"
    numbers = json.loads((root / "summary.json").read_text())
    assert taken[-2]["fields"]["metric"] == numbers["metric"]
    assert [t["loss"] for t in taken if t["record"] == "StepRecord"] == [
        json.loads(line)["loss"] for line in undisturbed.splitlines()
    ]


def test_data_workers_and_a_tracker_do_not_disturb_each_other(tmp_path):
    from PIL import Image

    for index in range(12):
        folder = tmp_path / "images" / "train" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (index * 10, 255 - index * 10, 7 * index)).save(folder / f"{index}.png")
    words = [f"dataset.root={tmp_path / 'images'}", "dataset.image_size=8", "dataset.workers=2", "train.batch_size=4"]
    words = ["dataset=image_folder", "model=mlp", "train.epochs=2", "dataset.val_samples=2", *words]
    steps = []
    for name, tracker in (("with", own(close_seconds=60.0)), ("without", ())):
        launch(compose([*words, *tracker, f"run.root={tmp_path}", f"run.name={name}"]), lambda opening: [])
        steps.append((tmp_path / name / "steps.jsonl").read_bytes())
    assert steps[0] == steps[1] != b""
    assert lines(tmp_path / "with" / "own.jsonl")[-1] == {"record": "closed"}
    assert warnings_of(tmp_path / "with") == []


@pytest.mark.process
def test_an_interrupted_run_ends_as_ever_and_so_does_its_tracker(tmp_path):
    words = (*HALF, *own(close_seconds=60.0), "train.epochs=100000", "run.name=run")
    process = subprocess.Popen(
        command(*words), cwd=tmp_path, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL
    )
    kept = tmp_path / "outputs" / "run" / "own.jsonl"
    end = time.monotonic() + 120
    while not (kept.exists() and "StepRecord" in kept.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    taken = lines(kept)
    assert taken[-1] == {"record": "closed"}
    assert "signal" in [line.get("kind") for line in taken]
    assert json.loads((kept.parent / "run.json").read_text())["status"] == "preempted"


@pytest.fixture
def _nothing_installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("tensorboard", "wandb", "mlflow") else find(name)
    )


@pytest.mark.usefixtures("_nothing_installed")
@each("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(ConfigError, match=f"logger={name} needs the package {name}") as refused:
        trained(tmp_path, f"logger={name}")
    assert refused.value.hint == f"pip install 'mptrain[{name}]'"
    assert list(tmp_path.iterdir()) == []
    composer = Composer()
    with pytest.raises(ConfigError, match=rf"point 2/2 \(logger={name}\): logger={name} needs the package {name}"):
        validate(expand([f"logger=none,{name}"], composer.catalogue), composer)


def test_what_is_no_tracker_is_refused(tmp_path):
    words = ("logger._target_=tests.own_trackers.not_a_logger", "extensions.allow=[tests.own_trackers.*]")
    with pytest.raises(ConfigError, match=r"tests\.own_trackers\.not_a_logger is not a tracker"):
        trained(tmp_path, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_with_another_tracker_than_it_began_with(tmp_path):
    root = trained(tmp_path)
    resume(str(root), ["logger=tensorboard", "logger.close_seconds=60", "train.epochs=4"], lambda opening: [])
    assert list((root / "tensorboard").glob("events.out.tfevents.*"))
    assert reload((root / "config.yaml").read_text()).chosen["logger"] == "tensorboard"
    assert warnings_of(root) == []
    words = (f"run.root={tmp_path}", "run.name=run", "run.resume=auto", "logger=wandb", "train.epochs=4")
    assert launch(compose([*HALF, *words]), lambda opening: []).already_done  # another tracker is no other training
