"""Run directories: made exclusively, found again, and never mistaken for something else."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mptrain.runlog import RunState, create_run, existing_run, last_run, open_run, run_paths
from mptrain.runlog.atomic_files import temporary
from mptrain.system.errors import ConfigError, StorageError

CREATE = """
import sys, pathlib
from mptrain.runlog import create_run, run_paths
# Both processes want the same names, and each wants every name twice.
tries = iter(range(10**6))
run_paths.secrets.token_hex = lambda size: f"{next(tries) // 2:04x}"
sys.stdin.readline()
for _ in range(10):
    print(create_run(pathlib.Path(sys.argv[1]), "cnn-digits-fp32").root)
"""


def state(started=""):
    fresh = RunState(id="x", argv=(), command="mptrain").begin()
    return replace(fresh, attempts=(replace(fresh.attempts[0], started=started),)) if started else fresh


def test_a_nameless_run_is_dated_and_labelled(tmp_path):
    run = create_run(tmp_path / "outputs", "cnn-digits-amp_dynamic")
    inside = run.root.relative_to(tmp_path / "outputs")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-cnn-digits-amp_dynamic-[0-9a-f]{4}", str(inside))
    assert run.root.is_dir()


def test_two_processes_that_race_for_names_share_no_directory(tmp_path, python):
    children = [python(CREATE, tmp_path) for _ in range(2)]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    made = []
    for child in children:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        made += out.split()
    assert len(made) == len(set(made)) == 20
    assert all(Path(path).is_dir() for path in made)


def test_names_that_are_all_taken_end_in_an_error_and_not_in_a_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(run_paths.secrets, "token_hex", lambda size: "ab" * size)
    moment = run_paths.datetime(2026, 1, 1)
    monkeypatch.setattr(run_paths, "datetime", type("Clock", (), {"now": staticmethod(lambda: moment)}))
    create_run(tmp_path, "x")
    with pytest.raises(StorageError, match="no unused run name"):
        create_run(tmp_path, "x")


def test_no_run_is_called_as_commands_call_the_newest_one(tmp_path):
    with pytest.raises(ConfigError, match="commands use it for the newest run"):
        create_run(tmp_path, "x", "last")


def test_a_name_is_made_once(tmp_path):
    assert create_run(tmp_path, "x", "a/b").root == tmp_path / "a" / "b"
    with pytest.raises(StorageError, match="exists") as caught:
        create_run(tmp_path, "x", "a/b")
    assert "run.resume=auto" in caught.value.hint


def test_a_name_inside_another_run_is_refused(tmp_path):
    create_run(tmp_path, "x", "a").write_state(state())
    with pytest.raises(StorageError, match=r"a is the run"):
        create_run(tmp_path, "x", "a/checkpoints")


def test_an_escaping_name_creates_nothing(tmp_path):
    root = tmp_path / "outputs"
    for name in ("../x", "/abs", "a/../../x", ""):
        with pytest.raises(ConfigError):
            create_run(root, "x", name)
        with pytest.raises(ConfigError):
            existing_run(root, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [None, "a"])
def test_a_root_that_cannot_be_written_is_a_storage_error(tmp_path, monkeypatch, name):
    def refuse(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        create_run(tmp_path / "file", "x", name)
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(StorageError, match="cannot create") as caught:
        create_run(tmp_path / "outputs", "x", name)
    assert "run.root" in caught.value.hint


def test_a_run_whose_maker_was_killed_at_once_has_no_state(tmp_path):
    assert existing_run(tmp_path, "a") is None
    run = create_run(tmp_path, "x", "a")
    run.write_config("seed: 0\n", [])
    assert existing_run(tmp_path, "a").read_state() is None
    run.paths.data.write_text("{}\n")  # the last that is written before run.json
    assert existing_run(tmp_path, "a").read_state() is None
    run.write_state(state())
    assert existing_run(tmp_path, "a").read_state() is not None


def test_a_foreign_directory_is_neither_a_run_nor_overwritten(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("")
    with pytest.raises(StorageError, match="is not a run"):
        existing_run(tmp_path, "a")
    with pytest.raises(StorageError, match="is not a run directory"):
        open_run(tmp_path / "a")
    with pytest.raises(StorageError, match="no run directory"):
        open_run(tmp_path / "b")


def test_the_last_run_is_the_one_started_last_wherever_it_lies(tmp_path, monkeypatch):
    create_run(tmp_path, "x").write_state(state("2026-01-01T00:00:00.000+00:00"))
    newest = create_run(tmp_path, "x", "sweeps/lr/3")
    newest.write_state(state("2026-01-03T00:00:00.000+00:00"))
    create_run(tmp_path, "x", "named").write_state(state("2026-01-02T00:00:00.000+00:00"))
    assert last_run(tmp_path).root == newest.root
    monkeypatch.chdir(tmp_path.parent)
    assert last_run(Path(tmp_path.name)).root == newest.root.relative_to(tmp_path.parent)


def test_the_last_run_passes_over_broken_hidden_and_nested_ones(tmp_path):
    good = create_run(tmp_path, "x", "good")
    good.write_state(state("2026-01-01T00:00:00.000+00:00"))
    create_run(tmp_path, "x", "broken").paths.run_json.write_text("{")
    create_run(tmp_path, "x", "unborn")
    for folder in (tmp_path / ".trash", good.paths.failure):
        folder.mkdir()
        (folder / "run.json").write_text(state("2027-01-01T00:00:00.000+00:00").to_json())
    assert last_run(tmp_path).root == good.root


@pytest.mark.parametrize("root", ["", "missing"])
def test_no_run_at_all_is_an_error_with_a_hint(tmp_path, root):
    with pytest.raises(StorageError, match="no run") as caught:
        last_run(tmp_path / root)
    assert "train" in caught.value.hint


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        *(("tracd", "outputs/traced"), ("outputs/trace", "outputs/traced"), ("outputs/traced/run.json", "outputs/traced")),
        ("quite_another", "run.json"),
    ],
)  # fmt: skip
def test_a_run_that_is_not_there_leads_to_one_of_a_similar_name(tmp_path, monkeypatch, wrong, hint):
    monkeypatch.chdir(tmp_path)
    create_run(Path("outputs"), "x", "traced").write_state(state())
    with pytest.raises(StorageError, match="no run directory") as raised:
        open_run(Path(wrong))
    assert hint in raised.value.hint


def test_drafts_of_a_killed_process_are_removed_in_all_folders(tmp_path):
    run = create_run(tmp_path, "label")
    run.paths.samples.mkdir()
    drafts = [temporary(run.root / "run.json"), temporary(run.paths.samples / "picture.png")]
    kept = [run.paths.samples / "picture.png", run.paths.config]
    for path in (*drafts, *kept):
        path.touch()
    run.remove_drafts()
    assert [path.exists() for path in (*drafts, *kept)] == [False, False, True, True]


@pytest.mark.parametrize("written", [["run.lock"], ["run.lock", "config.yaml"], ["run.lock", "run.json.0123abcd.tmp"]])
def test_a_run_killed_before_it_had_a_state_is_told_how_to_start(tmp_path, written):
    killed = create_run(tmp_path, "x", "a").root
    for name in written:
        (killed / name).touch()
    with pytest.raises(StorageError, match="was killed before training started") as caught:
        open_run(killed)
    assert "run.resume=auto" in caught.value.hint
    (killed / "notes.txt").touch()
    with pytest.raises(StorageError, match="is not a run directory"):
        open_run(killed)
