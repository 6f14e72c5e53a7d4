from datetime import datetime
from pathlib import Path

import pytest

from mptrain.campaign.points import Point, expand
from mptrain.campaign.sweep import directory_name, in_this_process, prepare, quoted, run, sweep_folder
from mptrain.config.compose import Composer, compose
from mptrain.errors import StorageError
from mptrain.runlog.summary import write_summary


@pytest.fixture(scope="module")
def composer():
    return Composer()


def sweep_of(composer, train, folder, words=("seed=0,1,2",)):
    reported = []
    jobs = prepare(expand(words, composer.catalogue), composer, folder)
    launcher = in_this_process(train, lambda error: reported.append(error) or 1, lambda job: None)
    return *run(jobs, launcher), reported


def raising(errors):
    def train(config):
        error = errors.get(config.seed)
        if isinstance(error, BaseException):
            raise error
        return error or 0

    return train


def test_what_one_job_raises_never_ends_the_others(composer, tmp_path):
    errors = {0: SystemExit(3), 1: RuntimeError("oh")}
    outcomes, code, reported = sweep_of(composer, raising(errors), tmp_path)
    assert [outcome.code for outcome in outcomes] == [3, 1, 0]
    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "done"]
    assert code == 7
    assert reported == [errors[1]]


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (130, 130), (75, 75)])
def test_a_signal_ends_the_sweep_with_its_own_code(composer, tmp_path, stop, code):
    outcomes, found, _ = sweep_of(composer, raising({1: stop}), tmp_path)
    assert found == code
    assert [outcome.code for outcome in outcomes] == [0, code, None]
    assert outcomes[2].status == "not run"


def test_a_sweep_without_failures_ends_with_0(composer, tmp_path):
    outcomes, code, _ = sweep_of(composer, raising({0: SystemExit(None)}), tmp_path)
    assert code == 0
    assert {outcome.status for outcome in outcomes} == {"done"}


def test_each_job_has_a_directory_and_its_summary_is_read(composer, tmp_path):
    def train(config):
        root = Path(config.run.root) / config.run.name
        root.mkdir(parents=True)
        write_summary(root / "summary.json", {"metric": config.seed / 10})
        return 0

    outcomes, _, _ = sweep_of(composer, train, tmp_path / "it's a sweep")
    assert [outcome.summary["metric"] for outcome in outcomes] == [0.0, 0.1, 0.2]
    assert [outcome.job.root.name for outcome in outcomes] == ["000-seed=0", "001-seed=1", "002-seed=2"]


def test_directory_names_are_sortable_and_safe():
    assert directory_name(Point(7, (), ("a=b/../c", "d='x y'"))) == "007-a=b_.._c,d=_x_y"
    assert directory_name(Point(7, (), ())) == "007"
    assert len(directory_name(Point(7, (), ("x=" + "y" * 500,)))) <= 104


def test_a_sweep_has_a_folder_of_its_own_below_sweeps(tmp_path):
    first, second = sweep_folder(tmp_path, None), sweep_folder(tmp_path, None)
    assert first != second
    assert first.is_dir()
    assert first.parent.parent == tmp_path / "sweeps"
    datetime.strptime(first.parent.name, "%Y-%m-%d")
    assert sweep_folder(tmp_path, "mine") == tmp_path / "mine"


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        sweep_folder(tmp_path / "file", None)


@pytest.mark.parametrize("text", ["plain", "it's", "back\\slash", "a,b", "x: {y}", "tail\\", "\\'"])
def test_quoted_values_come_back_as_they_were(text):
    assert compose([f"run.root={quoted(text)}"]).run.root == text
