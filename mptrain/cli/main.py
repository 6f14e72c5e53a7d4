"""The entry point: first word, command, exit code. Everything that fails ends here, as lines and a number.

Nothing is imported before the command that needs it is known: help and usage errors answer at once. The docstring of a
command is its help, without the first line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mptrain.cli import command_line
from mptrain.cli.command_line import read_flags, run_and_overrides, take_options
from mptrain.cli.help import print_help
from mptrain.cli.messages import report, unwritable, wants_traceback, warn, writing
from mptrain.errors import (
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    MptrainError,
    Preempted,
    StorageError,
    UsageError,
    out_of_memory,
)
from mptrain.parallel.torchrun import torchrun_rank

if TYPE_CHECKING:
    from mptrain.config.schema import Config


def main(argv: Sequence[str] | None = None, at_end: Callable[[], None] = lambda: None) -> int:
    """Run one command line.

    Args:
        argv: The words after the program's name; those of this process when not given.
        at_end: Called when all is done, and a run that a signal has ended has only to say so.

    Returns:
        The exit code (see `mptrain.errors`).
    """
    # Threads that spin while they wait make a step 20 times slower as soon as another process wants the core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported
    # What torch's C++ warns of outside of Python is for people who mend torch: that ranks try again to meet, and the like.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    completing = words[:2] == ["completion", "query"]  # then the other words are those of some other command line
    if "--traceback" in words and not completing:
        words.remove("--traceback")
        os.environ["MPTRAIN_TRACEBACK"] = "1"
    code = _guarded(lambda: _completion(words[1:]) if completing else _dispatch(words), at_end)
    # What is left is written here, not while the interpreter ends, when nobody can be told that it failed.
    if code == EXIT_OK:
        code = _guarded(_flush)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _discard_output()
    at_end()
    return code


def _be_silent_on_other_ranks() -> None:
    """Of the ranks that torchrun has begun, the first one speaks for all; the first on each other machine says its errors."""
    begun = torchrun_rank()
    if begun is None or begun.rank == 0:
        return
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    if not begun.speaks and "MPTRAIN_TRACEBACK" not in os.environ:
        os.dup2(quiet, 2)
    os.close(quiet)


def _guarded(action: Callable[[], int], at_end: Callable[[], None] = lambda: None) -> int:
    """Return the exit code of an action, whatever it raises."""
    try:
        return action()
    except KeyboardInterrupt as interrupt:
        if wants_traceback():
            report(interrupt)
        else:
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`mptrain list | head`); what it wanted it has.
        _discard_output()
        return EXIT_OK
    except MptrainError as error:
        if isinstance(error, Preempted):
            at_end()
        return report(error)
    except SystemExit as leaving:  # of what a sweeper calls, for one
        return EXIT_OK if leaving.code in (None, 0) else EXIT_CONFIG
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            return report(StorageError(*unwritable(error)))
        return report(out_of_memory(error) or error)


#: What print() raises when standard output takes no more; errors about files name them, or are StorageErrors.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


def _flush() -> int:
    with writing():
        sys.stdout.flush()
    return EXIT_OK


def _discard_output() -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor holds nothing back
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    """Refuse what every rank that torchrun has begun would do for itself."""
    if torchrun_rank() is not None:
        raise UsageError(
            f"torchrun begins the ranks of one run, and {what} is none",
            "leave torchrun out; in a sweep, distributed.procs=2 gives each run two ranks",
        )


def _train(words: list[str]) -> int:
    """Run ``mptrain train``.

    Trains one configuration, or with -m every combination of several, --jobs N at a time. Any KEY=VALUE is
    allowed. Nothing of a sweep starts before all of its points are valid; what happens to one of them does not
    stop the others.
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
    from mptrain.engine.interrupt import ending_at_once
    from mptrain.machine import dropping_nothing

    with ending_at_once():
        with dropping_nothing():
            config = _composed(flags)
            from mptrain.cli.train import train
        return train(config)


def _composed(flags: command_line.Flags) -> Config:
    from mptrain.config.compose import compose

    config = compose(flags.overrides, config_dirs=flags.config_dirs, config_name=flags.config_name)
    warn(config.warnings)
    return config


