"""What may come of a fault: a documented exit code with an error and a hint, and in the end the undisturbed run."""

from __future__ import annotations

import re

#: The exit codes with which an attempt that was struck may end. 0: the fault came too late, or did no harm.
CODES = {
    "kill": {-9, 0}, "kill_saving": {-9, 0}, "sigterm": {75, 0}, "sigint": {130, 0}, "pause": {0}, "clock": {0},
    "disk_full": {6, 0}, "read_only": {6, 0}, "data_gone": {6, 0}, "bad_picture": {6, 0}, "kill_rank": {75, -9, 0},
}  # fmt: skip

#: Of the attempt that meets damaged files.
CODES_OF_DAMAGE = {0, 2, 6}

#: What the error has to speak of.
WORDS = {
    "disk_full": r"the disk is full",
    "read_only": r"permission denied",
    "data_gone": r"data",
    "bad_picture": r"\.png",
    "sigterm": r"SIGTERM",
    "sigint": r"SIGINT|Ctrl-C|interrupted",
}

DOCUMENTED = {2, 3, 4, 6, 7, 75, 130}


def objections(attempt, kind=None, allowed=None, words=None):
    """What is wrong with how an attempt ended, one sentence each."""
    allowed = allowed or (CODES[kind] if kind else {0})
    words = words or WORDS.get(kind, "")
    found = []
    if attempt.hung:
        found.append("it hung")
    if attempt.code not in allowed:
        found.append(f"it ended with {attempt.code}, allowed are {sorted(allowed)}")
    said, _, ending = attempt.output.partition(
        "\n  go on "
    )  # the last line of a run that is done; then Python ends itself
    if "Traceback" in (attempt.output if attempt.code or not ending else said) or "this is a bug" in attempt.output:
        found.append("it printed a traceback, or spoke of a bug")
    if attempt.code in DOCUMENTED and attempt.output.strip().splitlines()[-1:] != ["interrupted"]:
        if not re.search(r"^(error|stopped): .", attempt.output, re.MULTILINE):
            found.append("it printed neither an error nor that it was stopped")
        if not re.search(r"^hint: .", attempt.output, re.MULTILINE):
            found.append("it printed no hint")
        said = " ".join(re.findall(r"^(?:error|stopped): .*", attempt.output, re.MULTILINE))
        if words and not re.search(words, said):
            found.append(f"its error speaks of something else than {words!r}: {said}")
    return found


def words_about(files):
    """What the error about damaged files has to name: one of them, or what they are."""
    names = [re.escape(path.name) for path in files]
    if any(path.name.startswith("step-") for path in files):
        names += ["checkpoint"]
    if any(path.name == "config.yaml" for path in files):
        names += ["configuration", " was .*, now ", r"\w+\.\w+"]
    return "|".join(names)


def differences(result, expected):
    """In what a finished run differs from the undisturbed one."""
    found = []
    if result.steps != expected.steps:
        mine, theirs = result.steps.splitlines(), expected.steps.splitlines()
        at = next((i for i, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other), None)
        found.append(f"steps.jsonl: {len(mine)} lines, expected {len(theirs)}; first other line {at}")
    if result.epochs != expected.epochs:
        found.append(f"epochs.csv: {result.epochs}, expected {expected.epochs}")
    if result.events != expected.events:
        others = [line for line in result.events if line not in expected.events]
        found.append(f"events.jsonl: {len(result.events)}, expected {len(expected.events)}; other: {others[:2]}")
    if isinstance(result.state, str):
        found.append(result.state)
    elif result.state != expected.state:
        keys = result.state.keys() | expected.state.keys()
        names = sorted(key for key in keys if result.state.get(key) != expected.state.get(key))
        found.append(f"the last checkpoint differs in {len(names)}: {', '.join(names[:4])}")
    return found


def steps_bound(setting):
    """How many steps a kill may cost: those since the last checkpoint, and behind it those while one is being written."""
    return setting.interval * (2 if setting.async_save else 1)
