"""Ranks as a user begins, interrupts and loses them: exit codes, what is saved, and records that end up the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mptrain.lab.diagnosis import case
from mptrain.lab.diagnosis.diagnose import diagnose_run
from mptrain.lab.step.repetition import observe_step
from tests.faults.attempts import children_of
from tests.faults.references import result_of
from tests.parallel.test_equal_to_one_rank import LSTM
from tests.parallel.warm_commands import begin_command, run_command
from tests.several_ranks import trained_alone
from tests.small_runs import environment

pytestmark = pytest.mark.distributed

WORDS = (
    "model=mlp",
    "precision=fp16_dynamic",
    "schedule=constant",
    "train.epochs=5",
    "checkpoint.every_epochs=2",
    "log.seconds=0.05",
)
TWO = "distributed.procs=2"


def wait_for_steps(run, count):
    steps, until = run / "steps.jsonl", time.monotonic() + 120
    while not steps.exists() or len(steps.read_bytes().splitlines()) < count:
        assert time.monotonic() < until, "no steps"
        time.sleep(0.01)


def status_of(run):
    return json.loads((run / "run.json").read_text())["status"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    finished = run_command(*WORDS, TWO, "run.name=r", cwd=folder)
    assert finished.returncode == 0, finished.stderr
    assert "cpu, 2 ranks (gloo)" in finished.stdout
    assert finished.stdout.count("done") == 1  # the others are silent
    assert json.loads((folder / "outputs/r/run.json").read_text())["ranks"] == 2
    return folder / "outputs/r"


@pytest.mark.parametrize("how", ["a killed rank", "the first rank killed", "a signal to one rank"])
def test_nothing_is_lost_with_a_rank(tmp_path, undisturbed, how):
    process = begin_command(*WORDS, TWO, "run.name=r", cwd=tmp_path)
    run = tmp_path / "outputs/r"
    wait_for_steps(run, 60)
    (other,) = children_of(process.pid)
    number = signal.SIGTERM if how == "a signal to one rank" else signal.SIGKILL
    os.kill(process.pid if how == "the first rank killed" else other, number)
    ended = process.finish(60)
    if how == "the first rank killed":
        assert status_of(run) == "running"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and os.path.exists(f"/proc/{other}/exe"):  # noqa: PTH110
            time.sleep(0.05)
    else:
        assert ended.returncode == 75, ended.stderr
        assert status_of(run) == "preempted"
        saved = len((run / "steps.jsonl").read_bytes().splitlines())
        assert f"saved after step {saved} of" in ended.stderr
        assert f"mptrain resume {run.relative_to(tmp_path)}" in ended.stderr
        assert ("rank 1 was killed by SIGKILL" in ended.stderr) == (how == "a killed rank")
    finished = run_command("resume", "r", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert (run / "steps.jsonl").read_bytes() == (undisturbed / "steps.jsonl").read_bytes()


def test_a_run_whose_time_is_over_goes_on_without_a_step(tmp_path):
    words = (*WORDS, TWO, "train.epochs=100000", "train.max_minutes=0.01", "run.name=r")
    run = tmp_path / "outputs/r"
    for way in (words, ("resume", "r")):
        finished = run_command(*way, cwd=tmp_path)
        assert finished.returncode == 0, finished.stderr
        if way is words:
            steps, state = (run / "steps.jsonl").read_bytes(), json.loads((run / "run.json").read_text())
            (run / "run.json").write_text(
                json.dumps({**state, "status": "running"})
            )  # killed behind its last checkpoint
    assert (run / "steps.jsonl").read_bytes() == steps


MORTAL = """
import os, signal
from pathlib import Path
from mptrain.engine.loop import Loop
from mptrain.engine.telemetry import Telemetry
from mptrain.engine.validation import Validation
from mptrain.workloads.classification.models.perceptron import mlp as net

OWNERS = {"attempt": Loop, "report_faulty_samples": Telemetry, "run": Validation}
running = []

