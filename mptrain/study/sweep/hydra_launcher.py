"""Hydra launcher with which a Hydra sweeper (Optuna, Ax, Nevergrad, a user's own) chooses points from earlier metrics.

The launcher passes each batch of points (one run each) to a function and returns the metrics of the jobs to the
sweeper. It does not run or display the points itself. This module is imported only if a sweeper is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mptrain.config.allowed_targets import is_allowed, resolve
from mptrain.config.compose import Composer
from mptrain.config.overrides import parse, quoted
from mptrain.config.value_checks import first_line
from mptrain.runlog.sweeps import Sweep, SweepJob, summary_of
from mptrain.study.comparison.ranking import selected
from mptrain.study.sweep.points import Point
from mptrain.study.sweep.worker import one_line
from mptrain.system.errors import EXIT_OK, EXIT_SWEEP, ConfigError, MptrainError, Problem

#: Function that runs a batch of points, whose numbers continue those of the last batch; returns sweep and exit code.
RunBatch = Callable[[Sequence[Point]], "tuple[Sweep, int]"]

#: Name of the launcher in Hydra, which only accepts plugins below the package ``hydra_plugins``.
_TARGET = "hydra_plugins.mptrain.ProcessLauncher"


#: Packages in which sweepers may be, and packages of the objects that a sweeper's configuration may contain.
_SWEEPERS = ("hydra_plugins", "hydra._internal.core_plugins")
_PARTS = ("hydra_plugins", "optuna.samplers")


class JobFailedError(MptrainError):
    """Error that a Hydra sweeper receives as the result of a failed job; some sweepers raise it to give up."""

    exit_code = EXIT_SWEEP


class ProcessLauncher(Launcher):
    """Hydra launcher that lets a `RunBatch` run the points which a Hydra sweeper requests."""

    def setup(self, *, hydra_context: HydraContext, task_function: RunBatch, config: DictConfig) -> None:
        """Prepare the launcher; the Hydra sweeper calls this once.

        ``task_function`` runs a batch of points, in place of Hydra's task function. The overrides common to all points
        are read from the node ``hydra`` of the composed configuration.
        """
        self._run = task_function
        self._fixed = {key_of(word) for word in fixed_overrides(config.hydra.overrides.task)}
        self._asked = 0

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch of points that the Hydra sweeper requests, and return the metric of each job, in order.

        The metric is that on validation data, if there are any (`mptrain.study.comparison.ranking.selected`). It is
        returned without a change of sign, so the direction of the sweeper must be that of the metric. A job that failed
        or has no metric has a failed result with a `JobFailedError`. ``initial_job_idx`` is ignored: the
        launcher counts jobs itself, because not all sweepers do.

        Raises:
            MptrainError: A point is invalid; no job of the batch was run.
            KeyboardInterrupt: A signal stopped the batch; sweepers do not catch this.
        """
        count = self._asked + len(job_overrides)
        points = [
            Point(number, tuple(words), tuple(word for word in words if key_of(word) not in self._fixed), count=count)
            for number, words in enumerate(job_overrides, start=self._asked)
        ]
        self._asked = count
        if not points:
            return []
        sweep, code = self._run(points)
        if code not in (EXIT_OK, EXIT_SWEEP):
            raise KeyboardInterrupt
        return [_answer(sweep, sweep.jobs[point.number], point.overrides) for point in points]


