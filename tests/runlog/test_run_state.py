"""run.json: a life of a run in values, there and back, and refusals of what is damaged or newer."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from mptrain.runlog import RunState
from mptrain.runlog.run_state import read_state
from mptrain.system.errors import StorageError
from tests.loops import each

FRESH = RunState(
    id="2026-01-02/x",
    argv=("precision=amp_dynamic", "run.name=a b"),
    command="mptrain precision=amp_dynamic 'run.name=a b'",
    git_sha=None,
    versions={"torch": "2.15"},
    device="CPU",
    parts={"precision": "parameters float32"},
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def parse_state(text, path):
    """Read a run.json of some text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return read_state(path)


def test_a_state_with_two_attempts_comes_back_equal():
    state = FRESH.begin().end("preempted", "SIGTERM", 75, to_step=40).begin(from_step=40)
    assert parse_state(state.to_json(), Path("run.json")) == state
    assert next(iter(json.loads(state.to_json()))) == "schema"


def test_an_attempt_says_which_process_began_where_and_how_it_ended():
    begun = FRESH.begin(from_step=3)
    attempt = begun.attempts[0]
    assert (attempt.pid, attempt.host, attempt.from_step) == (os.getpid(), socket.gethostname(), 3)
    assert (attempt.ended, attempt.to_step, attempt.exit_code) == (None, None, None)
    ended = begun.end("failed", "the loss diverged", 4, to_step=9)
    assert (ended.status, ended.reason, ended.exit_code) == ("failed", "the loss diverged", 4)
    assert (ended.attempts[0].to_step, ended.attempts[0].exit_code) == (9, 4)
    assert ended.attempts[0].ended >= ended.attempts[0].started


def test_beginning_again_forgets_the_end_but_keeps_the_record():
    again = FRESH.begin().end("failed", "why", 4, 1).begin(1)
    assert (again.status, again.reason, again.exit_code) == ("running", "", None)
    assert [attempt.exit_code for attempt in again.attempts] == [4, None]
    assert again.started == again.attempts[1].started
    killed = FRESH.begin().begin(5).end("done", "", 0, 9)
    assert [attempt.ended is None for attempt in killed.attempts] == [True, False]


ATTEMPT = {"started": 5, "ended": None, "pid": 1, "host": "h", "from_step": 0, "changes": []}


@each(
    ("text", "words"),
    [
        *(({"schema": 3}, "schema 3"), ({"schema": None}, "no schema number"), ({"status": "finished"}, "status")),
        *(({"attempts": [{"pid": 1}]}, "damaged"), ({"attempts": [ATTEMPT]}, r"attempts\.0\.started"), ({"attempts": 3}, "damaged")),
        ({"argv": None}, "damaged"),
        *((text, r"run\.json") for text in ("", "{", "[]", '{"schema": 2}', '{"schema": NaN}')),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_understood_is_refused(text, words):
    if isinstance(text, dict):
        text = json.dumps({**json.loads(FRESH.to_json()), **text})
    with pytest.raises(StorageError, match=words) as caught:
        parse_state(text, Path("outputs/x/run.json"))
    assert "outputs/x/run.json" in str(caught.value)


def test_a_field_that_a_later_version_added_is_passed_over():
    text = json.dumps({**json.loads(FRESH.to_json()), "colour": "blue"})
    assert parse_state(text, Path("run.json")) == FRESH
