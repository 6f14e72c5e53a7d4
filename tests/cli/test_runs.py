"""``mptrain runs``: what it lists, writes and removes, and what it asks before."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess

import pytest

from mptrain.runlog.directory import hold_lock
from tests.report.folders import make_run
from tests.small_runs import command, environment, run_in_process


@pytest.fixture
def folder(tmp_path):
    for name, status in (("good", "done"), ("bad", "failed"), ("dead", "running"), ("live", "running")):
        make_run(tmp_path / "outputs" / name, steps=3, status=status, reason="it diverged" * (status == "failed"))
    return tmp_path


def asked(folder, *words):
    """Run the command while ``live`` is being written."""
    with hold_lock(folder / "outputs/live/run.lock"):
        return run_in_process("runs", *words, cwd=folder)


def there(folder):
    return sorted(path.name for path in (folder / "outputs").iterdir())


def test_a_list_is_filtered_and_sorted_and_shows_the_number(folder):
    done = asked(folder, "--filter", "status=done", "--sort", "train_seconds")
    head, row = done.stdout.splitlines()
    assert head.split() == ["run", "status", "started", "steps", "metric", "train_seconds", "overrides"]
    assert "outputs/good" in row
    assert "12.00" in row
    assert "there is no run in outputs that fits" in asked(folder, "--filter", "status=Done").stdout
    listed = json.loads(asked(folder, "--filter", "run=*d*", "--sort", "started", "--json").stdout)
    assert {one["path"] for one in listed["runs"]} == {"outputs/good", "outputs/bad", "outputs/dead"}
    assert listed["removed"] == []


def test_a_page_lists_the_same_runs(folder):
    assert run_in_process("report", "outputs/good", cwd=folder).returncode == 0
    done = asked(folder, "--html", "--filter", "status=done")
    assert done.stdout.splitlines() == ["outputs/runs.html", "outputs/runs.md"]
    page = (folder / "outputs/runs.html").read_text()
    assert '<a href="./good/report.html">outputs/good</a>' in page
    assert "outputs/bad" not in page


def test_nothing_is_removed_without_a_yes(folder):
    before = there(folder)
    done = asked(folder, "--prune")
    assert done.returncode == 0
    assert "outputs/bad" in done.stdout
    assert "outputs/dead" in done.stdout
    assert "outputs/good" not in done.stdout
    assert "2 runs, " in done.stdout
    assert done.stdout.splitlines()[-1] == "nothing was removed; --yes removes them"
    assert json.loads(asked(folder, "--prune", "--json").stdout)["removed"] == []
    assert there(folder) == before


@pytest.mark.parametrize("name", ["x\nremoved good", "\x1b[2J", "\u202egnp"])
def test_the_name_of_a_removed_run_is_one_line(folder, name):
    (folder / "outputs/bad").rename(folder / "outputs" / name)
    done = asked(folder, "--prune", "--yes")
    told = [line for line in done.stdout.splitlines() if line.startswith("removed")]
    assert (len(told), "removed good" in told) == (2, False)
    assert all(letter.isprintable() or letter == "\n" for letter in done.stdout)
    assert "good" in there(folder)


def test_failed_and_killed_runs_are_removed_and_a_running_one_stays(folder):
    done = asked(folder, "--prune", "--yes")
    assert done.returncode == 0
    assert {line for line in done.stdout.splitlines() if line.startswith("removed")} == {
        "removed outputs/bad", "removed outputs/dead",
    }  # fmt: skip
    assert there(folder) == ["good", "live"]
    assert "there is no run to remove in outputs" in asked(folder, "--prune", "--yes").stdout


def test_what_a_filter_selects_is_removed_but_for_a_running_run(folder):
    done = asked(folder, "--prune", "--filter", "run=*o*", "--filter", "status=[dr]*", "--yes", "--json")
    told = json.loads(done.stdout)
    assert told["removed"] == ["outputs/good"]
    assert told["notes"] == ["outputs/live is running: it stays"]
    assert there(folder) == ["bad", "dead", "live"]


def test_a_run_that_cannot_be_removed_is_named_and_the_others_are_removed(folder, monkeypatch):
    with hold_lock(folder / "outputs/sweep.lock"):
        done = asked(folder, "--prune", "--yes")
    assert done.returncode == 6
    named = re.findall(r"^error: outputs/(\w+) belongs to a sweep that process", done.stderr, re.M)
    assert set(named) == {"dead", "bad"}
    assert done.stderr.count("hint: wait until it has ended") == 2
    assert {"bad", "dead", "good", "live"} < set(there(folder))


@pytest.mark.process
@pytest.mark.parametrize(("typed", "left"), [("yes\n", ["good"]), ("y\n", ["bad", "good"]), ("\x04", ["bad", "good"])])
def test_a_terminal_is_asked(tmp_path, typed, left):
    for name, status in (("good", "done"), ("bad", "failed")):
        make_run(tmp_path / "outputs" / name, steps=3, status=status)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command("runs", "--prune"), cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env=environment()
    ) as process:
        os.close(theirs)
        said = b""
        while b"Type yes:" not in said:
            said += os.read(ours, 1000)
        os.write(ours, typed.encode())
        assert process.wait(60) == 0
    os.close(ours)
    assert there(tmp_path) == left
