"""Reading runs: what was written comes back, half lines of killed runs are ignored, damage is located."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def same(left, right):
    return repr(left) == repr(right)  # nan is not equal to itself


def test_everything_written_comes_back_with_its_nonfinite_numbers(run, some_records):
    view = read_run(run.root)
    assert same(list(view.steps()), [record for record in some_records if isinstance(record, StepRecord)])
    assert same(list(view.epochs()), [record for record in some_records if isinstance(record, EpochRecord)])
    assert [event["event"] for event in view.events()] == ["start", "overflow", "scale", "evaluation"]
    assert view.state == run.read_state()
    assert view.config == "seed: 0\n"
    assert view.overrides == tuple(OVERRIDES)
    assert same(view.summary, {"top1": 0.5, "loss": math.nan})


@settings(max_examples=50, deadline=None)
@given(st.floats(), st.floats())
def test_every_float_of_a_step_comes_back(step_record, tmp_path_factory, loss, grad_norm):
    run = create_run(tmp_path_factory.mktemp("runs"), "x", "a")
    run.write_state(RunState(id="a", argv=(), command=""))
    record = step_record(1, loss, grad_norm)
    writer = RecordWriter(run.paths)
    writer.take(record)
    writer.close()
    assert same(list(read_run(run.root).steps()), [record])


@pytest.mark.parametrize("overrides", [[], OVERRIDES])
def test_the_overrides_file_is_a_yaml_list_of_strings(run, overrides):
    yaml = pytest.importorskip("yaml")
    run.write_config("", overrides)
    assert yaml.safe_load(run.paths.overrides.read_text()) == overrides


def test_a_step_reads_the_same_in_whatever_order_its_fields_are(run):
    found = list(read_run(run.paths.root).steps())
    lines = run.paths.steps.read_text().splitlines()
    turned = [json.dumps(dict(reversed(json.loads(line).items()))) for line in lines]
    run.paths.steps.write_text("".join(f"{line}\n" for line in turned))
    assert all(map(same, read_run(run.paths.root).steps(), found))
    assert len(turned) == len(found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"step": 1,', '"step": -1,'),
        ('"step": 1,', '"step": true,'),
        ('"step": 1,', '"step": 9223372036854775808,'),
        ('"lr": ', '"lr": "x", "rest": '),
        ('"lr": ', '"lr": NaN, "rest": '),
        ('"skipped": ', '"skipped": 0, "lost": '),
    ],
)
def test_a_step_with_a_value_of_another_kind_is_damage(run, old, new):
    text = run.paths.steps.read_text()
    assert old in text
    run.paths.steps.write_text(text.replace(old, new, 1))
    with pytest.raises(StorageError, match="line 1"):
        list(read_run(run.paths.root).steps())


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


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"step": 1}',
        b'{"loss": NaN}',
        b'{"nonfinite": {"loss": "inf"}}',
        b'{"nonfinite": 3}',
        b'{"loss": 1.0, "nonfinite": {"loss": "inf"}}',
    ],
)
def test_damage_of_a_step_is_located_by_file_and_line(run, line):
    lines = run.paths.steps.read_bytes().split(b"\n")
    lines[1] = line
    run.paths.steps.write_bytes(b"\n".join(lines))
    steps = read_run(run.root).steps()
    assert next(steps).step == 1
    with pytest.raises(StorageError, match=r"steps\.jsonl, line 2 is damaged"):
        next(steps)


@pytest.mark.parametrize(
    ("line", "number"),
    [("nonsense\n", 1), ("{}\n", 1), ('{"event": "a"}\n{"event": "b", "loss": NaN}\n', 2)],
)
def test_damage_of_an_event_is_located(run, line, number):
    run.paths.events.write_text(line)
    with pytest.raises(StorageError, match=rf"events\.jsonl, line {number} is damaged"):
        list(read_run(run.root).events())


@pytest.mark.parametrize(
    ("old", "new", "number"),
    [
        ("epoch,step", "step,epoch", 1),
        ("val_loss", "top_loss", 1),
        ("1,10,9", "1,10", 2),
        ("1,10,9", "x,10,9", 2),
    ],
)
def test_damage_of_an_epoch_is_located(run, old, new, number):
    text = run.paths.epochs.read_text()
    assert old in text
    run.paths.epochs.write_text(text.replace(old, new))
    with pytest.raises(StorageError, match=rf"epochs\.csv, line {number} is damaged"):
        list(read_run(run.root).epochs())


@pytest.mark.parametrize("line", ["- precision=fp32\n", "- 3\n"])
def test_overrides_that_were_edited_into_something_else_are_located(run, line):
    run.paths.overrides.write_text(line)
    with pytest.raises(StorageError, match=r"overrides\.yaml, line 1"):
        read_run(run.root)


def test_a_configuration_of_many_megabytes_is_refused(run):
    run.paths.config.write_text("x: 1\n" + "y" * 6_000_000)
    with pytest.raises(StorageError, match=r"config.yaml has 6,000,005 bytes, more than any configuration"):
        read_run(run.root)


def test_what_is_not_a_run_is_said_to_be_none(tmp_path):
    with pytest.raises(StorageError, match=r"no run\.json"):
        read_run(tmp_path)


def test_reading_records_imports_no_torch(run, python):
    code = (
        "import sys, pathlib, mptrain.runlog as runlog, mptrain.runlog.manifest\n"
        "view = runlog.read_run(pathlib.Path(sys.argv[1]))\n"
        "assert len(list(view.steps())) == 3 and list(view.events()) and list(view.epochs())\n"
        "assert not {'torch', 'numpy', 'hydra'} & set(sys.modules), 'heavy'\n"
    )
    child = python(code, run.root)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err


def test_a_run_is_written_where_pydantic_is_not_installed(tmp_path, python):
    code = (
        "import sys, pathlib, torch\n"
        "sys.modules['pydantic'] = sys.modules['pydantic_core'] = None\n"
        "from mptrain.system.records import StepRecord\n"
        "from mptrain.runlog import RecordWriter, RunState, create_run, existing_run, write_summary\n"
        "from mptrain.runlog.checkpoints import CheckpointStore\n"
        "run = create_run(pathlib.Path(sys.argv[1]), 'x', 'a')\n"
        "state = RunState(id='a', argv=(), command='').begin()\n"
        "with run.lock():\n"
        "    run.write_state(state)\n"
        "    run.write_config('seed: 0\\n', [])\n"
        "    store = CheckpointStore(run.paths.checkpoints, keep=1)\n"
        "    for step in (1, 2, 3):\n"
        "        writer = RecordWriter(run.paths)\n"
        "        writer.take(StepRecord('main', step, step, 0, 0.5, 1.0, False, False, 1.0, 0.1))\n"
        "        sizes = writer.flush()\n"
        "        writer.close()\n"
        "        store.save({'w': torch.zeros(2)}, step=step, records=sizes, metric=1 / step, config_digest='')\n"
        "    assert store.best() is not None and store.load_latest().manifest.step == 3\n"
        "    write_summary(run.paths.summary, {'steps': 3})\n"
        "    run.write_state(state.end('done', '', 0, 3))\n"
        "assert existing_run(pathlib.Path(sys.argv[1]), 'a') == run\n"
    )
    child = python(code, tmp_path)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert [record.step for record in read_run(tmp_path / "a").steps()] == [1, 2, 3]
