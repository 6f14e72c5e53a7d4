"""Commands that are printed for a run with code of one's own find that code: PYTHONPATH before, extensions.allow after."""

from __future__ import annotations

import re
import sys

import pytest

from mptrain.cli.main import main
from tests.small_runs import TINY

NET = """
from torch import nn

def net(num_classes, in_channels=1, image_size=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, 16), nn.ReLU(), nn.Linear(16, num_classes))
"""
ALLOW = "extensions.allow=[nets_for_commands]"
WORDS = ("--config-dir", "conf", "model=mine", *TINY[1:], ALLOW)
COMMAND = re.compile(r"(PYTHONPATH='my code' )?mptrain (resume|diagnose|eval|--config-dir DIR)\b(?! RUN)([^;)\n]*)")


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Run a command and return what it printed, without line breaks."""
    (tmp_path / "my code").mkdir()
    (tmp_path / "my code/nets_for_commands.py").write_text(NET)
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/mine.yaml").write_text("_target_: nets_for_commands.net\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "my code")
    monkeypatch.syspath_prepend("my code")
    monkeypatch.setenv("COLUMNS", "4000")

    def run(*words, code):
        capsys.readouterr()
        assert main(list(words)) == code
        shown = capsys.readouterr()
        return re.sub(r"\n {2,}", " ", shown.out + shown.err)

    yield run
    sys.modules.pop("nets_for_commands", None)


def check(text, *expected):
    found = COMMAND.findall(text)
    assert {command for _, command, _ in found} == set(expected), text
    for path, command, rest in found:
        assert path, (command, rest)
        assert ALLOW in rest, (command, rest)


@pytest.mark.long
def test_every_next_step_of_a_run_finds_its_code(printed):
    loud = ("precision=fp16_static", "scaler.scale=2.0e+9", "train.max_consecutive_overflows=3", "run.name=loud")
    check(printed(*WORDS, *loud, code=4), "diagnose")
    check(printed("diagnose", "outputs/loud", ALLOW, code=0), "resume")
    check(printed("replay", "outputs/loud", ALLOW, "scaler.scale=8", code=0), "diagnose")
    check(printed(*WORDS, *loud, "train.epochs=4", "run.resume=auto", code=2), "resume")
    printed(*WORDS, "train.max_steps=2", "run.name=good", code=0)
    check(printed("export", "outputs/good", ALLOW, code=0), "--config-dir DIR")


@pytest.mark.workload
def test_every_next_step_of_a_sweep_finds_its_code(printed):
    sweep = ("-m", *WORDS, "train.max_steps=2", "seed=0,1", "run.name=s")
    printed(*sweep, code=0)
    check(printed(*sweep, code=6), "resume")
    check(printed("resume", "outputs/s", ALLOW, "train.max_steps=3", code=2), "resume")
    check(
        printed(*sweep[:-1], "run.name=t", "train.max_steps=1", "optimizer.lr=1e30", "precision=fp32", code=7), "resume"
    )