def begin(loop, *given, inner=Loop.__init__):
    inner(loop, *given)
    running.append(loop)

def dies_in(name, step, testing):
    inner = getattr(OWNERS[name], name)
    def outer(owner, *given, **named):
        loop = running[-1]
        here = (loop.parts.comm.rank, loop.progress.step, getattr(loop, "testing", False)) == (1, step, testing)
        if here and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(owner, *given, **named)
    setattr(OWNERS[name], name, outer)

def evaluate_test(loop, inner=Loop._evaluate_test):
    loop.testing = True
    inner(loop)

Loop.__init__, Loop._evaluate_test = begin, evaluate_test
if "DIES_IN" in os.environ:
    name, *where = os.environ["DIES_IN"].split(":")
    dies_in(name, *map(int, where))
"""


def train_mortal(folder, words, **more):
    (folder / "mortal.py").write_text(MORTAL)
    path = f"{environment()['PYTHONPATH']}:{folder}"
    return run_command(*words, "extensions.allow=[mortal.*]", cwd=folder, PYTHONPATH=path, **more)


MORTALS = (
    *("model=mlp", "model._target_=mortal.net", "precision=fp16_dynamic", "dataset.train_samples=24", TWO),
    *("train.batch_size=8", "train.epochs=3", "inject.step=5", "inject.tensor=input", "run.name=r"),
)


@pytest.fixture(scope="module")
def immortal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("immortal")
    finished = train_mortal(folder, MORTALS)
    assert finished.returncode == 0, finished.stderr
    result = result_of(folder / "outputs/r")
    assert any(b'"injected"' in line for line in result.events)
    return result


@pytest.mark.parametrize(
    "place",
    [
        *("attempt:3:0", "attempt:4:0", "report_faulty_samples:9:1"),
        *(pytest.param(f"{place}:0", marks=pytest.mark.slow) for place in ("run:6", "report_faulty_samples:6")),
    ],
)
def test_what_is_done_again_without_a_rank_is_on_record_once(tmp_path, immortal, place):
    lost = train_mortal(tmp_path, MORTALS, DIES_IN=place)
    assert lost.returncode == 75, lost.stderr
    assert "rank 1 was killed by SIGKILL; saved after step" in lost.stderr
    finished = train_mortal(tmp_path, ("resume", "r"), DIES_IN=place)
    assert finished.returncode == 0, finished.stderr
    result = result_of(tmp_path / "outputs/r")
    assert result.steps == immortal.steps
    assert result.events == immortal.events


@pytest.mark.parametrize("last", ["distributed.procs=2", pytest.param("distributed.procs=4", marks=pytest.mark.slow)])
def test_parts_are_gone_on_with_at_any_number_of_ranks(tmp_path, last):
    words = ("model=mlp", "precision=fp16_dynamic", "optimizer=adamw", "schedule=constant", "train.accumulate=4")
    words = (*words, "checkpoint.every_epochs=null", "train.epochs=3")
    finished = run_command(*words, "distributed=fsdp2", TWO, "train.max_steps=24", "run.name=whole", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    ways = [
        (*words, TWO, "run.name=r"),
        ("resume", "r", "distributed=fsdp2", TWO),
        ("resume", "r", "distributed.procs=1"),
    ]
    for number, way in enumerate([*ways, ("resume", "r", last)], start=1):
        finished = run_command(*way, f"train.max_steps={6 * number}", cwd=tmp_path)
        assert finished.returncode == 0, finished.stderr
        assert ("the same batches" in finished.stdout) == (number > 2)
        in_parts = (tmp_path / f"outputs/r/checkpoints/step-{6 * number:08}.parts").exists()
        assert in_parts == (number in (2, 4))
    steps = [
        [json.loads(line) for line in (tmp_path / "outputs" / name / "steps.jsonl").read_text().splitlines()]
        for name in ("whole", "r")
    ]
    assert len(steps[0]) == len(steps[1]) == 24
    for one, other in zip(*steps, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert {**other, "loss": 0, "grad_norm": 0} == {**one, "loss": 0, "grad_norm": 0}
    measured = run_command("eval", "whole", cwd=tmp_path)
    assert measured.returncode == 0, measured.stderr
    assert "warning" not in measured.stderr.replace("warning: this CPU", "")
    damaged = next((tmp_path / "outputs/whole/checkpoints").glob("*.parts/rank-1.pt"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    refused = run_command("eval", "whole", cwd=tmp_path)
    assert refused.returncode == 6
    assert "SHA-256" in refused.stderr
    assert "Traceback" not in refused.stderr


def losses_of(run):
    return [json.loads(line)["loss"] for line in (run / "steps.jsonl").read_text().splitlines()]


def test_a_state_carried_by_two_ranks_is_gone_on_with_by_one(tmp_path):
    words = (*LSTM, "train.accumulate=2", "precision=fp16_dynamic", "schedule=constant", "seed=3")
    one = ("resume", "r", "distributed.procs=1", "train.max_steps=null")
    for way in ((*words, TWO, "run.name=r", "train.max_steps=9"), one):
        finished = run_command(*way, cwd=tmp_path)
        assert finished.returncode == 0, finished.stderr
    whole, resumed = [step["loss"] for step in trained_alone(*words)["steps"]], losses_of(tmp_path / "outputs/r")
    assert len(whole) == len(resumed) > 9
    assert resumed == pytest.approx(whole, rel=2e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.batch_size=2", "distributed.procs=3"), "train.batch_size=2 with 3 ranks"),
        (("inject.rank=2", "inject.step=1", "inject.tensor=input", TWO), "there are 2 ranks"),
        (("distributed=fsdp2", TWO, "diagnostics=histograms"), "choose distributed=ddp"),
        (("distributed=fsdp2", TWO, "distributed.units=[1,nothing]"), "no module 'nothing'"),
        (("distributed=fsdp2", TWO, "model=dcgan64", "dataset=digits"), "2 learners"),
        (("distributed.procs=0",), "distributed.procs=0"),
        (("distributed=ddp", "distributed.units=[a]"), "only fsdp2"),
        (("distributed=dpp",), "ddp"),
        ((TWO, "dataset=text", "dataset.path=nowhere", "model=word_lstm"), "nowhere"),
    ],
)
def test_what_ranks_cannot_do_is_said_once(tmp_path, words, said):
    finished = run_command("model=mlp", *words, cwd=tmp_path)
    assert finished.returncode in (2, 6), finished.stderr
    assert finished.stderr.count(said) == 1, finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "outputs").exists()


THEIRS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, *, num_classes: int, in_channels: int):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 16), nn.ReLU())])
        self.head = nn.Linear(16, num_classes)

    def forward(self, images):
        return self.head(self.blocks[0][0](images.flatten(1)))
"""


