"""The table of commands: the arguments, options and help of each, and the function that runs it.

Those of shelves are in the module ``shelf`` of each (`mptrain.shelves`).

Parsing (`mptrain.cli.command_line`), help and shell completion derive from it. The docstring of a command is its help
text. Each command imports what it needs only when it runs, so that help and usage errors appear at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mptrain import shelves
from mptrain.cli.command import (
    ANY_KEY,
    BEST,
    CONFIG_DIR,
    CONFIGURATION,
    ENTERED,
    JOBS,
    JSON,
    LAUNCHER,
    OBJECTIVE,
    OVERRIDES,
    RAW,
    RECIPE_OR_OPTION,
    RUN,
    RUN_OR_SWEEP,
    SHELL,
    TRAINING,
    WRITING,
    Argument,
    Command,
    Option,
    Outcome,
    Usage,
    command,
    composed,
    named_folder,
    run_folder,
    whole_number,
)
from mptrain.parallel.torchrun import refuse_torchrun
from mptrain.system.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace


@command(
    "train (the default command)",
    CONFIGURATION,
    also=[
        Usage(
            "sweep: train every combination, each in its own process",
            (Argument("A,B", "+", ANY_KEY),),
            switch="-m",
            options=(JOBS, LAUNCHER, OBJECTIVE),
        )
    ],
    options=TRAINING,
)
def _train(arguments: Namespace) -> int:
    """Trains one configuration, or with -m every combination of several values.

    Any KEY=VALUE is allowed. A sweep starts only after all of its points were checked. A point that fails does not stop
    the others.
    """
    for option in ("jobs", "launcher", "objective"):
        if getattr(arguments, option) is not None and not arguments.multirun:
            raise UsageError(f"--{option} applies only to sweeps", "add -m, or remove it")
    if any((arguments.cfg, arguments.package, arguments.resolve, arguments.info)):
        from mptrain.cli.hydra_app import show

        return show(arguments)
    if arguments.multirun:
        refuse_torchrun("a sweep")
        return int(shelves.load("study", "a sweep (-m)").sweep(arguments))
    from mptrain.system.machine import dropping_nothing

    with dropping_nothing():
        config = composed(arguments)
        from mptrain.cli.train import train
    return train(config)


@command(
    "resume an interrupted run, or run the missing jobs of a sweep",
    RUN_OR_SWEEP,
    OVERRIDES,
    options=(JOBS, LAUNCHER),
)
def _resume(arguments: Namespace) -> int:
    """Resumes a run from its last checkpoint.

    RUN is its directory, or last for the run that was started last. Any key may change (train.epochs or train.max_steps
    to train longer; precision, scaler, optimizer, schedule and logger may be replaced), except model, dataset, task and
    train.batch_size. SWEEP is the folder of a sweep: its missing, failed and interrupted points are run, on this
    machine or with --launcher. Their configuration comes from sweep.json, so KEY=VALUE is not allowed.
    """
    (run,), overrides = arguments.words, arguments.overrides
    from mptrain.runlog.sweeps import is_sweep

    study = shelves.find("study")
    if study is None and is_sweep(named_folder(run)):
        raise shelves.missing("study", f"{run}, a sweep,")
    code: int | None = study.resumed(arguments) if study else None
    if code is not None:
        return code
    run = run_folder(run, overrides)  # a run that does not exist is said before torch is imported
    from mptrain.cli.train import resume

    return resume(run, overrides)


@command(
    "evaluate the last or best checkpoint of a run",
    RUN,
    OVERRIDES,
    options=(
        BEST,
        RAW,
        Option("--by-class", "write by-class.html: each class, confusions, and the worst mistakes"),
        JSON,
    ),
)
def _eval(arguments: Namespace) -> Outcome:
    """Evaluates a checkpoint of a run.

    RUN is its directory, or last for the run that was started last. Keys such as device or precision.eval can be
    changed for the evaluation.
    """
    run = run_folder(arguments.words[0], arguments.overrides)
    from mptrain.cli.train import evaluate

    which = "best" if arguments.best else "last"
    return evaluate(run, arguments.overrides, which, average=not arguments.raw, by_class=arguments.by_class)


@command(
    "predict: the answers of a run's network to new pictures, recordings or texts",
    RUN,
    Argument("FILE|FOLDER|-", "+"),
    OVERRIDES,
    options=(
        BEST,
        RAW,
        Option("--jsonl", "print a JSON object in a line for each input, with all that is known"),
        Option("--output", "write pictures with the answers into a new folder", "FOLDER"),
        *WRITING,
    ),
)
def _predict(arguments: Namespace) -> int:
    """Prints the answer of a run's network to each input: a class, objects, a translation, a transcript and so on.

    Inputs are files and folders of pictures or recordings, or text files with a text in each line; with - the paths, or
    the texts, are lines of standard input. They are read and prepared as in the run's evaluation, by its data.json; the
    data itself need not be there. An unusable input is reported and left out, and the exit code is then 6.
    """
    from mptrain.cli.using import predict

    return predict(arguments)


@command(
    "export the weights or the network of a run to a file",
    RUN,
    Argument("PACKAGES", "?", "extensions.allow"),
    options=(
        BEST,
        RAW,
        Option("--fp16", "write float16 instead of float32"),
        Option(
            "--format",
            "weights as state_dict (the default) or safetensors, or the network as onnx or torch_export",
            "state_dict|safetensors|onnx|torch_export",
        ),
        Option("--output", "file to write; its ending chooses the format: .pt, .safetensors, .onnx, .pt2", "PATH"),
    ),
)
def _export(arguments: Namespace) -> int:
    """Writes the weights of a run's checkpoint, or the network with its weights, to a file.

    A state dict is for torch.load with weights_only=True. onnx and torch_export contain the network, so that it runs
    without its code; they take any number of samples, and their answers are compared with torch's before the file is
    written. If the run has averaged weights (train.ema_decay), they are exported. The description of the data is copied
    to FILE.json.
    """
    from mptrain.cli.using import export

    return export(arguments)


@command(
    "list the runs below a folder, the newest first",
    Argument("FOLDER", "?"),
    options=(
        Option(
            "--sort",
            "sort, best first, by a validation metric such as top1, by started, steps, or a number of summary.json",
            "KEY",
        ),
        Option(
            "--filter",
            "list only runs that fit, such as status=failed, precision=fp16* or 'top1>0.9'; may be repeated",
            "KEY=PATTERN",
            many=True,
        ),
        Option("--html", "write the list as a page, runs.html, with links to the reports of the runs"),
        Option(
            "--prune", "show failed and killed runs, or those of a --filter status=, and remove them after a question"
        ),
        Option("--yes", "answer yes to the question of --prune"),
        JSON,
    ),
)
def _runs(arguments: Namespace) -> Outcome:
    """Lists the runs below FOLDER, by default outputs, with status, steps, final metric and overrides.

    KEY of --filter is run (the path), status, started, reason, a group such as model, a key of the configuration, or a
    number that --sort takes. PATTERN may have *, ? and [...]; numbers have <, <=, > and >= too. --prune never removes a
    run that is running, or anything outside FOLDER.
    """
    from mptrain.cli.runs import list_runs

    return list_runs(arguments)


@command(
    "write an HTML and Markdown report of runs, sweeps, comparisons or recipes",
    replace(RUN_OR_SWEEP, nargs="+"),
    options=(
        Option("--together", "draw the curves of several runs into the same figures, without verdicts"),
        Option(
            "--follow",
            "write the report of a run every N seconds until it has ended; the page reloads itself",
            "N",
            read=whole_number(86_400),
        ),
        JSON,
    ),
)
def _report(arguments: Namespace) -> Outcome:
    """Writes report.html (self-contained) and report.md with figures/, and prints their paths.

    They are written into the folder of a run, finished or not, of a sweep, a comparison or a recipe; with --together
    into a new folder below outputs/reports. The word last stands for the run that was started last.
    """
    from mptrain.cli.reports import report_folders

    return report_folders(arguments)


@command(
    "list groups, their options, keys and defaults; or recipes",
    Argument("GROUP|recipes", "?"),
    options=(CONFIG_DIR,),
)
def _list(arguments: Namespace) -> int:
    """Lists all groups and their options; or the keys, defaults and comments of one group's options; or all recipes."""
    from mptrain.cli.list_and_copy import list_groups

    return list_groups(arguments)


