"""Nothing out of a file controls a terminal: words are shown, escape sequences in them are written out."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
from rich.console import Console

from mptrain.cli.display import RunProgress
from mptrain.cli.messages import print_rows, say
from mptrain.cli.panel import render
from mptrain.config.compose import Composer
from mptrain.runlog.sweeps import read_sweep
from mptrain.study.commands.reproduce import print_recipe
from mptrain.study.commands.sweep_display import Lines, LiveTable, print_outcome
from mptrain.study.sweep.points import expand
from mptrain.study.sweep.runner import plan_sweep
from mptrain.system.records import EvalRecord, ProgressRecord, StepRecord

EVIL = "a\x1b]0;title\x07b\x1b[2Jc\x9b1md\x1b[8me\r\x00f\x1b[?1049h"


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Screen()


def harmful(text):
    """What is left of it without line ends and sequences that mptrain and rich write themselves: colours, bold, dim."""
    return [
        letter
        for letter in re.sub(r"\x1b\[(?:[0-3]|[39][0-7])(?:;(?:[0-3]|[39][0-7]))*m|\n", "", text)
        if not letter.isprintable()
    ]


@pytest.fixture
def sweep(tmp_path):
    """One whose file says evil things."""
    composer = Composer()
    words = ("seed=0,2",)
    planned = plan_sweep(expand(words, composer.catalogue), tmp_path, words=words)
    folder = planned.folder
    fields = json.loads((folder / "sweep.json").read_text())
    for job, status in zip(fields["jobs"], ("done", "failed"), strict=True):
        job |= {"varied": [EVIL], "arm": EVIL, "reason": EVIL, "status": status, "code": 4}
    (folder / "sweep.json").write_text(json.dumps(fields))
    run = folder / fields["jobs"][0]["name"]
    run.mkdir()
    numbers = {"schema": 1, "metric": 0.5, "metric_name": EVIL, "metric_split": EVIL}
    (run / "summary.json").write_text(json.dumps(numbers))
    return read_sweep(folder)


def test_tables_of_sweeps(sweep, screen):
    with redirect_stdout(screen):
        print_outcome(sweep)
    assert "title" in screen.getvalue()
    assert not harmful(screen.getvalue())


def test_lines_of_sweeps(sweep, screen):
    for job in sweep.jobs:
        Lines(screen).changed(sweep, job)
    assert not harmful(screen.getvalue())


def test_live_tables_of_sweeps(sweep):
    table = LiveTable(sweep, Screen())
    for width in (80, 160):
        with table._console.capture() as drawn:
            table._console.print(table.render(width, 40))
        assert not harmful(drawn.get())


def test_the_panel_of_a_run():
    """Its title is a word of the configuration that a run was saved with; metrics and terms are named by tasks."""
    seen = RunProgress()
    for learner in (EVIL, "other"):
        seen.take(StepRecord(learner, 1, 1, 0, 1.0, 8.0, False, False, 2.0, 0.1))
    seen.take(EvalRecord(EVIL, 1, 1, 200, {EVIL: 0.1}))
    seen.take(ProgressRecord(1, 40, 0, 10, 4215.2, EVIL, 0.25, 512_000_000, 32.0, EVIL))
    console = Console(width=300, file=Screen())
    console.print(render(seen, EVIL))
    assert console.file.getvalue().count("]0;title") >= 5
    assert not harmful(console.file.getvalue())


def test_recipes(screen):
    from mptrain.study.recipe.catalogue import find_recipe

    recipe = replace(find_recipe("two_cliffs"), name=EVIL, title=EVIL, claim=EVIL, source=EVIL)
    with redirect_stdout(screen):
        print_recipe(recipe, remark=EVIL)
    print_rows(EVIL, [(EVIL, EVIL)], screen)
    assert not harmful(screen.getvalue())


def test_styles_of_ours_pass_and_no_others(screen):
    with redirect_stdout(screen):
        say(f"\x1b[1;32mmet\x1b[0m {EVIL}", styled=True)
    assert screen.getvalue().startswith("\x1b[1;32mmet\x1b[0m a\\x1b]0;title")
    assert "\\x1b[8me" in screen.getvalue()
    assert not harmful(screen.getvalue())


def test_not_even_those_reach_what_is_no_terminal(capsys):
    say("\x1b[1mx\x1b[0m", styled=True)
    assert capsys.readouterr().out == "\\x1b[1mx\\x1b[0m\n"