def _resume(words: list[str]) -> int:
    """Run ``mptrain resume``.

    Continues a run from its last checkpoint. RUN is its directory, or the word last. Any key may change on the
    way (train.epochs or train.max_steps to go on for longer; precision, scaler, optimizer, schedule and logger
    may be chosen anew), except what the run is about: model, dataset, task, and train.batch_size. SWEEP is the
    folder of a sweep: its points that are missing, failed or interrupted are run, --jobs N at a time, by what its
    sweep.json says, without KEY=VALUE, here or with --launcher. The word last always means a run.
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
    from mptrain.engine.interrupt import ending_at_once

    with ending_at_once():
        from mptrain.cli.train import resume

        return resume(run, overrides)


def _eval(words: list[str]) -> int:
    """Run ``mptrain eval``.

    Evaluates the last checkpoint of a run, or with --best the best. RUN is its directory, or the word last. Keys
    such as device or precision.eval can be changed for it. --raw measures the weights themselves where a run has
    averaged ones (train.ema_decay).
    """
    rest, found = take_options(words, {}, ("--best", "--raw"))
    run, overrides = run_and_overrides("eval", rest)
    from mptrain.cli.train import evaluate

    return evaluate(run, overrides, "best" if "--best" in found else "last", average="--raw" not in found)


def _export(words: list[str]) -> int:
    """Run ``mptrain export``.

    Writes the weights of a run's last checkpoint, or with --best its best, as a plain state dict that torch.load
    reads with weights_only=True: float32, or with --fp16 float16. Averaged weights (train.ema_decay) are taken
    where there are any; --raw takes the others. --output PATH says where to.
    """
    from mptrain.cli.export import export

    return export(words)


def _compare(words: list[str]) -> int:
    """Run ``mptrain compare``.

    Trains every arm that the words form, with every seed (seed= repeats arms and forms none), or takes RUNs that
    exist, folders of sweeps included, and says of each arm whether it is better than the reference, equivalent to
    it, worse, or undecided, from differences paired by seed. --reference ARM (precision=fp32 if not given);
    --margin X is the largest difference that counts as none, in the metric's unit, 0.01 if not given; --metric
    NAME; --jobs N. RUNs must differ in precision and scaler only: --by KEY,KEY names what else they are to differ
    in, --anyway compares them all the same.
    """
    from mptrain.cli.compare import compare

    return compare(words)


def _report(words: list[str]) -> int:
    """Run ``mptrain report``.

    Writes report.html (one file, nothing to load) and report.md with figures/ into the folder of a run, finished
    or not, of a sweep, a comparison or a recipe, and prints their paths. The word last is the run that was
    started last.
    """
    from mptrain.cli.report import report_folders

    return report_folders(words)


def _recommend(words: list[str]) -> int:
    """Run ``mptrain recommend``.

    Says which static loss scales are usable for a RUN that was trained with diagnostics=histograms, which one to
    take, from how many looks, and what every other one would do: what underflows at 2^0, what overflows at 2^24.
    A scale is named only where less than 1 % of skipped steps is sure with 95 % confidence; too few looks end it
    with exit code 6, and it says which diagnostics.every gives enough. Prints a table and writes forecast.html
    and forecast.md into its folder. A run in FP32 shows all gradients; one in FP16 only those that it kept.
    --sweep SWEEP shows what a sweep over scaler.scale measured beside it. The word last is the run that was
    started last.
    """
    from mptrain.cli.recommend import recommend_scale

    return recommend_scale(words)


def _diagnose(words: list[str]) -> int:
    """Run ``mptrain diagnose``.

    Does one step again, forward and backward without an update, and looks at every operator: which module first
    gives something that is not finite, how far values reach into FP16's range, what is lost to underflow. Then it
    tries what may mend the step, on that very step: a lower scale, precision.keep_fp32=[...], another precision.
    Of a RUN that was ended by its numerics this is the step that ended it, else the one after its last
    checkpoint; --step N trains in memory up to step N. Of several learners it is the one that went wrong;
    --learner NAME chooses another. Into the run's folder diagnosis/ it writes what it found, else nothing.
    KEY=VALUE alone is a configuration that was never run, step 1 if not given. --all shows every module;
    --config-dir DIR adds groups and options of your own.
    """
    from mptrain.cli.diagnose import diagnose

    return diagnose(words)


def _replay(words: list[str]) -> int:
    """Run ``mptrain replay``.

    Runs a loss scaling rule, scaler=NAME scaler.KEY=VALUE, over the recorded steps of a run, and shows its scales
    beside those on record; without a rule, the run's own, which gives exactly the recorded scales. Writes
    replay-NAME-KEY-VALUE.html and .md into the run's directory, so that every rule has its own. What a step would
    have done at another scale is known, or estimated, from a run with diagnostics=histograms; rules that measure
    gradients (logmax, als) need one.
    """
    from mptrain.machine import dropping_nothing

    run, overrides = run_and_overrides("replay", words)
    with dropping_nothing():
        from mptrain.cli.replay import replay

    return replay(run, overrides)


def _reproduce(words: list[str]) -> int:
    """Run ``mptrain reproduce``.

    Runs a recipe of mptrain list recipes, or the one in a folder of yours, prints what it found beside what it
    expects, and ends with 5 where that is something else. Runs that have ended are not run again. --dry-run
    prints the plain commands and runs nothing; --smoke only shows that everything runs, in short; --jobs N runs N
    at a time; --config-dir DIR adds groups and options of your own. KEY=VALUE changes every run; run.root=DIR is
    where.
    """
    from mptrain.cli.reproduce import reproduce

    return reproduce(words)


def _list(words: list[str]) -> int:
    """Run ``mptrain list``.

    Shows all groups and their options, or one group with every option's keys, defaults and comments; or all
    recipes.
    """
    from mptrain.cli.list import list_groups

    return list_groups(words)


def _doctor(words: list[str]) -> int:
    """Run ``mptrain doctor``.

    Shows the environment, the devices, and which precision suits them. Ends with 3 when something that is needed
    is broken. With KEY=VALUE (or --config-dir DIR) it trains nothing, but reads all files of the data set, lists
    every one that training would stop at, leave out or convert, and ends with 6 where it would stop. Else it
    computes the gradients of the first step in FP64, in FP32 and in the precision at loss scales from 1 to 2^24,
    and says which scales are right, and what is wrong by module: a loss or a norm in half precision, gradients
    that do not follow the scale, an eps that vanishes, a mask that becomes infinite. Ends with 4 when something
    is wrong.
    """
    if not words:
        from mptrain.cli.doctor import doctor

        return doctor()
    flags = read_flags(words)
    if plain := [word for word in flags.overrides if "=" not in word and not word.startswith("~")]:
        raise UsageError(f"doctor takes KEY=VALUE, but there is '{plain[0]}'", "write mptrain doctor model=resnet18")
    if flags.multirun or flags.show:
        unknown = next(
            word for word in words if word.startswith("-") and not word.startswith(("--config-", "-cd", "-cn"))
        )
        raise UsageError(f"doctor knows no {unknown}", "it looks at one configuration: mptrain doctor KEY=VALUE ...")
    config = _composed(flags)
    from mptrain.cli.doctor_model import doctor_model

    return doctor_model(config)


def _completion(words: list[str]) -> int:
    """Run ``mptrain completion``.

    Prints a script after which the TAB key completes groups, options, keys, values and runs. In bash and zsh:
    eval "$(mptrain completion bash)"; in fish: mptrain completion fish | source.
    """
    from mptrain.cli.completion import completion

    return completion(words, command_texts())


def _help(words: list[str]) -> int:
    """Run ``mptrain help``.

    Shows how a command is used; or the options of a group, the keys of an option or of a section (train, log, run
    ...), what a key means, or how to sweep.
    """
    return print_help(words, command_texts())


def command_texts() -> dict[str, str]:
    """Return the help of each command."""
    return {name: " ".join((command.__doc__ or "").split()[3:]) for name, command in COMMANDS.items()}


def _version(words: list[str]) -> int:
    if words:
        raise UsageError(f"--version takes no words, but there is '{words[0]}'")
    from mptrain import __version__

    print(f"mptrain {__version__}")
    return EXIT_OK


_ALL = (_train, _resume, _eval, _export, _compare, _report, _recommend, _diagnose, _replay, _reproduce)

#: Each command by its name.
COMMANDS = {command.__name__[1:]: command for command in (*_ALL, _list, _doctor, _completion, _help)}
