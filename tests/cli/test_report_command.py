import json
import threading
import time

import pytest

from mptrain.runlog import open_run
from tests.loops import each
from tests.report.folders import make_run, make_sweep


def test_it_prints_where_the_reports_are(terminal, tmp_path):
    make_run(tmp_path / "a")
    make_sweep(tmp_path / "b", [(("seed=0",), "done", {})])
    assert terminal("report", "a", "b") == 0
    assert terminal.out.splitlines() == ["a/report.html", "a/report.md", "b/report.html", "b/report.md"]
    assert (tmp_path / "a" / "report.html").exists()


def test_the_last_run_is_that_started_last(terminal, tmp_path):
    make_run(tmp_path / "outputs" / "only")
    assert terminal("report", "last") == 0
    assert terminal.out.splitlines()[0] == "outputs/only/report.html"


@each(
    ("words", "code", "message"), [(["last"], 6, "there is no run in outputs"), (["."], 6, "neither a run nor a sweep")]
)
def test_what_is_no_folder_of_ours_gets_one_line_and_a_hint(terminal, words, code, message):
    assert terminal("report", *words) == code
    assert message in terminal.err
    assert "hint:" in terminal.err


def test_a_folder_may_be_named_like_an_override(terminal, tmp_path):
    make_run(tmp_path / "scale=8")
    assert terminal("report", "scale=8") == 0


def test_several_runs_are_drawn_together(terminal, tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name, words=(f"note={name}",))
    assert terminal("report", "a", "b", "--together") == 0
    html, markdown = terminal.out.splitlines()
    assert html.startswith("outputs/reports/")
    assert "a and b" in (tmp_path / html).read_text()
    assert "](figures/losses.svg)" in (tmp_path / markdown).read_text()
    assert not (tmp_path / "a" / "report.html").exists()
    assert terminal("report", "a", "b", "--together", "--json") == 0
    (report,) = json.loads(terminal.out)["reports"]
    assert (report["kind"], report["title"], report["run"]) == ("runs", "a and b", None)


@each(
    "words",
    [
        ["a", "--together"],
        ["a", "a", "--together"],
        ["a", "b", "--together", "--follow", "1"],
        ["a", "b", "--follow=1"],
    ],
)
def test_options_that_do_not_fit_the_folders_write_nothing(terminal, tmp_path, words):
    for name in ("a", "b"):
        if not (tmp_path / name).exists():
            make_run(tmp_path / name, steps=3)
    assert terminal("report", *words) == 2
    assert "hint: write mptrain report RUN" in terminal.err
    assert not list(tmp_path.rglob("report.html"))


def test_a_run_that_cannot_be_drawn_leaves_no_folder(terminal, tmp_path):
    make_run(tmp_path / "a", steps=3)
    make_sweep(tmp_path / "b", [(("seed=0",), "done", {"steps": 3})])
    assert terminal("report", "a", "b", "--together") == 6
    assert "not a run directory" in terminal.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.long
def test_a_run_is_followed_until_it_has_ended(terminal, tmp_path):
    path = make_run(tmp_path / "a", steps=20, status="running")
    page, seen = path / "report.html", []

    def end_the_run():
        while not page.exists():
            time.sleep(0.01)
        seen.append(page.read_text())
        ended.set()

    ended = threading.Event()
    with open_run(path).lock():
        watcher = threading.Thread(target=end_the_run)
        watcher.start()
        threading.Thread(target=lambda: (ended.wait(), finish(path))).start()
        assert terminal("report", "a", "--follow", "1") == 0
        watcher.join()
    assert 'http-equiv="refresh" content="1"' in seen[0]
    assert 'http-equiv="refresh"' not in page.read_text()
    assert terminal.out.splitlines() == [
        "a/report.html: written again every 1 s until the run has ended", "a/report.html", "a/report.md",
    ]  # fmt: skip


def finish(path):
    run = open_run(path)
    run.write_state(run.read_state().end("done", "", 0, 20))


def test_a_page_that_is_no_longer_followed_does_not_reload_itself(terminal, tmp_path, monkeypatch):
    path = make_run(tmp_path / "a", steps=20, status="running")

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mptrain.cli.reports.time.sleep", interrupt)
    with open_run(path).lock():
        assert terminal("report", "a", "--follow", "1") == 130
    assert 'http-equiv="refresh"' not in (path / "report.html").read_text()


def test_a_run_that_was_killed_is_not_followed(terminal, tmp_path):
    make_run(tmp_path / "a", steps=20, status="running")
    assert terminal("report", "a", "--follow", "600") == 0
    assert terminal.out.splitlines() == ["a/report.html", "a/report.md"]
