"""Files that a user names are written beside nothing that is no file, never into a run, and without rests of killed writers."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mptrain.report.html_and_markdown import write_page
from mptrain.report.page import Cell, Page
from mptrain.runlog import atomic_files
from mptrain.runlog.atomic_files import folder_at_once, remove_drafts, temporary, write_atomically, write_together
from mptrain.runlog.directory import create_run, require_outside_runs, require_target
from mptrain.study.sweep.runner import fresh_place
from mptrain.system.errors import StorageError


def made(kind, path):
    """Something that is no regular file, made for the test."""
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except OSError:
            pytest.skip("nodes cannot be made here")
    else:
        path.symlink_to(path.with_name("elsewhere"))


KINDS = ("a named pipe", "a socket", "a folder", "a device", "a symbolic link")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_by_every_writer_and_stays(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path, other = tmp_path / "w.pt", tmp_path / "a.json"
    made(kind, path.relative_to(tmp_path))
    before = path.lstat()
    for write in (
        lambda: write_atomically(path, "x"),
        lambda: write_together({other: "x", path: b"x"}),
        lambda: require_target(path),
    ):
        with pytest.raises(StorageError, match=f"w.pt is {kind}, not a file, and is not replaced"):
            write()
    assert (path.lstat().st_mode, path.lstat().st_ino) == (before.st_mode, before.st_ino)
    assert [one.name for one in tmp_path.iterdir()] == ["w.pt"]


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_a_page_whose_place_is_taken_replaces_none_of_its_files(tmp_path, name):
    other = {"report.html": "report.md", "report.md": "report.html"}[name]
    (tmp_path / other).write_text("old")
    os.mkfifo(tmp_path / name)
    with pytest.raises(StorageError, match=f"{name} is a named pipe"):
        write_page(
            Page("over", "title", Cell(""), "lead", ()), tmp_path, tmp_path / "report.html", tmp_path / "report.md"
        )
    assert (tmp_path / other).read_text() == "old"


def test_several_files_are_replaced_together_or_not_at_all(tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    write_together({one: "1", two: "2"})
    write, written = atomic_files.write_all, []

    def full(descriptor, pending):
        written.append(bytes(pending))
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "full")
        write(descriptor, pending)

    monkeypatch.setattr(atomic_files, "write_all", full)
    with pytest.raises(StorageError, match=r"cannot write .*two: the disk is full"):
        write_together({one: "new", two: "new"})
    assert (one.read_text(), two.read_text(), len(list(tmp_path.iterdir()))) == ("1", "2", 2)


def test_a_run_is_no_place_for_other_files_however_it_is_named(tmp_path, monkeypatch):
    run = create_run(tmp_path, "x", "a")
    run.paths.run_json.write_text("{}")
    run.paths.checkpoints.mkdir()
    run.paths.export.mkdir()
    (tmp_path / "link").symlink_to(run.paths.checkpoints)
    (tmp_path / "b").mkdir()
    places = [run.root / "w.pt", run.root / "run.json", run.root / "export" / "w.pt", tmp_path / "link" / "w.pt"]
    places += [tmp_path / "b" / ".." / "a" / "checkpoints" / "w.pt"]
    monkeypatch.chdir(run.paths.checkpoints)
    for place in (*places, Path(os.path.relpath(places[0]))):
        with pytest.raises(StorageError, match=r"(?m)(is|lies in) the run .*/a$"):
            require_target(place)
    require_target(run.paths.export / "w.pt", run.paths.export)
    require_target(tmp_path / "b" / "w.pt", run.paths.export)
    with pytest.raises(StorageError, match="is the run"):
        require_outside_runs(run.root)
    for make in (lambda: fresh_place(run.root, "reports"), lambda: create_run(run.root / "more", "x")):
        with pytest.raises(StorageError, match="the run"):
            make()


def test_another_name_of_a_file_of_a_run_is_replaced_without_it(tmp_path):
    (tmp_path / "a").write_text("checkpoint")
    os.link(tmp_path / "a", tmp_path / "b")
    write_atomically(tmp_path / "b", "new")
    assert (tmp_path / "a").read_text() == "checkpoint"


def test_a_read_only_folder_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK and False)
    with pytest.raises(StorageError, match=r"cannot write .*w\.pt: .* is read-only"):
        require_target(tmp_path / "w.pt")


KILLED = """
import os, signal, sys
from pathlib import Path
from mptrain.runlog import atomic_files
atomic_files.write_all = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "file":
    atomic_files.write_atomically(Path(sys.argv[2]), "x")
with atomic_files.folder_at_once(Path(sys.argv[2])) as folder:
    atomic_files.write_atomically(folder / "page", "x")
"""


@pytest.mark.process
@pytest.mark.parametrize("what", ["file", "folder"])
def test_the_next_writer_removes_what_a_killed_one_has_left(tmp_path, what):
    target = tmp_path / "reports" / "day" / "w"
    target.parent.mkdir(parents=True)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED, what, str(target)], check=False, timeout=60)
        assert [path.name.startswith("w.") for path in target.parent.iterdir()] == [True]
        if what == "file":
            remove_drafts(target.parent, "other")
            assert len(list(target.parent.iterdir())) == 1
            require_target(target)
            assert not list(target.parent.iterdir())
    with folder_at_once(tmp_path / "reports" / "later" / "x") as folder:
        (folder / "page").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        "reports/later/x/page"
    ]


def test_drafts_that_are_being_written_stay_and_a_folder_that_fails_leaves_nothing(tmp_path):
    path = tmp_path / "day" / "x"

    def fail():
        with folder_at_once(path) as folder:
            remove_drafts(path.parent)
            assert folder.is_dir()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(path.parent.iterdir())
    dead = temporary(path)
    dead.touch()
    remove_drafts(path.parent)
    assert not dead.exists()
