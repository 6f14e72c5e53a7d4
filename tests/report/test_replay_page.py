"""The page of a replay, from values made by hand."""

import re
from pathlib import Path

import pytest
from report.folders import HOSTILE

from mptrain.errors import StorageError
from mptrain.report import write_replay
from mptrain.report.replay_page import Course, Replay, ReplayedLearner, figure_name, replay_page, replay_rows


def course(scales, overflows=()):
    found = Course()
    for step, scale in enumerate(scales, 1):
        found.add(step, scale, step in overflows, step in overflows)
    return found


def learner(name="main", replayed=(8.0, 16.0, 32.0, 16.0), overflows=(3,), parted=2, same=1):
    recorded = course([8.0, 8.0, 8.0, 8.0])
    words = ("static 8, on overflow skip", "dynamic from 8")
    return ReplayedLearner(name, *words, recorded, course(replayed, overflows), 2, 1, 1, same, parted)


def replay(root, *learners, scaler="dynamic", words=("scaler=dynamic",), notes=()):
    return Replay(Path(root), scaler, words, learners or (learner(),), notes)


def test_a_course_knows_its_ends_and_what_came_of_its_steps():
    found = course([8.0, 16.0, 4.0, 4.0], overflows=(2, 3))
    assert (found.first, found.lowest, found.highest, found.last) == (8.0, 4.0, 16.0, 4.0)
    assert (found.steps, found.updates, found.skipped, found.overflows) == (4, 2, 2, 2)
    assert found.marks.extremes() == ([2, 3], [16.0, 4.0])


def test_a_learner_has_two_rows_recorded_and_replayed():
    assert replay_rows(replay("run")) == [
        ["main", "recorded", "4", "0", "8", "8", "8", "8"],
        ["main", "replayed", "3", "1", "8", "8", "32", "16"],
    ]


@pytest.mark.parametrize(
    ("given", "clause"),
    [
        ({"parted": None, "same": 4}, "its scale is the recorded one at all 4 steps"),
        ({"parted": 1, "same": 0}, "its scale is another one at each of the 4 steps"),
        ({}, "its scale is the recorded one at 1 of 4 steps, another one first at step 2"),
    ],
)
def test_how_far_scales_agree_is_said_in_one_clause(given, clause):
    assert learner(**given).agreement() == clause


def test_the_page_says_what_would_have_been_and_how_that_is_known(tmp_path):
    page = replay_page(replay(tmp_path / "run", notes=("the run has no histograms",)))
    assert page.lead == (
        "It would have skipped 1 update where the run skipped 0, and ended at a scale of 16 where the run ended at 8."
    )
    assert page.status.text == "another rule than the run's"
    written = write_replay(replay(tmp_path, notes=("the run has no histograms",)))
    text = written.md.read_text()
    assert "| main | 4 | 2 | 1 | 1 |" in text
    assert "The run has no histograms." in text
    assert "scaler=dynamic" in text
    assert (tmp_path / "figures" / "replay-dynamic.svg").exists()


def test_every_learner_has_a_panel_and_a_sentence(tmp_path):
    page = replay_page(replay(tmp_path, learner("critic"), learner("actor", parted=None, same=4)))
    assert page.lead.startswith("Critic: it would have skipped 1 update")
    assert "actor: its scale is the recorded one at all 4 steps" in page.lead
    (plot,) = page.plots()
    assert ">critic<" in plot.svg
    assert ">actor<" in plot.svg
    assert ">overflow, replayed<" in plot.svg
    assert ">overflow, recorded<" not in plot.svg


def test_a_page_loads_nothing_and_shows_hostile_names_as_text(tmp_path):
    for at, text in enumerate(HOSTILE):
        made = replay(tmp_path, learner(text), scaler=f"x{at}", words=(f"scaler={text}",), notes=(text,))
        page = write_replay(made).html.read_text(encoding="utf-8")
        assert "<script" not in page
        assert not re.search(r"<[^>]*onmouseover", page)
        assert not re.search(r'(src|href)="(?!#|data:)', page)


def test_the_names_of_files_are_letters_digits_and_hyphens():
    assert figure_name("dynamic") == "replay-dynamic"
    assert figure_name("../my rule") == "replay----my-rule"


def test_figures_that_lead_elsewhere_are_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a symbolic link"):
        write_replay(replay(tmp_path / "run"))
