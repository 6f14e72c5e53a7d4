"""A golden run is trained, broken off and resumed, and what went otherwise is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mptrain.numerics import overflow_check
from tests.faults.attempts import Attempt
from tests.golden import runs
from tests.small_runs import parts_of

ROOT = Path(__file__).parents[2]
ROW = {
    "precision": "fp16_dynamic", "scaler": "dynamic", "family": "perceptron", "accumulate": "1", "ranks": "one",
    "optimizer": "sgd", "clipping": "unclipped", "average": "last", "fault": "infinite", "interruption": "sigkill",
}  # fmt: skip
PARTS = ("steps", "epochs", "histograms", "summary", "data", "samples", "state")


def recorded(monkeypatch, row=ROW, *, codes=(0, -9, 0), saved=True, resumed_at=7, loss=0.0):
    """The record of a run, and what is wrong with it, where attempts end with some codes."""
    left, kept = iter(codes), iter([0.0, loss])

    def attempt(words, folder, prepare):
        checkpoints = folder / "outputs" / "run" / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        if saved:
            (checkpoints / "step-00000007.json").touch()
        return Attempt(tuple(words), next(left), "what it said", None, 0.0, False, 0.0)

    def computed(function, run):
        events = [{"event": "resume", "step": resumed_at}] if "broken" in run.parts else []
        return {**{part: [] for part in PARTS}, "steps": [{"step": 1, "loss": next(kept)}], "events": events}

    monkeypatch.setattr(runs, "attempt", attempt)
    monkeypatch.setattr(runs, "computed", computed)
    record, problems = runs.record_of(row, ROOT / "configs")
    return record, [problem.removeprefix(f"{runs.name_of(row)}: ") for problem in problems]


def test_a_run_that_is_resumed_where_it_was_broken_off_is_right(monkeypatch):
    record, problems = recorded(monkeypatch)
    assert (record["resumed_from"], problems) == (7, [])
    record, problems = recorded(monkeypatch, {**ROW, "interruption": "sigterm"}, codes=(0, 75, 0))
    assert (record["resumed_from"], problems) == (7, [])


@pytest.mark.parametrize(
    ("otherwise", "told"),
    [
        ({"codes": (4,)}, "exit code 4: what it said"),
        ({"codes": (0, 0)}, "exit code 0, not -9, when it is interrupted: what it said"),
        ({"codes": (0, 1)}, "exit code 1, not -9, when it is interrupted: what it said"),
        ({"codes": (0, 75)}, "exit code 75, not -9, when it is interrupted: what it said"),
        ({"saved": False}, "no checkpoint of step 7 when it is interrupted"),
        ({"codes": (0, -9, 6)}, "exit code 6 when it is resumed: what it said"),
        ({"resumed_at": 0}, "resumed from [0], not from step 7"),
        ({"loss": -0.0}, "resumed after sigkill, other steps"),
    ],
)
def test_what_goes_otherwise_is_said(monkeypatch, otherwise, told):
    _, problems = recorded(monkeypatch, **otherwise)
    assert problems == [told]


def test_the_record_of_a_run_that_failed_has_its_exit_code(monkeypatch):
    assert recorded(monkeypatch, codes=(4,))[0] == {"run": ROW, "exit_code": 4}


def test_some_gradients_are_judged_in_several_pieces():
    parts, _ = parts_of(*runs.FAMILIES["perceptron"])
    largest = max(parameter.numel() for parameter in parts.model.parameters())
    assert largest > 2 * overflow_check._PIECE, "give the perceptron of tests/golden/runs.py wider layers"
    assert largest % overflow_check._HOST_ROW, "a last row that is not full is judged otherwise than the others"


@pytest.mark.process
def test_a_run_is_made_from_end_to_end(tmp_path):
    code = "import json, pathlib, sys; from tests.golden import __main__ as golden, runs; "
    code += "sys.exit(golden.make([json.loads(sys.argv[2])], runs.warm_up(), pathlib.Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "made", json.dumps(ROW)],
        check=False, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "made" / f"{runs.name_of(ROW)}.json").read_text())
    assert [step["step"] for step in record["steps"]] == list(range(1, 11))
    assert [step["step"] for step in record["steps"] if step["skipped"]] == [4, 5]
    assert record["state"][".model.5.weight"].startswith("torch.float32 (270, 270) ")
    assert record["resumed_from"] == 7
