"""``mptrain -m``: nothing starts before everything is valid, and all is told at the end."""

import re
import shlex

from mptrain.cli.messages import warn
from mptrain.errors import NumericsError


def test_every_point_is_trained_with_a_directory_of_its_own(terminal, tmp_path):
    assert terminal("-m", "precision=fp32,bf16", "seed=0,1", "train.epochs=2") == 0
    assert "4/4 points valid" in terminal.out
    assert [(config.precision.name, config.seed) for config in terminal.trained] == [
        ("fp32", 0),
        ("fp32", 1),
        ("bf16", 0),
        ("bf16", 1),
    ]
    roots = {config.run.root for config in terminal.trained}
    assert len(roots) == 1
    assert re.match(r"outputs/sweeps/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{4}$", roots.pop())
    assert terminal.trained[0].run.name == "000-precision=fp32,seed=0"


def test_nothing_starts_when_one_point_is_wrong(terminal, tmp_path):
    assert terminal("-m", "precision=fp32,fp16_static", "scaler.scale=8") == 2
    assert "error: point 1/2 (precision=fp32): unknown key 'scaler.scale'" in terminal.err
    assert not terminal.trained
    assert not list(tmp_path.iterdir())


def test_a_failed_job_is_reported_and_the_sweep_ends_with_7(terminal):
    terminal.codes = [0, ZeroDivisionError("oh"), 4]
    assert terminal("-m", "seed=0,1,2,3") == 7
    assert "this is a bug in mptrain: ZeroDivisionError" in terminal.err
    table = terminal.out.split("exit  metric")[1]
    assert re.search(r"1\s+seed=1\s+failed\s+1", table)
    assert re.search(r"2\s+seed=2\s+failed\s+4", table)
    assert re.search(r"3\s+seed=3\s+done\s+0", table)


def test_ctrl_c_stops_the_sweep(terminal):
    terminal.codes = [0, KeyboardInterrupt()]
    assert terminal("-m", "seed=0,1,2") == 130
    assert len(terminal.trained) == 2
    assert re.search(r"2\s+seed=2\s+not run", terminal.out)


def test_the_table_names_directories_and_reasons(terminal):
    terminal.codes = [0, NumericsError("only overflows\nsecond line")]
    assert terminal("-m", "seed=0,1") == 7
    table = terminal.out.split("exit  metric")[1]
    assert re.search(r"done\s+0\s+000-seed=0$", table, re.MULTILINE)
    assert re.search(r"failed\s+4\s+001-seed=1\s+only overflows$", table, re.MULTILINE)


def test_after_ctrl_c_the_command_that_is_printed_goes_on_in_the_same_folder(terminal):
    terminal.codes = [0, KeyboardInterrupt()]
    assert terminal("-m", "seed=0,1,2") == 130
    [command] = re.findall(r"^to run the rest: mptrain (.*)$", terminal.out, re.MULTILINE)
    first = terminal.trained[0].run
    terminal.trained.clear()
    assert terminal(*shlex.split(command)) == 0
    assert len(terminal.trained) == 3
    again = terminal.trained[0].run
    assert (again.root, again.name, again.resume) == (first.root, first.name, "auto")


def test_a_mode_that_the_device_cannot_run_stops_the_sweep_before_its_first_point(terminal, tmp_path):
    assert terminal("-m", "precision=fp32,tf32", "device=cpu") == 3
    assert terminal.err.startswith("error: point 2/2 (precision=tf32): precision=tf32 on cpu")
    assert not terminal.trained
    assert not list(tmp_path.iterdir())


def test_a_warning_that_several_points_give_is_printed_once(terminal, monkeypatch):
    monkeypatch.setattr("mptrain.cli.train.train", lambda config: warn(["slow"]) or 0)
    assert terminal("-m", "seed=0,1,2") == 0
    assert terminal.err == "warning: slow\n"
    warn(["slow"])
    assert terminal("-m", "seed=0,1") == 0
    assert terminal.err == "warning: slow\n"


def test_warnings_of_points_come_out_once(terminal):
    assert terminal("-m", "scaler=static", "scaler.scale=9", "seed=0,1,2") == 0
    assert terminal.err.count("warning: ") == 1


def test_a_named_sweep_is_the_same_folder_each_time(terminal):
    assert terminal("-m", "seed=0,1", "run.name=mine", "run.resume=auto") == 0
    assert {config.run.root for config in terminal.trained} == {"outputs/mine"}
    assert {config.run.resume for config in terminal.trained} == {"auto"}


def test_output_has_no_control_characters_when_piped(terminal):
    terminal("-m", "seed=0,1")
    assert all(letter.isprintable() or letter == "\n" for letter in terminal.out)
    assert not re.search(r" +$", terminal.out, re.MULTILINE)