@command(
    "copy an option or a recipe to a folder of yours, to edit it",
    RECIPE_OR_OPTION,
    Argument("FOLDER", "?"),
)
def _copy(arguments: Namespace) -> int:
    """Copies an option or a recipe of mptrain to a folder of yours, and prints the command that uses the copy.

    Without FOLDER, GROUP/OPTION becomes my_configs/GROUP/my_OPTION.yaml, and RECIPE becomes the folder
    my_recipes/my_RECIPE. GROUP/OPTION=NAME or RECIPE=NAME gives the copy another name. Nothing is replaced.
    """
    from mptrain.cli.list_and_copy import copy_files

    return copy_files(arguments)


@command('set up shell completion: eval "$(mptrain completion bash)"', SHELL)
def _completion(arguments: Namespace) -> int:
    """Prints a script that enables TAB completion of groups, options, keys, values and runs.

    In bash and zsh: eval "$(mptrain completion bash)"; in fish: mptrain completion fish | source.
    """
    from mptrain.cli.completion import print_script

    return print_script(arguments.words[0])


@command(
    "show help on a command, group, option or key",
    Argument("COMMAND|GROUP|sweep|json|agents", "*"),
    options=(CONFIG_DIR,),
)
def _help(arguments: Namespace) -> int:
    """Shows the usage of a command, the options of a group, or the keys of an option or of a section (train, log ...).

    It also explains single keys, how to sweep, --json, and how an agent uses the commands.
    """
    from mptrain.cli.help import print_help

    return print_help(COMMANDS, arguments.words, arguments.config_dir)


shelves.load_all()

#: Commands by name, in the order of the help; a command that `shelves.COMMANDS` does not name raises a ValueError here.
COMMANDS: dict[str, Command] = {name: ENTERED[name] for name in sorted(ENTERED, key=shelves.COMMANDS.index)}
