"""Entry point of the command line: selection of the command, report of errors, and exit code.

Each command imports what it needs only when it runs, so that help and usage errors appear at once. The docstring of a
command, without its first line, is its help text.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mptrain.cli import command_line
from mptrain.cli.command_line import place_of, read_flags, run_and_overrides, take_options
from mptrain.cli.help import print_help
from mptrain.cli.messages import discard_output, outlive_reader, report, unwritable, wants_traceback, warn, writing
from mptrain.errors import (
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    MptrainError,
    Preempted,
    StorageError,
    UsageError,
    kernel_refusal,
    out_of_memory,
)
from mptrain.parallel.torchrun import torchrun_rank

if TYPE_CHECKING:
    from mptrain.config.schema import Config


def main(argv: Sequence[str] | None = None, at_end: Callable[[], None] = lambda: None) -> int:
    """Run a command line of mptrain, report errors on standard error, and return the exit code.

    Args:
        argv: Arguments after the program's name; those of this process if not given.
        at_end: Called when the work is done; for a run that a signal ended, before its message is printed.

    Returns:
        The exit code (see `mptrain.errors`).
    """
    # torch's C++ warnings, such as retries of the rendezvous, are meant for developers of torch.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    completing = words[:2] == ["completion", "query"]  # the other words are the command line to complete
    if "--traceback" in words and not completing:
        words.remove("--traceback")
        os.environ["MPTRAIN_TRACEBACK"] = "1"
    code = _guarded(lambda: _completion(words[1:]) if completing else _dispatch(words), at_end)
    # Flush here, because a failure during interpreter shutdown cannot be reported.
    if code == EXIT_OK:
        code = _guarded(_flush)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        discard_output()
    at_end()
    return code


def _be_silent_on_other_ranks() -> None:
    """Silence all ranks of torchrun except rank 0; the first rank of each other machine still prints errors."""
    begun = torchrun_rank()
    if begun is None or begun.rank == 0:
        return
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    if not begun.speaks and "MPTRAIN_TRACEBACK" not in os.environ:
        os.dup2(quiet, 2)
    os.close(quiet)


def _guarded(action: Callable[[], int], at_end: Callable[[], None] = lambda: None) -> int:
    """Run an action, report any exception, and return the exit code."""
    try:
        return action()
    except KeyboardInterrupt as interrupt:
        if wants_traceback():
            report(interrupt)
        else:
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`mptrain list | head`); this is not an error.
        discard_output()
        return EXIT_OK
    except MptrainError as error:
        if isinstance(error, Preempted):
            at_end()
        return report(error)
    except SystemExit as leaving:  # for example from code that a sweeper calls
        return EXIT_OK if leaving.code in (None, 0) else EXIT_CONFIG
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            return report(StorageError(*unwritable(error)))
        return report(out_of_memory(error) or kernel_refusal(error) or error)


#: Error numbers that print() raises if standard output cannot be written. Errors about files have a file name, or are
#: StorageErrors.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


def _flush() -> int:
    with writing():
        sys.stdout.flush()
    return EXIT_OK


def _dispatch(words: list[str]) -> int:
    _be_silent_on_other_ranks()
    words = command_line.command_first(words, COMMANDS)
    first = words[0] if words else ""
    command = COMMANDS.get(first)
    command_line.refuse_blanks(
        words,
        COMMANDS,
        keys=command in (None, _train, _doctor, _diagnose, _compare, _resume, _eval, _replay, _reproduce),
    )
    if "-h" in words or "--help" in words:
        return _help(
            [first] if command else [word for word in words if "=" not in word and word[:1] not in ("-", "~", "")]
        )
    outlive_reader(command in (None, _train, _resume, _compare, _reproduce))
    if command:
        if command not in (_train, _resume):
            _refuse_torchrun(f"mptrain {first}")
        return command(words[1:])
    if first in ("--version", "-V"):
        return _version(words[1:])
    if not words or "=" in first or first.startswith(("-", "~")):
        return _train(words)
    raise UsageError(f"'{first}' is not a command", command_line.command_hint(first, COMMANDS))


def _refuse_torchrun(what: str) -> None:
    """Reject commands that every rank of torchrun would run separately."""
    if torchrun_rank() is not None:
        raise UsageError(
            f"torchrun starts the ranks of a single run, but {what} is not a single run",
            "run it without torchrun; in a sweep, distributed.procs=2 gives each run two ranks",
        )


def _train(words: list[str]) -> int:
    """Run ``mptrain train``.

    Trains one configuration, or with -m every combination of several values, --jobs N at a time. Any KEY=VALUE is
    allowed. A sweep starts only after all of its points were checked. A point that fails does not stop the others.
    """
    flags = read_flags(words)
    if flags.completion:
        return _completion([flags.completion])
    if flags.show:
        from mptrain.cli.hydra_app import show

        return show(flags)
    if flags.multirun:
        _refuse_torchrun("a sweep")
        from mptrain.cli.sweep import sweep

        return sweep(flags)
    from mptrain.engine.interrupt import ending_at_once, exiting_at_once
    from mptrain.machine import dropping_nothing

    with ending_at_once():
        with exiting_at_once(), dropping_nothing():
            config = _composed(flags)
            from mptrain.cli.train import train
        return train(config)


def _composed(flags: command_line.Flags) -> Config:
    from mptrain.config.compose import compose

    if ours := [word for word in flags.overrides if word.startswith(("hydra/", "hydra.sweeper"))]:
        raise UsageError(f"{ours[0]} has no effect on a single run", "add -m, and give several values: KEY=A,B")
    config = compose(flags.overrides, config_dirs=flags.config_dirs, config_name=flags.config_name)
    warn(config.warnings)
    return config


def _resume(words: list[str]) -> int:
    """Run ``mptrain resume``.

    Resumes a run from its last checkpoint. RUN is its directory, or last for the run that was started last. Any
    key may change (train.epochs or train.max_steps to train longer; precision, scaler, optimizer, schedule and
    logger may be replaced), except model, dataset, task and train.batch_size. SWEEP is the folder of a sweep: its
    missing, failed and interrupted points are run, --jobs N at a time, on this machine or with --launcher. Their
    configuration comes from sweep.json, so KEY=VALUE is not allowed.
    """
    words, found = take_options(words, {"--jobs": "VALUE", "--launcher": "VALUE"})
    flags = command_line.training_flags(found, (), multirun=True)
    run, overrides = run_and_overrides("resume", words)
    from mptrain.config.trust import allowed_packages, is_allow_override

    trusted = [word for word in overrides if is_allow_override(word)]
    from mptrain.cli.sweep import find_sweep, resume_sweep

    sweep = find_sweep(run, [word for word in overrides if word not in trusted], flags.jobs, flags.launcher)
    if sweep is not None:
        _refuse_torchrun("a sweep")
        return resume_sweep(sweep, flags.jobs, allowed_packages(trusted), flags.launcher)
    run = place_of(run, overrides)
    from mptrain.engine.interrupt import ending_at_once, exiting_at_once

    with ending_at_once():
        with exiting_at_once():
            from mptrain.cli.train import resume
        return resume(run, overrides)


def _eval(words: list[str]) -> int:
    """Run ``mptrain eval``.

    Evaluates the last checkpoint of a run, or with --best the best one. RUN is its directory, or last for the run
    that was started last. Keys such as device or precision.eval can be changed for the evaluation. --raw evaluates
    the raw weights if the run also has averaged weights (train.ema_decay).
    """
    rest, found = take_options(words, {}, ("--best", "--raw"))
    run, overrides = run_and_overrides("eval", rest)
    run = place_of(run, overrides)
    from mptrain.engine.interrupt import exiting_at_once

    with exiting_at_once():
        from mptrain.cli.train import evaluate
    return evaluate(run, overrides, "best" if "--best" in found else "last", average="--raw" not in found)


def _export(words: list[str]) -> int:
    """Run ``mptrain export``.

    Writes the weights of a run's last checkpoint, or with --best its best one, as a plain state dict that
    torch.load reads with weights_only=True, in float32, or with --fp16 in float16. If the run has averaged weights
    (train.ema_decay), they are exported; --raw exports the raw weights instead. --output PATH sets the file; a path
    that ends in .safetensors gets that format.
    """
    from mptrain.cli.export import export

    return export(words)


def _compare(words: list[str]) -> int:
    """Run ``mptrain compare``.

    Trains every arm, that is every combination of the values, with every seed (seed= repeats arms and forms no new
    ones), or takes existing RUNs, including folders of sweeps. Reports for each arm if it is better than the
    reference, equivalent, worse or undecided, from differences paired by seed. --reference ARM sets the reference
    (default: precision=fp32); --margin X the largest difference that counts as equivalent, in the metric's unit
    (default: 0.01); --metric NAME the metric; --jobs N the number of runs at a time. RUNs must differ only in
    precision and scaler: --by KEY,KEY allows other keys to differ, --anyway skips this check.
    """
    from mptrain.cli.compare import compare

    return compare(words)


def _report(words: list[str]) -> int:
    """Run ``mptrain report``.

    Writes report.html (self-contained) and report.md with figures/ into the folder of a run, finished or not, of a
    sweep, a comparison or a recipe, and prints their paths. The word last stands for the run that was started last.
    """
    from mptrain.cli.report import report_folders

    return report_folders(words)


def _recommend(words: list[str]) -> int:
    """Run ``mptrain recommend``.

    Recommends a static loss scale for a RUN that was trained with diagnostics=histograms. Prints the usable range
    and the effect of every scale, from underflow at 2^0 to overflow at 2^24, and writes forecast.html and
    forecast.md into the run's folder. A scale is recommended only if less than 1 % of steps would be skipped with
    95 % confidence. With too few histograms the exit code is 6, and the output names a sufficient
    diagnostics.every. A run in FP32 records all gradients; a run in FP16 only those that did not underflow.
    --sweep SWEEP adds the measurements of a sweep over scaler.scale. The word last stands for the run that was
    started last.
    """
    from mptrain.cli.recommend import recommend_scale

    return recommend_scale(words)


def _diagnose(words: list[str]) -> int:
    """Run ``mptrain diagnose``.

    Repeats one step, forward and backward without an update, and checks every operator: which module first
    produces a value that is not finite, how much of FP16's range is used, and what is lost to underflow. Then it
    tests fixes on the same step: a lower scale, precision.keep_fp32=[...], another precision. For a RUN that was
    ended by its numerics, it repeats the step that ended it, otherwise the step after the last checkpoint; --step N
    trains in memory up to step N. With several learners, it examines the one that failed; --learner NAME selects
    another. The result is written to diagnosis/ in the run's folder; nothing else is changed. KEY=VALUE without
    RUN examines a new configuration, at step 1 by default. --all shows every module; --config-dir DIR adds a
    folder with your own groups and options.
    """
    from mptrain.cli.diagnose import diagnose

    return diagnose(words)


def _replay(words: list[str]) -> int:
    """Run ``mptrain replay``.

    Simulates a loss scaling rule, scaler=NAME scaler.KEY=VALUE, on the recorded steps of a run, and shows its
    scales next to the recorded ones. Without a rule, the run's own is replayed, which gives exactly the recorded
    scales. Writes replay-NAME-KEY-VALUE.html and .md into the run's directory, one pair of files for each rule.
    With diagnostics=histograms, the outcome of a step at another scale is known or estimated; rules that measure
    gradients (logmax, als) need histograms.
    """
    from mptrain.machine import dropping_nothing

    run, overrides = run_and_overrides("replay", words)
    with dropping_nothing():
        from mptrain.cli.replay import replay

    return replay(run, overrides)


def _reproduce(words: list[str]) -> int:
    """Run ``mptrain reproduce``.

    Runs a recipe from mptrain list recipes or from your own folder, and prints its results and expectations. The
    exit code is 5 if an expectation is not met. Finished runs are not repeated. --dry-run prints the plain
    commands and runs nothing; --smoke shortens all runs to check that they work; --jobs N runs N at a time;
    --config-dir DIR adds a folder with your own groups and options. KEY=VALUE changes every run; run.root=DIR sets
    the output folder.
    """
    from mptrain.cli.reproduce import reproduce

    return reproduce(words)


def _list(words: list[str]) -> int:
    """Run ``mptrain list``.

    Lists all groups and their options, or the keys, defaults and comments of one group's options; or all recipes.
    """
    from mptrain.cli.list import list_groups

    return list_groups(words)


def _copy(words: list[str]) -> int:
    """Run ``mptrain copy``.

    Copies an option or a recipe of mptrain to a folder of yours, and prints the command that uses the copy. Without
    FOLDER, GROUP/OPTION becomes my_configs/GROUP/my_OPTION.yaml, and RECIPE becomes the folder my_recipes/my_RECIPE.
    GROUP/OPTION=NAME or RECIPE=NAME gives the copy another name. Nothing is replaced.
    """
    from mptrain.cli.copy_files import copy_files

    return copy_files(words)


def _doctor(words: list[str]) -> int:
    """Run ``mptrain doctor``.

    Shows the environment, the devices and the precision modes that they support. The exit code is 3 if a required
    package is broken. With dataset=NAME and dataset.KEY=VALUE alone, it describes a data set: its splits, classes,
    lengths and picture sizes. It reads all files and lists those at which training would stop and pictures that are
    in two splits or classes (exit code 6), and those that training would skip or convert. With other KEY=VALUE (or
    --config-dir DIR) it checks the files and then the model, without training. It computes the gradients of the
    first step in FP64, in FP32 and in the precision at loss scales from 1 to 2^24. It prints the usable range of
    loss scales and the problems of each module, such as a loss or norm in half precision, gradients that are not
    proportional to the loss scale, an eps that underflows, or a mask that becomes infinite. The exit code is 4 if
    it found a problem.
    """
    if not words:
        from mptrain.cli.doctor import doctor

        return doctor()
    flags = read_flags(words)
    if plain := [word for word in flags.overrides if "=" not in word and not word.startswith("~")]:
        raise UsageError(f"doctor takes KEY=VALUE, but got '{plain[0]}'", "write mptrain doctor model=resnet18")
    if flags.multirun or flags.show:
        unknown = next(
            word for word in words if word.startswith("-") and not word.startswith(("--config-", "-cd", "-cn"))
        )
        raise UsageError(f"unknown option '{unknown}'", "doctor checks one configuration: mptrain doctor KEY=VALUE ...")
    config = _composed(flags)
    from mptrain.config.overrides import is_about_data

    if any(word.startswith("dataset") for word in flags.overrides) and all(map(is_about_data, flags.overrides)):
        from mptrain.cli.doctor_data import doctor_data

        return doctor_data(config)
    from mptrain.cli.doctor_model import doctor_model

    return doctor_model(config)


def _completion(words: list[str]) -> int:
    """Run ``mptrain completion``.

    Prints a script that enables TAB completion of groups, options, keys, values and runs. In bash and zsh: eval
    "$(mptrain completion bash)"; in fish: mptrain completion fish | source.
    """
    from mptrain.cli.completion import completion

    return completion(words, command_texts())


def _help(words: list[str]) -> int:
    """Run ``mptrain help``.

    Shows the usage of a command, the options of a group, the keys of an option or of a section (train, log, run
    ...), the meaning of a key, or how to sweep. --config-dir DIR adds a folder with your own groups and options.
    """
    return print_help(words, command_texts())


def command_texts() -> dict[str, str]:
    """Return the help text of each command, by name: its docstring without the first line."""
    return {name: " ".join((command.__doc__ or "").split()[3:]) for name, command in COMMANDS.items()}


def _version(words: list[str]) -> int:
    if words:
        raise UsageError(f"--version takes no arguments, but got '{words[0]}'")
    from mptrain import __version__

    print(f"mptrain {__version__}")
    return EXIT_OK


_ALL = (_train, _resume, _eval, _export, _compare, _report, _recommend, _diagnose, _replay, _reproduce)

#: Commands by name.
COMMANDS = {command.__name__[1:]: command for command in (*_ALL, _list, _copy, _doctor, _completion, _help)}
