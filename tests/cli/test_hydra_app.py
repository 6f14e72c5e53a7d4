"""Hydra's own abilities keep working, and its errors come out as ours."""

import os
import sys

import pytest
import yaml

from mptrain.lab.commands.doctor import doctor
from tests.loops import each


def test_the_composed_configuration_is_shown(terminal, tmp_path):
    assert terminal("--cfg", "job", "model=plain16", "train.epochs=7") == 0
    tree = yaml.safe_load(terminal.out)
    assert tree["train"]["epochs"] == 7
    assert tree["optimizer"]["_target_"] == "mptrain.optimizer.Adam"
    assert list(tmp_path.iterdir()) == []
    assert not terminal.trained
    assert terminal("--cfg", "job", "--resolve", "--package", "optimizer") == 0
    assert "lr: 0.05" in terminal.out
    assert "epochs" not in terminal.out


def test_hydra_makes_no_directories_and_leaves_the_process_as_it_was(terminal, tmp_path):
    before = list(sys.argv), os.environ.get("HYDRA_FULL_ERROR")
    assert terminal("--cfg", "hydra") == 0
    assert "output_subdir: null" in terminal.out
    assert "dir: ." in terminal.out
    assert (list(sys.argv), os.environ.get("HYDRA_FULL_ERROR")) == before
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_ones_own_is_handed_over(terminal, tmp_path):
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "mine.yaml").write_text("_target_: mine.Net\n")
    assert terminal("--cfg", "job", "model=mine", "--config-dir", str(tmp_path / "own")) == 0
    assert "mine.Net" in terminal.out
    assert terminal("--cfg", "job", "-cd", "a", "-cd", "b") == 2


INFO = ("config", "defaults", "defaults-tree", "searchpath")


@pytest.mark.usefixtures("python_3_14")
def test_the_check_of_python_3_14_breaks_hydras_parser_as_it_does_there():
    """So that the tests below cannot pass by accident."""
    from hydra._internal.utils import get_args_parser

    with pytest.raises(ValueError, match="badly formed help string"):
        get_args_parser()


@pytest.mark.long
@pytest.mark.usefixtures("python_3_14")
@each(
    "words",
    [
        *(("--cfg", kind) for kind in ("job", "hydra", "all")),
        ("-c", "job", "--resolve", "-p", "optimizer"),
        *(("--info", kind) for kind in INFO),
        ("--info",),
        ("-i", "model=plain16"),
        ("--info=plugins",),
    ],
)
def test_python_3_14_shows_what_hydra_composes(terminal, words):
    assert terminal(*words) == 0
    assert terminal.out.strip()
    assert not terminal.trained


@pytest.mark.usefixtures("python_3_14")
def test_python_3_14_trains_and_sweeps_without_hydras_parser(terminal):
    assert terminal("model=mlp") == 0
    assert terminal.trained


def test_doctor_says_that_python_3_14_is_untried(terminal, monkeypatch, capsys):
    monkeypatch.setattr("mptrain.lab.commands.doctor.sys.version_info", (3, 14, 0))
    doctor().show()
    assert f"({sys.executable}); untested" in capsys.readouterr().out
