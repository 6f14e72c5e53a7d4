"""What the harness is asked for wrongly is refused before anything is measured."""

from __future__ import annotations

import pytest

from benchmarks import report, run
from benchmarks.results import Results


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--suite", "smoke", "--budget", "0"], "no positive number"),
        (["--suite", "smoke", "--budget", "inf"], "no positive number"),
        (["--suite", "smoke", "--rehearse"], "needs no GPU"),
        (["--suite", "smoke", "--threads", "0"], "a positive number"),
        (["--suite", "cpu", "--only", "C1,Z"], "no case of cpu measures Z"),
        (["--suite", "cpu", "--out", "."], "a file in a folder that exists"),
        (["--suite", "cpu", "--out", "nowhere/x.json"], "a file in a folder that exists"),
    ],
)
def test_wrong_arguments_of_a_run(words, answer, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run.main(words)
    assert answer in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "measurements": [{}]}', '{"schema": 0}']
)
def test_what_is_no_result_is_refused_in_a_line(content, capsys, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        report.main([str(path)])
    assert "this harness" in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_file_is_refused_and_an_empty_result_is_shown(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path / "nowhere.json")])
    assert "nowhere.json" in capsys.readouterr().err
    path = tmp_path / "x.json"
    Results("cpu", {"processor": "a", "cores": 1, "threads": 1, "versions": {}}).write(path)
    assert report.main([str(path)]) == 0
