"""A run that is moved, removed or replaced while it trains ends with an error, and nothing is made anew in its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mptrain.cli.main import main
from mptrain.runlog.atomic_files import require_folder_stays, require_in_place, storage_errors, write_atomically
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.system.errors import StorageError
from tests.small_runs import TINY

WORDS = (*TINY, "train.max_steps=12", "checkpoint.every_steps=4", "run.name=a")


def moved(folder):
    folder.rename(folder.with_name("b"))


def removed(folder):
    gone = folder.rename(folder.absolute().parents[1] / "gone")  # else it would not be empty for long
    shutil.rmtree(gone)


def replaced(folder):
    folder.rename(folder.with_name("b"))
    shutil.copytree(folder.with_name("b"), folder)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def interfered(monkeypatch, change, path="outputs/a"):
    """Let something happen to a folder once the first checkpoint is there."""
    save, done = CheckpointStore.save, []

    def save_and_change(self, *args, **options):
        found = save(self, *args, **options)
        if not done:
            done.append(change(Path(path)))
        return found

    monkeypatch.setattr(CheckpointStore, "save", save_and_change)


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize("change", [moved, removed, replaced])
def test_a_run_whose_folder_has_gone_ends_and_makes_nothing_anew(capsys, monkeypatch, tmp_path, change, background):
    left = []

    def change_and_look(folder):
        change(folder)
        left.append(contents("outputs"))

    interfered(monkeypatch, change_and_look)
    assert main([*WORDS, f"checkpoint.async_save={background}"]) == 6
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    what = "it was " if change is removed else f"it was moved to {tmp_path}/outputs/b"
    assert error.startswith(f"error: outputs/a disappeared while it was being written: {what}")
    assert hint.startswith("hint: ")
    assert contents("outputs") == left[0]
    if change is moved:
        assert hint.endswith(f"mptrain resume {tmp_path}/outputs/b")
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        assert main(["resume", "outputs/b"]) == 0


def test_a_failure_and_a_stall_are_not_written_into_another_folder(monkeypatch, tmp_path):
    from mptrain.engine.loop import Loop

    def fail(loop):
        replaced(Path("outputs/a"))
        shutil.rmtree("outputs/a/checkpoints", ignore_errors=True)
        raise LookupError("a bug")

    monkeypatch.setattr(Loop, "run", fail)
    assert main(list(WORDS)) == 1
    assert not Path("outputs/a/failure").exists()
    assert '"running"' in Path("outputs/a/run.json").read_text()


@pytest.mark.long
def test_a_sweep_whose_folder_has_gone_makes_nothing_anew(capsys, monkeypatch, tmp_path):
    from mptrain.study.commands import sweep_display

    def move(self, sweep, job):
        if Path("outputs/s").exists():
            Path("outputs/s").rename("outputs/t")

    monkeypatch.setattr(sweep_display.Lines, "changed", move)
    assert main(["-m", *WORDS[:-1], "run.name=s", "seed=0,1"]) == 6
    assert (
        f"outputs/s disappeared while it was being written: it was moved to {tmp_path}/outputs/t"
        in capsys.readouterr().err
    )
    assert [path.name for path in Path("outputs").iterdir()] == ["t"]


def test_writing_requires_the_folder_that_was_there(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with require_folder_stays(folder):
        write_atomically(folder / "x", "x")
        with require_folder_stays(folder):
            require_in_place(folder / "deep/er")
        folder.rename(tmp_path / "old")
        for write in (lambda: write_atomically(folder / "x", "y"), lambda: storage_errors(folder / "x").__enter__()):
            with pytest.raises(StorageError, match=r"disappeared while it was being written: it was moved to .*/old"):
                write()
        folder.mkdir()
        (tmp_path / "old/x").unlink()
        (tmp_path / "old").rmdir()
        with pytest.raises(StorageError, match="another folder has replaced it"):
            write_atomically(folder / "x", "y")
        write_atomically(tmp_path / "run2", "elsewhere")
        with storage_errors(folder / "x", "read"):
            pass
        folder.rmdir()
        with pytest.raises(StorageError, match="it was removed"):
            write_atomically(folder / "x", "y")
        assert not folder.exists()
    write_atomically(tmp_path / "x", "afterwards nothing is required")
