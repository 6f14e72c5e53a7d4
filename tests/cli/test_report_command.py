from loops import each
from report.folders import make_run, make_sweep


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
