"""The first word decides; every failure ends as lines and a number."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mptrain.runlog.directory import create_run
from mptrain.runlog.run_state import RunState
from mptrain.system import errors
from tests.loops import each
from tests.small_runs import environment


def test_words_with_an_equals_sign_train(terminal):
    assert terminal("train.epochs=3") == 0
    assert terminal("train", "train.epochs=4") == 0
    assert terminal() == 0
    assert [config.train.epochs for config in terminal.trained] == [3, 4, 10]
    terminal.codes = [75]
    assert terminal("scaler=static", "scaler.scale=1000") == 75
    assert terminal.err.count("warning: scaler.scale=1000") == 1


def test_resume_and_eval_pass_the_run_and_the_overrides(terminal, monkeypatch):
    monkeypatch.setattr("mptrain.cli.commands.run_folder", lambda run, overrides: run)
    assert terminal("resume", "last") == 0
    assert terminal("resume", "outputs/x", "train.epochs=3") == 0
    assert terminal("eval", "outputs/x", "--best", "device=cpu") == 0
    assert terminal.resumed == [("last", []), ("outputs/x", ["train.epochs=3"])]
    assert terminal("eval", "outputs/x", "--raw") == 0
    assert terminal.evaluated == [("outputs/x", ["device=cpu"], "best", True), ("outputs/x", [], "last", False)]


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_a_run_is_looked_for_below_run_root(terminal, command):
    for root in ("outputs", "mine"):
        directory = create_run(Path(root), "net", "one")
        directory.paths.config.write_text("")
        directory.write_state(RunState(id="one", argv=(), command="mptrain").begin())
    for words, place in (
        (("last",), "outputs/one"),
        (("last", "run.root=mine"), "mine/one"),
        (("one", "device=cpu", "run.root='mine'"), "mine/one"),
    ):
        assert terminal(command, *words) == 0
        assert [run[0] for run in (*terminal.evaluated, *terminal.resumed)][-1] == place
    assert terminal(command, "last", "run.root=none") == 6
    assert "there is no run in none" in terminal.err


@pytest.mark.process
def test_a_run_that_is_missing_is_said_before_torch_is_imported(tmp_path):
    code = """
import sys
from mptrain.cli.main import main
for line in ("eval last", "eval last run.root=elsewhere", "resume last run.root=elsewhere", "diagnose last run.root=elsewhere"):
    assert main(line.split()) == 6
print("torch" in sys.modules)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment()
    )
    assert found.stdout == "False\n"
    assert found.stderr.count("there is no run in elsewhere") == 3


@pytest.mark.parametrize("policy", [None, "active"])
def test_torch_chooses_how_its_threads_wait_unless_the_user_does(terminal, monkeypatch, policy):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert terminal("train.max_steps=1") == 0
    assert [os.environ.get(name) for name in names] == [policy, None, None]


@each(
    ("raised", "code", "text"),
    [
        (
            errors.NumericsError("only overflows", "lower the scale"),
            4,
            "error: only overflows\nhint: lower the scale\n",
        ),
        (errors.DataError("no data"), 6, "error: no data\n"),
        (errors.EnvironmentRefused("no bf16", "use fp32"), 3, "error: no bf16\nhint: use fp32\n"),
        (errors.Preempted("SIGTERM at 3", "mptrain resume x", 75), 75, "stopped: SIGTERM at 3\nhint: mptrain"),
        (errors.Preempted("rank 1 has ended", "x", 75, asked=False), 75, "error: rank 1 has ended\nhint: x"),
        (KeyboardInterrupt(), 130, ""),
        (ModuleNotFoundError("No module", name="hydra"), 3, "error: the installation is broken: No module"),
        (ModuleNotFoundError("No module named 'mptrain.x'", name="mptrain.x"), 1, "error: this is a bug"),
        (RuntimeError("operator torchvision::nms does not exist"), 3, "error: the installation is broken: operator"),
        (
            ZeroDivisionError("oh"),
            1,
            "error: this is a bug in mptrain: ZeroDivisionError: oh\nhint: MPTRAIN_TRACEBACK=1",
        ),
    ],
)
def test_what_training_raises_becomes_lines_and_an_exit_code(terminal, raised, code, text):
    terminal.codes = [raised]
    assert terminal() == code
    assert terminal.err.startswith(text)
    assert "Traceback" not in terminal.err


def test_a_traceback_is_shown_when_asked_for(terminal, monkeypatch):
    terminal.codes = [ZeroDivisionError("oh")] * 2
    monkeypatch.setenv("MPTRAIN_TRACEBACK", "0")  # so that what --traceback sets is undone after the test
    assert terminal("--traceback") == 1
    assert "Traceback (most recent call last)" in terminal.err
    monkeypatch.setenv("MPTRAIN_TRACEBACK", "1")
    assert terminal() == 1
    assert "Traceback (most recent call last)" in terminal.err


def test_control_characters_of_the_user_do_not_reach_the_terminal(terminal):
    assert terminal("train.epochs=\x1b[31m") == 2
    assert "\x1b" not in terminal.err
    assert terminal("\ud800\n\x00=1") == 2


def test_help_version_and_usage_errors_import_neither_torch_nor_hydra():
    code = """
import sys
from mptrain.cli.main import main
for line in ("--help", "--version", "list", "list precision", "trian", "--oops", "train -h"):
    main(line.split())
heavy = ("torch", "hydra", "omegaconf", "pydantic", "rich")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr.splitlines()[-1] == "[]"


def test_output_into_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m mptrain list | head -n 1"
    found = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert found.stderr == ""
    assert found.returncode == 0


@pytest.mark.process
@pytest.mark.parametrize("words", ["--help", "list", "train.max_steps=1 device=cpu precision=fp32"])
def test_a_full_disk_behind_the_output_is_exit_code_6(words, tmp_path):
    command = f"{sys.executable} -m mptrain {words} > /dev/full"
    found = run_in_shell(command, tmp_path)
    assert found.returncode == 6
    assert found.stderr.startswith("error: standard output: no space left on device\n")
    assert found.stderr.count("error: ") == 1
    assert "Exception ignored" not in found.stderr


@pytest.mark.process
@pytest.mark.parametrize("words", ["--help >&-", "train.max_steps=1 device=cpu precision=fp32 >&-", "trian >&- 2>&-"])
def test_closed_output_is_no_error(words, tmp_path):
    found = run_in_shell(f"{sys.executable} -m mptrain {words}", tmp_path)
    assert found.stderr == ""
    assert found.returncode == (2 if "trian" in words else 0)


def run_in_shell(command, folder):
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=folder, env=environment()
    )


def test_a_message_on_a_terminal_breaks_between_words_and_never_in_a_command(terminal, monkeypatch):
    command = "mptrain -m model=plain16 scaler.scale=1,8 --jobs 2"
    terminal.codes = [
        errors.NumericsError("word " * 40, f"try it again with a lower scale; {command}; or leave it")
    ] * 2
    assert terminal() == 4
    assert terminal.err.count("\n") == 2  # in a file, a line each
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal() == 4
    lines = terminal.err.splitlines()
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(("error: word", "       word", "hint: ", "      ")) for line in lines)
    assert "word" * 2 not in terminal.err
    assert f"      {command}; or" in lines
