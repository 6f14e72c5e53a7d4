"""MLflow: a tracking server, or a database of one's own.

A request for each value would be thousands a minute; values are collected and sent together.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Any

from mptrain.logger.base import TrackedRun, TrackerOptions, load_or_create_id
from mptrain.logger.series import flat, numbers, points
from mptrain.records import EventRecord, Record

#: Seconds between two requests, while there is something to send.
_EVERY_SECONDS = 2.0

#: Most metrics and parameters that MLflow's REST API takes in one request (its documentation of runs/log-batch), and the length of a value.
_METRICS, _PARAMETERS, _LONGEST = 1000, 100, 500


@dataclass(frozen=True)
class MLflow(TrackerOptions):
    """One MLflow run for each run, whatever the number of attempts.

    Attributes:
        tracking_uri: The server (``http://host:5000``) or database (``sqlite:///mlflow.db``); None leaves it to
            ``MLFLOW_TRACKING_URI`` and MLflow's own choice.
        experiment: MLflow's experiment; made if there is none of the name.
        every_steps: Send the curves of each n-th step only; those of overflows are always sent.
    """

    tracking_uri: str | None = None
    experiment: str = "mptrain"

    def open(self, run: TrackedRun) -> _Run:
        """The MLflow run whose id stands in ``RUN/mlflow/run_id``; it is made for a new run, and gone on with else."""
        return _Run(self, run)


class _Run:
    def __init__(self, options: MLflow, run: TrackedRun) -> None:
        from mlflow import MlflowClient, entities

        self._entities = entities
        self._samples = run.samples
        self._every_steps = options.every_steps
        self._status = "FAILED"
        self._metrics: list[Any] = []
        self._sent = time.monotonic()
        self._client = MlflowClient(tracking_uri=options.tracking_uri)
        file = run.folder / "mlflow" / "run_id"
        self._id = load_or_create_id(file, lambda: self._create(options.experiment, run.name))
        self._client.update_run(self._id, status="RUNNING")
        self._log_parameters(run.config)

    def take(self, record: Record) -> None:
        """Collect what the record adds to curves; send it when it is time."""
        self._collect(points(record, self._every_steps), record.step)
        match record:
            case EventRecord(kind="summary"):
                self._status = "FINISHED"
                self._collect({f"final/{name}": value for name, value in numbers(record.fields).items()}, record.step)
            case EventRecord(kind="signal"):
                self._status = "KILLED"
            case EventRecord(kind="samples"):
                for name in record.fields["files"]:
                    self._client.log_artifact(self._id, str(self._samples / name), "samples")
        if len(self._metrics) >= _METRICS or time.monotonic() - self._sent >= _EVERY_SECONDS:
            self._send()

    def close(self) -> None:
        """Send the rest, and say how the run ended."""
        self._send()
        self._client.set_terminated(self._id, self._status)

    def _create(self, experiment: str, name: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        try:
            where = found.experiment_id if found else self._client.create_experiment(experiment)
        except Exception:
            found = self._client.get_experiment_by_name(experiment)
            if found is None:
                raise
            where = found.experiment_id  # another run has made it in between
        identity: str = self._client.create_run(where, run_name=name).info.run_id
        return identity

    def _log_parameters(self, config: dict[str, Any]) -> None:
        """Log the configuration; what MLflow has already it does not let change, so a new value becomes a tag."""
        known = self._client.get_run(self._id).data.params
        now = {_name(name): str(value)[:_LONGEST] for name, value in flat(config).items()}
        fresh = [self._entities.Param(name, value) for name, value in now.items() if name not in known]
        changed = {name: value for name, value in now.items() if known.get(name, value) != value}
        for piece in _pieces(fresh, _PARAMETERS):
            self._client.log_batch(self._id, params=piece)
        for name, value in changed.items():
            self._client.set_tag(self._id, name, value)

    def _collect(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        for name, value in values.items():
            # Databases store an infinity as the largest number there is, which leaves nothing of a curve to be seen.
            kept = value if math.isfinite(value) else math.nan
            self._metrics.append(self._entities.Metric(_name(name), kept, now, step))

    def _send(self) -> None:
        metrics, self._metrics = self._metrics, []
        for piece in _pieces(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=piece)
        self._sent = time.monotonic()


def _pieces(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _name(name: str) -> str:
    """A name as MLflow allows it."""
    return re.sub(r"[^\w./ -]", "_", name)
