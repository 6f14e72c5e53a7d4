"""What a run that ended tells its user to type."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mptrain.config.compose import compose
from mptrain.parallel.communicator import SINGLE_PROCESS
from mptrain.run.failure_report import explain_error
from mptrain.system.errors import ConfigError, NumericsError, Preempted, StorageError

DIRECTORY = SimpleNamespace(root="outputs/r")
TRUST = "extensions.allow=[theirs.*]"


def hint_of(error, words=()):
    shown = explain_error(error, compose([*words]), DIRECTORY, SINGLE_PROCESS)
    assert isinstance(shown, Preempted)
    return shown.hint


@pytest.mark.parametrize(
    "ended", [lambda: Preempted("SIGTERM", "continue with: mptrain resume outputs/r", 75), KeyboardInterrupt]
)
@pytest.mark.parametrize(
    ("words", "count", "here", "machines", "expected"),
    [
        ((), 1, 1, "", "mptrain resume outputs/r"),
        ((), 2, 2, "1", "torchrun --nproc-per-node=2 -m mptrain resume outputs/r"),
        ((), 8, 4, "2", "torchrun --nproc-per-node=4 --nnodes=2 ... -m mptrain resume outputs/r"),
        ((), 8, 4, "", "torchrun --nproc-per-node=4 --nnodes=2 ... -m mptrain resume outputs/r"),
        ((), 8, 6, "2", "torchrun --nproc-per-node=... --nnodes=2 ... -m mptrain resume outputs/r"),
        ((), 8, 1, "3", "torchrun --nproc-per-node=... --nnodes=3 ... -m mptrain resume outputs/r"),
        ((TRUST,), 2, 2, "1", f"torchrun --nproc-per-node=2 -m mptrain resume outputs/r '{TRUST}'"),
    ],
)
def test_a_run_is_gone_on_with_as_it_was_begun(torchrun, ended, words, count, here, machines, expected):
    torchrun(count, here, machines)
    assert hint_of(ended(), words) == f"continue with: {expected}"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StorageError("", "to continue: mptrain resume /new/place"), "to continue: {}mptrain resume /new/place{}"),
        (StorageError("", "write mptrain resume outputs/r"), "write {}mptrain resume outputs/r{}"),
        (NumericsError("", "x; mptrain diagnose outputs/r tries it"), "x; {}mptrain diagnose outputs/r{} tries it"),
        (NumericsError("", "mptrain diagnose names the operator"), "mptrain diagnose names the operator"),
    ],
)
def test_every_command_in_the_hint_of_a_run_finds_and_allows_its_code(monkeypatch, error, expected):
    monkeypatch.setenv("PYTHONPATH", "my code")
    plain = error.hint
    assert explain_error(error, compose([]), DIRECTORY, SINGLE_PROCESS).hint == plain
    shown = explain_error(error, compose([TRUST]), DIRECTORY, SINGLE_PROCESS)
    assert shown is error
    assert shown.hint == expected.format("PYTHONPATH='my code' ", f" '{TRUST}'")


def test_an_index_out_of_range_names_the_cast_of_the_inputs(tmp_path):
    directory = SimpleNamespace(root=tmp_path, paths=SimpleNamespace(failure=tmp_path / "failure"))
    for mode, said in (("bf16", "torch.bfloat16, which rounds whole numbers above 256"), ("amp_dynamic", "")):
        try:
            exec("[][3]", {"__name__": "theirs.net"})
        except IndexError as error:
            shown = explain_error(error, compose([TRUST, f"precision={mode}"]), directory, SINGLE_PROCESS)
        assert isinstance(shown, ConfigError)
        assert said in shown.problems[0].hint
        assert ("an index may be another one" in shown.problems[0].hint) == bool(said)


@pytest.fixture
def torchrun(monkeypatch):
    """Sets the variables that torchrun sets."""

    def begin(count, here, machines=""):
        monkeypatch.delenv("PYTHONPATH", raising=False)  # which a hint would name
        sizes = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": here, "GROUP_WORLD_SIZE": machines}
        names = {"RANK": 0, "LOCAL_RANK": 0, **sizes}
        for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
            monkeypatch.setenv(name, str(value))

    return begin
