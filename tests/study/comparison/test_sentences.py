"""One set of sentences: a reason is said alike of run directories and of logs, and each reason has a sentence."""

from __future__ import annotations

import math
import re
from typing import get_args

import pytest

from mptrain.study.comparison.logs.compare_logs import judge_arm
from mptrain.study.comparison.logs.runs import LoggedRun, Question
from mptrain.study.comparison.results import Interval, Reason
from mptrain.study.comparison.sentences import Grounds, line, why
from mptrain.study.comparison.statistics import equivalence
from mptrain.study.comparison.verdict import Sample, decide, pair
from tests.loops import each

OTHERS = [3.3, 3.31, 3.325, 3.29, 3.4, 3.35, 3.28]


def judged(values, question, others=()):
    runs, reference = (
        [LoggedRun("", "", "", 1, value, f"{seed}") for seed, value in enumerate(some)] for some in (values, others)
    )
    return judge_arm("arm", runs, reference, question, 0.05)


def asked(form="equivalent", *, target=math.nan):
    paired = form != "beats target"
    return Question("loss", form, 0.01, target, "last", paired=paired, looks=1, lower_is_better=True)


@each(
    "differences",
    [
        [0.03, 0.031, 0.029], [-0.03, -0.031, -0.0295], [0.3, 0.3, 0.31, 0.3, 0.2], [0.004, 0.0125, 0.007, 0.009, 0.0115],
        [0.001, 0.002, 0.0015], [0.0, 0.0, 0.0, -0.001, 0.0, 0.0, 0.0001], [0.0, 0.0, 0.0, -0.012, 0.001, 0.0, 0.0],
        [0.02, -0.015, 0.01], [0.001],
    ],
)  # fmt: skip
def test_pairs_get_one_sentence_whether_logs_or_run_directories_tell_them(differences):
    others = OTHERS[: len(differences)]
    values = [other + by for other, by in zip(others, differences, strict=True)]
    of_runs = decide(pair("loss", False, Sample(dict(enumerate(values))), Sample(dict(enumerate(others))), margin=0.01))
    of_logs = judged(values, asked(), others)
    assert of_logs.word == of_runs.word
    # Logs name four digits and no p value of t tests, and a certificate says elsewhere what is not excluded.
    said = re.sub(r"; no run failed.*|(?<=tests), p [=<] [\d.e-]+| \(p [=<] [\d.e-]+\)(?=, but)", "", of_runs.why)
    assert digits_left_out(of_logs.why) == digits_left_out(said)


def digits_left_out(text):
    return re.sub(r"[+-]?\d[\d.]*(e-\d+)?", "#", text)


@pytest.mark.parametrize("form", ["equivalent", "not inferior", "beats target"])
@pytest.mark.parametrize("reason", get_args(Reason))
def test_each_reason_has_a_sentence(reason, form):
    tests = equivalence([0.001, 0.002, 0.0], 0.01)
    number = 3.28 if form == "beats target" else None
    known = {"failed": "seed 3 failed", "few": "an arm has no finite run", "unlearned": "no loss fell"}
    found = why(reason, Grounds("loss", False, Interval(0.001, -0.1, 0.1, 0.1, 3), tests, form, number=number, **known))
    assert found
    assert "nan" not in found


@each(
    ("word", "said"),
    [
        ("worse", "fp8 is worse: so."),
        ("undecided", "fp8 is undecided: so."),
        ("not inferior", "fp8 is not inferior: so."),
        ("beats target", "fp8 beats target: so."),
        ("neither has learned", "fp8 neither has learned: so."),
    ],
)
def test_a_line_names_arm_verdict_and_reason(word, said):
    assert line("fp8", word, "so") == line("fp8", word, "so.") == said


@each(
    ("values", "word", "why"),
    [
        ([3.27, 3.271, 3.269], "beats target", "the difference of loss from 3.28 is -0.01, one-sided 95 % bounds -0.01169"),
        ([3.29, 3.291, 3.289], "misses target", "the difference of loss from 3.28 is +0.01, one-sided 95 % bounds +0.00831"),
        ([3.27, 3.29, 3.28], "undecided", "the difference of loss from 3.28 is"),
        ([3.27, 3.271, math.nan], "undecided", "1 of 3 runs are not finite there: the runs that are left are a biased"),
        ([3.27, 3.27], "undecided", "the runs of each arm all end at one value"),
        ([3.27], "undecided", "an arm has only one finite run, and a verdict needs at least two"),
        ([3.27, math.nan], "undecided", "1 of 2 runs are not finite there; an arm has only one finite run"),
    ],
)  # fmt: skip
def test_a_target_is_judged_by_the_rule_of_all_verdicts(values, word, why):
    found = judged(values, asked("beats target", target=3.28))
    assert found.word == word
    assert found.why.startswith(why)
    assert (found.difference is None) == (len(values) < 3 or math.isnan(values[-1]))
