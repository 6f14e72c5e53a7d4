"""Named pipes, sockets and hard links in a run that somebody else made: nothing waits for them, and nothing is written through them."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from mptrain.cli.main import main
from mptrain.config.catalogue import Catalogue
from mptrain.config.yaml_files import find_endless
from mptrain.runlog.directory import hold_lock, holder_of
from mptrain.runlog.sweeps import SWEEP_JSON, read_sweep
from mptrain.system.errors import StorageError
from mptrain.system.files import open_in_place, open_to_read
from tests.small_runs import TINY

WORDS = (*TINY, "train.max_steps=2", "diagnostics=histograms", "run.name=run")
COMMANDS = ("report", "resume", "eval", "replay", "recommend", "compare", "export", "diagnose")
#: For each file of a run, a command that reads it.
FILES = {
    "config.yaml": "resume", "overrides.yaml": "resume", "steps.jsonl": "report", "events.jsonl": "report", "epochs.csv": "resume",
    "histograms.jsonl": "recommend", "summary.json": "report", "data.json": "export", "run.lock": "resume", "samples/captions.json": "report",
    "checkpoints/step-00000002.json": "eval", "checkpoints/step-00000002.pt": "eval",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert main([*WORDS, f"run.root={folder}"]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained, tmp_path / "outputs/run")).relative_to(tmp_path)


def words_of(command, run):
    more = {"resume": ["train.max_steps=3"], "replay": ["scaler=static", "scaler.scale=8"]}
    more |= {"compare": [str(run)], "diagnose": ["--step", "1"]}
    return [command, str(run), *more.get(command, [])]


def answers(capsys, words):
    """The exit code and the errors of a command that has to end by itself."""
    capsys.readouterr()
    code = main(words)
    errors = capsys.readouterr().err
    assert "bug in mptrain" not in errors
    return code, errors


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_waits_for_a_named_pipe_in_place_of_a_run(capsys, run, command):
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    code, errors = answers(capsys, words_of(command, run))
    if command == "export":  # does not need what it says
        assert code == 0
    else:
        assert code == 6
        assert f"{run}/run.json: it is a named pipe, not a file\nhint: " in errors
    assert answers(capsys, words_of(command, "last"))[0] != 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_run_can_keep_a_command_waiting(capsys, run, name):
    place = run / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    (run / "samples/x-000001.tsv").parent.mkdir(exist_ok=True)
    os.mkfifo(run / "samples/x-000001.tsv")
    answers(capsys, words_of(FILES[name], run))


@pytest.mark.timeout(30)
def test_a_socket_and_a_device_are_refused_too(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        with pytest.raises(OSError, match="it is a socket, not a file"):
            open_to_read(tmp_path / "s")
    with pytest.raises(OSError, match="it is a device, not a file"):
        open_to_read(Path("/dev/zero"))
    os.mkfifo(tmp_path / "run.lock")
    for look in (lambda: holder_of(tmp_path / "run.lock"), lambda: hold_lock(tmp_path / "run.lock").__enter__()):
        with pytest.raises(StorageError, match="it is a named pipe, not a file"):
            look()
    os.mkfifo(tmp_path / SWEEP_JSON)
    with pytest.raises(StorageError, match="it is a named pipe, not a file"):
        read_sweep(tmp_path)
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model/evil.yaml")
    assert find_endless([tmp_path]) is None
    [option] = Catalogue([tmp_path]).groups["model"].values()
    assert option.lines == ()


@pytest.mark.parametrize("name", ["steps.jsonl", "events.jsonl", "epochs.csv", "histograms.jsonl", "run.lock"])
@pytest.mark.parametrize("words", [("resume", "outputs/run", "train.max_steps=3"), (*WORDS, "run.resume=auto")])
def test_nothing_is_written_through_a_hard_link(capsys, run, name, words):
    precious = Path("precious")
    shutil.copyfile(run / name, precious)
    (run / name).unlink()
    (run / name).hardlink_to(precious)
    state = (run / "run.json").read_text().replace('"status": "done"', '"status": "preempted"')
    (run / "run.json").write_text(state)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    content = precious.read_bytes()
    code, errors = answers(capsys, list(words))
    assert code == 6
    first, hint = errors.splitlines()[-2:]
    assert first == f"error: {run}/{name} has another hard link, which would change too"
    assert hint == f"hint: work on a copy: cp -r {run} {run}-copy"
    assert precious.read_bytes() == content
    changed = {str(path) for path, held in before.items() if path.read_bytes() != held}
    assert changed <= {f"{run}/run.lock"}


def test_a_backup_of_hard_links_can_be_read_and_its_copy_resumed(capsys, run):
    shutil.copytree(run, "backup", copy_function=os.link)
    assert answers(capsys, ["report", "backup"])[0] == 0
    code, errors = answers(capsys, ["resume", str(run), "train.max_steps=3"])
    assert code == 6
    assert "has another hard link" in errors
    shutil.copytree("backup", "copy")
    assert answers(capsys, ["resume", "copy", "train.max_steps=3"])[0] == 0


def test_what_is_appended_to_is_a_file_of_its_own(tmp_path):
    flags = os.O_WRONLY | os.O_APPEND
    os.close(open_in_place(tmp_path / "log", flags))
    (tmp_path / "link").hardlink_to(tmp_path / "log")
    with pytest.raises(StorageError, match="has another hard link"):
        open_in_place(tmp_path / "log", flags)
    (tmp_path / "soft").symlink_to(tmp_path / "log")
    with pytest.raises(OSError, match="symbolic links"):
        open_in_place(tmp_path / "soft", flags)
