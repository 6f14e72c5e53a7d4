"""``mptrain help`` and ``--help``: built from names and comments in the YAML files, without composing a configuration.

To answer within a fraction of a second, this module must import only the standard library and the catalogue.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

from mptrain import __version__
from mptrain.cli.messages import supports_colour
from mptrain.config.catalogue import SHARED, Catalogue, Entry
from mptrain.config.synonyms import translate_command
from mptrain.errors import EXIT_OK, ConfigError, Problem, near_names

#: Usage line and description of each command.
_LINES = {
    "mptrain [train] KEY=VALUE ...": "train (the default command)",
    "mptrain -m KEY=A,B ... [--jobs N] [--launcher FILE]": "sweep: train every combination, each in its own process",
    "mptrain compare KEY=A,B seed=0,1,2 ... [--margin X] [--jobs N] [--launcher FILE]": (
        "train arms and compare them, with confidence intervals and verdicts"
    ),
    "mptrain compare RUN RUN ...": "compare existing runs",
    "mptrain resume RUN|SWEEP|last [KEY=VALUE ...]": "resume an interrupted run, or run the missing jobs of a sweep",
    "mptrain eval RUN|last [--best] [KEY=VALUE ...]": "evaluate the last or best checkpoint of a run",
    "mptrain export RUN|last [--best] [--fp16]": "export the weights of a run as a plain state dict",
    "mptrain report RUN|last ...": "write an HTML and Markdown report of runs, sweeps, comparisons or recipes",
    "mptrain recommend RUN|last [--sweep SWEEP]": "recommend a static loss scale from a run's histograms",
    "mptrain diagnose RUN|last [KEY=VALUE ...] [--step N] [--learner NAME] [--all]": (
        "find the cause of the failure at the step that ended a run, or at step N, and test fixes"
    ),
    "mptrain diagnose KEY=VALUE ... [--step N] [--learner NAME] [--all]": "the same for a step of a new configuration",
    "mptrain replay RUN|last [KEY=VALUE ...]": "simulate another scaler on a run's recorded steps, without training",
    "mptrain reproduce RECIPE [KEY=VALUE ...] [--dry-run] [--smoke] [--jobs N]": (
        "reproduce a published result and check its claim"
    ),
    "mptrain list [GROUP|recipes]": "list groups, their options, keys and defaults; or recipes",
    "mptrain copy RECIPE|GROUP/OPTION [FOLDER]": "copy an option or a recipe to a folder of yours, to edit it",
    "mptrain doctor [KEY=VALUE ...]": (
        "show what this machine supports; or check a data set (dataset=NAME ...); or check a model's gradients in a "
        "precision and find usable loss scales"
    ),
    "mptrain completion bash|zsh|fish": 'set up shell completion: eval "$(mptrain completion bash)"',
    "mptrain help [COMMAND|GROUP|sweep]": "show help on a command, group, option or key",
}

#: Usage lines and descriptions by command; shell completion takes the arguments of commands from here.
USAGE: dict[str, list[tuple[str, str]]] = {}
for _line, _about in _LINES.items():
    USAGE.setdefault(_line.split()[1].strip("[]").replace("-m", "train"), []).append((_line, _about))

_EXAMPLES = (
    "mptrain model=resnet50 precision=amp_dynamic",
    "mptrain precision=fp16_static scaler.scale=128 train.epochs=3",
    "mptrain -m precision=amp_static scaler.scale=1,8,128,1024",
    "mptrain compare precision=fp32,amp_dynamic seed=0,1,2,3,4,5,6,7",
)

OPTIONS = (
    ("-m, --multirun", "sweep: KEY=A,B, KEY=range(1,4), GROUP=glob(fp16*)"),
    ("--jobs N", "number of sweep points that run at a time, sharing CPU cores and GPUs (default: 1)"),
    ("--launcher slurm|local|FILE", "submit sweep points to Slurm with submitit; FILE sets its options (YAML)"),
    ("--config-dir DIR", "add a folder with your own groups and options"),
    ("--config-name NAME", "use another top-level config file (default: train)"),
    ("--cfg job|hydra|all", "show the composed configuration (--resolve, --package P)"),
    ("--info", "show how Hydra composes the configuration"),
    ("--traceback", "show the traceback of an error; MPTRAIN_TRACEBACK=1 does the same"),
    ("--version", "show the version"),
)

_EXIT_CODES = (
    ("0", "success"),
    ("1", "bug in mptrain"),
    ("2", "invalid command line or configuration"),
    ("3", "not supported on this machine"),
    ("4", "numerics: only overflows, the loss diverged, or doctor found a problem"),
    ("5", "an expectation of a recipe was not met"),
    ("6", "data, checkpoint or disk error"),
    ("7", "some jobs of a sweep failed"),
    ("75", "stopped by a signal after saving a checkpoint; run the command again to resume"),
    ("130", "Ctrl-C"),
)

#: Help text about sweeps, which are not a separate command.
_SWEEP = (
    "Trains every combination of the values. KEY=A,B lists values, KEY=range(1,4) stands for 1, 2 and 3, and "
    "GROUP=glob(fp16*) for all matching options. All points are checked before the first one starts. A point that "
    "fails does not stop the others. --jobs N runs N points at a time; --launcher slurm submits them to Slurm. To "
    "compare arms with confidence intervals and verdicts, see mptrain help compare."
)
_SWEEP_USAGE = (USAGE["train"][1][0], "mptrain resume SWEEP [--jobs N]", "mptrain report SWEEP")


def print_help(words: list[str], texts: Mapping[str, str]) -> int:
    """Print the overall help, or the help on commands, groups, options and keys.

    Args:
        words: Arguments after ``help``: topics, none for the overall help, and ``--config-dir DIR`` for more folders.
        texts: Help text of each command by name.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: There is no help on some of the words; the error lists them.
    """
    from mptrain.cli.list import read_topics

    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    topics, catalogue = read_topics(words)
    if not topics:
        print(_whole_help(catalogue, width))
        return EXIT_OK
    found = {word: _topic(word, texts, catalogue, width) for word in topics}
    if unknown := [word for word, text in found.items() if not text]:
        raise ConfigError([Problem(f"there is no help on '{one}'", _nearest(one, catalogue)) for one in unknown])
    print("\n\n".join(found.values()))
    return EXIT_OK


def _topic(word: str, texts: Mapping[str, str], catalogue: Catalogue, width: int) -> str:
    """Return the help on a word; empty for an unknown word."""
    keys = [entry for entry in catalogue.root_entries() if entry.key == word or entry.key.startswith(f"{word}.")]
    if word in USAGE or word == "sweep":
        usage = [line for line, _ in USAGE[word]] if word in USAGE else _SWEEP_USAGE
        lines = [*(f"usage: {line}" for line in usage), "", textwrap.fill(texts.get(word, _SWEEP), width)]
        return "\n".join([*lines, *(["", _keys_help(word, keys, width)] if keys else [])])
    if word in catalogue.groups:
        return _group_help(word, catalogue, width)
    if keys:
        return _keys_help(word, keys, width)
    from mptrain.cli.list import in_short, option_text

    if options := catalogue.options(word):
        return "\n\n".join(option_text(catalogue, option) for option in options)
    rows = [in_short(entry) for entry in catalogue.root_entries() if _is_called(entry, word)]
    rows += [
        (f"{group}={name}", "   ".join(filter(None, in_short(entry))))
        for group, options in catalogue.groups.items()
        for name, option in options.items()
        for entry in option.entries
        if _is_called(entry, word)
    ]
    if not rows and "." in word:  # a key of a section that is null
        section, _, key = word.rpartition(".")
        rows = [in_short(one) for one in catalogue.root_entries() if one.key == section and f"{key}:" in one.comment]
    return "\n".join(_columns(rows, width)) if rows else ""


def _is_called(entry: Entry, word: str) -> bool:
    """Return whether a word is the dotted name of a key or its last component."""
    return word in (entry.key, entry.key.rpartition(".")[2]) and ".defaults." not in entry.key and word != "_target_"


def _nearest(word: str, catalogue: Catalogue) -> str:
    """Return the hint for an unknown word."""
    command = translate_command(word)
    topics = [*USAGE, "sweep", *catalogue.groups]
    options = [name for options in catalogue.groups.values() for name in options]
    near = [command] if command in USAGE else near_names(word, topics)
    near = near or near_names(word, [*dict.fromkeys(options), *(entry.key for entry in catalogue.root_entries())])
    return (
        f"did you mean mptrain help {near[0]}?"
        if near
        else f"help topics are {', '.join(topics)}, their options and keys"
    )


def _group_help(group: str, catalogue: Catalogue, width: int) -> str:
    comment = catalogue.comment(group)
    default = catalogue.defaults.get(group)
    rows = [
        (f"{group}={name}", option.summary + " (default)" * (name == default))
        for name, option in catalogue.groups[group].items()
    ]
    title = f"{group}: {comment}" if comment else group
    first = next(iter(catalogue.groups[group]))
    keys = f"mptrain list {group} shows their keys and defaults; mptrain help {first} shows those of one option"
    shared = [_keys_help(f"every {group}", SHARED[group], width), ""] if group in SHARED else []
    return "\n".join([_section(title, _columns(rows, width)), "", *shared, keys])


def _keys_help(name: str, entries: Sequence[Entry], width: int) -> str:
    rows = [(f"{entry.key}={entry.value}", entry.comment) for entry in entries]
    if name == entries[0].key:
        return "\n".join(_columns(rows, width)).lstrip()
    return _section(f"{name}: keys and defaults", _columns(rows, width))


def _whole_help(catalogue: Catalogue, width: int) -> str:
    keys = [(f"{entry.key}={entry.value}", entry.comment) for entry in catalogue.root_entries()]
    groups = [(name, ", ".join(options)) for name, options in catalogue.groups.items()]
    parts = [
        f"mptrain {__version__}: mixed precision training with a record of every loss scale and overflow",
        _section("Usage", _columns(list(_LINES.items()), width)),
        _section("Examples", [f"  {line}" for line in _EXAMPLES]),
        _section("Groups, GROUP=OPTION (mptrain list GROUP shows their keys)", _columns(groups, width)),
        _section("Keys and defaults", _columns(keys, width)),
        _section("Options", _columns(OPTIONS, width)),
        _section("Exit codes", _columns(_EXIT_CODES, width)),
    ]
    return "\n\n".join(parts)


def _section(title: str, lines: list[str]) -> str:
    heading = f"\x1b[1m{title}\x1b[0m" if supports_colour(sys.stdout) else title
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
