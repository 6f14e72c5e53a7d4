"""Loops as others write them train as they do alone, and their records hold all that was not finite, skipped or left out."""

from __future__ import annotations

import subprocess
import sys
import threading
from subprocess import PIPE, STDOUT

import pytest
import torch

import mptrain
from mptrain.integrations.learner import WatchedLearner
from mptrain.runlog import RecordWriter, read_run
from tests.integrations.loops import ended
from tests.integrations.loops.judge import (
    Checks,
    Loop,
    Truth,
    Watching,
    all_loops,
    batches,
    cpu_scaler,
    hooks,
    listening,
    loss_of,
    mlp,
    update,
)
from tests.small_runs import environment

#: Loops that are unlike those of other tests, and take no second.
QUICK = {
    "optimizers_in_backward",
    "backward_of_many",
    "closure_that_fails",
    "out_of_memory",
    "lbfgs",
    "gan",
    "gradient_penalty",
    "two_passes_over_one_graph",
    "replaced_optimizer",
    "parts_of_a_model",
    "checkpointed_reentrant",
    "private",
    "hooks_that_write",
}


def parameters():
    for name, loop in all_loops().items():
        marks = [] if name in QUICK else [pytest.mark.slow]
        marks += [pytest.mark.process] * (loop.processes == 1) + [pytest.mark.distributed] * (loop.processes > 1)
        yield pytest.param(loop, id=name, marks=marks)


@pytest.mark.parametrize("loop", [*parameters()])
def test_a_loop_trains_as_alone_and_its_record_is_true(loop, tmp_path):
    if loop.processes == 0:
        failed = loop.judge(tmp_path)
        assert not failed, "\n".join(failed)
        return
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(loop.processes), "-m"]
    command = [sys.executable, "-m", *launcher * (loop.processes > 1), "tests.integrations.loops"]
    done = subprocess.run(
        [*command, loop.name, str(tmp_path)],
        env=environment(),
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("how", ended.ENDINGS)
def test_a_process_ends_as_alone_and_its_record_is_true(how, tmp_path):
    ending, truth, check = ended.ENDINGS[how], Truth(), Checks(how)
    ended.train(ending, Watching(None), truth)
    truth.status, truth.reason = ending.status, "KeyboardInterrupt" * (ending.status == "failed")
    command = [sys.executable, "-m", "tests.integrations.loops.ended", how, str(tmp_path)]
    out = []
    with subprocess.Popen(command, env=environment(), stdout=PIPE, stderr=STDOUT, text=True) as process:
        timer = threading.Timer(100, process.kill)
        timer.start()
        for line in process.stdout:
            out.append(line)
            if ending.signal is not None and line.strip() == ended.READY:
                process.send_signal(ending.signal)
        timer.cancel()
    check("exit status is that of the loop alone", process.returncode in ending.codes)
    check("tracebacks", "".join(out).count("Traceback"), ending.tracebacks)
    if ending.status == "running":  # of the last second nothing is sure to be on disk
        written = len([*read_run(tmp_path / "run").steps()])
        truth.attempts["main"] = truth.attempts["main"][: max(10, written)]
    Loop(how, ended.train).judge_records(check, truth, tmp_path, [])
    assert not check.failed, "\n".join([*check.failed, *out])


def test_no_flush_of_another_thread_is_one_that_fails_while_the_watch_ends(tmp_path, monkeypatch):
    close = RecordWriter.close

    def close_and_flush(self):
        close(self)
        thread = threading.Thread(target=watch.flush)
        thread.start()
        thread.join(0.3)  # it may wait for the end of the watch

    monkeypatch.setattr(RecordWriter, "close", close_and_flush)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with listening() as told:
        watch = mptrain.watch(model, optimizer, dir=tmp_path / "run")
        for _, x, y in batches(3):
            update(Truth(), model, optimizer, loss_of(model, x, y))
        watch.close()
    assert not told


def test_a_watch_that_fails_leaves_no_hook(monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(WatchedLearner, "_after_step", fail)
    model, scaler = mlp(), cpu_scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = hooks([model])
    with listening() as told, mptrain.watch(model, optimizer, scaler, every=1):
        update(Truth(), model, optimizer, loss_of(model, *batches(1)[0][1:]), scaler)
    assert "planted" in told[0]
    assert hooks([model]) == before