def run_sweeper(words: Sequence[str], composer: Composer, folder: Path, run: RunBatch) -> None:
    """Run the Hydra sweeper that the overrides select, until it requests no more points.

    The overrides include Hydra's own; the sweeper interprets those with several values, and keeps its own
    files in ``folder``.

    Raises:
        ConfigError: The sweeper does not exist, or Hydra or the sweeper cannot parse the overrides.
        JobFailedError: The sweeper gave up because of a failed job.
        MptrainError: The sweeper failed for another reason, or a batch could not be run.
        KeyboardInterrupt: A signal stopped the sweep.
    """
    # Registered by hand, because every Hydra app would find a real plugin package.
    Plugins.instance().class_name_to_class[_TARGET] = ProcessLauncher
    ConfigStore.instance().store("mptrain", {"_target_": _TARGET}, "hydra/launcher", provider="mptrain")
    ours = (
        "hydra/launcher=mptrain",
        "hydra/job_logging=disabled",
        "hydra/hydra_logging=disabled",
        "hydra.mode=MULTIRUN",
    )
    with composer.opened() as search:
        hydra: Any = GlobalHydra.instance().hydra  # keep it: composing points replaces the global instance
    dir_override = f"hydra.sweep.dir={quoted(str(folder))}"
    asked = [*ours, *words, dir_override, *search]
    try:
        _require_tame(hydra.compose_config(composer.name, asked, RunMode.MULTIRUN).hydra)
        hydra.multirun(composer.name, run, asked, with_log_configuration=False)
    except (MptrainError, BrokenPipeError):
        raise
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group != "hydra/sweeper":
            raise ConfigError(first_line(error)) from error
        there_is = ", ".join(error.options or ())
        hint = f"install its plugin (hydra-NAME-sweeper for optuna, ax and nevergrad); available: {there_is}"
        raise ConfigError(f"{group}={name}: there is no such sweeper", hint) from error
    except (HydraException, OmegaConfBaseException) as error:
        composer.compose(fixed_overrides(words))  # raises a clearer error if the fault is in these overrides
        raise ConfigError(first_line(error)) from error
    except Exception as error:
        raise MptrainError(f"the sweeper failed: {one_line(error)}", "--traceback shows where") from error


def _require_tame(node: DictConfig) -> None:
    """Raise ConfigError if Hydra's configuration, of which Hydra calls any target, calls anything but sweepers."""
    forbidden = ["hydra.callbacks would call a callback"] if node.get("callbacks") else []
    for name in ("sweeper", "launcher"):
        tree: Any = OmegaConf.to_container(node[name], resolve=True)
        own = str(tree.pop("_target_", ""))
        if not is_allowed(own, _SWEEPERS):
            forbidden.append(f"hydra.{name} would call {own}")
        for path in _targets(tree):  # Hydra follows any attribute of a module, which may lead out of the package
            try:
                resolve(path, _PARTS)
            except ConfigError as error:
                forbidden.append(f"hydra.{name} would call {path}: {error}")
    if forbidden:
        raise ConfigError([Problem(f"{what}: not part of a sweeper", "remove it") for what in forbidden])


def _targets(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if "_target_" in tree:
            yield str(tree["_target_"])
        tree = list(tree.values())
    for item in tree if isinstance(tree, list) else ():
        yield from _targets(item)


def fixed_overrides(words: Sequence[str]) -> list[str]:
    """Return the overrides that have a single value, and are thus common to all points, or cannot be parsed."""
    parsed = [(word, parse(word)[0]) for word in words]
    return [word for word, override in parsed if override is None or not override.is_sweep_override()]


def key_of(word: str) -> str:
    """Return the key of an override without Hydra's ``+`` and ``~``: ``optimizer.lr`` for ``+optimizer.lr=0.1``."""
    return word.partition("=")[0].lstrip("+~")


def _answer(sweep: Sweep, job: SweepJob, words: Sequence[str]) -> JobReturn:
    run = sweep.paths.run(job.name)
    job_return = JobReturn(overrides=words, working_dir=str(run), task_name="mptrain", status=JobStatus.FAILED)
    summary = summary_of(run) if job.status == "done" else {}
    metric = selected(sweep, summary).get("metric")
    if metric is not None:
        job_return.status, job_return.return_value = JobStatus.COMPLETED, float(metric)
    else:
        wanted, names = sweep.plan.get("objective"), ", ".join(summary.get("val") or ()) or "none"
        missing = (
            f"it has no {wanted} on validation data; recorded: {names}" if wanted else "it has no metric of record"
        )
        reason = missing if job.status == "done" else job.reason
        job_return.return_value = JobFailedError(f"{job.name}: {reason}")
    return job_return
