"""Lets a sweeper of Hydra's (Optuna, Ax, Nevergrad, one of the user's) choose points, batch by batch, from the metrics before.

The sweeper meets a launcher that hands each batch to a function and answers with the jobs' metrics. How the points are
run and shown is not known here. Nothing is imported from here where no sweeper was asked for.
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

from mptrain.config.compose import Composer
from mptrain.config.overrides import parse, quoted
from mptrain.config.targets import is_allowed, resolve
from mptrain.config.value_checks import first_line
from mptrain.errors import EXIT_OK, EXIT_SWEEP, ConfigError, MptrainError, Problem
from mptrain.runlog.sweeps import Sweep, SweepJob, summary_of
from mptrain.sweep.points import Point
from mptrain.sweep.worker import one_line

#: Runs a batch, numbered on from the one before; the sweep as it is then, and its exit code.
RunBatch = Callable[[Sequence[Point]], "tuple[Sweep, int]"]

#: What the launcher is to Hydra, which takes plugins from below this package only.
_TARGET = "hydra_plugins.mptrain.ProcessLauncher"


#: Where sweepers of Hydra's come from, of which it knows a list; and the parts that they are made of.
_SWEEPERS = ("hydra_plugins", "hydra._internal.core_plugins")
_PARTS = ("hydra_plugins", "optuna.samplers")


class JobFailedError(MptrainError):
    """What a sweeper is told of a job that failed; raised again by one that gives up for it."""

    exit_code = EXIT_SWEEP


class ProcessLauncher(Launcher):
    """Runs what a sweeper asks for. Its task function is a `RunBatch`."""

    def setup(self, *, hydra_context: HydraContext, task_function: RunBatch, config: DictConfig) -> None:
        """Called once by the sweeper."""
        self._run = task_function
        self._fixed = {key_of(word) for word in fixed_overrides(config.hydra.overrides.task)}
        self._asked = 0

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The metric of record of each job, as it is: the sweeper's direction must be that of the metric.

        Args:
            job_overrides: A command line for each job.
            initial_job_idx: Not needed: numbers go on from batch to batch, also for sweepers that do not count.

        Raises:
            MptrainError: A point is wrong, so that none of the batch was run.
            KeyboardInterrupt: A signal ended the batch; sweepers let that pass.
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
    """Lets the sweeper that the words choose ask for points until it has enough.

    Args:
        words: Overrides, some of Hydra's own; those with several values are the sweeper's business.
        composer: Over the folders that hold groups and options.
        folder: Where the sweeper writes its own files.
        run: Runs a batch.

    Raises:
        ConfigError: There is no such sweeper, or Hydra or the sweeper cannot read the words.
        JobFailedError: The sweeper gave up.
        MptrainError: The sweeper failed otherwise, or a batch could not be run.
        KeyboardInterrupt: A signal ended it.
    """
    Plugins.instance().class_name_to_class[_TARGET] = (
        ProcessLauncher  # a real package would be found by every Hydra app
    )
    ConfigStore.instance().store("mptrain", {"_target_": _TARGET}, "hydra/launcher", provider="mptrain")
    ours = (
        "hydra/launcher=mptrain",
        "hydra/job_logging=disabled",
        "hydra/hydra_logging=disabled",
        "hydra.mode=MULTIRUN",
    )
    with composer.opened() as search:
        hydra: Any = GlobalHydra.instance().hydra  # usable when it is no longer the global one, which points need
    place = f"hydra.sweep.dir={quoted(str(folder))}"
    asked = [*ours, *words, place, *search]
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
        hint = f"install its plugin (that of optuna, ax and nevergrad is hydra-NAME-sweeper); there is {there_is}"
        raise ConfigError(f"{group}={name}: there is no such sweeper", hint) from error
    except (HydraException, OmegaConfBaseException) as error:
        composer.compose(fixed_overrides(words))  # finds better words for what is wrong with them, if it is in these
        raise ConfigError(first_line(error)) from error
    except Exception as error:
        raise MptrainError(f"the sweeper ended with {one_line(error)}", "--traceback shows where") from error


def _require_tame(node: DictConfig) -> None:
    """Refuse what files let Hydra call besides the sweeper that was asked for: it would, without asking anybody.

    Raises:
        ConfigError: They name something.
    """
    found = ["hydra.callbacks would call a callback"] if node.get("callbacks") else []
    for name in ("sweeper", "launcher"):
        tree: Any = OmegaConf.to_container(node[name], resolve=True)
        own = str(tree.pop("_target_", ""))
        if not is_allowed(own, _SWEEPERS):
            found.append(f"hydra.{name} would call {own}")
        for path in _targets(tree):  # Hydra would follow any attribute of a module, out of the package too
            try:
                resolve(path, _PARTS)
            except ConfigError as error:
                found.append(f"hydra.{name} would call {path}: {error}")
    if found:
        raise ConfigError([Problem(f"{what}: no part of a sweeper", "leave it out") for what in found])


def _targets(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if "_target_" in tree:
            yield str(tree["_target_"])
        tree = list(tree.values())
    for item in tree if isinstance(tree, list) else ():
        yield from _targets(item)


def fixed_overrides(words: Sequence[str]) -> list[str]:
    """The words with one value, and those that cannot be read."""
    parsed = [(word, parse(word)[0]) for word in words]
    return [word for word, override in parsed if override is None or not override.is_sweep_override()]


def key_of(word: str) -> str:
    """The key of a word, without Hydra's marks."""
    return word.partition("=")[0].lstrip("+~")


def _answer(sweep: Sweep, job: SweepJob, words: Sequence[str]) -> JobReturn:
    run = sweep.paths.run(job.name)
    found = JobReturn(overrides=words, working_dir=str(run), task_name="mptrain", status=JobStatus.FAILED)
    metric = summary_of(run).get("metric") if job.status == "done" else None
    if metric is not None:
        found.status, found.return_value = JobStatus.COMPLETED, float(metric)
    else:
        reason = "it has no metric of record" if job.status == "done" else job.reason
        found.return_value = JobFailedError(f"{job.name}: {reason}")
    return found
