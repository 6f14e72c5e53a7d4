"""What MLflow is asked for, in how many requests; and, where it is installed, what it then knows."""

import contextlib
import importlib.metadata
import importlib.util
import math
import sys
import types
from dataclasses import dataclass, field

import pytest

from mptrain.logger import MLflow, TrackerProcess
from mptrain.logger import mlflow as module
from mptrain.logger.base import TrackedRun
from mptrain.system.errors import ConfigError
from mptrain.system.records import EventRecord, StepRecord
from tests.small_runs import Kept

REAL = importlib.util.find_spec("mlflow") is not None and importlib.util.find_spec("sqlalchemy") is not None


def step(number, loss=0.5):
    return StepRecord("main", number, number, 0, loss, 1024.0, False, False, 2.0, 0.1)


def tracked(tmp_path, config=None, from_step=0):
    return TrackedRun("2026/mine", tmp_path, tmp_path / "samples", config or {"seed": 1}, from_step)


@dataclass
class Entity:
    """Metric, Param: what they were made of."""

    key: str
    value: object
    timestamp: int = 0
    step: int = 0


@dataclass
class Server:
    """As much of MLflow's client as is used; refuses what the real one refuses."""

    uris: list = field(default_factory=list)
    experiments: dict = field(default_factory=dict)
    runs: dict = field(default_factory=dict)
    requests: list = field(default_factory=list)
    artifacts: list = field(default_factory=list)

    def client(self, tracking_uri):
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name):
        found = self.experiments.get(name)
        return found and types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name):
        self.experiments[name] = f"experiment {name}"
        return self.experiments[name]

    def create_run(self, experiment, run_name):
        identity = f"id{len(self.runs)}"
        self.runs[identity] = types.SimpleNamespace(
            experiment=experiment, name=run_name, params={}, metrics=[], tags={}, status="RUNNING"
        )
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=identity))

    def get_run(self, identity):
        return types.SimpleNamespace(data=types.SimpleNamespace(params=dict(self.runs[identity].params)))

    def update_run(self, identity, status):
        self.runs[identity].status = status

    def log_batch(self, identity, metrics=(), params=()):
        assert len(metrics) <= 1000
        assert len(params) <= 100
        self.requests.append((len(metrics), len(params)))
        run = self.runs[identity]
        for parameter in params:
            assert run.params.setdefault(parameter.key, parameter.value) == parameter.value, "cannot be changed"
        run.metrics += metrics

    def set_tag(self, identity, name, value):
        self.runs[identity].tags[name] = value

    def log_artifact(self, identity, path, folder):
        self.artifacts.append((identity, path, folder))

    def set_terminated(self, identity, status):
        self.runs[identity].status = status


@pytest.fixture
def server(monkeypatch):
    found = Server()
    fake = types.ModuleType("mlflow")
    fake.MlflowClient = found.client
    fake.entities = types.SimpleNamespace(Metric=Entity, Param=Entity)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return found


@pytest.mark.parametrize(
    ("version", "place", "refused"),
    [
        *(("3.17.0", place, True) for place in ("mlruns", "./a/mlruns/", "/data/mlruns", "file:///data/mlruns")),
        *(
            ("3.17.0", place, False)
            for place in ("sqlite:///m.db", "http://h:5000", "databricks", "mysql+x://u@h", None)
        ),
        ("3.12.1", "mlruns", False),
    ],
)
def test_a_folder_is_refused_where_mlflow_refuses_it(monkeypatch, version, place, refused):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="is a folder") if refused else contextlib.nullcontext():
        MLflow(tracking_uri=place).require()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    MLflow(tracking_uri=place).require()


def test_values_are_sent_together(tmp_path, server, monkeypatch):
    monkeypatch.setattr(module, "_EVERY_SECONDS", 3600.0)
    tracker = MLflow(tracking_uri="http://host", experiment="e").open(tracked(tmp_path))
    for number in range(1, 501):
        tracker.take(step(number, loss=number / 8))
    tracker.close()
    [run] = server.runs.values()
    assert server.uris == ["http://host"]
    assert (run.experiment, run.name) == ("experiment e", "2026/mine")
    losses = [(metric.step, metric.value) for metric in run.metrics if metric.key == "train/loss"]
    assert losses == [(n, n / 8) for n in range(1, 501)]
    assert sum(metrics for metrics, _ in server.requests) == 3000
    assert len(server.requests) <= 7  # one of parameters, and those of 1000 values at most


