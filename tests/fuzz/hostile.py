"""What the fuzz tests share: how much they try, what may come out, and how text and bytes are spoiled.

A run of the whole suite tries a few hundred fixed examples of everything. ``MPTRAIN_FUZZ=full`` tries thousands of fresh
ones: ``MPTRAIN_FUZZ=full pytest tests/fuzz -n 0 --timeout 0``.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mptrain.system import errors
from mptrain.system.errors import MptrainError

FULL = os.environ.get("MPTRAIN_FUZZ") == "full"

#: Seconds of this process that one example may take.
LONGEST = 20

EXIT_CODES = {value for name, value in vars(errors).items() if name.startswith("EXIT_")} - {errors.EXIT_BUG}

_CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"})
_PROGRAMS = frozenset({"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect"})
_seen: list[str] | None = None
_allowed = ""
_hooked = False


def examples(few, many):
    """Settings of hypothesis: so many examples in every run of the tests, and so many in a full one."""
    return settings(
        max_examples=many if FULL else few,
        derandomize=not FULL,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def only_our_errors(folder=Path("/nowhere")):
    """Inside, errors for the user end the block and any other is a failure, as are delays and writes outside a folder."""
    began, refused = time.process_time(), None
    with _watched(folder) as seen:
        try:
            yield
        except MptrainError as error:
            refused = error
    assert refused is None or (refused.exit_code in EXIT_CODES and str(refused).strip())
    assert not seen
    assert time.process_time() - began < LONGEST


@contextlib.contextmanager
def _watched(folder):
    global _seen, _allowed, _hooked
    if not _hooked:
        sys.addaudithook(_note)
        _hooked = True
    _seen, _allowed = [], str(folder)
    try:
        yield _seen
    finally:
        _seen = None


def _note(event, arguments):
    if _seen is None:
        return
    if event in _PROGRAMS or (_changes(event, arguments) and not _is_inside(arguments[0])):
        _seen.append(f"{event} {arguments!r}")


def _changes(event, arguments):
    return event in _CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _is_inside(place):
    return isinstance(place, int) or os.fsdecode(place).startswith((_allowed, "/dev/null"))


DEEP = 2000

TOKENS = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1", b"9" * 30, b"9" * 400, b"9" * 5000, b"1e308", b"0.5"),
    *(b"null", b"true", b'""', b'"x"', b'"\\ud800"', b"[]", b"{}", b"[[", b"}}", b"\0", b"\0" * 600, b"\xff\xfe"),
    *(b"\n", b"\r", b"\n\n", b",", b":", b'"', b"\\", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xe2\x80\xae"),
    *(b"[" * DEEP, b'{"a":' * DEEP, b"[" * DEEP + b"]" * DEEP, b"[" * 300 + b"]" * 300, b"x" * 200_000),
]

texts = st.one_of(
    st.sampled_from(
        ["", "x", "\0", "../../etc", "/", "nan", "inf", "\ud800", "\u202e", "<b>", "a" * 5000, "1", "test"]
    ),
    st.text(max_size=8),
)

#: Values that JSON can hold and a record should not.
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 10**30, -(10**400), 2**63, 1e308, -1e308, 5e-324, 0.5, -0.0]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
    st.sampled_from(
        [[], {}, [[]], [{}], [None], {"": None}, [1, 2, 3], ["x"], {"x": 1}, {"x": {"y": []}}, {"nonfinite": {}}]
    ),
    st.integers(1, 4).map(lambda power: _nested(4**power)),
)


ODD = [
    *(None, True, False, 0, -1, 1, 2**63, 10**30, -(10**400), 1e308, -5e-324, -0.0, math.nan, math.inf),
    *("", "x", "\0", "\ud800", "1", "nan", "a" * 3000, "main", [], [1], ["x"], [[[[]]]]),
    *({}, {"x": 1}, {"loss": "inf"}, {"loss": "nan", "lr": "-inf"}, {"loss.x": "inf"}, {"step": "nan"}, {"": ""}),
    {"nonfinite": {"x": "inf"}},
]


def _nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@st.composite
def spoiled(draw, whole, *others):
    """Bytes after one to three accidents: flipped, cut, doubled, overwritten, spliced with lines of other files."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.integers(0, 6))
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(1, 40))
        if kind == 0 and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            del data[place : place + length]
        elif kind == 3:
            data[place:place] = data[place : place + length]
        elif kind == 4:
            data[place:place] = draw(st.sampled_from(TOKENS))
        elif kind == 5:
            data[place : place + length] = draw(st.sampled_from(TOKENS))
        else:
            lines = [line for file in (bytes(data), *others) for line in file.splitlines(keepends=True)]
            if lines:
                data[place:place] = draw(st.sampled_from(lines))
    return bytes(data)


def places(tree, prefix=()):
    """Every place of a tree of JSON values."""
    found = [prefix]
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found += places(value, (*prefix, key))
    return found


@st.composite
def misfit(draw, tree):
    """A tree of JSON values of which one or two are another value, missing, or under another name."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 2))):
        where = draw(st.sampled_from(places(tree)))
        if not where:
            continue
        holder = tree
        for key in where[:-1]:
            holder = holder[key]
        how = draw(st.integers(0, 5))
        if how == 0:
            del holder[where[-1]]
        elif how == 1 and isinstance(holder, dict):
            holder[draw(texts)] = holder.pop(where[-1])
        elif how == 2 and isinstance(holder, dict):
            holder[draw(st.sampled_from(["nonfinite", "schema", "step", "event", "x"]))] = copy.deepcopy(draw(odd))
        else:
            holder[where[-1]] = copy.deepcopy(draw(odd))
    return tree
