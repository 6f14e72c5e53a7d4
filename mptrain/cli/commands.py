"""The table of commands: the arguments, options and help of each, and the function that runs it.

Parsing (`mptrain.cli.command_line`), help and shell completion derive from it. The docstring of a command is its help
text. Each command imports what it needs only when it runs, so that help and usage errors appear at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from mptrain.cli.command import (
    ANY_KEY,
    BEST,
    CONFIG_DIR,
    CONFIGURATION,
    FOLDERS,
    JOBS,
    JSON,
    LAUNCHER,
    OBJECTIVE,
    OVERRIDES,
    RAW,
    RECIPE,
    RECIPE_OR_OPTION,
    RUN,
    RUN_OR_SWEEP,
    SHELL,
    TRAINING,
    WANTED,
    Argument,
    Command,
    Option,
    Outcome,
    Usage,
    any_number,
    positive_number,
    whole_number,
)
from mptrain.cli.messages import warn
from mptrain.parallel.torchrun import refuse_torchrun
from mptrain.system.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from mptrain.config.schema import Config


_Run = TypeVar("_Run", bound=Callable[["Namespace"], int | Outcome])

#: Commands by name, in the order of the help.
COMMANDS: dict[str, Command] = {}


def _command(
    about: str, *arguments: Argument, also: Sequence[Usage] = (), options: Sequence[Option] = ()
) -> Callable[[_Run], _Run]:
    """Enter a function, named after its command, into the table: how it is usually called, other ways, its options."""

    def enter(run: _Run) -> _Run:
        usages = (Usage(about, arguments), *also)
        name = run.__name__.removeprefix("_")
        COMMANDS[name] = Command(run, name, usages, tuple(options))
        return run

    return enter


@_command(
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
        from mptrain.cli.sweep import has_sweeper, sweep

        if has_sweeper(arguments.overrides):
            from mptrain.cli.sweeper_search import search

            return search(arguments)
        return sweep(arguments)
    from mptrain.system.machine import dropping_nothing

    with dropping_nothing():
        config = _composed(arguments)
        from mptrain.cli.train import train
    return train(config)


def _composed(arguments: Namespace) -> Config:
    from mptrain.config.compose import compose

    if ours := [word for word in arguments.overrides if word.startswith(("hydra/", "hydra.sweeper"))]:
        raise UsageError(f"{ours[0]} has no effect on a single run", "add -m, and give several values: KEY=A,B")
    config = compose(arguments.overrides, config_dirs=arguments.config_dir, config_name=arguments.config_name)
    warn(config.warnings)
    return config


@_command(
    "train arms and compare them, with confidence intervals and verdicts",
    Argument("A,B", key=ANY_KEY),
    Argument("0,1,2", "+", "seed"),
    also=[
        Usage("compare existing runs", (Argument("RUN"), Argument("RUN", "+"))),
        Usage("compare logs of any program", (Argument("LOGS", "+", "ARM"),), switch="--logs"),
    ],
    options=(
        Option("--reference", "arm that the others are compared with (default: precision=fp32)", "ARM"),
        Option(
            "--margin",
            "largest difference that counts as equivalent, in the metric's unit: 0.005 is half a percentage point of "
            "accuracy (default: 0.01)",
            "X",
            read=positive_number,
        ),
        Option("--metric", "metric to compare (default: that of the best checkpoint)", "NAME"),
        Option("--by", "keys in which RUNs may differ", "KEY,KEY"),
        Option("--anyway", "compare RUNs whatever they differ in"),
        Option("--logs", "compare logs: CSV, JSONL, TensorBoard, Lightning, transformers, wandb, MLflow, mptrain"),
        Option("--at", "where logs are compared: at a step, or by the mean of the last N values", "last|last=N|step=N"),
        Option("--not-inferior", "ask of logs only whether no arm is worse by the margin or more"),
        Option("--target", "ask of logs whether the mean of each arm beats a number", "X", read=any_number),
        Option("--pair", "compare logs in pairs, named by {seed} in their paths"),
        Option("--looks", "times that logs are looked at as runs come in (default: 1)", "N", read=whole_number(1000)),
        Option("--where", "rows of logs that count, such as split=val; may be repeated", "KEY=VALUE", many=True),
        Option("--pattern", "read text logs by a regular expression with named groups such as (?P<step>...)", "REGEX"),
        Option("--better", "direction of the metric in logs (default: by its name)", "lower|higher"),
        JOBS,
        LAUNCHER,
        JSON,
        *FOLDERS,
    ),
)
def _compare(arguments: Namespace) -> int | Outcome:
    """Trains every arm with every seed, or takes existing RUNs, including folders of sweeps.

    An arm is a combination of the values; seed= repeats arms and forms no new ones. Reports for each arm if it is
    better than the reference, equivalent, worse or undecided, from differences paired by seed. RUNs must differ only in
    precision and scaler, unless --by or --anyway is given. With --logs an arm is a name and the logs of its runs, files
    or folders that any program wrote, in quotes if they have a *; --metric and --margin (or --target) are required.
    """
    if arguments.logs:
        from mptrain.cli.compare_logs import compare_logged

        return compare_logged(arguments)
    for option in ("at", "not_inferior", "target", "pair", "looks", "better", "where", "pattern"):
        if getattr(arguments, option) not in (None, False, []):
            raise UsageError(f"--{option.replace('_', '-')} is about logs", "add --logs, and write ARM=LOGS")
    from mptrain.cli.compare import compare

    return compare(arguments)


@_command(
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
    from mptrain.config.trust import allowed_packages, is_allow_override

    trusted = [word for word in overrides if is_allow_override(word)]
    from mptrain.cli.sweep import find_sweep, resume_sweep

    others = [word for word in overrides if word not in trusted]
    sweep = find_sweep(run, others, arguments.jobs, arguments.launcher)
    if sweep is not None:
        refuse_torchrun("a sweep")
        code = resume_sweep(sweep, arguments.jobs, allowed_packages(trusted), arguments.launcher)
        if sweep.kind == "comparison" and code not in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
            from mptrain.cli.compare import conclude

            conclude(sweep, code).show()
        return code
    from mptrain.cli.places import place_of

    run = place_of(run, overrides)  # a run that does not exist is said before torch is imported
    from mptrain.cli.train import resume

    return resume(run, overrides)


@_command(
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
    from mptrain.cli.places import place_of

    run = place_of(arguments.words[0], arguments.overrides)
    from mptrain.cli.train import evaluate

    which = "best" if arguments.best else "last"
    return evaluate(run, arguments.overrides, which, average=not arguments.raw, by_class=arguments.by_class)


@_command(
    "predict: the answers of a run's network to new pictures, recordings or texts",
    RUN,
    Argument("FILE|FOLDER|-", "+"),
    OVERRIDES,
    options=(
        BEST,
        RAW,
        Option("--jsonl", "print a JSON object in a line for each input, with all that is known"),
        Option("--output", "write pictures with the answers into a new folder", "FOLDER"),
        Option("--length", "number of tokens that continue a text (default: 32)", "N", read=whole_number(100_000)),
        Option("--temperature", "below 1 likely tokens are drawn more often (default: 1)", "X", read=positive_number),
        Option("--seed", "draw others (default: 1)", "N", read=whole_number(2**31)),
    ),
)
def _predict(arguments: Namespace) -> int:
    """Prints the answer of a run's network to each input: a class, objects, a translation, a transcript and so on.

    Inputs are files and folders of pictures or recordings, or text files with a text in each line; with - the paths, or
    the texts, are lines of standard input. They are read and prepared as in the run's evaluation, by its data.json; the
    data itself need not be there. An unusable input is reported and left out, and the exit code is then 6.
    """
    from mptrain.cli.predict import predict

    return predict(arguments)


@_command(
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
    from mptrain.cli.export import export

    return export(arguments)


@_command(
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


@_command(
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


@_command(
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
    from mptrain.cli.reports import recommend_scale

    return recommend_scale(arguments)


@_command(
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
    from mptrain.cli.diagnose import diagnose

    return diagnose(arguments)


@_command("simulate another scaler on a run's recorded steps, without training", RUN, OVERRIDES)
def _replay(arguments: Namespace) -> int:
    """Simulates a loss scaling rule, scaler=NAME scaler.KEY=VALUE, on the recorded steps of a run.

    Shows its scales next to the recorded ones. Without a rule, the run's own is replayed, which gives exactly the
    recorded scales. Writes replay-NAME-KEY-VALUE.html and .md into the run's directory, one pair of files for each
    rule. With diagnostics=histograms, the outcome of a step at another scale is known or estimated; rules that measure
    gradients (logmax, als) need histograms.
    """
    from mptrain.system.machine import dropping_nothing

    with dropping_nothing():
        from mptrain.inspection.replay import replay_run
    from mptrain.cli.reports import report_replay

    return report_replay(replay_run(arguments.words[0], arguments.overrides))


@_command(
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
        from mptrain.cli.find_batch import find_batch

        return find_batch(arguments)
    from mptrain.cli.find import find_rate

    return find_rate(arguments)


@_command(
    "reproduce a published result and check its claim",
    RECIPE,
    OVERRIDES,
    options=(
        Option("--dry-run", "print the plain commands and run nothing"),
        Option("--smoke", "shorten all runs to check that they work"),
        JOBS,
        CONFIG_DIR,
    ),
)
def _reproduce(arguments: Namespace) -> int:
    """Runs a recipe from mptrain list recipes or from your own folder, and prints its results and expectations.

    The exit code is 5 if an expectation is not met. Finished runs are not repeated. KEY=VALUE changes every run;
    run.root=DIR sets the output folder.
    """
    from mptrain.cli.reproduce import reproduce

    return reproduce(arguments)


@_command(
    "list groups, their options, keys and defaults; or recipes",
    Argument("GROUP|recipes", "?"),
    options=(CONFIG_DIR,),
)
def _list(arguments: Namespace) -> int:
    """Lists all groups and their options; or the keys, defaults and comments of one group's options; or all recipes."""
    from mptrain.cli.list import list_groups

    return list_groups(arguments)


