"""``mptrain -m hydra/sweeper=NAME``: a sweep like any other, whose points come while it runs."""

import json
import re
from pathlib import Path

import pytest

from tests import jobs_that_end as jobs
from tests.sweeper_that_asks import asking as registered

WORDS = ("-m", "hydra/sweeper=asking", "dataset.image_size=8", "dataset.train_samples=64", "run.name=mine")


@pytest.fixture
def asking():
    with registered() as sweeper:
        yield sweeper


@pytest.fixture
def searching(terminal, monkeypatch, asking):
    """A terminal whose sweeps run jobs that end at once."""
    monkeypatch.setattr("mptrain.study.commands.sweeper_search.PROGRAM", jobs.program())
    monkeypatch.setattr("mptrain.study.commands.sweep.PROGRAM", jobs.program())
    return terminal


def names():
    return [job["name"] for job in json.loads(Path("outputs/mine/sweep.json").read_text())["jobs"]]


@pytest.mark.usefixtures("python_3_14")  # whose argparse does not take Hydra's parser
def test_every_batch_is_checked_and_shown_and_the_table_at_the_end_has_them_all(searching, asking, monkeypatch):
    summary = {"metric": 0.5, "metric_name": "top1", "metric_split": "test", "higher_is_better": True}
    monkeypatch.setattr("mptrain.study.commands.sweeper_search.summary_of", lambda run: summary)
    asking.batches = ([["seed=0"]], [["seed=9"], ["precision=fp32"]])
    assert searching(*WORDS, "seed=0,9", "--jobs", "2") == 0, searching.err
    assert (
        searching.out.count("the sweeper receives top1 (test) unchanged: configure it to maximize this metric\n") == 1
    )
    assert searching.err.count("there is no validation data: the sweeper chooses by test data") == 1
    assert re.findall(r"^(?:\d/\d points valid|sweep=.*)$", searching.out, re.MULTILINE) == [
        "1/1 points valid", "sweep=outputs/mine", "2/2 points valid",
    ]  # fmt: skip
    assert "job=1/1 run=000-seed=0 status=running\n" in searching.out
    assert len(re.findall(r"^\d  .* done ", searching.out, re.MULTILINE)) == 3
    assert names() == ["000-seed=0", "001-seed=9", "002-precision=fp32"]


@pytest.mark.long
def test_a_sweeper_that_goes_on_after_a_failure_ends_with_7_and_one_that_gives_up_too(searching, asking):
    asking.batches = ([[f"seed={jobs.NUMERICS}"]], [["seed=0"]])
    assert searching(*WORDS) == 7
    assert searching.out.endswith("\nto run the rest: mptrain resume outputs/mine\n")
    assert names() == ["000-seed=1", "001-seed=0"]
    asking.gives_up = True
    assert searching(*WORDS[:-1], "run.name=other") == 7
    assert re.search(r"^0\s+seed=1\s+failed \(4\)", searching.out, re.MULTILINE)
    assert "001-seed=0" not in searching.out
    assert "error: " not in searching.err


def test_resume_runs_what_the_sweeper_had_asked_for(searching, asking):
    asking.batches = ([["seed=0"], [f"seed={jobs.NUMERICS}"]],)
    assert searching(*WORDS) == 7
    asking.batches = asking.answers = ()
    assert searching("resume", "mine") == 7
    assert "1/1 missing points valid, 1 done before\n" in searching.out
    assert "only the points recorded in sweep.json are run; the sweeper is not called again\n" in searching.out
    assert "job=2/2 run=001-seed=1 status=running\n" in searching.out
    assert asking.answers == ()


def test_a_wrong_first_batch_leaves_the_name_free_and_a_wrong_later_one_shows_what_was_done(searching, asking):
    asking.batches = ([["optimizer.lr=-1"]],)
    assert searching(*WORDS) == 2
    assert "optimizer.lr=-1" in searching.err
    assert not Path("outputs/mine").exists()
    asking.batches = ([["seed=0"]], [["optimizer.lr=-1"]])
    assert searching(*WORDS) == 2
    assert "optimizer.lr=-1" in searching.err
    assert re.search(r"^0\s+seed=0\s+done", searching.out, re.MULTILINE)


@pytest.mark.parametrize("code", [130, 75])
def test_a_signal_in_a_batch_ends_the_search_with_its_code(searching, asking, monkeypatch, code):
    monkeypatch.setattr("mptrain.study.commands.sweeper_search.run_sweep", lambda sweep, *rest: (sweep, code))
    asking.batches = ([["seed=0"]], [["seed=9"]])
    assert searching(*WORDS) == code
    assert names() == ["000-seed=0"]
    assert "to run the rest: mptrain resume outputs/mine\n" in searching.out


def test_ctrl_c_between_two_batches_ends_it_with_130(searching, asking):
    asking.batches = ([["seed=0"]], KeyboardInterrupt())
    assert searching(*WORDS) == 130
    assert re.search(r"^0\s+seed=0\s+done", searching.out, re.MULTILINE)
    asking.batches = (KeyboardInterrupt(),)
    assert searching(*WORDS[:-1], "run.name=other") == 130
    assert not Path("outputs/other").exists()


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("hydra/launcher=joblib", "hydra/launcher=joblib"),
        ("run.name=a,b", "run.name=a,b"),
        ("hydra.sweep.dir=x", "'hydra.sweep.dir'"),
        ("precision=fp33", "'fp33'"),
        ("seed=0", "no points"),
    ],
)
def test_words_that_no_sweeper_can_have(searching, word, named):
    assert searching(*WORDS[:-1], word) == 2
    assert named in searching.err
    assert not list(Path().glob("outputs/**/sweep.json"))
    assert searching("hydra/sweeper=basic") == 2
    assert "hint: add -m" in searching.err


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # Optuna's own
def test_optuna_chooses_the_points(searching):
    words = [word.replace("=asking", "=optuna") for word in WORDS]
    trials = ("hydra.sweeper.n_trials=2", "hydra.sweeper.direction=minimize")
    assert searching(*words, *trials, "scaler.init_scale=choice(1024,65536)") == 0, searching.err
    assert {name.split("=")[1] for name in names()} <= {"1024", "65536"}
    assert len(names()) == 2
