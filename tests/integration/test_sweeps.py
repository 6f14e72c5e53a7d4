"""A sweep survives whatever happens to its jobs, and to itself; `mptrain resume` runs just what is missing."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from tests.small_runs import command, environment, run_command

pytestmark = pytest.mark.process

MODEL = """
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    import torch
    from torch import nn

    class Unruly(nn.Module):
        def __init__(self, *, num_classes: int, in_channels: int, image_size: int, deed: str = "none"):
            super().__init__()
            self.deed = deed
            self.layer = nn.Linear(in_channels * image_size**2, num_classes)

        def forward(self, images):
            outputs = self.layer(images.flatten(1))
            if Path("cured").exists():
                return outputs
            if self.deed == "exit":
                sys.exit(0)
            elif self.deed == "leave":
                os._exit(0)
            elif self.deed == "raise":
                raise LookupError("a deed of the user's")
            elif self.deed == "diverge":
                outputs = outputs * float("nan")
            elif self.deed == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.deed == "eat":
                torch.empty(1 << 50)
            elif self.deed == "slow":
                time.sleep(0.05)
            elif self.deed == "stuck":
                time.sleep(600)
            return outputs
"""
CONF = """
# @package _global_
# A network that does as it is told.
model:
  _target_: unruly.Unruly
  deed: none   # what it does in its first step
  defaults: {lr: {sgd: 0.05}}
"""
WORDS = (
    "--config-dir", "conf", "model=unruly", "extensions.allow=[unruly]", "precision=fp16_dynamic",
    "dataset.image_size=8", "dataset.train_samples=64", "train.batch_size=16", "train.epochs=1",
    "train.max_consecutive_overflows=3", "run.name=mine",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "unruly.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "unruly.yaml").write_text(CONF.lstrip())
    return tmp_path


def mptrain(folder, *words, timeout=120):
    root = environment()["PYTHONPATH"]
    return run_command(*words, cwd=folder, timeout=timeout, PYTHONPATH=f"{root}{os.pathsep}{folder}")


def start(folder, *words):
    extra = {"PYTHONPATH": f"{environment()['PYTHONPATH']}{os.pathsep}{folder}"}
    return subprocess.Popen(
        command(*words),
        cwd=folder,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def jobs_of(folder):
    path = folder / "outputs" / "mine" / "sweep.json"
    return json.loads(path.read_text())["jobs"] if path.exists() else []


def runs_of(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("outputs/mine/*/run.json")}


def wait_until(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children_of(pid):
    """The processes below a process, with their command lines."""
    found, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents.setdefault(int(fields[1]), []).append(int(entry.name))
            except OSError:
                continue
    rest = [pid]
    while rest:
        for child in parents.get(rest.pop(), []):
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            rest.append(child)
    return found


def test_four_jobs_go_wrong_each_in_its_own_way_and_resume_runs_them(folder):
    deeds = "none,exit,raise,diverge,kill,none"
    found = mptrain(folder, "-m", *WORDS, f"model.deed={deeds}", "--jobs", "2")
    assert found.returncode == 7, found.stderr
    assert "6/6 points valid" in found.stdout
    jobs = jobs_of(folder)
    assert [job["status"] for job in jobs] == ["done", "failed", "failed", "failed", "failed", "done"]
    reasons = [job["reason"] for job in jobs if job["status"] == "failed"]
    assert re.match(r"sys\.exit\(0\) in unruly\.py:\d+$", reasons[0])
    assert "LookupError: a deed of the user's" in reasons[1]
    assert [jobs[3]["code"], jobs[4]["code"]] == [4, -9]
    assert reasons[3] == "killed by SIGKILL (out of memory?)"
    assert str(Path("outputs/mine/004-model.deed=kill.log")) in found.stdout
    with (folder / "outputs" / "mine" / "sweep.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["status"] for row in rows] == [job["status"] for job in jobs]
    assert [bool(row["metric"]) for row in rows] == [job["status"] == "done" for job in jobs]
    assert rows[4]["model.deed"] == "kill"

    (folder / "cured").touch()
    before = runs_of(folder)
    again = mptrain(folder, "resume", "outputs/mine", WORDS[3])
    assert again.returncode == 0, again.stderr
    assert len(re.findall(r"^job=\d+/6 .* status=running$", again.stdout, re.MULTILINE)) == 4
    assert {job["status"] for job in jobs_of(folder)} == {"done"}
    after = runs_of(folder)
    changed = [name for name in after if after[name] != before.get(name)]
    assert sorted(name[:3] for name in changed) == ["001", "002", "003", "004"]


#: Jobs of ten seconds and more, which take a moment once they are cured.
SLOW = (*WORDS, "model.deed=slow", "train.epochs=60", "log.seconds=0.05")


def has_steps(folder, number, count=2):
    return any(
        path.read_bytes().count(b"\n") >= count for path in folder.glob(f"outputs/mine/{number:03d}-*/steps.jsonl")
    )


def nothing_is_left(processes):
    return not any(Path(f"/proc/{pid}").exists() and not is_zombie(pid) for pid in processes)


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("number", "code", "status"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 75, "preempted")]
)
def test_a_signal_lets_the_jobs_save_themselves(folder, number, code, status):
    process = start(folder, "-m", *SLOW, "seed=0,1,2", "--jobs", "2")
    wait_until(lambda: has_steps(folder, 0) and has_steps(folder, 1))
    processes = children_of(process.pid)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output
    assert [job["status"] for job in jobs_of(folder)] == [status, status, "waiting"]
    assert [job["code"] for job in jobs_of(folder)] == [code, code, None]
    assert re.search(
        r"to run the rest: PYTHONPATH=\S+ mptrain resume outputs/mine 'extensions.allow=\[unruly\]'\n", output
    )
    wait_until(lambda: nothing_is_left(processes), 10)
    assert {run["attempts"][0]["to_step"] > 0 for run in runs_of(folder).values()} == {True}


def test_a_second_ctrl_c_ends_it_at_once(folder):
    process = start(folder, "-m", *WORDS, "model.deed=stuck", "seed=0,1")
    wait_until(lambda: any(folder.glob("outputs/mine/000-*/run.json")))
    time.sleep(0.5)  # now it is in its first step
    processes = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130, output
    assert [job["status"] for job in jobs_of(folder)] == ["interrupted", "waiting"]
    wait_until(lambda: nothing_is_left(processes), 10)


def test_a_sweep_killed_with_sigkill_leaves_no_process_and_can_be_resumed(folder):
    process = start(folder, "-m", *SLOW, "seed=0,1,2", "--jobs", "2")
    wait_until(lambda: has_steps(folder, 0) and has_steps(folder, 1))
    processes = children_of(process.pid)
    assert len(processes) >= 3
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: nothing_is_left(processes), 20)
    assert [job["status"] for job in jobs_of(folder)] == ["running", "running", "waiting"]
    assert {run["status"] for run in runs_of(folder).values()} == {"preempted"}

    (folder / "cured").touch()
    again = mptrain(folder, "resume", "mine", "--jobs=3", WORDS[3])
    assert again.returncode == 0, again.stderr
    assert {job["status"] for job in jobs_of(folder)} == {"done"}
    for name in ("000-seed=0", "001-seed=1"):
        assert [attempt["from_step"] > 0 for attempt in runs_of(folder)[name]["attempts"]] == [False, True]


RECIPE = """
title: Mine
claim: It works.
source: a paper, section 1
base: [model=unruly, model.deed=slow, {base}]
arms:
  half: [precision=fp16_dynamic]
  full: [precision=fp32]
