"""A run is removed whole, and only if it lies inside the folder and nobody writes it."""

from __future__ import annotations

import shutil

import pytest

from mptrain.cli.runs import remove_leftovers, remove_run, size_of
from mptrain.runlog.directory import hold_lock
from mptrain.runlog.run_reader import read_run
from mptrain.system.errors import StorageError
from tests.report.folders import make_run


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    make_run(tmp_path / "outputs/2026-01-01/a", steps=3)
    make_run(tmp_path / "outputs/b", steps=3)
    return tmp_path / "outputs"


def test_a_run_and_the_folders_that_become_empty_are_removed_and_no_more(folder):
    (folder / "notes.txt").write_text("mine")
    remove_run(read_run(folder / "2026-01-01/a"), folder)
    assert names(folder) == ["b", "notes.txt"]
    remove_run(read_run(folder / "b"), folder)
    assert names(folder) == ["notes.txt"]


def test_the_folder_itself_stays_when_it_becomes_empty(folder):
    shutil.rmtree(folder / "2026-01-01")
    remove_run(read_run(folder / "b"), folder)
    assert names(folder) == []


def test_what_symbolic_links_name_is_left_alone(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/kept").write_text("kept")
    (folder / "b/wandb").mkdir()
    (folder / "b/wandb/latest").symlink_to(tmp_path / "elsewhere")
    remove_run(read_run(folder / "b"), folder)
    assert (tmp_path / "elsewhere/kept").read_text() == "kept"
    assert not (folder / "b").exists()


def test_runs_outside_the_folder_or_behind_a_link_are_refused(folder, tmp_path):
    other = make_run(tmp_path / "other/c", steps=3)
    (folder / "link").symlink_to(tmp_path / "other")
    (folder / "single").symlink_to(other)
    for path in (other, folder / "link/c", folder / "single", folder / "../other/c"):
        with pytest.raises(StorageError, match=r"does not lie inside|symbolic link"):
            remove_run(read_run(path), folder)
    with pytest.raises(StorageError, match="does not lie inside"):
        remove_run(read_run(folder / "b"), folder / "b")
    assert (other / "run.json").exists()


def test_a_run_that_is_written_or_whose_sweep_runs_or_that_has_changed_is_refused(folder):
    run = read_run(folder / "b")
    with hold_lock(run.paths.lock), pytest.raises(StorageError, match="is being written by process"):
        remove_run(run, folder)
    with hold_lock(folder / "sweep.lock"), pytest.raises(StorageError, match="belongs to a sweep that process"):
        remove_run(run, folder)
    (folder / "b/run.json").write_text((folder / "b/run.json").read_text().replace('"done"', '"failed"'))
    with pytest.raises(StorageError, match="has changed since it was listed"):
        remove_run(run, folder)
    assert (folder / "b/summary.json").exists()


@pytest.mark.parametrize("at", ["rename", "rmtree"])
def test_an_interruption_leaves_a_whole_run_or_none_and_the_rest_goes_the_next_time(folder, monkeypatch, at):
    files = names(folder / "b")

    def interrupted(path, *rest, **more):
        if at == "rmtree":
            (path / "steps.jsonl").unlink()
        raise KeyboardInterrupt

    run = read_run(folder / "b")
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename" if at == "rename" else "shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove_run(run, folder)
    if at == "rename":
        assert [name for name in names(folder / "b") if name != "run.lock"] == files
        return
    left = [name for name in names(folder) if name.endswith(".removed")]
    assert len(left) == 1
    assert not (folder / "b").exists()
    (folder / ".mine.removed").mkdir()
    remove_leftovers(folder)
    assert names(folder) == [".mine.removed", "2026-01-01"]


def test_the_size_is_that_of_the_files(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/one").write_bytes(b"x" * 10)
    (tmp_path / "a/b/two").write_bytes(b"x" * 100)
    (tmp_path / "a/link").symlink_to("/usr")
    assert 110 <= size_of(tmp_path / "a") < 200


def test_a_run_with_others_inside_is_refused(folder):
    make_run(folder / "b/inner", steps=3)
    with pytest.raises(StorageError, match="has another run inside"):
        remove_run(read_run(folder / "b"), folder)
    assert (folder / "b/inner/run.json").exists()
