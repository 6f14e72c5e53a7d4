"""Comparison of two folders of records."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from tests.golden.kept import in_order


class Difference(NamedTuple):
    """The first place where a file of a run differs.

    Attributes:
        run: Its name.
        part: Of its record: ``steps``, ``epochs``, ``events``, ``summary``, ``data``, ``state`` ...
        place: The step, epoch or name.
        before: The value there; `MISSING` where there is none.
        after: The same of the newer record.
        more: How many values of this part differ besides.
    """

    run: str
    part: str
    place: str
    before: object
    after: object
    more: int = 0

    def __str__(self):
        more = f" (and {self.more} more)" if self.more else ""
        return f"{self.run}: {self.part}, {self.place}: {_shown(self.before)} -> {_shown(self.after)}{more}"


class _Missing:
    def __repr__(self):
        return "nothing"


MISSING = _Missing()


def compare(older, newer, renamed):
    """Return the number of runs in common and the differences of two folders.

    Args:
        older: The folder whose words are translated.
        newer: The other one.
        renamed: Old word to new word.
    """
    before, after, found = translated(_records(older), renamed), _records(newer), []
    for name in sorted(before.keys() | after.keys()):
        if name in before and name in after:
            codes = [record[name].get("exit_code", 0) for record in (before, after)]
            if any(codes):  # nothing is known of a run that failed, on both sides neither
                found.append(Difference(name, "run", "exit code", *codes))
            else:
                found += differences(name, before[name], after[name])
        else:
            sides = (MISSING if name not in before else "a record", MISSING if name not in after else "a record")
            found.append(Difference(name, "run", "the whole", *sides))
    return len(before.keys() & after.keys()), found


def differences(run, before, after):
    """Return the first difference of each part of two records of a run."""
    found = []
    for part in sorted(before.keys() | after.keys()):
        one, other = dict(_leaves(part, before.get(part))), dict(_leaves(part, after.get(part)))
        if part == "events":  # compared in one order, whatever their words were
            one, other = (dict(_leaves(part, in_order(record.get(part) or []))) for record in (before, after))
        places = [place for place in {**one, **other} if _differ(one.get(place, MISSING), other.get(place, MISSING))]
        if places:
            first = min(places, key=lambda place: place[0])
            values = one.get(first, MISSING), other.get(first, MISSING)
            found.append(Difference(run, part, first[1], *values, len(places) - 1))
    return found


def translated(value, renamed):
    """Return a record in the words of today.

    Raises:
        ValueError: Two keys of a record become one, so that a value would be lost.
    """
    if not renamed:
        return value
    words = "|".join(re.escape(word) for word in sorted(renamed, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)")

    def visit(one):
        if isinstance(one, dict):
            new = {visit(key): visit(item) for key, item in one.items()}
            if len(new) < len(one):
                lost = [key for key in one if sum(visit(key) == visit(other) for other in one) > 1]
                raise ValueError(f"RENAMED in tests/golden/renamed.py makes one key of {' and '.join(lost)}")
            return new
        if isinstance(one, list):
            return [visit(item) for item in one]
        return pattern.sub(lambda found: renamed[found[0]], one) if isinstance(one, str) else one

    return visit(value)


def _records(folder):
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def _leaves(part, value):
    """Yield each value of a part with its place: a number to sort by, and words."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            at = f"epoch {item['epoch']}" if part == "epochs" else f"step {item['step']}"
            at += "".join(f", {item[key]}" for key in ("learner", "event") if key in item)
            yield from (((number, f"{at}, {name}"), leaf) for name, leaf in _flat(item, ""))
    else:
        yield from (((0, name or "value"), leaf) for name, leaf in _flat(value, ""))


def _flat(value, name):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _flat(item, f"{name}.{number}")
    else:
        yield name, value


def _differ(one, other):
    return repr(one) != repr(other)  # 1 and 1.0 and true are not the same, nor are 0.0 and -0.0


def _shown(value):
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:48]}...{text[-48:]}"
