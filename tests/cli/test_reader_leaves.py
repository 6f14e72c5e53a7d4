"""Commands whose reader leaves: those that train continue, the others end."""

import json
import os
import subprocess

import pytest

from mptrain.cli import messages
from tests.small_runs import TINY, command, environment

pytestmark = pytest.mark.process


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("words", [(), ("-m", "seed=0,1")])
def test_a_reader_that_leaves_does_not_end_training(tmp_path, words):
    done = subprocess.run(
        command(*words, *TINY, "run.name=x"),
        check=False,
        cwd=tmp_path,
        env=environment(),
        stdout=closed_pipe(),
        stderr=subprocess.PIPE,
    )
    assert (done.returncode, done.stderr.count(b"error")) == (0, 0)
    states = [json.loads(path.read_text()) for path in (tmp_path / "outputs/x").rglob("run.json")]
    assert [state["status"] for state in states] == ["done"] * max(1, len(words))


def test_a_reader_that_leaves_ends_a_command_that_only_prints():
    messages.outlive_reader(False)
    with pytest.raises(BrokenPipeError), messages.writing():
        raise BrokenPipeError
    with pytest.raises(messages.StorageError), messages.writing():
        raise OSError(28, "No space left on device")
