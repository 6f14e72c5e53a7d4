"""``mptrain --help``: built from the comments and names of the YAML files, without composing anything.

Must import nothing beyond the standard library and the catalogue: it has a fraction of a second.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping

from mptrain import __version__
from mptrain.cli.messages import supports_colour
from mptrain.config import location
from mptrain.config.catalogue import Catalogue, Entry
from mptrain.config.synonyms import translate_command
from mptrain.errors import EXIT_OK, ConfigError, Problem, near_names

#: How each command is written, and what it does.
_LINES = {
    "mptrain [train] KEY=VALUE ...": "train (the default command)",
    "mptrain -m KEY=A,B ... [--jobs N] [--launcher FILE]": "train every combination, each in a process of its own",
    "mptrain compare KEY=A,B seed=0,1,2 ... [--margin X] [--jobs N] [--launcher FILE]": "train arms and compare them, with intervals and verdicts",
    "mptrain compare RUN RUN ...": "compare runs that exist",
    "mptrain resume RUN|SWEEP|last [KEY=VALUE ...]": "continue an interrupted run, or run what is missing of a sweep",
    "mptrain eval RUN|last [--best] [KEY=VALUE ...]": "evaluate the last checkpoint of a run, or its best",
    "mptrain export RUN|last [--best] [--fp16]": "write its weights as a plain state dict",
    "mptrain report RUN|last ...": "write a report of runs, sweeps, comparisons or recipes: HTML and Markdown",
    "mptrain recommend RUN|last [--sweep SWEEP]": "which static loss scale to take, from a run's histograms",
    "mptrain diagnose RUN|last [KEY=VALUE ...] [--step N] [--learner NAME] [--all]": "look at the step that ended a run, or at step N: where it goes wrong, and what mends it",
    "mptrain diagnose KEY=VALUE ... [--step N] [--learner NAME] [--all]": "the same for a step of a configuration",
    "mptrain replay RUN|last [KEY=VALUE ...]": "what another scaler would have done to a run; nothing is trained",
    "mptrain reproduce RECIPE [KEY=VALUE ...] [--dry-run] [--smoke] [--jobs N]": "run a published claim again, and judge it",
    "mptrain list [GROUP|recipes]": "what there is to choose from, with keys and defaults",
    "mptrain doctor [KEY=VALUE ...]": "what this machine can do; or whether a model trains rightly in a precision, at which loss scales",
    "mptrain completion bash|zsh|fish": 'complete command lines: eval "$(mptrain completion bash)"',
    "mptrain help [COMMAND|GROUP|sweep]": "how a command is used; what a group, an option or a key is",
}

#: The lines of each command; shell completion takes from here which words a command takes.
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

#: Text about sweeps, which are no command of their own.
_SWEEP = (
    "Trains every combination of the values: KEY=A,B lists them, KEY=range(1,4) counts from 1 to 3, GROUP=glob(fp16*) takes the "
    "options that match. All points are checked before the first one begins; what happens to one does not stop the others. --jobs N "
    "runs N at a time; --launcher slurm hands them to Slurm. To compare arms with intervals and verdicts: mptrain help compare."
)
_SWEEP_USAGE = (USAGE["train"][1][0], "mptrain resume SWEEP [--jobs N]", "mptrain report SWEEP")


def print_help(words: list[str], texts: Mapping[str, str]) -> int:
    """Print how mptrain is used, or what each word means: a command, a group, an option, a key.

    Args:
        words: After ``help``.
        texts: A text about each command, by its name.

    Raises:
        ConfigError: Names the words that mean nothing.
    """
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    catalogue = Catalogue([location.configs()])
    if not words:
        print(_whole_help(catalogue, width))
        return EXIT_OK
    topics = [(word, _topic(word, texts, catalogue, width)) for word in words]
    if unknown := [word for word, text in topics if not text]:
        raise ConfigError([Problem(f"there is no help about '{one}'", _nearest(one, catalogue)) for one in unknown])
    print("\n\n".join(text for _, text in topics))
    return EXIT_OK


def _topic(word: str, texts: Mapping[str, str], catalogue: Catalogue, width: int) -> str:
    """Return the help about a word; empty where the word means nothing."""
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
    return "\n".join(_columns(rows, width)) if rows else ""


def _is_called(entry: Entry, word: str) -> bool:
    """Return whether a key has this dotted name, or this last part."""
    return word in (entry.key, entry.key.rpartition(".")[2]) and ".defaults." not in entry.key and word != "_target_"


def _nearest(word: str, catalogue: Catalogue) -> str:
    """Return the hint for a word that means nothing."""
    command = translate_command(word)
    topics = [*USAGE, "sweep", *catalogue.groups]
    options = [name for options in catalogue.groups.values() for name in options]
    near = [command] if command in USAGE else near_names(word, topics)
    near = near or near_names(word, [*dict.fromkeys(options), *(entry.key for entry in catalogue.root_entries())])
    return (
        f"did you mean mptrain help {near[0]}?"
        if near
        else f"there is help about {', '.join(topics)}, their options and keys"
    )


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


def _whole_help(catalogue: Catalogue, width: int) -> str:
    keys = [(f"{entry.key}={entry.value}", entry.comment) for entry in catalogue.root_entries()]
    groups = [(name, ", ".join(options)) for name, options in catalogue.groups.items()]
    parts = [
        f"mptrain {__version__}: mixed precision training, every step's loss scale and overflow on record",
        _section("Usage", _columns(list(_LINES.items()), width)),
        _section("Examples", [f"  {line}" for line in _EXAMPLES]),
        _section("Groups, GROUP=OPTION (mptrain list GROUP shows their keys)", _columns(groups, width)),
        _section("Keys, with their defaults", _columns(keys, width)),
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