def test_values_do_not_wait_for_a_full_request(tmp_path, server, monkeypatch):
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.0)
    tracker = MLflow().open(tracked(tmp_path))
    tracker.take(step(1))
    [run] = server.runs.values()
    assert {metric.step for metric in run.metrics} == {1}


def test_another_attempt_goes_on_with_the_same_run(tmp_path, server):
    first = MLflow().open(tracked(tmp_path, {"lr": 0.1, "seed": 1}))
    first.take(EventRecord("signal", 5, {"signal": "SIGTERM"}))
    first.close()
    assert server.runs["id0"].status == "KILLED"
    second = MLflow().open(tracked(tmp_path, {"lr": 0.2, "seed": 1, "new": True}, from_step=5))
    assert list(server.runs) == ["id0"]
    run = server.runs["id0"]
    assert run.status == "RUNNING"
    assert run.params == {"lr": "0.1", "seed": "1", "new": "True"}  # MLflow lets none be changed
    assert run.tags == {"lr": "0.2"}
    second.close()
    assert run.status == "FAILED"


def test_a_run_that_is_done_has_final_numbers(tmp_path, server):
    tracker = MLflow().open(tracked(tmp_path))
    tracker.take(EventRecord("summary", 9, {"metric": 0.9, "device": "cpu"}))
    tracker.close()
    run = server.runs["id0"]
    assert [(m.key, m.value, m.step) for m in run.metrics] == [("final/metric", 0.9, 9)]
    assert run.status == "FINISHED"


def test_many_parameters_go_in_several_requests_and_long_ones_are_cut(tmp_path, server):
    MLflow().open(tracked(tmp_path, {f"key{n}": "x" * 9000 for n in range(250)}))
    assert server.requests == [(0, 100), (0, 100), (0, 50)]
    assert {len(value) for value in server.runs["id0"].params.values()} == {500}


def test_infinities_are_not_numbers_and_names_are_what_mlflow_allows(tmp_path, server):
    tracker = MLflow().open(tracked(tmp_path, {"layer[0]": 1}))
    tracker.take(step(1, loss=math.inf))
    tracker.close()
    run = server.runs["id0"]
    assert all(math.isfinite(m.value) for m in run.metrics if m.key != "train/loss")
    assert [math.isnan(m.value) for m in run.metrics if m.key == "train/loss"] == [True]
    assert list(run.params) == ["layer_0_"]


def test_pictures_are_kept_as_artifacts(tmp_path, server):
    tracker = MLflow().open(tracked(tmp_path))
    tracker.take(EventRecord("samples", 9, {"files": ["grid-0001.png"]}))
    assert server.artifacts == [("id0", str(tmp_path / "samples" / "grid-0001.png"), "samples")]


def test_an_experiment_that_another_run_makes_in_between_is_used(tmp_path, server, monkeypatch):
    def taken(name):
        server.experiments[name] = "theirs"
        raise RuntimeError("RESOURCE_ALREADY_EXISTS")

    monkeypatch.setattr(server, "create_experiment", taken)
    MLflow().open(tracked(tmp_path))
    assert server.runs["id0"].experiment == "theirs"


@pytest.mark.skipif(not REAL, reason="mlflow with a database is not installed")
def test_the_real_one_knows_every_value_of_both_attempts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MLflow makes a folder for artifacts
    heard = Kept()
    uri = f"sqlite:///{tmp_path}/ml.db"
    for from_step in (0, 20):
        config = {"seed": from_step, "names": ["a"]}
        logger = MLflow(tracking_uri=uri, experiment="e", close_seconds=200.0)
        sink = TrackerProcess(logger, tracked(tmp_path, config, from_step), tmp_path / "logger.log", heard)
        for number in range(from_step + 1, from_step + 21):
            sink.take(step(number, loss=number / 8))
        sink.take(EventRecord("summary", from_step + 20, {"metric": 0.5}))
        sink.close()
    assert heard.records == [], (tmp_path / "logger.log").read_text()
    import sqlite3

    with sqlite3.connect(tmp_path / "ml.db") as database:
        rows = database.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
        params = dict(database.execute("select key, value from params").fetchall())
        runs = database.execute("select status, name from runs").fetchall()
    assert rows == [(n, n / 8) for n in range(1, 41)]
    assert params == {"seed": "0", "names": '["a"]'}
    assert runs == [("FINISHED", "2026/mine")]
