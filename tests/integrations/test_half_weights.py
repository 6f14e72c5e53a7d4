"""A checkpoint that is loaded in BF16 and trained without a master copy, as frameworks do by default."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.small_runs import environment, run_command

FRAMEWORKS = ["plain", "accelerate", "transformers", "lightning"]


def fine_tuned(framework, dtype, folder):
    pytest.importorskip("transformers")
    pytest.importorskip({"plain": "transformers"}.get(framework, framework))
    program = [sys.executable, "-m", "tests.integrations.half_weights_loops", framework, dtype, str(folder)]
    done = subprocess.run(program, cwd=folder.parent, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.process
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_share_that_cannot_move_is_said_once_at_the_start_and_what_stood_still_is_named(framework, tmp_path):
    told = fine_tuned(framework, "bfloat16", tmp_path / "run")
    (said,) = told["warnings"]
    assert "weights bfloat16, no master copy: at peak lr 2e-05" in said
    start, *others = told["events"]
    assert start["event"] == "no_master_weights"
    assert start["step"] == 0
    share = start["stuck"] / start["elements"]
    assert 0.5 < share < 1
    lost = [sum(five[1] for five in look.values()) / sum(five[0] for five in look.values()) for look in told["looks"]]
    assert abs(lost[0] - share) < 0.25  # the forecast knows the rate alone, which the Trainer lowers later
    norms = [name for name in told["still"] if "norm" in name]
    assert len(norms) == 5
    frozen = [name for event in others if event["event"] == "frozen" for name in event["parameters"]]
    if framework == "lightning":  # its module has the model in an attribute
        frozen = [name.removeprefix("model.") for name in frozen]
    assert set(norms) <= {*told["still"]} <= set(frozen)  # others may stand still at the end of a schedule
    assert any(event["event"] == "state_rounding" and event["state"] == "exp_avg_sq" for event in others)

    report = run_command("report", tmp_path / "run", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    page = (tmp_path / "run" / "report.md").read_text()
    summary = page.index("no master copy: at peak lr 2e-05")
    assert summary < page.index("no element changed between two looks") < page.index("## Training")


@pytest.mark.process
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_is_said_of_a_checkpoint_that_is_loaded_in_fp32(framework, tmp_path):
    told = fine_tuned(framework, "float32", tmp_path / "run")
    assert told["warnings"] == []
    assert told["events"] == []
    assert told["still"] == []
    assert all(five[2] > 0 for look in told["looks"] for five in look.values())
