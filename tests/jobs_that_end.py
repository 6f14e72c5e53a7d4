"""Jobs of sweeps that end at once, each in the way that its seed says; imported by their processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from mptrain.runlog import RunDirectory, RunPaths, RunState, write_summary
from mptrain.study.commands.sweep import PROGRAM
from mptrain.study.sweep.executor import Program
from mptrain.system.errors import DataError, NumericsError, Preempted
from mptrain.system.records import EvalRecord, ProgressRecord, StepRecord

DONE, NUMERICS, BUG, LEAVES, KILLED, SILENT, STUCK, HELD, STOPPED, SAYS = range(10)

TORCH_WAS_THERE = "torch" in sys.modules


def train(config, sink):
    print(f"seed {config.seed}")
    match config.seed:
        case 1:
            raise NumericsError("only overflows\nsecond line")
        case 2:
            raise ZeroDivisionError("oh")
        case 3:
            sys.exit(0)
        case 4:
            os.kill(os.getpid(), signal.SIGKILL)
        case 5:
            os._exit(0)
        case 6:
            time.sleep(600)
        case 7:
            threading.Thread(target=time.sleep, args=(600,)).start()
        case 8:
            raise Preempted("SIGTERM: stopped", "", 75)
        case 9:
            say(sink)
    finish(config)


def finish(config):
    """What a run leaves that is done."""
    paths = RunPaths(Path(config.run.root) / config.run.name)
    paths.root.mkdir(exist_ok=True)
    learner = {"updates": 9, "skipped": 1, "skip_rate": 0.1, "overflows": {"unexpected": 1}}
    learner["scale"] = {"first": 8.0, "min": 4.0, "max": 8.0, "last": 4.0}
    numbers = {"metric": config.seed / 10, "metric_name": "top1", "metric_split": "test", "learners": {"main": learner}}
    write_summary(paths.summary, numbers)
    RunDirectory(paths).write_state(RunState("x", (), "", status="done"))


def finish_at_once(config, sink):
    """Whatever the seed says."""
    finish(config)


def takes_two_goes(config, sink):
    """Is told that its time is up once, after a step."""
    print("goes on")
    paths = RunPaths(Path(config.run.root) / config.run.name)
    if paths.root.exists():
        return finish(config)
    return run_out_of_time(paths, 5)


def gets_nowhere(config, sink):
    """Its time is up before its first step."""
    run_out_of_time(RunPaths(Path(config.run.root) / config.run.name), 0)


def run_out_of_time(paths, step):
    paths.root.mkdir()
    RunDirectory(paths).write_state(RunState("x", (), "").begin(0).end("preempted", "", 75, step))
    raise Preempted(f"SIGUSR1: stopped and saved after step {step} of 9", "", 75)


def say(sink, count=3):
    """So many records of progress, and an evaluation."""
    sink.take(StepRecord("main", 7, 5, 0, 1.0, 4096.0, False, False, 1.0, 0.1))
    for step in range(count):
        sink.take(ProgressRecord(step, count, 0, 1, 1.0, "samples", 0.0, 0, 3.0, "training"))
    sink.take(EvalRecord("val", 7, 1, 10, {"loss": 2.0, "top1": 0.5}))


def flood(config, sink):
    """Says more than a pipe holds."""
    say(sink, 20_000)
    print("all said")


def describe(config, sink):
    """Prints what its process is like."""
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    print("parent threads", next(line.split()[1] for line in status.splitlines() if line.startswith("Threads")))
    print("torch before", TORCH_WAS_THERE)
    print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))
    print("leads its session", os.getsid(0) != os.getsid(os.getppid()))
    print("out of memory first", Path("/proc/self/oom_score_adj").read_text().strip())


def threads(config, sink):
    import torch

    print("threads", torch.get_num_threads())


def refuse():
    raise DataError("no data", "get some")


def environment():
    return dict(os.environ)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def report(error):
    print("reported", error)
    return getattr(error, "exit_code", 1)


def program(function=train):
    return Program(function, report, PROGRAM.modules)
