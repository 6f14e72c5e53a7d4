"""``mptrain help`` and ``--help``: built from the table of commands and from names and comments in the YAML files.

To answer within a fraction of a second, this module must import only the standard library and the catalogue.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mptrain import __version__
from mptrain.cli.command import GENERAL, JSON, Command, Option
from mptrain.cli.list_and_copy import bold, catalogue_with, columns, in_short, option_text
from mptrain.config.catalogue import SHARED, Catalogue, Entry
from mptrain.config.synonyms import guess_word, translate_command
from mptrain.system.errors import EXIT_OK, ConfigError, Problem, near_names

_EXAMPLES = (
    "mptrain model=resnet50 precision=amp_dynamic",
    "mptrain precision=fp16_static scaler.scale=128 train.epochs=3",
    "mptrain -m precision=amp_static scaler.scale=1,8,128,1024",
    "mptrain compare precision=fp32,amp_dynamic seed=0,1,2,3,4,5,6,7",
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
#: Help text about ``--json``.
_JSON = (
    "prints one JSON object on standard output, and nothing else there. Errors, warnings and progress go to standard "
    "error. The exit code is the same. A command that fails prints no object: its error: and hint: lines on standard "
    "error say why. A number that is not finite is null; the field nonfinite maps its path to inf, -inf or nan. The "
    "field schema is the name and version of the object. New fields keep the version, so ignore fields that you do not "
    "know. JSON Schemas:"
)

#: Instructions for agents, and the folder of the JSON Schemas of what ``--json`` prints.
SKILL, SCHEMAS = Path(__file__).with_name("SKILL.md"), Path(__file__).with_name("schemas")

#: Least likeness of a word to a topic: there are so many that one resembles every word a little (lora, logger: 0.6).
_LIKE = 0.7

_SWEEP_USAGE = ("mptrain resume SWEEP [--jobs N]", "mptrain report SWEEP")


def print_help(commands: Mapping[str, Command], topics: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Print the overall help, or the help on commands, groups, options and keys.

    Args:
        commands: All commands by name.
        topics: The topics; none for the overall help.
        config_dirs: Values of ``--config-dir``, folders with more groups and options.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: There is no help on some of the topics; the error lists them.
    """
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    catalogue = catalogue_with(config_dirs)
    if not topics:
        print(_whole_help(commands, catalogue, width))
        return EXIT_OK
    texts = {word: _topic(word, commands, catalogue, width) for word in topics}
    unknown = (word for word, text in texts.items() if not text)
    if problems := [Problem(f"there is no help on '{word}'", _nearest(word, commands, catalogue)) for word in unknown]:
        raise ConfigError(problems)
    print("\n\n".join(texts.values()))
    return EXIT_OK


def _topic(word: str, commands: Mapping[str, Command], catalogue: Catalogue, width: int) -> str:
    """Return the help on a word; empty for an unknown word."""
    if word == "agents":
        return SKILL.read_text(encoding="utf-8").rstrip()
    if word == "json":
        return _json_help(commands, width)
    keys = [entry for entry in catalogue.root_entries() if entry.key == word or entry.key.startswith(f"{word}.")]
    if word in commands or word == "sweep":
        usage = (commands["train"].usage[1], *_SWEEP_USAGE) if word == "sweep" else commands[word].usage
        lines = ["\n".join(f"usage: {line}" for line in usage)]
        lines.append(textwrap.fill(_SWEEP if word == "sweep" else commands[word].about, width))
        if word in commands and (own := commands[word].options):
            lines.append(_section("Options", columns(_option_rows(own), width)))
        return "\n\n".join([*lines, *([_keys_help(word, keys, width)] if keys else [])])
    if word in catalogue.groups:
        return _group_help(word, catalogue, width)
    if keys:
        return _keys_help(word, keys, width)
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
        rows = [
            in_short(entry) for entry in catalogue.root_entries() if entry.key == section and f"{key}:" in entry.comment
        ]
    return "\n".join(columns(rows, width)) if rows else ""


def _json_help(commands: Mapping[str, Command], width: int) -> str:
    rows = [(name, str(SCHEMAS / f"{name}.json")) for name, command in commands.items() if JSON in command.options]
    text = f"mptrain {'|'.join(name for name, _ in rows)} --json {_JSON}"
    return "\n".join([textwrap.fill(text, width), *columns(rows, width)])


def _option_rows(options: Iterable[Option]) -> list[tuple[str, str]]:
    return [(", ".join(filter(None, [option.short, option.usage])), option.about) for option in options]


def _is_called(entry: Entry, word: str) -> bool:
    """Return whether a word is the dotted name of a key or its last component."""
    return word in (entry.key, entry.key.rpartition(".")[2]) and ".defaults." not in entry.key and word != "_target_"


def _nearest(word: str, commands: Mapping[str, Command], catalogue: Catalogue) -> str:
    """Return the hint for an unknown word."""
    command = translate_command(word)
    sections = dict.fromkeys(entry.key.partition(".")[0] for entry in catalogue.root_entries() if "." in entry.key)
    topics = [*commands, "sweep", "json", "agents", *catalogue.groups]
    options = [name for options in catalogue.groups.values() for name in options]
    near = [command] if command in commands else near_names(word, [*topics, *sections], _LIKE)
    near = near or [guess for guess in (guess_word(word, "", catalogue, exact=True).partition("=")[0],) if guess]
    keys = (entry.key for entry in catalogue.root_entries())
    near = near or near_names(word, [*dict.fromkeys(options), *keys], _LIKE)
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
    return "\n".join([_section(title, columns(rows, width)), "", *shared, keys])


def _keys_help(name: str, entries: Sequence[Entry], width: int) -> str:
    lines = columns([*map(in_short, entries)], width)
    return "\n".join(lines).lstrip() if name == entries[0].key else _section(f"{name}: keys and defaults", lines)


def _whole_help(commands: Mapping[str, Command], catalogue: Catalogue, width: int) -> str:
    usage = [
        (line, usage.about)
        for command in commands.values()
        for line, usage in zip(command.usage, command.usages, strict=True)
    ]
    groups = [(name, ", ".join(options)) for name, options in catalogue.groups.items()]
    options = [*_option_rows([*commands["train"].options, *GENERAL]), ("--version", "show the version")]
    parts = [
        f"mptrain {__version__}: mixed precision training with a record of every loss scale and overflow",
        _section("Usage", columns(usage, width)),
        _section("Examples", [f"  {line}" for line in _EXAMPLES]),
        _section("Groups, GROUP=OPTION (mptrain list GROUP shows their keys)", columns(groups, width)),
        _section("Keys and defaults", columns([*map(in_short, catalogue.root_entries())], width)),
        _section("Options (mptrain help COMMAND shows those of other commands)", columns(options, width)),
        _section("Exit codes", columns(_EXIT_CODES, width)),
    ]
    return "\n\n".join(parts)


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([bold(title), *lines])
