"""Rows of logs are one curve, or told apart by name; their metric and step may stand elsewhere, or in any text."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from mptrain.study.comparison.logs.curves import read_curve
from mptrain.study.comparison.logs.runs import Question, read_curves
from mptrain.system.errors import DataError, UsageError

MIXED = {
    "interleaved.csv": "step,split,loss\n" + "".join(f"{at},train,{3 / at}\n{at},val,{4 / at}\n" for at in (1, 2, 3)),
    "one after the other.csv": "step,loss,part\n"
    + "".join(f"{at},{by / at},{part}\n" for part, by in (("dev", 4), ("fit", 3)) for at in (1, 2, 3)),
    "ranks.jsonl": "".join(
        f'{{"step": {at}, "device": {rank}, "loss": {3 / at + rank}, "time": {at + rank / 7}}}\n'
        for at in (1, 2, 3)
        for rank in (0, 1)
    ),
    "micro-batches.csv": "iter,micro,loss\n"
    + "".join(f"{at},{one},{3 / at + one}\n" for at in (1, 2) for one in range(4)),
    "no step is shared.csv": "step,phase,loss\n1,train,3\n2,train,2\n3,validate,9\n4,train,1\n",
    "no steps.csv": "mode,loss\ntrain,3\neval,4\ntrain,2\neval,3\n",
    "long.csv": "step,split,metric,value\n"
    + "".join(f"{at},{part},{name},{at}.5\n" for at in (1, 2) for part in ("train", "val") for name in ("loss", "acc")),
}
APART = ["split=val", "part=dev", "device=0", "micro=0", "phase=validate", "mode=eval", "split=val"]


@pytest.mark.parametrize(("name", "chosen"), [*zip(MIXED, APART, strict=True)])
def test_rows_of_several_curves_are_refused_with_what_tells_them_apart_and_chosen_by_it(name, chosen, tmp_path):
    path = tmp_path / name
    path.write_text(MIXED[name])
    column, _, value = chosen.partition("=")
    with pytest.raises(DataError, match=f"are told apart by {column}") as refused:
        read_curve(path, "loss")
    assert refused.value.hint == f"choose one, such as --where {column}={value}"
    curve = read_curve(path, "loss", {column: value})
    assert np.all(np.diff(curve.steps) > 0)
    assert curve.given_up == 0
    rows = [line for line in MIXED[name].splitlines() if value in re.split(r"[,: {}]+", line) and "acc" not in line]
    assert len(curve.values) == len(rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step,loss\n1,3\n1,2.5\n2,2\n", "has several values of loss at step 1, and no column tells them apart"),
        ("step,loss\n1,3\n2,2\n1,4\n3,1\n2,2.5\n3,1.5\n", "as of processes that write at once"),
    ],
)
def test_values_of_one_step_that_nothing_tells_apart_are_refused(text, said, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=said):
        read_curve(tmp_path / "a.csv", "loss")


def test_what_differs_after_a_resume_tells_no_rows_apart_and_an_equal_value_is_one(tmp_path):
    (tmp_path / "a.csv").write_text(
        "step,loss,seconds,lr,when\n1,3,10,1,a1\n2,2,20,1,a2\n3,2.5,30,1,a3\n2,2.1,95,1,b2\n3,1.5,99,1,b3\n3,1.5,99,1,b3\n"
    )
    curve = read_curve(tmp_path / "a.csv", "loss")
    assert (curve.values.tolist(), curve.given_up) == ([3, 2.1, 1.5], 3)


OTHER_FORMS = {
    "nested.jsonl": '{"trainer": {"step": 1}, "step": 10, "train": {"loss": 2.5}}\n{"step": 20, "train": {"loss": 1.25}}\n',
    "wandb of transformers.jsonl": '{"_step": 0, "train/global_step": 10, "train/loss": 2.5}\n'
    '{"_step": 3, "train/global_step": 20, "train/loss": 1.25}\n',
    "restarted.csv": "step,train/loss\n10,2.5\nstep,train/loss\n20,1.25\n",
    "long.csv": "step,key,value\n10,train/loss,2.5\n10,acc,0.1\n20,train/loss,1.25\n",
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_forms_in_which_names_and_steps_stand_elsewhere(name, tmp_path):
    (tmp_path / name).write_text(OTHER_FORMS[name])
    curve = read_curve(tmp_path / name, "train/loss")
    assert (curve.steps.tolist(), curve.values.tolist(), curve.given_up) == ([10, 20], [2.5, 1.25], 0)
    with pytest.raises(DataError, match="has no los"):
        read_curve(tmp_path / name, "los")


#: As nanoGPT and Megatron print them, among other lines.
CONSOLES = {
    r"^iter (?P<iter>\d+): loss (?P<loss>\S+),": "number of parameters: 1M\niter 10: loss 2.5000, time 9ms\n"
    "step 20: train loss 2.0, val loss 2.1\niter 20: loss nan, time 9ms\n",
    r"iteration +(?P<iteration>\d+)/.* lm loss: (?P<loss>\S+)": " [x] iteration       10/     100 | lm loss: 2.5E+00 | ok |\n"
    " [x] iteration       20/     100 | lm loss: NaN | ok |\n",
}


@pytest.mark.parametrize("pattern", CONSOLES)
def test_any_text_is_read_by_a_pattern_with_named_groups(pattern, tmp_path):
    (tmp_path / "out.log").write_text(CONSOLES[pattern])
    curve = read_curve(tmp_path / "out.log", "loss", pattern=pattern)
    assert (curve.form, curve.steps.tolist()) == ("text", [10, 20])
    assert curve.values[0] == 2.5
    assert math.isnan(curve.values[1])
    with pytest.raises(UsageError, match="no group is named acc"):
        read_curve(tmp_path / "out.log", "acc", pattern=pattern)
    with pytest.raises(UsageError, match="--pattern"):
        read_curve(tmp_path / "out.log", "loss", pattern="(")
    for large in (r"(?P<loss>\d{4294967295})", "(" * 10_000 + "(?P<loss>x)" + ")" * 10_000):
        with pytest.raises(UsageError, match="--pattern"):
            read_curve(tmp_path / "out.log", "loss", pattern=large)
    with pytest.raises(DataError, match="the pattern is in no line of") as refused:
        read_curve(tmp_path / "out.log", "loss", pattern="(?P<loss>x+x+y)")
    assert CONSOLES[pattern].splitlines()[0].strip() in refused.value.hint
    (tmp_path / "out.log").write_text(CONSOLES[pattern].rstrip("\n"))
    with pytest.raises(DataError, match="no line break ends it"):
        read_curve(tmp_path / "out.log", "loss", pattern=pattern.replace(" ok", ""))


@pytest.mark.parametrize("name", ["rank", "gpu", "worker-"])
def test_logs_of_ranks_are_no_runs_of_an_arm(name, tmp_path):
    for rank in (0, 1):
        (tmp_path / f"log_{name}{rank}.csv").write_text(f"step,loss\n1,{rank}\n")
    question = Question("loss", "equivalent", 0.01, math.nan, "last", paired=False, looks=1, lower_is_better=True)
    with pytest.raises(DataError, match="are ranks of one run by their names"):
        read_curves([str(tmp_path / "log_*.csv")], question)
