"""Whatever the files of a run directory hold, reading them ends in records or in an error that says which is damaged."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptrain.report import plotting
from mptrain.report.html_and_markdown import page_of, write_report
from mptrain.report.run_history import read_history
from mptrain.runlog import RecordWriter, RunPaths, open_run, read_run
from mptrain.study.comparison.run_measures import measure
from mptrain.system.errors import StorageError
from mptrain.system.records import ExponentCounts, HistogramRecord, OverflowRecord, ScaleRecord, StepRecord
from tests.fuzz.hostile import examples, misfit, only_our_errors, spoiled
from tests.study.comparison.fake_runs import SOME_RECORDS, epoch, some_summary, write_run

FILES = ("run.json", "config.yaml", "overrides.yaml", "steps.jsonl", "events.jsonl", "epochs.csv", "histograms.jsonl", "summary.json", "data.json")  # fmt: skip
COUNTS = ExponentCounts("float16", 3, 1, 0, 2.5, -14, (1, 2, 3))
RECORDS = (
    *(StepRecord("main", step, step, 0, 1.0 / step, 1024.0, False, False, 1.0, 0.1) for step in (1, 2)),
    StepRecord("main", 3, 2, 0, float("nan"), 1024.0, True, True, float("inf"), 0.1),
    OverflowRecord("main", 3, 1024.0, "unexpected", "nan", (("fc.weight", "inf"), ("fc.bias", "nan")), 2, True, 1),
    ScaleRecord("main", 3, 1024.0, 512.0, "overflow"),
    HistogramRecord("main", 2, 1024.0, False, {"activation_gradients": {"fc": COUNTS}, "weights": {"fc.weight": COUNTS}}, {"fc.weight": (5, 2)}),
    *SOME_RECORDS,
    epoch(1, 10, 10, loss=0.5, top1=0.8),
    epoch(2, 30, 28, loss=0.3, top1=0.92),
)  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("fuzz"), records=RECORDS, summary=some_summary())
    page_of(run.paths.root)  # imports everything, and makes matplotlib's own cache
    return run.paths.root


@pytest.fixture
def unfigured(monkeypatch):
    """Figures are painted, which may fail, and are not made into SVG, which takes most of the time."""
    monkeypatch.setattr(plotting.Figure, "savefig", lambda *_, **__: None)
    monkeypatch.setattr(plotting, "_tidied", lambda *_: "<svg/>")


def read_everything(root):
    run = read_run(root)
    for records in (run.steps, run.events, run.histograms, run.epochs):
        with only_our_errors(root):
            list(records())
    read_history(run)
    measure(run)


def copied(sound):
    root = sound.parent / "spoiled"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(sound, root)
    return root


def put(root, name, content):
    (root / name).write_bytes(content)


def lines_of(sound, name):
    return (sound / name).read_bytes().splitlines(keepends=True)


@examples(100, 5000)
@given(st.data())
def test_a_run_directory_with_a_spoiled_file(sound, data):
    root = copied(sound)
    name = data.draw(st.sampled_from(FILES))
    put(root, name, data.draw(spoiled((sound / name).read_bytes(), *((sound / other).read_bytes() for other in FILES))))
    with only_our_errors(root):
        read_everything(root)


@examples(100, 5000)
@given(st.data())
def test_a_run_directory_with_a_value_of_another_kind(sound, data):
    root = copied(sound)
    spoil_a_value(root, sound, data)
    with only_our_errors(root):
        read_everything(root)


def spoil_a_value(root, sound, data):
    name = data.draw(st.sampled_from([name for name in FILES if name.endswith(("json", "jsonl"))]))
    if name.endswith("jsonl"):
        lines = lines_of(sound, name)
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = json.dumps(data.draw(misfit(json.loads(lines[at])))).encode() + b"\n"
        put(root, name, b"".join(lines))
    else:
        put(root, name, json.dumps(data.draw(misfit(json.loads((sound / name).read_bytes())))).encode())


@pytest.mark.long
@examples(25, 5000)
@given(data=st.data())
def test_the_report_of_a_run_directory_with_a_value_of_another_kind(sound, unfigured, data):
    root = copied(sound)
    spoil_a_value(root, sound, data)
    with only_our_errors(root):
        write_report(root)


def with_line(name, line):
    return lambda root: (root / name).write_bytes((root / name).read_bytes() + line + b"\n")


def with_fields(name, **fields):
    return lambda root: put(root, name, json.dumps({**json.loads((root / name).read_bytes()), **fields}).encode())


DAMAGES = {
    "a step deeper than the stack": with_line("steps.jsonl", b"[" * 100_000),
    "an event deeper than the stack": with_line("events.jsonl", b'{"event": "x", "a": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "a loss that is text": with_line(
        "steps.jsonl",
        b'{"learner": "main", "step": 4, "updates": 3, "epoch": 0, "loss": "x", "loss_scale": 1.0, "overflow": false, '
        b'"skipped": false, "grad_norm": 1.0, "lr": 0.1}',
    ),
    "a place beyond a list": with_line("events.jsonl", b'{"event": "x", "a": [], "nonfinite": {"a.3": "inf"}}'),
    "a step beyond counting": with_line(
        "events.jsonl",
        b'{"event": "evaluation", "split": "val", "samples": 1, "metrics": {}, "step": 1' + b"0" * 400 + b"}",
    ),
    "an overflow of no tensors": with_line(
        "events.jsonl",
        b'{"event": "overflow", "learner": "main", "step": 1, "loss_scale": "1", "phase": "unexpected", "tensors": {"ab": 1}}',
    ),
    "a cell that no reader of CSV takes": with_line("epochs.csv", b"x" * 200_000),
    "an epoch beyond counting": with_line("epochs.csv", b"main,1" + b"0" * 400 + b",1,1,1,1,1,1,,,1,1"),
    "a summary whose numbers are text": with_fields("summary.json", steps="30", peak_memory="much"),
    "a summary of learners that are none": with_fields("summary.json", learners={"main": []}),
    "a summary without learners' numbers": with_fields("summary.json", learners={"main": {}}),
    "a summary that lists a list": with_fields("summary.json", intervals=[], nonfinite={"intervals.0": "inf"}),
    "a state of attempts that are none": with_fields("run.json", attempts=[{"started": "x", "ended": None, "pid": 1, "host": "h", "from_step": "no"}]),
    "versions that are none": with_fields("run.json", versions=[1]),
    "a configuration that is no YAML": lambda root: put(root, "config.yaml", b"a: [1\n"),
    "a configuration that is a number": lambda root: put(root, "config.yaml", b"3"),
    "a seed that is a list": lambda root: put(root, "config.yaml", b"seed: [1]\n"),
    "a configuration that holds itself": lambda root: put(root, "config.yaml", b"a: &a [*a]\n"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damages_that_once_ended_in_a_traceback(sound, unfigured, damage):
    root = copied(sound)
    damage(root)
    with only_our_errors(root):
        write_report(root)
    with only_our_errors(root):
        measure(read_run(root))


def test_undecodable_configurations_and_headers_stop_a_resumption(sound):
    root = copied(sound)
    put(root, "config.yaml", b"seed: \xff\n")
    put(root, "epochs.csv", b"\xff\n")
    with pytest.raises(StorageError, match=r"config\.yaml is damaged: byte 6"):
        open_run(root).read_config()
    with pytest.raises(StorageError, match=r"epochs\.csv, line 1 is damaged"):
        RecordWriter(RunPaths(root))


def test_words_with_line_separators_and_undecodable_bytes_are_read_back(sound):
    root = copied(sound)
    words = ("run.name=a\u2028b", "run.name=\udce9")
    open_run(root).write_config("seed: 0\n", words)
    assert open_run(root).read_overrides() == words == read_run(root).overrides