reference: full
seeds: [0]
margin: 0.5
expect: [{{arm: half, measure: top1, equals: full, within: 1}}]
needs: {{gpu: optional, minutes: 1, data: none}}
smoke: [train.epochs=1]
"""


@pytest.mark.parametrize(
    ("deed", "child"),
    [
        pytest.param("compare", False, marks=pytest.mark.slow, id="compare, parent"),
        pytest.param("reproduce", True, id="reproduce, child"),
    ],
)
def test_a_comparison_and_a_recipe_go_on_after_a_sigkill(folder, deed, child):
    (folder / "recipe").mkdir()
    (folder / "recipe" / "recipe.yaml").write_text(RECIPE.format(base=", ".join(SLOW[5:8] + SLOW[12:13])))
    words = {
        "compare": ("compare", *SLOW, "precision=fp32,fp16_dynamic", "seed=0"),
        "reproduce": ("reproduce", "recipe", *WORDS[:2], WORDS[3], SLOW[13]),
    }[deed]
    process = start(folder, *words)
    held = []
    wait_until(lambda: held.extend(folder.glob("outputs/**/000-*/steps.jsonl")) or (held and held[0].read_bytes()))
    run = held[0].parent
    wait_until(lambda: (run / "checkpoints").is_dir() and any((run / "checkpoints").glob("*.json")))
    processes = children_of(process.pid)
    os.kill(json.loads((run / "run.json").read_text())["attempts"][0]["pid"] if child else process.pid, signal.SIGKILL)
    (folder / "cured").touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (7 if child else -signal.SIGKILL), output
    if child:
        assert "status=failed exit=-9 " in output
        assert re.search(r"\nto run the rest: (PYTHONPATH=\S+ )?mptrain ", output), output
    wait_until(lambda: nothing_is_left(processes), 20)

    again = mptrain(folder, *(("resume", "outputs/mine", WORDS[3]) if deed == "compare" else words))
    expected = {"compare": 0, "reproduce": 5}[deed]  # one seed decides nothing
    assert again.returncode == expected, again.stderr + again.stdout
    state = json.loads((run / "run.json").read_text())
    assert state["status"] == "done"
    assert [attempt["from_step"] > 0 for attempt in state["attempts"]] == [False, True]
    assert (run.parent / "comparison.json").exists()