@_command(
    "copy an option or a recipe to a folder of yours, to edit it",
    RECIPE_OR_OPTION,
    Argument("FOLDER", "?"),
)
def _copy(arguments: Namespace) -> int:
    """Copies an option or a recipe of mptrain to a folder of yours, and prints the command that uses the copy.

    Without FOLDER, GROUP/OPTION becomes my_configs/GROUP/my_OPTION.yaml, and RECIPE becomes the folder
    my_recipes/my_RECIPE. GROUP/OPTION=NAME or RECIPE=NAME gives the copy another name. Nothing is replaced.
    """
    from mptrain.cli.copy_files import copy_files

    return copy_files(arguments)


@_command(
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
        from mptrain.cli.doctor import doctor

        return doctor()
    config = _composed(arguments)
    from mptrain.config.overrides import is_about_data

    if any(word.startswith("dataset") for word in arguments.overrides) and all(map(is_about_data, arguments.overrides)):
        from mptrain.cli.doctor_data import doctor_data

        return doctor_data(config)
    from mptrain.cli.doctor_model import doctor_model

    return doctor_model(config)


@_command('set up shell completion: eval "$(mptrain completion bash)"', SHELL)
def _completion(arguments: Namespace) -> int:
    """Prints a script that enables TAB completion of groups, options, keys, values and runs.

    In bash and zsh: eval "$(mptrain completion bash)"; in fish: mptrain completion fish | source.
    """
    from mptrain.cli.completion import print_script

    return print_script(arguments.words[0])


@_command(
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
