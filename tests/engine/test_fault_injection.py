import json

import pytest

from mptrain.engine.loop import Loop
from mptrain.system.errors import ConfigError, NumericsError
from mptrain.system.records import EventRecord, OverflowRecord, StepRecord
from tests.loops import each
from tests.small_runs import TINY, Kept, loop_of, parts_of, run_in_process


def run(tmp_path, *overrides) -> tuple[Loop, Kept]:
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, "train.max_steps=6", *overrides, kept=kept)
    loop.run()
    return loop, kept


def named(kept):
    return {record.step: dict(record.tensors) for record in kept.of(OverflowRecord)}


@pytest.mark.parametrize(
    ("precision", "tensor", "value", "offenders", "loss"),
    [
        ("fp32", "input", "nan", {f"{layer}.{kind}" for layer in (1, 3, 5, 7) for kind in ("weight", "bias")}, "nan"),
        ("fp16_dynamic", "activation:3", "inf", None, None),
        ("amp_dynamic", "activation_gradient:3", "nan", {"1.weight", "1.bias", "3.weight", "3.bias"}, "finite"),
        ("fp16_dynamic", "activation_gradient:3", "nan", {"1.weight", "1.bias", "3.weight", "3.bias"}, "finite"),
        ("fp16_dynamic", "gradient:3.bias", "inf", {"3.bias"}, "finite"),
        ("amp_dynamic", "gradient:5.weight", "-inf", {"5.weight"}, "finite"),
    ],
)
def test_a_fault_is_refused_named_and_gone_after_its_step(tmp_path, precision, tensor, value, offenders, loss):
    words = ("inject.step=3", f"inject.tensor={tensor}", f"inject.value={value}", f"precision={precision}")
    loop, kept = run(tmp_path, *words)
    steps = {record.step: record for record in kept.of(StepRecord)}
    assert [step for step, record in steps.items() if record.overflow] == [3]
    assert steps[3].skipped
    assert steps[6].updates == 5
    (overflow,) = kept.of(OverflowRecord)
    if offenders is not None:
        assert dict(overflow.tensors) == dict.fromkeys(offenders, value.lstrip("-"))
        assert overflow.loss == loss
    assert overflow.count == len(overflow.tensors) > 0
    (event,) = [record for record in kept.of(EventRecord) if record.kind == "injected"]
    assert (event.step, event.fields) == (3, {"tensor": tensor, "value": value})
    assert all(value.isfinite().all() for value in loop.parts.full_precision().values())


def test_a_number_is_put_in_as_it_is(tmp_path):
    _, kept = run(tmp_path, "inject.step=2", "inject.tensor=gradient:5.bias", "inject.value=1000", "precision=fp32")
    steps = {record.step: record for record in kept.of(StepRecord)}
    assert not steps[2].overflow
    assert steps[2].grad_norm == pytest.approx(1000, rel=1e-3)


def test_a_number_that_fp16_cannot_hold_becomes_infinite_there(tmp_path):
    words = (
        "inject.step=2",
        "inject.tensor=activation_gradient:3",
        "inject.value=70000",
        "scaler=static",
        "scaler.scale=1",
    )
    assert not named(run(tmp_path, *words, "precision=fp32")[1])
    assert 2 in named(run(tmp_path, *words, "precision=fp16_static")[1])


def test_a_weight_stays_wrong(tmp_path):
    words = ("inject.step=4", "inject.tensor=weight:3.weight", "inject.value=nan", "precision=fp16_dynamic")
    loop, kept = run(tmp_path, *words)
    assert sorted(named(kept)) == [4, 5, 6]
    weight = loop.parts.full_precision()["3.weight"]
    assert weight.flatten()[0].isnan()
    assert weight.isnan().sum() == 1


def test_a_fault_in_every_step_runs_into_patience(tmp_path):
    words = ("inject.step=2", "inject.count=null", "inject.tensor=gradient:3.weight")
    loop = loop_of(tmp_path, *TINY, *words, "train.max_consecutive_overflows=3")
    with pytest.raises(NumericsError, match=r"3 steps in a row overflowed, the last at step 4 .*3\.weight"):
        loop.run()
    assert (loop.storage.paths.failure / "diagnosis.json").exists()


def test_some_steps_in_a_row_can_have_it(tmp_path):
    words = ("inject.step=2", "inject.count=3", "inject.tensor=input", "scaler=deepspeed")
    assert sorted(named(run(tmp_path, *words)[1])) == [2, 3, 4]


def test_a_resumed_run_has_the_fault_in_the_same_step(tmp_path):
    words = [*TINY, "run.root=o", "inject.step=5", "inject.tensor=gradient:3.bias", "run.resume=auto", "train.epochs=2"]
    whole = run_in_process(*words, "run.name=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    first = run_in_process(*words, "run.name=parts", "train.max_steps=3", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    second = run_in_process("resume", "o/parts", "train.max_steps=null", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    found = [(tmp_path / "o" / name / "steps.jsonl").read_bytes() for name in ("whole", "parts")]
    assert b'"step": 5' in found[0]
    injected = [
        [json.loads(line) for line in (tmp_path / "o" / name / "events.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    assert [[e["step"] for e in events if e["event"] == "injected"] for events in injected] == [[5], [5]]


@each(
    ("words", "says"),
    [
        (["inject.step=1"], "needs an inject.tensor"),
        (["inject.tensor=input"], "needs an inject.step"),
        (["inject.step=1", "inject.tensor=loss"], "unknown kind"),
        (["inject.step=1", "inject.tensor=input:x"], "the input has no name"),
        (["inject.step=1", "inject.tensor=activation:"], "there is no module ''"),
        (["inject.step=1", "inject.tensor=activation:2x"], "there is no module '2x'"),
        (["inject.step=1", "inject.tensor=gradient:3"], "there is no parameter '3'"),
        (["inject.step=0", "inject.tensor=input"], "at least 1"),
        (["inject.value=big"], "must be a number, or inf, -inf or nan"),
        (
            ["inject.step=1", "inject.tensor=activation:3", "train.compile=true", "precision=fp32"],
            "inject.tensor needs hooks on single modules",
        ),
    ],
)
def test_what_cannot_be_put_in_is_refused(words, says):
    with pytest.raises(ConfigError, match=says) as refused:
        parts_of(*TINY, *words)
    if "there is no" in says:
        assert "there is " + ("1.weight, 1.bias" if "parameter" in says else "0, 1, 2") in refused.value.hint


def test_a_step_that_is_never_reached_is_warned_of(tmp_path):
    _, kept = run(tmp_path, "inject.step=99", "inject.tensor=input")
    (warning,) = [record for record in kept.of(EventRecord) if record.kind == "warning"]
    assert warning.fields["message"] == "inject.step=99 is never reached: training ends at step 6"


def test_tokens_cannot_be_infinite(tmp_path):
    loop = loop_of(tmp_path, "model=char_lstm", "inject.step=2", "inject.tensor=input", "train.max_steps=2")
    with pytest.raises(ConfigError, match="the inputs are integers"):
        loop.run()


@each(("count", "steps"), [("1", "in step 4"), ("3", "in 3 steps from 4 on"), ("null", "from step 4 on")])
def test_a_run_says_beforehand_which_fault_it_has(count, steps):
    parts, _ = parts_of(*TINY, "inject.step=4", "inject.tensor=input", f"inject.count={count}")
    assert parts.notes == (f"a fault is injected on purpose: inf into input, {steps}",)
