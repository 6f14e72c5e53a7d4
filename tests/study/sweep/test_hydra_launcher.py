"""A sweeper of Hydra's asks, and is answered with metrics; what is wrong comes out as our errors."""

import pytest
from hydra.core.utils import JobStatus
from hydra.errors import HydraException

from mptrain.config.compose import Composer
from mptrain.runlog.sweeps import read_sweep
from mptrain.study.sweep.hydra_launcher import JobFailedError, run_sweeper
from mptrain.study.sweep.points import check
from mptrain.study.sweep.runner import plan_sweep, run_sweep
from mptrain.system.errors import ConfigError, MptrainError, StorageError
from tests import jobs_that_end as jobs
from tests.sweeper_that_asks import asking as registered

SMALL = ("dataset.image_size=8", "dataset.train_samples=64")
ASKED = "hydra/sweeper=asking"


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.fixture
def asking():
    with registered() as sweeper:
        yield sweeper


class Watched:
    def __init__(self):
        self.started = []

    def changed(self, sweep, job):
        assert read_sweep(sweep.folder) == sweep
        if job.status == "running":
            self.started.append(job.number)

    def progressed(self, number, progress):
        pass

    def tick(self):
        pass


def ask(composer, folder, *words):
    """A sweep as `mptrain.study.commands.sweep` has it; the numbers of the jobs that were started, batch by batch."""
    points, started = [], []

    def run(batch):
        points.extend(check(batch, composer, jobs.program()))
        sweep = plan_sweep(points, folder, words=words, grows=True)
        watch = Watched()
        started.append(watch.started)
        return run_sweep(sweep, composer, jobs.program(), watch, {point.number for point in batch})

    run_sweeper((*SMALL, ASKED, *words), composer, folder, run)
    return started


@pytest.mark.long
def test_batches_are_one_sweep_and_their_metrics_are_the_answers(asking, composer, tmp_path):
    asking.batches = ([["seed=0"], ["seed=9"]], [["seed=9", "precision=fp32"]])
    assert ask(composer, tmp_path, "seed=0,9") == [[0, 1], [2]]
    assert [[(answer.status, answer.return_value) for answer in batch] for batch in asking.answers] == [
        [(JobStatus.COMPLETED, 0.0), (JobStatus.COMPLETED, 0.9)],
        [(JobStatus.COMPLETED, 0.9)],
    ]
    sweep = read_sweep(tmp_path)
    assert [job.name for job in sweep.jobs] == ["000-seed=0", "001-seed=9", "002-seed=9,precision=fp32"]
    assert sweep.jobs[2].overrides == (*SMALL, "seed=9", "precision=fp32")
    assert asking.answers[0][1].working_dir == str(tmp_path / "001-seed=9")


def test_the_sweeper_sees_the_words_its_own_keys_and_the_folder(asking, composer, tmp_path):
    ask(composer, tmp_path, "seed=0,9", "hydra.sweeper.params={seed: 'range(3)'}")
    assert asking.seen == ([*SMALL, "seed=0,9"], str(tmp_path), {"seed": "range(3)"})


def test_a_failed_job_raises_when_the_sweeper_looks_and_is_not_run_again_with_the_next_batch(
    asking, composer, tmp_path
):
    asking.batches = ([[f"seed={jobs.KILLED}"], [f"seed={jobs.NUMERICS}"]], [["seed=0"]])
    assert ask(composer, tmp_path) == [[0, 1], [2]]
    killed, diverged = asking.answers[0]
    assert killed.status == JobStatus.FAILED
    with pytest.raises(JobFailedError, match=r"000-seed=4: killed by SIGKILL"):
        _ = killed.return_value
    with pytest.raises(JobFailedError, match=r"001-seed=1: only overflows"):
        _ = diverged.return_value
    assert [(job.status, job.code) for job in read_sweep(tmp_path).jobs] == [("failed", -9), ("failed", 4), ("done", 0)]


