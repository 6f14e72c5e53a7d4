"""Names of runs: nothing leads out of the root, and fresh names are safe in a shell."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mptrain.runlog.run_paths import check_run_name, fresh_name
from mptrain.system.errors import ConfigError
from tests.loops import each

UNSAFE = (
    *("", "/", "/etc/run", "..", "../x", "a/..", "a/../../x", ".", "a/./b", "a//b", "a/", ".hidden", "a/.hidden", "-rf", "a/-m"),
    *("a\nb", "a\0b", "a\x7f", "a\u202eb", "a\udc80", " a", "a ", "x" * 256, "é" * 128),
)  # fmt: skip


@each("name", UNSAFE)
def test_a_name_that_is_unsafe_or_confusing_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        check_run_name(name)
    assert f"run.name={name!r}" in str(caught.value)
    assert caught.value.exit_code == 2
    assert caught.value.hint


@each("name", ["a", "resnet50", "sweep/seed=0", "a/b/c", "x" * 255, "lr 0.1", "grün", "a..b", "a-"])
def test_an_ordinary_name_is_taken_as_it_is(name):
    assert check_run_name(name) == name


@settings(max_examples=40)
@given(st.text() | st.lists(st.sampled_from(["a", "..", ".", "", "-", "\n", "b c"])).map("/".join))
@example("a/b")
def test_whatever_is_accepted_stays_strictly_inside_the_root(name):
    try:
        check_run_name(name)
    except ConfigError:
        return
    path = Path("/root-of-runs") / name
    resolved = path.resolve()
    assert resolved == path
    assert Path("/root-of-runs") in resolved.parents
    assert not any(ord(character) < 32 for character in name)
    assert all(part[0] not in "-." for part in name.split("/"))


@settings(max_examples=40)
@given(st.text())
def test_a_fresh_name_has_date_time_label_and_random_digits(label):
    date, folder = fresh_name(label, datetime(2026, 3, 4, 5, 6, 7))
    assert date == "2026-03-04"
    assert re.fullmatch(r"05-06-07-[A-Za-z0-9._+-]{0,120}-[0-9a-f]{4}", folder)
    assert check_run_name(f"{date}/{folder}")
