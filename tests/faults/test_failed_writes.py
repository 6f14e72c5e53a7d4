"""Every write of the commands that read runs fails once: a line and a code, and no file is half written."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path

import pytest

from mptrain.cli.main import main
from tests.small_runs import TINY

COMMANDS = {
    "report": ("report", "outputs/a"),
    "replay": ("replay", "outputs/a", "scaler=dynamic", "scaler.growth_interval=2"),
    "recommend": ("recommend", "outputs/a"),
    "export": ("export", "outputs/a"),
    "export of a safetensors file": ("export", "outputs/a", "--output", "weights.safetensors"),
    "diagnose": ("diagnose", "outputs/a"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a short run whose histograms, failure and checkpoints all commands can read."""
    place = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(place)
    try:
        words = ["precision=fp16_dynamic", "scaler.init_scale=65536", "diagnostics=histograms", "diagnostics.every=1"]
        assert main([*TINY, *words, "train.max_steps=4", "run.name=a"]) == 0
    finally:
        os.chdir(before)
    return place


class FailsOnce:
    """Replacements of calls of the operating system that write, of which the k-th one fails."""

    def __init__(self, monkeypatch, root: Path, names=("fsync", "rename", "replace", "mkdir", "write", "open")) -> None:
        self.left, self.failed = 0, ""
        self._root = str(root)
        for name in names:
            made = self._opened(os.open) if name == "open" else self._failing(name, getattr(os, name))
            monkeypatch.setattr(os, name, made)

    def _failing(self, name, original):
        def call(*args, **kwargs):
            if name == "write" and not str(Path(f"/proc/self/fd/{args[0]}").readlink()).startswith(self._root):
                return original(*args, **kwargs)  # a pipe or the terminal
            self._count(name)
            return original(*args, **kwargs)

        return call

    def _opened(self, original):
        def call(path, flags, *args, **kwargs):
            if flags & os.O_CREAT:
                self._count("open")
            return original(path, flags, *args, **kwargs)

        return call

    def _count(self, name):
        self.left -= 1
        if self.left == 0:
            self.failed = name
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.slow if name == "report" else ()) for name in COMMANDS]
)
def test_each_write_that_fails_once_gives_a_line_and_a_code_and_nothing_half(
    trained, tmp_path, monkeypatch, capsys, command
):
    place = tmp_path / "here"
    place.mkdir()
    fails = FailsOnce(monkeypatch, tmp_path)
    before, whole = files(trained), set()
    for k in itertools.count():  # 0: nothing fails
        fails.left = -1
        os.chdir(tmp_path)
        shutil.rmtree(place)
        shutil.copytree(trained, place)
        monkeypatch.chdir(place)
        fails.left, fails.failed = k, ""
        code = main(list(COMMANDS[command]))
        shown = capsys.readouterr()
        after = files(place)
        if k and not fails.failed:
            break
        if k:
            assert code == 6, (k, fails.failed, code, shown)
            assert "error: " in shown.err, (k, fails.failed)
        assert "bug in mptrain" not in shown.err
        whole = whole or set(after)
        assert set(after) <= whole, (k, fails.failed)
        changed = {name for name, content in before.items() if after.get(name) != content}
        assert changed <= {"outputs/a/run.lock"}, (k, fails.failed)
    assert k > 3


@pytest.mark.slow
def test_each_fsync_and_rename_of_training_that_fails_gives_a_line_and_a_code(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fails = FailsOnce(monkeypatch, tmp_path, ("fsync", "rename", "replace", "mkdir"))
    for k in itertools.count(1):
        fails.left, fails.failed = k, ""
        code = main([*TINY, "train.max_steps=2", f"run.name=run{k}"])
        shown = capsys.readouterr()
        if not fails.failed:
            break
        assert code == 6, (k, fails.failed, shown)
        assert "error: " in shown.err, (k, fails.failed)
    assert code == 0
    assert k > 10