def test_a_run_without_a_metric_is_a_failure_to_a_sweeper(asking, composer, tmp_path, monkeypatch):
    monkeypatch.setattr("mptrain.study.sweep.hydra_launcher.summary_of", lambda run: {"metric": None})
    asking.batches = ([["seed=0"]],)
    ask(composer, tmp_path)
    with pytest.raises(JobFailedError, match="it has no metric of record"):
        _ = asking.answers[0][0].return_value


def test_a_sweeper_is_answered_with_the_figure_on_validation_data(asking, composer, tmp_path, monkeypatch):
    summary = {
        "metric": 0.2,
        "metric_name": "top1",
        "metric_split": "test",
        "val": {"top1": 0.7},
        "test": {"top1": 0.2},
    }
    monkeypatch.setattr("mptrain.study.sweep.hydra_launcher.summary_of", lambda run: summary)
    asking.batches = ([["seed=0"]],)
    ask(composer, tmp_path)
    assert asking.answers[0][0].return_value == 0.7


@pytest.mark.long
def test_asked_for_the_same_again_it_answers_from_the_record(asking, composer, tmp_path):
    asking.batches = ([["seed=0"], ["seed=9"]],)
    ask(composer, tmp_path)
    asking.batches = ([["seed=0"]], [["seed=9"], [f"seed={jobs.BUG}"]])
    assert ask(composer, tmp_path) == [[], [2]]
    assert [batch[0].return_value for batch in asking.answers[1:]] == [0.0, 0.9]
    assert [job.number for job in read_sweep(tmp_path).jobs] == [0, 1, 2]
    asking.batches = ([["seed=0"]],)
    assert ask(composer, tmp_path) == [[]]
    assert len(read_sweep(tmp_path).jobs) == 3
    asking.batches = ([["seed=9"]],)
    with pytest.raises(StorageError, match="is a sweep with different points"):
        ask(composer, tmp_path)


def test_nothing_of_a_batch_is_run_when_one_of_its_points_is_wrong(asking, composer, tmp_path):
    asking.batches = ([["seed=0"]], [["seed=9"], ["optimizer.lr=-1"]])
    with pytest.raises(ConfigError, match=r"point 3/3 \(optimizer.lr=-1\): optimizer.lr=-1: must be"):
        ask(composer, tmp_path)
    assert [job.name for job in read_sweep(tmp_path).jobs] == ["000-seed=0"]


def test_an_ended_batch_ends_the_sweeper_too(asking, composer, tmp_path):
    asking.batches = ([["seed=0"]], [["seed=9"]])
    sweep = plan_sweep([], tmp_path, words=())
    with pytest.raises(KeyboardInterrupt):
        run_sweeper((*SMALL, ASKED), composer, tmp_path, lambda batch: (sweep, 75))
    assert asking.answers == ()


@pytest.mark.parametrize(
    ("words", "raised", "message", "hint"),
    [
        (["hydra/sweeper=optunna"], None, "hydra/sweeper=optunna: there is no such sweeper", "hydra-NAME-sweeper"),
        (["hydra.sweeper.nothing=3"], None, "Could not override 'hydra.sweeper.nothing'", ""),
        (["train.epoch=3"], None, "unknown key 'train.epoch'", "did you mean train.epochs=3?"),
        ([], HydraException("no range() here"), "no range() here", ""),
        ([], ZeroDivisionError("oh"), "the sweeper failed: ZeroDivisionError: oh", "--traceback shows where"),
    ],
)
def test_what_hydra_or_the_sweeper_refuses_is_one_error_of_ours(
    asking, composer, tmp_path, words, raised, message, hint
):
    asking.batches = (raised,)
    with pytest.raises(MptrainError) as found:
        ask(composer, tmp_path, *words)
    assert str(found.value).startswith(message)
    assert hint in found.value.hint
    assert isinstance(found.value, ConfigError) == (not isinstance(raised, ZeroDivisionError))
