"""The page of a replay with handmade values."""

import re
from pathlib import Path

import pytest

from mptrain.lab.commands.diagnose import write_replay
from mptrain.lab.pages.loss_scale_pages import Replay, ReplayedLearner, ScaleTrajectory, file_name, replay_page
from mptrain.system.errors import StorageError
from tests.loops import each
from tests.report.folders import HOSTILE
from tests.report.policy import without_script

pytestmark = pytest.mark.usefixtures("undrawn")


def course(scales, overflows=()):
    found = ScaleTrajectory()
    for step, scale in enumerate(scales, 1):
        found.add(step, scale, step in overflows, step in overflows)
    return found


def learner(name="main", replayed=(8.0, 16.0, 32.0, 16.0), overflows=(3,), parted=2, same=1):
    recorded = course([8.0, 8.0, 8.0, 8.0])
    words = ("static 8, on overflow skip", "dynamic from 8")
    return ReplayedLearner(name, *words, recorded, course(replayed, overflows), 3, 1, same, parted)


def replay(root, *learners, scaler="dynamic", words=("scaler=dynamic",), notes=()):
    return Replay(Path(root), scaler, words, learners or (learner(),), notes)


def test_a_course_knows_its_ends_and_what_came_of_its_steps():
    found = course([8.0, 16.0, 4.0, 4.0], overflows=(2, 3))
    assert (found.first, found.lowest, found.highest, found.last) == (8.0, 4.0, 16.0, 4.0)
    assert (found.steps, found.updates, found.skipped, found.overflows) == (4, 2, 2, 2)
    assert found.marks.extremes() == ([2, 3], [16.0, 4.0])


def test_a_learner_has_two_rows_recorded_and_replayed():
    rows = replay_page(replay("run")).sections[0].blocks[0].rows
    assert [[cell.text for cell in row] for row in rows] == [
        ["main", "recorded", "4", "0", "0", "8", "8", "8", "8"],
        ["main", "replayed", "3", "1", "0", "8", "8", "32", "16"],
    ]


@pytest.mark.parametrize(
    ("given", "clause"),
    [
        ({"parted": None, "same": 4}, "its scale equals the recorded one at all 4 steps"),
        ({"parted": 1, "same": 0}, "its scale differs from the recorded one at all 4 steps"),
        ({}, "its scale equals the recorded one at 1 of 4 steps and first differs at step 2"),
    ],
)
def test_how_far_scales_agree_is_said_in_one_clause(given, clause):
    assert learner(**given).agreement() == clause


def test_the_page_says_what_would_have_been_and_how_known(tmp_path):
    made = replay(tmp_path, notes=("the run has no histograms",))
    page = replay_page(made)
    assert "skipped 1 update and ended at a loss scale of 16; the run skipped 0 and ended at 8" in page.lead
    assert page.status.text == "another rule"
    text = write_replay(made).md.read_text()
    assert "| known | outcomes of 4 steps: 3 known, 1 estimated |" in text
    assert "The run has no histograms." in text
    assert "scaler=dynamic" in text
    assert (tmp_path / "figures" / "replay-dynamic.svg").exists()


def test_every_learner_has_a_panel_and_a_sentence(tmp_path, drawn):
    page = replay_page(replay(tmp_path, learner("critic"), learner("actor", parted=None, same=4)))
    assert page.lead.startswith("critic: it would have skipped 1 update")
    assert "actor: its scale equals the recorded one at all 4 steps" in page.lead
    (plot,) = page.plots()
    assert ">critic<" in plot.svg
    assert ">actor<" in plot.svg
    assert ">overflow, replayed<" in plot.svg
    assert ">overflow, recorded<" not in plot.svg


def test_a_page_loads_nothing_and_shows_hostile_names_as_text(tmp_path):
    for at, text in enumerate(HOSTILE):
        made = replay(tmp_path, learner(text), scaler=f"x{at}", words=(f"scaler={text}",), notes=(text,))
        page = without_script(write_replay(made).html.read_text(encoding="utf-8"))
        assert not re.search(r"<[^>]*onmouseover", page)
        assert not re.search(r'(src|href)="(?!#|data:)', page)


@each(
    ("scaler", "words", "name"),
    [
        ("dynamic", (), "replay-dynamic"),
        ("static", ("scaler=static", "scaler.scale=8"), "replay-static-scale-8"),
        ("static", ("scaler.scale=64",), "replay-static-scale-64"),
        ("smooth", ("+scaler=smooth", "scaler.rate=0.5"), "replay-smooth-rate-0-5"),
        ("dynamic", ("learners.actor.scaler.interval=5",), "replay-dynamic-learners-actor-interval-5"),
        ("../my rule", ("scaler=../my rule",), "replay----my-rule"),
    ],
)
def test_names_of_files_have_the_words_in_letters_and_digits(scaler, words, name):
    assert file_name(replay("run", scaler=scaler, words=words)) == name


def test_long_words_have_short_names_of_their_own():
    one, other = (file_name(replay("run", words=(f"scaler.edges={'1,' * 200}{last}",))) for last in (1, 2))
    assert len(one) < 110
    assert one != other


def unsure(known, unknown):
    """Return a learner with skipped steps and unknown steps."""
    found = course([1.0] * known, range(1, known + 1))
    for step in range(known + 1, known + unknown + 1):
        found.pass_over(step, 1.0)
    words = ("static 8, on overflow skip", "static 1, on overflow skip")
    return ReplayedLearner("main", *words, course([8.0] * (known + unknown)), found, known, 0, 0, 1)


def test_steps_of_which_nothing_is_known_are_counted(tmp_path, drawn):
    page = replay_page(replay(tmp_path, unsure(0, 5)))
    assert "do not show what it would have done at any of the 5 steps" in page.lead
    assert ">overflow, replayed<" not in page.plots()[0].svg
    assert "skipped 2 updates (3 steps unknown) and ended" in replay_page(replay(tmp_path, unsure(2, 3))).lead


def test_figures_that_lead_elsewhere_are_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a symbolic link"):
        write_replay(replay(tmp_path / "run"))
