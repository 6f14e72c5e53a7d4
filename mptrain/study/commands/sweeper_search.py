"""``mptrain -m hydra/sweeper=NAME``: sweeps whose points (runs) a Hydra sweeper such as Optuna chooses one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.messages import each_warning_once, say, warn
from mptrain.config.compose import Composer, is_allow_override
from mptrain.config.overrides import read
from mptrain.runlog.sweeps import Sweep, is_sweep, read_sweep, summary_of
from mptrain.study.commands.sweep import PROGRAM, check_points, launcher_of, objective_of, record_sweep, show_end
from mptrain.study.commands.sweep_display import print_outcome, watching
from mptrain.study.comparison.ranking import metric_in_words, selected
from mptrain.study.sweep.hydra_launcher import JobFailedError, fixed_overrides, key_of, run_sweeper
from mptrain.study.sweep.points import NOT_SWEPT, Point
from mptrain.study.sweep.runner import run_sweep, sweep_folder
from mptrain.system.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SWEEP,
    ConfigError,
    MptrainError,
    Problem,
)

if TYPE_CHECKING:
    from argparse import Namespace


def search(arguments: Namespace) -> int:
    """Run the points (training runs) that a Hydra sweeper requests, in batches, until it stops.

    Args:
        arguments: Parsed command line, with the sweeper among its overrides.

    Returns:
        The exit code, as for `mptrain.study.commands.sweep.sweep`.

    Raises:
        MptrainError: The arguments, the sweeper or a requested point are invalid. No point of that batch is run then.
    """
    with each_warning_once():
        composer = Composer(arguments.config_dir, arguments.config_name)
        fixed = fixed_overrides(arguments.overrides)
        problems = [*read(fixed, composer.catalogue).problems]
        for word in arguments.overrides:
            if key_of(word).startswith(("hydra/launcher", "hydra.launcher")):
                problems.append(Problem(f"{word}: mptrain runs the jobs itself", "use --jobs N or --launcher instead"))
            elif word not in fixed and key_of(word) in NOT_SWEPT:
                problems.append(Problem(f"{word}: {key_of(word)} cannot be swept"))
        if problems:
            raise ConfigError(problems)
        # The other values may be valid only with the groups that the sweeper chooses.
        known = (*NOT_SWEPT, *composer.catalogue.groups)
        deciding = [word for word in fixed if key_of(word) in known or is_allow_override(word)]
        batches = _Batches(arguments, composer, sweep_folder(composer.compose(deciding).run))
        resumed = is_sweep(batches.folder)
        if resumed:
            read_sweep(batches.folder)  # raise for a damaged sweep before the sweeper writes into its folder
        try:
            run_sweeper(arguments.overrides, composer, batches.folder, batches.run)
        except JobFailedError:  # the final table shows it
            pass
        except KeyboardInterrupt:
            if batches.code in (EXIT_OK, EXIT_SWEEP):  # between two batches
                batches.code = EXIT_INTERRUPTED
        except MptrainError:
            if batches.sweep is not None:
                print_outcome(batches.sweep)
            raise
        finally:
            if batches.sweep is None and not resumed:
                with contextlib.suppress(OSError):  # remove the file that Hydra's sweepers write first, and the folder
                    (batches.folder / "multirun.yaml").unlink(missing_ok=True)
                    batches.folder.rmdir()
        if batches.sweep is None:
            if batches.code != EXIT_OK:
                return batches.code
            raise ConfigError("the sweeper requested no points", "check the sweeper's own keys, hydra.sweeper.KEY")
        return show_end(batches.sweep, batches.code, batches.launcher)


class _Batches:
    """Runner of the batches that a sweeper requests, recorded as one growing sweep."""

    def __init__(self, arguments: Namespace, composer: Composer, folder: Path) -> None:
        self.folder = folder
        self.sweep: Sweep | None = None
        self.code = EXIT_OK
        self.launcher = launcher_of(arguments.launcher, arguments.jobs)
        self._arguments, self._composer = arguments, composer
        self._points: list[Point] = []
        self._direction = False  # whether the direction of optimization was printed

    def run(self, batch: Sequence[Point]) -> tuple[Sweep, int]:
        """Check and run the points that the sweeper requests next; see `mptrain.study.sweep.hydra_launcher.RunBatch`.

        Returns:
            The sweep with all points so far, and its exit code.
        """
        points = check_points(batch, self._composer, self.launcher)
        warn(sentence for point in points for sentence in point.warnings)
        self._points += points
        plan = objective_of(self._arguments)
        planned = record_sweep(self._points, self.folder, self._arguments, grows=True, plan=plan)
        if self.sweep is None:
            say(f"sweep={self.folder}")
        self.sweep = planned
        with watching(planned) as watch:
            numbers = {point.number for point in batch}
            self.sweep, self.code = run_sweep(planned, self._composer, PROGRAM, watch, numbers, self.launcher)
        self._direction = self._direction or _say_direction(self.sweep)
        return self.sweep, self.code


def _say_direction(sweep: Sweep) -> bool:
    """Print whether to minimize or maximize the metric, once a job is done; return whether it was printed.

    A sweeper does not know the direction: if it minimizes an accuracy, it searches for the worst point.
    """
    for summary in (selected(sweep, summary_of(sweep.paths.run(job.name))) for job in sweep.jobs):
        if isinstance(higher := summary.get("higher_is_better"), bool):
            better, metric = "maximize" if higher else "minimize", metric_in_words(summary)
            say(f"the sweeper receives {metric} unchanged: configure it to {better} this metric")
            if summary.get("metric_split") == "test":
                warn(["there is no validation data: the sweeper chooses by test data, whose figures then are too good"])
            return True
    return False
