"""``mptrain --help``: built from the comments and names of the YAML files, without composing anything.

Must import nothing beyond the standard library and the catalogue: it has a fraction of a second.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable

from mptrain import __version__
from mptrain.cli.messages import colourful
from mptrain.config import location
from mptrain.config.catalogue import Catalogue, Entry, Option
from mptrain.config.synonyms import translate_command
from mptrain.errors import EXIT_OK, ConfigError, Problem, near_names

#: How each command is written, and what it does; shell completion takes from here which words a command takes.
USAGE = (
    ("mptrain [train] KEY=VALUE ...", "train (the default command)"),
    ("mptrain -m KEY=A,B ... [--jobs N] [--launcher FILE]", "train every combination, each in a process of its own"),
    (
        "mptrain compare KEY=A,B seed=0,1,2 ... [--margin X] [--jobs N] [--launcher FILE]",
        "train arms and compare them, with intervals and verdicts",
    ),
    ("mptrain compare RUN RUN ...", "compare runs that exist"),
    ("mptrain resume RUN|SWEEP|last [KEY=VALUE ...]", "continue an interrupted run, or run what is missing of a sweep"),
    ("mptrain eval RUN|last [--best] [KEY=VALUE ...]", "evaluate the last checkpoint of a run, or its best"),
    ("mptrain export RUN|last [--best] [--fp16]", "write its weights as a plain state dict"),
    ("mptrain report RUN|last ...", "write a report of runs, sweeps, comparisons or recipes: HTML and Markdown"),
    ("mptrain recommend RUN|last [--sweep SWEEP]", "which static loss scale to take, from a run's histograms"),
    (
        "mptrain diagnose RUN|last [KEY=VALUE ...] [--step N] [--learner NAME] [--all]",
        "look at the step that ended a run, or at step N: where it goes wrong, and what mends it",
    ),
    ("mptrain diagnose KEY=VALUE ... [--step N] [--learner NAME] [--all]", "the same for a step of a configuration"),
    ("mptrain replay RUN|last [KEY=VALUE ...]", "what another scaler would have done to a run; nothing is trained"),
    (
        "mptrain reproduce RECIPE [KEY=VALUE ...] [--dry-run] [--smoke] [--jobs N]",
        "run a published claim again, and judge it",
    ),
    ("mptrain list [GROUP|recipes]", "what there is to choose from, with keys and defaults"),
    (
        "mptrain doctor [KEY=VALUE ...]",
        "what this machine can do; or whether a model trains rightly in a precision, at which loss scales",
    ),
    ("mptrain completion bash|zsh|fish", 'complete command lines: eval "$(mptrain completion bash)"'),
    ("mptrain help [COMMAND|GROUP|sweep]", "how a command is used; what a group, an option or a key is"),
)

_EXAMPLES = (
    "mptrain model=resnet50 precision=amp_dynamic",
    "mptrain precision=fp16_static scaler.scale=128 train.epochs=3",
    "mptrain -m precision=amp_static scaler.scale=1,8,128,1024",
    "mptrain compare precision=fp32,amp_dynamic seed=0,1,2,3,4,5,6,7",
)

OPTIONS = (
    ("-m, --multirun", "sweep: KEY=A,B, KEY=range(1,4), GROUP=glob(fp16*)"),
    ("--jobs N", "points of a sweep that run at a time, sharing CPU cores and GPUs; 1 if not given"),
    ("--launcher slurm|local|FILE", "hand points of a sweep to Slurm through submitit; FILE says with what (YAML)"),
    ("--config-dir DIR", "a folder with groups and options of your own"),
    ("--config-name NAME", "another file at the top than train"),
    ("--cfg job|hydra|all", "show the composed configuration (--resolve, --package P)"),
    ("--info", "show how Hydra composes it"),
    ("--traceback", "show where an error came from; so does MPTRAIN_TRACEBACK=1"),
    ("--version", "the version"),
)

_EXIT_CODES = (
    ("0", "done"),
    ("1", "a bug"),
    ("2", "the command line or the configuration is wrong"),
    ("3", "this machine cannot do it"),
    ("4", "numerics: nothing but overflows, the loss diverged, or doctor found something wrong"),
    ("5", "a recipe found something else than it expects"),
    ("6", "data, checkpoint or disk"),
    ("7", "some jobs of a sweep failed"),
    ("75", "stopped by a signal after saving; run again to continue"),
    ("130", "Ctrl-C"),
)

DESCRIPTIONS = {
    "train": "Trains one configuration, or with -m every combination of several, --jobs N at a time. Any KEY=VALUE is allowed. "
    "Nothing of a sweep starts before all of its points are valid; what happens to one of them does not stop the others.",
    "compare": "Trains every arm that the words form, with every seed (seed= repeats arms and forms none), or takes RUNs that "
    "exist, folders of sweeps included, and says of each arm whether it is better than the reference, equivalent to it, worse, "
    "or undecided, from differences paired by seed. --reference ARM (precision=fp32 if not given); --margin X is the largest "
    "difference that counts as none, in the metric's unit, 0.01 if not given; --metric NAME; --jobs N. RUNs must differ in "
    "precision and scaler only: --by KEY,KEY names what else they are to differ in, --anyway compares them all the same.",
    "resume": "Continues a run from its last checkpoint. RUN is its directory, or the word last. "
    "Any key may change on the way (train.epochs or train.max_steps to go on for longer; precision, scaler, optimizer, "
    "schedule and logger may be chosen anew), except what the run is about: model, dataset, task, and train.batch_size. SWEEP is the folder of a sweep: its points "
    "that are missing, failed or interrupted are run, --jobs N at a time, by what its sweep.json says, without KEY=VALUE, here or with --launcher. "
    "The word last always means a run.",
    "eval": "Evaluates the last checkpoint of a run, or with --best the best. RUN is its directory, or the "
    "word last. Keys such as device or precision.eval can be changed for it. --raw measures the weights themselves where "
    "a run has averaged ones (train.ema_decay).",
    "export": "Writes the weights of a run's last checkpoint, or with --best its best, as a plain state dict that "
    "torch.load reads with weights_only=True: float32, or with --fp16 float16. Averaged weights (train.ema_decay) are "
    "taken where there are any; --raw takes the others. --output PATH says where to.",
    "report": "Writes report.html (one file, nothing to load) and report.md with figures/ into the folder of a run, finished "
    "or not, of a sweep, a comparison or a recipe, and prints their paths. The word last is the run that was started last.",
    "recommend": "Says which static loss scales are usable for a RUN that was trained with diagnostics=histograms, which one to "
    "take, from how many looks, and what every other one would do: what underflows at 2^0, what overflows at 2^24. A scale is named "
    "only where less than 1 % of skipped steps is sure with 95 % confidence; too few looks end it with exit code 6, and it says which "
    "diagnostics.every gives enough. Prints a table and writes forecast.html and forecast.md into its folder. A run in FP32 shows all gradients; one in FP16 only those that it kept. "
    "--sweep SWEEP shows what a sweep over scaler.scale measured beside it. The word last is the run that was started last.",
    "diagnose": "Does one step again, forward and backward without an update, and looks at every operator: which module first gives "
    "something that is not finite, how far values reach into FP16's range, what is lost to underflow. Then it tries what may "
    "mend the step, on that very step: a lower scale, precision.keep_fp32=[...], another precision. Of a RUN that was ended by "
    "its numerics this is the step that ended it, else the one after its last checkpoint; --step N trains in memory up to step N. "
    "Of several learners it is the one that went wrong; --learner NAME chooses another. "
    "Into the run's folder diagnosis/ it writes what it found, else nothing. KEY=VALUE alone is a configuration that was never "
    "run, step 1 if not given. --all shows every module; --config-dir DIR adds groups and options of your own.",
    "replay": "Runs a loss scaling rule, scaler=NAME scaler.KEY=VALUE, over the recorded steps of a run, and shows its scales "
    "beside those on record; without a rule, the run's own, which gives exactly the recorded scales. Writes replay-NAME-KEY-VALUE.html "
    "and .md into the run's directory, so that every rule has its own. What a step would have done at another scale is known, or estimated, from a "
    "run with diagnostics=histograms; rules that measure gradients (logmax, als) need one.",
    "reproduce": "Runs a recipe of mptrain list recipes, or the one in a folder of yours, prints what it found beside what "
    "it expects, and ends with 5 where that is something else. Runs that have ended are not run again. --dry-run prints the "
    "plain commands and runs nothing; --smoke only shows that everything runs, in short; --jobs N runs N at a time; "
    "--config-dir DIR adds groups and options of your own. KEY=VALUE changes every run; run.root=DIR is where.",
    "list": "Shows all groups and their options, or one group with every option's keys, defaults and comments; or all recipes.",
    "doctor": "Shows the environment, the devices, and which precision suits them. Ends with 3 when "
    "something that is needed is broken. With KEY=VALUE (or --config-dir DIR) it trains nothing, but reads all files of the data set, "
    "lists every one that training would stop at, leave out or convert, and ends with 6 where it would stop. Else it computes the gradients of "
    "the first step in FP64, in FP32 and in the precision at loss scales from 1 to 2^24, and says which scales are right, and "
    "what is wrong by module: a loss or a norm in half precision, gradients that do not follow the scale, an eps that vanishes, a "
    "mask that becomes infinite. Ends with 4 when something is wrong.",
    "completion": "Prints a script after which the TAB key completes groups, options, keys, values and runs. In bash and "
    'zsh: eval "$(mptrain completion bash)"; in fish: mptrain completion fish | source.',
    "help": "Shows how a command is used; or the options of a group, the keys of an option or of a section (train, log, run ...), "
    "what a key means, or how to sweep.",
}

#: Usage and text of each topic that is no command.
_TOPICS = {
    "sweep": (
        (USAGE[1][0], "mptrain resume SWEEP [--jobs N]", "mptrain report SWEEP"),
        "Trains every combination of the values: KEY=A,B lists them, KEY=range(1,4) counts from 1 to 3, GROUP=glob(fp16*) takes the "
        "options that match. All points are checked before the first one begins; what happens to one does not stop the others. --jobs N "
        "runs N at a time; --launcher slurm hands them to Slurm. To compare arms with intervals and verdicts: mptrain help compare.",
    ),
}


def print_help(words: list[str]) -> int:
    """Print how mptrain is used, or what each word means: a command, a group, an option, a key.

    Raises:
        ConfigError: Names the words that mean nothing.
    """
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    if not words:
        print(_whole_help(width))
        return EXIT_OK
    catalogue = Catalogue([location.configs()])
    topics = [(word, _topic(word, catalogue, width)) for word in words]
    unknown = [
        Problem(f"there is no help about '{word}'", _nearest(word, catalogue)) for word, show in topics if not show
    ]
    if unknown:
        raise ConfigError(unknown)
    for place, (_, show) in enumerate(topics):
        if place:
            print()
        if show:
            show()
    return EXIT_OK


def _topic(word: str, catalogue: Catalogue, width: int) -> Callable[[], None] | None:
    """Return what prints the help about a word; None where the word means nothing."""
    keys = [entry for entry in catalogue.root_entries() if entry.key == word or entry.key.startswith(f"{word}.")]
    if word in DESCRIPTIONS or word in _TOPICS:
        section = ["", _keys_help(word, keys, width)] if keys else []
        return lambda: print("\n".join([_command_help(word, width), *section]))
    if word in catalogue.groups:
        return lambda: print(_group_help(word, catalogue, width))
    if keys:
        return lambda: print(_keys_help(word, keys, width))
    if options := catalogue.options(word):
        return lambda: _print_options(catalogue, options)
    from mptrain.cli.list import in_short

    rows = [in_short(entry) for entry in catalogue.root_entries() if _is_called(entry, word)]
    rows += [
        (f"{group}={name}", "   ".join(filter(None, in_short(entry))))
        for group, options in catalogue.groups.items()
        for name, option in options.items()
        for entry in option.entries
        if _is_called(entry, word)
    ]
    return (lambda: print("\n".join(_columns(rows, width)))) if rows else None


def _is_called(entry: Entry, word: str) -> bool:
    """Return whether a key has this dotted name, or this last part."""
    return word in (entry.key, entry.key.rpartition(".")[2]) and ".defaults." not in entry.key and word != "_target_"


def _nearest(word: str, catalogue: Catalogue) -> str:
    """Return the hint for a word that means nothing."""
    command = translate_command(word)
    options = [name for options in catalogue.groups.values() for name in options]
    near = [command] if command in DESCRIPTIONS else near_names(word, [*DESCRIPTIONS, *_TOPICS, *catalogue.groups])
    near = near or near_names(word, [*dict.fromkeys(options), *(entry.key for entry in catalogue.root_entries())])
    if near:
        return f"did you mean mptrain help {near[0]}?"
    return f"there is help about {', '.join([*DESCRIPTIONS, *_TOPICS, *catalogue.groups])}, their options and keys"


def _group_help(group: str, catalogue: Catalogue, width: int) -> str:
    comment = catalogue.comment(group)
    default = catalogue.defaults.get(group)
    rows = [
        (f"{group}={name}", option.summary + " (default)" * (name == default))
        for name, option in catalogue.groups[group].items()
    ]
    title = f"{group}: {comment}" if comment else group
    keys = f"mptrain list {group} shows their keys and defaults; mptrain help {next(iter(catalogue.groups[group]))} those of one"
    return "\n".join([_section(title, _columns(rows, width)), "", keys])


def _keys_help(name: str, entries: list[Entry], width: int) -> str:
    rows = [(f"{entry.key}={entry.value}", entry.comment) for entry in entries]
    if name == entries[0].key:
        return "\n".join(_columns(rows, width)).lstrip()
    return _section(f"{name}, with the defaults of its keys", _columns(rows, width))


def _print_options(catalogue: Catalogue, options: list[Option]) -> None:
    from mptrain.cli.list import print_option

    for place, option in enumerate(options):
        if place:
            print()
        print_option(catalogue, option)


def _whole_help(width: int) -> str:
    catalogue = Catalogue([location.configs()])
    keys = [(f"{entry.key}={entry.value}", entry.comment) for entry in catalogue.root_entries()]
    groups = [(name, ", ".join(options)) for name, options in catalogue.groups.items()]
    parts = [
        f"mptrain {__version__}: mixed precision training, every step's loss scale and overflow on record",
        _section("Usage", _columns(USAGE, width)),
        _section("Examples", [f"  {line}" for line in _EXAMPLES]),
        _section("Groups, GROUP=OPTION (mptrain list GROUP shows their keys)", _columns(groups, width)),
        _section("Keys, with their defaults", _columns(keys, width)),
        _section("Options", _columns(OPTIONS, width)),
        _section("Exit codes", _columns(_EXIT_CODES, width)),
    ]
    return "\n\n".join(parts)


def _command_help(name: str, width: int) -> str:
    if name in _TOPICS:
        lines, text = _TOPICS[name]
        return "\n".join([*(f"usage: {line}" for line in lines), "", textwrap.fill(text, width)])
    usage = [line for line, _ in USAGE if line.startswith(f"mptrain {name}")]
    if name == "train":
        usage = [line for line, _ in USAGE[:2]]
    text = textwrap.fill(DESCRIPTIONS[name], width)
    return "\n".join(["usage: " + line for line in usage] + ["", text])


def _section(title: str, lines: list[str]) -> str:
    heading = f"\x1b[1m{title}\x1b[0m" if colourful(sys.stdout) else title
    return "\n".join([heading, *lines])


def _columns(rows: tuple[tuple[str, str], ...] | list[tuple[str, str]], width: int) -> list[str]:
    left = min(max(len(name) for name, _ in rows), 40) + 4
    lines: list[str] = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(width - left, 30), break_on_hyphens=False) or [""]
        if len(name) + 4 > left:  # too long for its column: the text goes below it
            lines.append(f"  {name}")
        else:
            lines.append(f"  {name}".ljust(left) + wrapped.pop(0))
        lines += [" " * left + more for more in wrapped]
    return [line.rstrip() for line in lines]
