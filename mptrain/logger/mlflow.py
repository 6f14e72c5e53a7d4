"""MLflow tracker for a tracking server or a local database.

Values are collected and sent in batches, because one request for each value would mean thousands a minute.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import re
import time
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from mptrain.logger.base import TrackedRun, TrackerOptions, flat, load_or_create_id, numbers, points
from mptrain.system.errors import ConfigError
from mptrain.system.records import EventRecord, Record

#: Seconds between two requests while there are values to send.
_EVERY_SECONDS = 2.0

#: Maximum numbers of metrics and parameters in one request and maximum length of a parameter's value, from MLflow's
#: REST API documentation (runs/log-batch).
_METRICS, _PARAMETERS, _LONGEST = 1000, 100, 500


#: First version that refuses folders unless MLFLOW_ALLOW_FILE_STORE is set (github.com/mlflow/mlflow/issues/23634).
_NO_FOLDERS = (3, 13)


@dataclass(frozen=True)
class MLflow(TrackerOptions):
    """Options of the MLflow tracker; all attempts at a training run share one MLflow run.

    Attributes:
        tracking_uri: Server (``http://host:5000``) or database (``sqlite:///mlflow.db``); None uses
            ``MLFLOW_TRACKING_URI`` or MLflow's default.
        experiment: Name of the MLflow experiment; created if it does not exist.
    """

    tracking_uri: str | None = None
    experiment: str = "mptrain"

    @override
    def require(self) -> None:
        super().require()
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        is_folder = bool(uri) and (uri.startswith("file:") or not re.match(r"[\w+]+:|databricks|uc$", uri))
        allowed = os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
        with contextlib.suppress(ValueError, importlib.metadata.PackageNotFoundError):
            version = tuple(map(int, importlib.metadata.version("mlflow").split(".")[:2]))
            if is_folder and not allowed and version >= _NO_FOLDERS:
                raise ConfigError(
                    f"logger.tracking_uri={uri} is a folder, and MLflow {version[0]}.{version[1]} writes to none",
                    f"use a database: logger.tracking_uri=sqlite:///{uri.removeprefix('file:').rstrip('/')}.db; or "
                    "set MLFLOW_ALLOW_FILE_STORE=true, as MLflow's page on file stores says",
                )

    def open(self, run: TrackedRun) -> _Run:
        """Open the MLflow run that tracks a training run, and log the configuration as parameters.

        The MLflow run's ID is in ``RUN/mlflow/run_id``; a new run creates the file.
        """
        return _Run(self, run)


class _Run:
    """Receiver of a run's records that sends them to MLflow as metrics; samples become artifacts."""

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
        """Collect the values that the record adds to curves, and send all collected ones if a request is due."""
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
        """Send the remaining values to MLflow, and mark its run as finished, killed or failed."""
        self._send()
        self._client.set_terminated(self._id, self._status)

    def _create(self, experiment: str, name: str) -> str:
        existing = self._client.get_experiment_by_name(experiment)
        try:
            where = existing.experiment_id if existing else self._client.create_experiment(experiment)
        except Exception:
            existing = self._client.get_experiment_by_name(experiment)
            if existing is None:
                raise
            where = existing.experiment_id  # another run created it in the meantime
        identity: str = self._client.create_run(where, run_name=name).info.run_id
        return identity

    def _log_parameters(self, config: dict[str, Any]) -> None:
        """Log the configuration; MLflow does not allow changes of a parameter, so a changed value becomes a tag."""
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
            # Databases store infinity as the largest finite number, which makes the rest of the curve unreadable.
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
    return re.sub(r"[^\w./ -]", "_", name)
