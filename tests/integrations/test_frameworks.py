"""A watch inside the loops of other frameworks sees what it sees in a plain loop."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mptrain.numerics.exponents import total
from mptrain.runlog import read_run
from mptrain.runlog.run_paths import RunPaths
from mptrain.study.comparison.run_measures import measure
from mptrain.system.errors import StorageError
from tests.small_runs import environment

BEHIND = ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


FRAMEWORKS = [
    ("accelerate", "", []),  # its schedule waits for the update
    ("transformers", "inner.", [4, 9]),
    ("lightning", "inner.", [4, 9]),
    ("manual", "inner.", [4, 9]),
    ("fabric", "", [4, 9]),
]


@pytest.mark.process
@pytest.mark.parametrize(("framework", "prefix", "moved"), FRAMEWORKS)
def test_a_framework_s_skipped_steps_are_named(framework, prefix, moved, tmp_path):
    assert_skipped_steps_are_named(framework, prefix, moved, tmp_path, "cpu")


def assert_skipped_steps_are_named(framework, prefix, moved, tmp_path, device):
    pytest.importorskip({"manual": "lightning", "fabric": "lightning"}.get(framework, framework))
    command = [sys.executable, "-m", "tests.integrations.framework_loops", framework, device]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["skipped"] == {step: [prefix + name for name in BEHIND] for step in ("4", "9")}
    assert found["moved"] == moved
    assert (found["last"]["step"], found["last"]["loss_scale"]) == (12, 256)


def on_two_ranks(folder, kind, micro=1):
    """Train with ``two_ranks``; return the record and the gradient norms that torch measured.

    The losses on record are those of rank 0.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "tests.integrations.two_ranks", str(folder), kind, str(micro)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1].replace("inf", "Infinity").replace("nan", "NaN"))
    run = read_run(folder)
    assert [one.loss for one in run.steps()] == pytest.approx(told[1])
    return run, told[0]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("memory", "micro"),
    [
        ("views", 1),
        ("copies", 2),
        pytest.param("copies", 1, marks=pytest.mark.slow),
        pytest.param("views", 2, marks=pytest.mark.slow),
    ],
)
def test_the_rank_whose_gradients_overflow_is_named(memory, micro, tmp_path):
    run, norms = on_two_ranks(tmp_path / "run", memory, micro)
    names = [name.removeprefix("net.") for name in BEHIND]
    found = [one for one in run.events() if one["event"].endswith("overflow")]
    assert [(one["event"], one["step"], one.get("rank")) for one in found] == [
        ("overflow", 3, None),
        ("rank_overflow", 3, 1),
    ]
    assert all([name for name, _ in one["tensors"]] == names for one in found)
    assert [one.skipped for one in run.steps()] == [False, False, True, False, False]
    assert [one.grad_norm for one in run.steps() if not one.skipped] == pytest.approx(norms[:2] + norms[3:], rel=1e-5)


@pytest.mark.distributed
def test_replicas_of_shards_are_counted_once(tmp_path):
    run, norms = on_two_ranks(tmp_path / "run", "replicas")
    assert [one.skipped for one in run.steps()] == [step == 3 for step in range(1, 6)]
    assert [one.grad_norm for one in run.steps() if not one.skipped] == pytest.approx(norms[:2] + norms[3:], rel=1e-5)
    (found,) = [one for one in run.events() if one["event"] == "overflow"]
    assert [name for name, _ in found["tensors"]] == [name.removeprefix("net.") for name in BEHIND]
    (first,) = [one for one in run.histograms() if one.step == 1]
    assert total(first.tensors["weight_gradients"]["0.weight"]) == 16 * 8


@pytest.mark.distributed
@pytest.mark.parametrize("micro", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_records_of_sharded_parameters_are_merged_when_they_are_read(micro, tmp_path):
    run, norms = on_two_ranks(tmp_path / "run", "shards", micro)
    steps = list(run.steps())
    assert [(one.skipped, one.overflow) for one in steps] == [(step == 3, step == 3) for step in range(1, 6)]
    assert [one.grad_norm for one in steps if not one.skipped] == pytest.approx(norms[:2] + norms[3:], rel=1e-5)
    (found,) = [one for one in run.events() if one["event"] == "overflow"]
    assert (found["step"], found["tensors"], found["count"]) == (3, [["0.weight", "inf"]], 1)
    assert found["boundary"] == ["", ""]  # of one module the weight alone is not finite
    own = [RunPaths(run.paths.ranks / rank).events.read_text() for rank in "01"]
    assert ["0.weight" in text for text in own] == [False, True]
    (first,) = [one for one in run.histograms() if one.step == 1]
    assert total(first.tensors["weight_gradients"]["0.weight"]) == 16 * 8
    assert first.unchanged["0.weight"][0] <= 16 * 8
    assert not run.paths.steps.exists()  # there it would have the norm of a part
    seen = measure(run)
    assert (seen.steps, seen.updates, seen.skipped, seen.split) == (5, 4, 1, "train")
    assert run.state.parts["model"].startswith("Network, ")
    events = run.paths.ranks / "1" / "events.jsonl"
    events.write_text(events.read_text().replace('[["0.weight", "inf"]]', "7"))
    with pytest.raises(StorageError, match=r"1/events.jsonl, line 1 is damaged: it is not the record of an overflow"):
        list(run.events())