def test_weights_that_are_used_outside_of_their_block_are_told(tmp_path):
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/theirs.yaml").write_text("_target_: theirs.Net\n")
    words = ("--config-dir", "conf", "extensions.allow=[theirs.*]", "model=theirs", "distributed=fsdp2", TWO)
    words = (*words, "train.max_steps=3")
    path = {"PYTHONPATH": f"{environment()['PYTHONPATH']}:{tmp_path}"}
    refused = run_command(*words, cwd=tmp_path, **path)
    assert refused.returncode == 2, refused.stderr
    assert "error: Net uses weights of a block outside the block's forward" in refused.stderr
    assert run_command(*words, "distributed.units=[]", cwd=tmp_path, **path).returncode == 0


def test_a_sample_that_only_one_rank_meets_ends_the_run(tmp_path):
    from PIL import Image

    for kind in ("cats", "dogs"):
        (tmp_path / "pictures/train" / kind).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (12, 12), (number * 20, 0, 99)).save(tmp_path / f"pictures/train/{kind}/{number}.png")
    (tmp_path / "pictures/train/dogs/5.png").write_bytes(b"no picture")
    words = ("model=mlp", "dataset=image_folder", "dataset.root=pictures", "dataset.image_size=8", "train.batch_size=8")
    finished = run_command(*words, TWO, "train.epochs=3", "run.name=r", cwd=tmp_path)
    assert finished.returncode == 6, finished.stdout + finished.stderr
    assert finished.stderr.count("error:") == 1
    assert "5.png" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_torchrun_begins_again_where_the_last_checkpoint_is(tmp_path, undisturbed, victim):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2", "--nproc-per-node=2"]
    process = subprocess.Popen([*torchrun, "-m", "mptrain", *WORDS], cwd=tmp_path, env=environment())
    until = time.monotonic() + 120
    while not (found := list(tmp_path.glob("outputs/*/*/steps.jsonl"))):
        assert time.monotonic() < until
        time.sleep(0.05)
    run = found[0].parent
    wait_for_steps(run, 90)
    for pid in children_of(process.pid):
        if f"\0RANK={victim}\0" in Path(f"/proc/{pid}/environ").read_text():
            os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=240) == 0
    assert list(tmp_path.glob("outputs/*/*/steps.jsonl")) == found
    assert (run / "steps.jsonl").read_bytes() == (undisturbed / "steps.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_rank_that_dies_under_torchrun_is_told_in_one_line(tmp_path, victim):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*torchrun, "-m", "mptrain", *WORDS, "run.name=r"]
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    wait_for_steps(tmp_path / "outputs/r", 60)
    for pid in children_of(process.pid):
        if f"\0RANK={victim}\0" in Path(f"/proc/{pid}/environ").read_text():
            os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    ours = [line for line in said.splitlines() if line.startswith(("error:", "stopped:"))]
    assert len(ours) == 1, said
    assert "hint: " in said


STATIC = (
    "model=mlp",
    "precision=fp16_static",
    "train.max_consecutive_overflows=3",
    "train.batch_size=9",
    TWO,
    "run.name=r",
)


@pytest.mark.parametrize(("kind", "tensor"), [("ddp", "input"), ("fsdp2", "activation:1")])
def test_a_step_gone_wrong_on_another_rank_is_done_again(tmp_path, monkeypatch, kind, tensor):
    fault = ("inject.step=2", "inject.count=9", f"inject.tensor={tensor}", "inject.value=nan", "inject.rank=1")
    failed = run_command(*STATIC, "scaler.scale=128", f"distributed={kind}", *fault, cwd=tmp_path)
    assert failed.returncode == 4, failed.stderr
    assert "a fault was injected on purpose" in failed.stderr
    kept = torch.load(tmp_path / "outputs/r/failure/step.pt", weights_only=True)
    assert kept["batch"]["inputs"].shape[0] == 9
    assert kept["batch"]["inputs"].isfinite().all()
    monkeypatch.chdir(tmp_path)
    found = diagnose_run("last").examination
    assert found.verdict.startswith(f"the injected fault is the cause: nan into {tensor}; ")
    assert "in the run 2 ranks shared its batch; here one process computes all of it" in found.remarks
    assert "the loss equals the recorded loss" in found.remarks
    assert [remedy.helped for remedy in found.remedies] == [True]


def test_remedies_of_several_ranks_are_tried_in_micro_batches(tmp_path, monkeypatch):
    failed = run_command(*STATIC, "scaler.scale=1e30", cwd=tmp_path)
    assert failed.returncode == 4, failed.stderr
    monkeypatch.chdir(tmp_path)
    tried = []

    def observe(parts, *rest):
        tried.append(parts.plan.accumulate)
        return observe_step(parts, *rest)

    monkeypatch.setattr(case, "observe_step", observe)
    found = diagnose_run("last").examination
    assert "the loss equals the recorded loss" in found.remarks
    assert found.remedies[0].helped
    assert set(tried) == {2}
