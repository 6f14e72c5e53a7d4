"""Safe writing: errors of the disk in words, and files that are replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from mptrain.runlog.atomic_files import (
    free_bytes,
    readable_bytes,
    remove_drafts,
    storage_errors,
    temporary,
    write_all,
    write_atomically,
)
from mptrain.system.errors import StorageError


@pytest.mark.parametrize(
    ("number", "words", "hint"),
    [
        (errno.ENOSPC, r"disk is full \(4.2 MB needed, [\d.]+ .?B free\)", "free some disk space"),
        (errno.EDQUOT, "quota", "free some disk space"),
        (errno.EROFS, "read-only", "run.root"),
        (errno.EACCES, "permission denied", "run.root"),
        (errno.EIO, "Input/output error", "check"),
    ],
)
def test_an_error_of_the_disk_says_what_and_where(tmp_path, number, words, hint):
    path = tmp_path / "steps.jsonl"
    with (
        pytest.raises(StorageError, match=words) as caught,
        storage_errors(path, needed=4_200_000, good="the checkpoint of step 9"),
    ):
        raise OSError(number, os.strerror(number))
    assert str(path) in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.hint.endswith("still intact: the checkpoint of step 9")
    with pytest.raises(ValueError, match="mine"), storage_errors(path):
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("files", "free_files", "free_blocks", "words"),
    [
        (100, 0, 10**9, "its inodes are used up"),
        (100, 0, 0, "the disk is full"),
        (100, 7, 10**9, "the disk is full"),
        (0, 0, 10**9, "the disk is full"),  # as btrfs says, which has no fixed number of files
    ],
)
def test_a_disk_without_inodes_is_not_called_full(tmp_path, monkeypatch, files, free_files, free_blocks, words):
    told = [4096, 4096, 10**9, free_blocks, free_blocks, files, free_files, free_files, 0, 255]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(told))
    with pytest.raises(StorageError, match=words) as caught, storage_errors(tmp_path / "a", needed=64):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert ("remove files" in caught.value.hint) == ("inodes" in words)


def test_a_really_full_device_is_an_error_for_the_user():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    pending = bytearray(b"line\n")
    try:
        with pytest.raises(StorageError, match="disk is full"), storage_errors(Path("/dev/full")):
            write_all(descriptor, pending)
    finally:
        os.close(descriptor)
    assert pending == b"line\n"  # nothing is lost for a second try


def test_free_bytes_are_those_of_the_nearest_existing_folder(tmp_path):
    assert free_bytes(tmp_path / "not" / "there") == pytest.approx(free_bytes(tmp_path), rel=0.05)
    assert free_bytes(tmp_path) > 0


def test_bytes_for_people():
    counts = (0, 999, 1000, 999_999, 4_200_000, 3 * 10**12)
    assert [readable_bytes(count) for count in counts] == ["0 B", "999 B", "1.0 kB", "1.0 MB", "4.2 MB", "3.0 TB"]


def test_an_atomic_write_leaves_nothing_beside_the_file(tmp_path):
    path = tmp_path / "run.json"
    for content in ("first", "zweite Fassung é", b"\x00\xff"):
        write_atomically(path, content)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("where", ["write", "fsync", "open"])
def test_a_failed_atomic_write_keeps_the_old_and_no_draft(tmp_path, monkeypatch, where):
    path = tmp_path / "run.json"
    write_atomically(path, "old")

    def refuse(*_):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, where, refuse)
        with pytest.raises(StorageError, match="disk is full"):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(StorageError, match=re.escape(str(tmp_path / "gone"))):
        write_atomically(tmp_path / "gone" / "x", "new")


def test_undecodable_bytes_of_a_command_line_survive(tmp_path):
    write_atomically(tmp_path / "x", b"caf\xe9".decode("utf-8", "surrogateescape"))
    assert (tmp_path / "x").read_bytes() == b"caf\xe9"


def test_temporary_names_are_beside_the_file_and_differ(tmp_path):
    drafts = {temporary(tmp_path / "x.pt") for _ in range(20)}
    assert len(drafts) == 20
    assert {(draft.parent, draft.suffix) for draft in drafts} == {(tmp_path, ".tmp")}


def test_drafts_of_killed_writers_are_removed_and_nothing_else(tmp_path):
    for name in ("run.json.0123abcd.tmp", "run.json", "notes.tmp", ".tmp", "mine.0123abcd.tmp.txt"):
        (tmp_path / name).touch()
    draft = temporary(tmp_path / "config.yaml")
    draft.touch()
    remove_drafts(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "notes.tmp", ".tmp", "mine.0123abcd.tmp.txt"}
