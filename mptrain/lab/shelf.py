"""Commands of the lab, which examines runs, steps, data and machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mptrain.cli.command import (
    CONFIG_DIR,
    CONFIGURATION,
    FOLDERS,
    JSON,
    OVERRIDES,
    RUN,
    WANTED,
    Option,
    Outcome,
    Usage,
    command,
    number_from_zero,
    whole_number,
)

if TYPE_CHECKING:
    from argparse import Namespace


@command(
    "recommend a static loss scale from a run's histograms",
    RUN,
    options=(Option("--sweep", "add the measurements of a sweep over scaler.scale", "SWEEP"), JSON),
)
def _recommend(arguments: Namespace) -> Outcome:
    """Recommends a static loss scale for a RUN that was trained with diagnostics=histograms.

    Prints the usable range and the effect of every scale, from underflow at 2^0 to overflow at 2^24, and writes
    forecast.html and forecast.md into the run's folder. A scale is recommended only if less than 1 % of steps would be
    skipped with 95 % confidence. With too few histograms the exit code is 6, and the output names a sufficient
    diagnostics.every. A run in FP32 records all gradients; a run in FP16 only those that did not underflow. The word
    last stands for the run that was started last.
    """
    from mptrain.lab.commands.diagnose import recommend_scale

    return recommend_scale(arguments)


@command(
    "find the cause of the failure at the step that ended a run, or at step N, and test fixes",
    RUN,
    OVERRIDES,
    also=[Usage("the same for a step of a new configuration", (CONFIGURATION,))],
    options=(
        Option(
            "--step",
            "step to repeat, counted from 1; the run trains in memory up to it",
            "N",
            read=whole_number(10**12),
        ),
        Option("--learner", "learner to examine, of several", "NAME"),
        Option("--all", "show every module"),
        JSON,
        CONFIG_DIR,
    ),
)
def _diagnose(arguments: Namespace) -> Outcome:
    """Repeats one step, forward and backward without an update, and checks every operator.

    It finds which module first produces a value that is not finite, how much of FP16's range is used, and what is lost
    to underflow. Then it tests fixes on the same step: a lower scale, precision.keep_fp32=[...], another precision. For
    a RUN that was ended by its numerics, it repeats the step that ended it, otherwise the step after the last
    checkpoint. With several learners, it examines the one that failed. The result is written to diagnosis/ in the run's
    folder; nothing else is changed. KEY=VALUE without RUN examines a new configuration, at step 1 by default.
    """
    from mptrain.lab.commands.diagnose import diagnose

    return diagnose(arguments)


@command("simulate another scaler on a run's recorded steps, without training", RUN, OVERRIDES)
def _replay(arguments: Namespace) -> int:
    """Simulates a loss scaling rule, scaler=NAME scaler.KEY=VALUE, on the recorded steps of a run.

    Shows its scales next to the recorded ones. Without a rule, the run's own is replayed, which gives exactly the
    recorded scales. Writes replay-NAME-KEY-VALUE.html and .md into the run's directory, one pair of files for each
    rule. With diagnostics=histograms, the outcome of a step at another scale is known or estimated; rules that measure
    gradients (logmax, als) need histograms.
    """
    from mptrain.system.machine import dropping_nothing

    with dropping_nothing():
        from mptrain.lab.replay import replay_run
    from mptrain.lab.commands.diagnose import report_replay

    return report_replay(replay_run(arguments.words[0], arguments.overrides))


@command(
    "find a learning rate by a range test, or the largest batch",
    WANTED,
    OVERRIDES,
    options=FOLDERS,
)
def _find(arguments: Namespace) -> int:
    """With lr, trains 200 updates while the learning rate rises from 1e-4 to 100 times that of the configuration.

    Prints the rates at which the loss falls fastest, is lowest and explodes, and suggests a tenth of that of the lowest
    loss. Writes range-test.html into the directory of this run. train.max_steps, schedule.first and schedule.last
    change the test. Only a training with the suggested rate proves that it is a good one.

    With batch, prints the largest batch of the precision, and how many times that of fp32 it is. On CUDA it tries sizes
    with two steps each; elsewhere it counts the memory of a step and divides that of the machine.
    """
    if arguments.words == ["batch"]:
        from mptrain.lab.commands.find import find_batch

        return find_batch(arguments)
    from mptrain.lab.commands.find import find_rate

    return find_rate(arguments)


def _steps(text: str) -> list[int]:
    """Read numbers of steps, ascending, as the value of an option."""
    steps = [whole_number(10**12)(part) for part in text.split(",")]
    if sorted(set(steps)) != steps:
        raise ValueError("must be ascending numbers of steps")
    return steps


def _percent(text: str) -> float:
    """Read a percentage, as the value of an option."""
    if not (percent := number_from_zero(text)) <= 100:
        raise ValueError("must be at most 100")
    return percent


@command(
    "show which number formats (FP16, BF16, FP8, MXFP8, FP4) a model's products can be trained in",
    RUN,
    OVERRIDES,
    also=[Usage("the same for a step of a new configuration", (CONFIGURATION,))],
    options=(
        Option("--at", "steps of a new configuration to look at (default: 21)", "N,N", read=_steps),
        Option("--formats", "formats to look at (default: all usual ones)", "NAME,NAME"),
        Option("--keep", "find layers to keep in FP32, up to so many per cent of the FLOPs", "PERCENT", read=_percent),
        Option("--output", "write the page and filters for torchao to a folder", "FOLDER"),
        JSON,
        *FOLDERS,
    ),
)
def _formats(arguments: Namespace) -> Outcome:
    """Computes one step with the products of all layers in each format, emulated on any device, without an update.

    It compares the gradients with those in FP32 and says in which formats damage is to be expected, and with --keep
    which layers must stay in FP32. A RUN is looked at after its last checkpoint, and the page is written to formats/ in
    its folder, with filters for torchao. KEY=VALUE without RUN trains a new configuration in memory first, because
    gradients of the first steps mislead. One step is no training: docs/formats.md has what networks with such errors
    lost.
    """
    from mptrain.lab.commands.formats import formats

    return formats(arguments)


@command(
    "show what this machine supports; or check a data set (dataset=NAME ...); or check a model's gradients in a "
    "precision and find usable loss scales",
    OVERRIDES,
    options=(JSON, *FOLDERS),
)
def _doctor(arguments: Namespace) -> Outcome:
    """Shows the environment, the devices and the precision modes that they support.

    The exit code is 3 if a required package is broken. With dataset=NAME and dataset.KEY=VALUE alone, it describes a
    data set: its splits, classes, lengths and picture sizes. It reads all files and lists those at which training would
    stop and pictures that are in two splits or classes (exit code 6), and those that training would skip or convert.
    With other KEY=VALUE it checks the files and then the model, without training. It computes the gradients of the
    first step in FP64, in FP32 and in the precision at loss scales from 1 to 2^24. It prints the usable range of loss
    scales and the problems of each module, such as a loss or norm in half precision, gradients that are not
    proportional to the loss scale, an eps that underflows, or a mask that becomes infinite. The exit code is 4 if it
    found a problem.
    """
    if not arguments.overrides and not arguments.config_dir and arguments.config_name == "train":
        from mptrain.lab.commands.doctor import doctor

        return doctor()
    from mptrain.cli.command import composed

    config = composed(arguments)
    from mptrain.config.overrides import is_about_data

    if any(word.startswith("dataset") for word in arguments.overrides) and all(map(is_about_data, arguments.overrides)):
        from mptrain.lab.commands.doctor_checks import doctor_data

        return doctor_data(config)
    from mptrain.lab.commands.doctor_checks import doctor_model

    return doctor_model(config)
