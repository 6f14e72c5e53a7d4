"""Reading runs: what was written comes back, half lines of killed runs are ignored, damage is located."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mptrain
from mptrain.runlog import RecordWriter, RunState, create_run, read_run, write_summary
from mptrain.system.errors import StorageError
from mptrain.system.records import EpochRecord, StepRecord

OVERRIDES = ["precision=amp_dynamic", 'run.name="a: b"', "x=[1,2]", "text=é\U0001f600\n# no"]


@pytest.fixture
def run(tmp_path, some_records):
    run = create_run(tmp_path, "x", "a")
    run.write_state(RunState(id="a", argv=tuple(OVERRIDES), command="mptrain").begin())
    run.write_config("seed: 0\n", OVERRIDES)
    writer = RecordWriter(run.paths)
    for record in some_records:
        writer.take(record)
    writer.close()
    write_summary(run.paths.summary, {"top1": 0.5, "loss": math.nan})
    return run


def test_records_are_columns_for_arrays_and_tables(run, some_records):
    opened = mptrain.open_run(run.root)
    steps = [record for record in some_records if isinstance(record, StepRecord)]
    columns = opened.columns("steps")
    assert columns["step"] == [record.step for record in steps]
    assert same(columns["loss"], [record.loss for record in steps])
    epochs = opened.columns("epochs")
    assert set(epochs) > {"epoch", "train_loss", "val_top1"}
    events = opened.columns("events")
    assert events["event"] == ["start", "overflow", "scale", "evaluation"]
    assert events["from_scale"][:2] == [None, None]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mptrain.nothing  # noqa: B018


def same(left, right):
    return repr(left) == repr(right)  # nan is not equal to itself


def test_everything_written_comes_back_with_its_nonfinite_numbers(run, some_records):
    yaml = pytest.importorskip("yaml")
    view = read_run(run.root)
    assert same(list(view.steps()), [record for record in some_records if isinstance(record, StepRecord)])
    assert same(list(view.epochs()), [record for record in some_records if isinstance(record, EpochRecord)])
    assert [event["event"] for event in view.events()] == ["start", "overflow", "scale", "evaluation"]
    assert view.state == run.read_state()
    assert view.config == "seed: 0\n"
    assert list(view.overrides) == OVERRIDES == yaml.safe_load(run.paths.overrides.read_text())
    assert same(view.summary, {"top1": 0.5, "loss": math.nan})


@settings(max_examples=25, deadline=None)
@given(st.floats(), st.floats())
def test_every_float_of_a_step_comes_back(step_record, tmp_path_factory, loss, grad_norm):
    run = create_run(tmp_path_factory.mktemp("runs"), "x", "a")
    run.write_state(RunState(id="a", argv=(), command=""))
    record = step_record(1, loss, grad_norm)
    writer = RecordWriter(run.paths)
    writer.take(record)
    writer.close()
    assert same(list(read_run(run.root).steps()), [record])


def test_a_step_reads_the_same_in_whatever_order_its_fields_are(run):
    found = list(read_run(run.paths.root).steps())
    lines = run.paths.steps.read_text().splitlines()
    turned = [json.dumps(dict(reversed(json.loads(line).items()))) for line in lines]
    run.paths.steps.write_text("".join(f"{line}\n" for line in turned))
    assert all(map(same, read_run(run.paths.root).steps(), found))
    assert len(turned) == len(found)


def test_a_run_that_has_written_nothing_yet_reads_as_empty(tmp_path):
    run = create_run(tmp_path, "x", "a")
    run.write_state(RunState(id="a", argv=(), command=""))
    view = read_run(run.root)
    assert (list(view.steps()), list(view.events()), list(view.epochs())) == ([], [], [])
    assert (view.config, view.overrides, view.summary) == ("", (), {})


def test_a_half_written_last_line_is_ignored_wherever_the_kill_cut_it(run):
    whole = run.paths.steps.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start, len(whole)):
        run.paths.steps.write_bytes(whole[:cut])
        assert [record.step for record in read_run(run.root).steps()] == [1, 2]
    run.paths.steps.write_bytes(whole + b"\0" * 100)  # what some file systems leave after a power failure
    assert [record.step for record in read_run(run.root).steps()] == [1, 2, 3]


def test_half_lines_of_the_other_files_are_ignored_too(run):
    for path in (run.paths.events, run.paths.epochs):
        path.write_bytes(path.read_bytes()[:-3])
    view = read_run(run.root)
    assert len(list(view.events())) == 3
    assert list(view.epochs()) == []


def test_a_cut_off_record_of_a_run_that_ended_in_order_is_damage(run):
    run.write_state(run.read_state().end("done", "", 0, 3))
    run.paths.steps.write_bytes(run.paths.steps.read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"steps\.jsonl, line 3 is damaged"):
        list(read_run(run.root).steps())


def read_all(root):
    view = read_run(root)
    return [list(records) for records in (view.steps(), view.events(), view.epochs())]


def replaced(number, old, new):
    """Change a line of a file."""

    def damage(path):
        lines = path.read_bytes().split(b"\n")
        assert old in lines[number - 1]
        lines[number - 1] = lines[number - 1].replace(old, new, 1)
        path.write_bytes(b"\n".join(lines))

    return damage


def put(number, line):
    """Put a line in the place of one of a file."""

    def damage(path):
        lines = path.read_bytes().split(b"\n")
        lines[number - 1] = line
        path.write_bytes(b"\n".join(lines))

    return damage


STEPS = (
    b"", b"{", b"[]", b"\xff\xfe", b'{"step": 1}', b'{"loss": NaN}', b'{"nonfinite": {"loss": "inf"}}', b'{"nonfinite": 3}',
    b'{"loss": 1.0, "nonfinite": {"loss": "inf"}}',
)  # fmt: skip
VALUES = (
    *((b'"step": 1,', b'"step": %s,' % value) for value in (b"-1", b"true", b"9223372036854775808")),
    *((b'"lr": ', b'"lr": %s, "rest": ' % value) for value in (b'"x"', b"NaN")),
    (b'"skipped": ', b'"skipped": 0, "lost": '),
)


@pytest.mark.parametrize(
    ("name", "number", "damage"),
    [
        *(("steps.jsonl", 2, put(2, line)) for line in STEPS),
        *(("steps.jsonl", 1, replaced(1, *change)) for change in VALUES),
        *(("events.jsonl", number, put(number, line)) for number, line in ((1, b"nonsense"), (1, b"{}"), (2, b'{"event": "b", "loss": NaN}'))),
        *(("epochs.csv", 1, replaced(1, *change)) for change in ((b"epoch,step", b"step,epoch"), (b"val_loss", b"top_loss"))),
        *(("epochs.csv", 2, replaced(2, b"1,10,9", changed)) for changed in (b"1,10", b"x,10,9")),
        *(("overrides.yaml", 1, put(1, line)) for line in (b"- precision=fp32", b"- 3")),
    ],
)  # fmt: skip
def test_damage_is_located_by_file_and_line(run, name, number, damage):
    damage(run.root / name)
    with pytest.raises(StorageError, match=rf"{name}, line {number}\b"):
        read_all(run.root)


def test_a_configuration_of_many_megabytes_is_refused(run):
    run.paths.config.write_text("x: 1\n" + "y" * 6_000_000)
    with pytest.raises(StorageError, match=r"config.yaml has 6,000,005 bytes"):
        read_run(run.root)


WRITES = """
import sys, pathlib, torch
sys.modules['pydantic'] = sys.modules['pydantic_core'] = None
from mptrain.system.records import StepRecord
from mptrain.runlog import RecordWriter, RunState, create_run, existing_run, write_summary
from mptrain.runlog.checkpoints import CheckpointStore
run = create_run(pathlib.Path(sys.argv[1]), 'x', 'a')
state = RunState(id='a', argv=(), command='').begin()
with run.lock():
    run.write_state(state)
    run.write_config('seed: 0\\n', [])
    store = CheckpointStore(run.paths.checkpoints, keep=1)
    for step in (1, 2, 3):
        writer = RecordWriter(run.paths)
        writer.take(StepRecord('main', step, step, 0, 0.5, 1.0, False, False, 1.0, 0.1))
        sizes = writer.flush()
        writer.close()
        store.save({'w': torch.zeros(2)}, step=step, records=sizes, metric=1 / step, config_digest='')
    assert store.best() is not None and store.load_latest().manifest.step == 3
    write_summary(run.paths.summary, {'steps': 3})
    run.write_state(state.end('done', '', 0, 3))
assert existing_run(pathlib.Path(sys.argv[1]), 'a') == run
"""


@pytest.mark.process
def test_a_run_is_written_where_pydantic_is_not_installed(tmp_path, succeed):
    succeed(WRITES, tmp_path)
    assert [record.step for record in read_run(tmp_path / "a").steps()] == [1, 2, 3]
