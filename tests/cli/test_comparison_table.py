"""What the table of a comparison shows of a ratio."""

from __future__ import annotations

import math
from dataclasses import replace

from mptrain.cli.main import main
from mptrain.study.commands.compare import print_comparison
from mptrain.study.comparison.compare_arms import compare
from tests.small_runs import TINY
from tests.study.comparison.fake_runs import arm


def table_of(speeds, capsys):
    full = arm("fp32", [0.95] * len(speeds))
    fast = arm("amp_dynamic", [0.95] * len(speeds))
    for run, speed in zip(fast.runs, speeds, strict=True):
        object.__setattr__(run, "terms_per_second", speed)
    print_comparison(compare([full, fast]))
    lines = capsys.readouterr().out.splitlines()
    return next(line for line in lines if line.startswith("amp_dynamic"))


def test_a_ratio_has_an_interval_that_is_not_symmetric_from_three_pairs_on(capsys):
    shown = table_of([500.0, 1000.0, 2000.0], capsys)
    end = math.exp(4.302653 * math.log(2) / math.sqrt(3))
    assert f"1.00x [{1 / end:.2f}, {end:.2f}]" in shown
    shown = table_of([500.0, 700.0], capsys)
    assert f"{math.sqrt(0.35):.2f}x " in shown
    assert "x [" not in shown


def test_what_was_checked_is_one_line_however_much_it_was(capsys):
    comparison = compare([arm("fp32", [0.95] * 3), arm("amp_dynamic", [0.95] * 3)])
    for checks, line in (
        (("a", "b", "c"), "- 3 conditions of a fair comparison hold; the report lists them under Fairness"),
        (("only that",), "- only that"),
    ):
        print_comparison(replace(comparison, checks=checks, notes=()))
        assert capsys.readouterr().out.rstrip().split("\n\n")[-1] == line


def test_single_runs_that_cannot_be_judged_stand_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, words in enumerate((("model=mlp", "seed=0"), ("model=mlp", "seed=1"), ("model=cnn", "precision=fp32"))):
        assert main([*words, *TINY[1:], "train.max_steps=2", f"run.name=r{number}"]) == 0
    capsys.readouterr()
    for others in (("r1",), ("r2",), ("r1", "r2")):  # another seed; another model; both
        assert main(["compare", "r0", *others]) == 0, others
        shown = capsys.readouterr().out
        assert "no verdict: " in shown
        assert {"equivalent", "better", "worse", "undecided"}.isdisjoint(shown.split())
        assert "top1 on test" in shown
    assert not (tmp_path / "outputs/comparisons").exists()
    assert main(["compare", "r0", "r0"]) == 2  # one run
    assert main(["compare", "r0", "r2", "--margin", "0.1"]) == 2  # a question that has no answer
