"""``mptrain find lr``: a learning rate range test, which is a short run whose rate rises, and what it shows."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.messages import say, warn
from mptrain.config.compose import compose
from mptrain.lab.pages.rate_range_test import range_test_page, read_range_test, result_blocks
from mptrain.report.html_and_markdown import write_page
from mptrain.run.resume import launch
from mptrain.runlog.run_reader import read_run
from mptrain.system.errors import EXIT_OK, NumericsError, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence
    from pathlib import Path

    from mptrain.run.attempt import RunInfo
    from mptrain.runlog.record_writer import Sink

#: Overrides of a range test; those of the user follow, and may change the number of updates and the range.
_WORDS = (
    "schedule=range_test",
    "run.root=range_tests",  # not among the trainings
    "train.max_steps=200",
    "train.epochs=100000",
    "train.max_consecutive_overflows=10",
    "checkpoint.every_epochs=null",
)

#: Beginnings of overrides that are about the test and not about the training that follows.
_OF_TEST = ("schedule.", "run.", "train.max_steps=", "train.epochs=", "optimizer.lr=", "train.max_consecutive")


def find_rate(arguments: Namespace) -> int:
    """Train a few hundred updates with a rising learning rate, and print which rates train and which do not.

    Args:
        arguments: Parsed command line: ``lr``, and the configuration.

    Returns:
        The exit code 0.

    Raises:
        MptrainError: The configuration is invalid, the loss did not fall, or the run failed for another reason than its
            loss.
    """
    if arguments.words != ["lr"]:
        raise UsageError(
            "find takes what to find, and a configuration", "write mptrain find lr model=resnet18, or find batch"
        )
    if odd := [word for word in arguments.overrides if word.startswith("schedule=")]:
        raise UsageError(f"{odd[0]} has no effect: a range test has its own schedule", "leave it out")
    words = (*_WORDS, *arguments.overrides)
    config = compose(words, config_dirs=arguments.config_dir, config_name=arguments.config_name)
    warn(config.warnings)
    roots: list[Path] = []

    def begun(info: RunInfo) -> Sequence[Sink]:
        roots.append(info.root)
        say(f"range test: {info.planned:,} updates, run={info.root}")
        return []

    try:
        root = launch(config, begun).root
    except NumericsError:  # a rate that is too high ends the run, which is what the test is for
        if not roots:
            raise
        root = roots[0]
    run = read_run(root)
    steps = list(run.steps())
    found = read_range_test(step for step in steps if step.learner == steps[0].learner)
    kept = [word for word in arguments.overrides if not word.lstrip("+~").startswith(_OF_TEST)]
    kept += [word for folder in arguments.config_dir for word in ("--config-dir", folder)]
    kept += ["--config-name", arguments.config_name] if arguments.config_name != "train" else []
    command = shlex.join(["mptrain", *kept, f"optimizer.lr={found.suggested:g}"])
    written = write_page(
        range_test_page(root.name, found, command), root, root / "range-test.html", root / "range-test.md"
    )
    print_blocks(*result_blocks(found, command))
    say(f"\n{written.html}")
    return EXIT_OK
