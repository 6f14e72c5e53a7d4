"""The file that is digested while it is written."""

from __future__ import annotations

import hashlib

import pytest
import torch

from mptrain.runlog.checkpoint_data import HashedFile


def test_the_digest_is_that_of_the_file_whatever_the_pieces(tmp_path):
    path = tmp_path / "file"
    lasting = torch.arange(3 << 20)
    passing, pieces = bytearray(100_000), [b"", b"a", lasting.numpy().data.cast("B"), b"bc"]
    with HashedFile(path, {lasting.data_ptr(): lasting.nbytes}) as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        for value in range(50):
            passing[:] = bytes([value]) * len(passing)
            file.write(passing)
        digest = file.finish()
    content = path.read_bytes()
    assert digest == hashlib.sha256(content).hexdigest()
    assert file.count == len(content) == 3 + lasting.nbytes + 50 * len(passing)
    assert content[1 : 1 + lasting.nbytes] == pieces[2]
    assert content.endswith(passing)


def test_it_ends_whatever_happens_and_keeps_the_cause(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="space"), HashedFile(tmp_path / "full", {}) as file:
        file.write(bytes(9 << 20))
    assert isinstance(file.failure, OSError)
    assert not file._thread.is_alive()
    with pytest.raises(KeyError), HashedFile(tmp_path / "file", {}) as file:
        raise KeyError
    assert not file._thread.is_alive()
    assert file.failure is None
