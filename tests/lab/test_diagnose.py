"""What stands for a step that ended a run: which step, which weights, and what of it is on record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mptrain.cli.main import main
from mptrain.config.compose import compose
from mptrain.lab.diagnosis.diagnose import diagnose_config, diagnose_run
from mptrain.system.errors import ConfigError, StorageError
from tests.faulty_networks import with_fault
from tests.small_runs import TINY

ENDED = (*TINY, "precision=fp16_dynamic", "scaler.init_scale=16777216", "train.max_consecutive_overflows=2")
GAN = (
    "model=dcgan",
    "dataset.train_samples=16",
    "train.batch_size=8",
    "precision=amp_static",
    "train.max_consecutive_overflows=2",
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.long
def test_the_loss_of_a_later_learner_is_the_one_on_record():
    assert main([*GAN, "learners.generator.scaler.scale=1e30", "run.name=run"]) == 4
    found = diagnose_run("run").examination
    assert (found.learner, found.step) == ("generator", 2)
    assert "the loss equals the recorded loss" in found.remarks


@pytest.mark.long
def test_weights_that_moved_behind_the_step_that_ended_a_run_are_said_to_have():
    assert main([*GAN, "learners.discriminator.scaler.scale=1e30", "run.name=run"]) == 4
    remarks = diagnose_run("run").examination.remarks
    assert "the weights were saved after the step and include its update of the generator" in remarks
    last = [json.loads(line) for line in Path("outputs/run/steps.jsonl").read_text().splitlines()][-2]
    [loss] = [remark for remark in remarks if remark.startswith("the recorded loss")]
    assert loss.startswith(f"the recorded loss was {last['loss']:.9g}, it is ")
    assert loss.endswith(" now: the weights changed in between")


@pytest.mark.long
def test_the_learner_that_overflowed_on_record_is_looked_at_and_another_where_it_is_asked_for():
    words = ("learners.generator.scaler.scale=1e7", "train.max_consecutive_overflows=20", "train.max_steps=2")
    assert main([*GAN, *words, "run.name=run"]) == 4
    assert diagnose_run("run", step=2).examination.learner == "generator"
    with_overrides = "learners.generator.scaler.scale=1"
    found = diagnose_run("run", (with_overrides,), step=2)
    assert (found.examination.learner, found.examination.cause) == ("generator", "none")
    assert found.page.name == f"step-000002-generator-under-{with_overrides}.html"
    assert any(remark.startswith("on record the gradients of generator.") for remark in found.examination.remarks)
    assert diagnose_run("run", step=2, learner="discriminator").examination.learner == "discriminator"
    with pytest.raises(ConfigError, match="no such learner") as raised:
        diagnose_run("run", step=2, learner="generater")
    assert raised.value.hint == "did you mean generator?"


@pytest.mark.parametrize(
    ("words", "scale"),
    [
        (("scaler.init_scale=1024",), 2**10),
        (("scaler=static", "scaler.scale=4096"), 2**12),
        (("precision=fp32",), 1),
        (("optimizer.lr=0.5",), 2**23),
    ],
)
def test_a_step_that_ended_a_run_is_done_at_the_first_scale_of_another_scaler(words, scale):
    assert main([*ENDED, "run.name=run"]) == 4
    found = diagnose_run("run", words).examination
    assert found.loss_scale == scale
    assert any("at the first loss scale" in remark for remark in found.remarks) is (scale != 2**23)


def test_the_step_behind_a_checkpoint_is_done_at_the_first_scale_of_another_scaler_too():
    assert main([*TINY, "precision=fp16_dynamic", "train.max_steps=2", "run.name=run"]) == 0
    assert diagnose_run("run", ("scaler.init_scale=1024",)).examination.loss_scale == 1024


def test_the_overflow_that_is_found_is_said_to_be_the_one_on_record():
    assert main([*ENDED, "run.name=run"]) == 4
    event = [json.loads(line) for line in Path("outputs/run/events.jsonl").read_text().splitlines()]
    tensors = [
        name for name, _ in next(one for one in event if one["event"] == "overflow" and one["step"] == 2)["tensors"]
    ]
    remarks = diagnose_run("run").examination.remarks
    assert remarks[-1] == f"the same gradients overflow as on record: {', '.join(tensors[:3])}" + (
        f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    )


def test_a_loss_under_other_keys_is_compared_with_the_record():
    assert main([*TINY, "precision=fp16_dynamic", "train.max_steps=3", "run.name=run"]) == 0
    remarks = diagnose_run("run", ("seed=7",), step=2).examination.remarks
    assert remarks[:2] == (
        "step 2, from the start, and 1 step trained in memory",
        "with seed=7, unlike the run itself; the steps in memory were trained with it too",
    )
    assert remarks[-1].endswith(" now: the configuration was changed")
    assert diagnose_run("run", step=2).examination.remarks[-1] == "the loss equals the recorded loss"


@pytest.mark.parametrize("name", ["step.pt", "diagnosis.json"])
@pytest.mark.parametrize("damage", [None, b"", b"{", b"PK\x03\x04 cut off"])
def test_a_damaged_failure_leads_to_the_steps_by_number(name, damage):
    assert main([*ENDED, "run.name=run"]) == 4
    path = Path("outputs/run/failure") / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    with pytest.raises(StorageError, match=name) as raised:
        diagnose_run("run")
    assert "mptrain diagnose outputs/run --step N" in raised.value.hint


def test_a_failure_that_the_run_went_on_from_is_not_what_is_asked_about():
    assert main([*ENDED, "run.name=run"]) == 4
    scales = ("scaler.init_scale=65536", "scaler.max_scale=65536")
    assert main(["resume", "outputs/run", *scales]) == 0
    state = Path("outputs/run/run.json")
    fields = json.loads(state.read_text())
    state.write_text(json.dumps({**fields, "status": "preempted"}))
    found = diagnose_run("run").examination
    assert (found.step, found.remarks) == (19, ("step 19, from the checkpoint of step 18",))


def test_the_report_of_a_run_that_failed_has_the_hint_of_the_terminal(capsys):
    assert main([*ENDED, "run.name=run"]) == 4
    [hint] = [line for line in capsys.readouterr().err.splitlines() if "mptrain diagnose outputs/run" in line]
    state = json.loads(Path("outputs/run/run.json").read_text())
    assert state["hint"]
    assert hint.strip().removeprefix("hint: ") in state["hint"] or state["hint"] in hint
    assert main(["report", "run"]) == 0
    page = next(Path("outputs/run").rglob("report.md")).read_text()
    assert f"To fix it: {state['hint'][:30]}" in page


def test_of_a_run_that_ended_well_the_steps_that_overflowed_unexpectedly_are_named():
    words = (*TINY, "precision=fp16_dynamic", "train.epochs=4", "scaler.init_scale=1024")
    assert main([*words, "inject.step=20", "inject.tensor=input", "run.name=run"]) == 0
    remarks = diagnose_run("run").examination.remarks
    assert any(
        one == "step 20 overflowed unexpectedly; to examine the first: mptrain diagnose outputs/run --step 20"
        for one in remarks
    )
    assert not any("unexpectedly" in one for one in diagnose_run("run", step=20).examination.remarks)


def test_an_overflow_of_emulated_products_is_explained_by_the_same_step_in_fp32():
    words = (*with_fault("large_linear"), "train.batch_size=16", "precision=fp8_current_emulated")
    found = diagnose_config(compose([*words, "precision.emulate=fp16"])).examination
    assert (found.cause, found.module, found.operator) == ("forward", "odd.wide", "addmm")
    assert [remedy.words for remedy in found.remedies if remedy.helped] == [("precision.keep_fp32=[odd.wide]",)]
    assert diagnose_config(compose(words)).examination.cause == "none"  # whose results stay in FP32


def test_a_run_that_overflows_of_emulated_gradients_ended_gets_another_scale():
    words = ("precision=fp8_current_emulated", "precision.emulate=fp16", "scaler=static", "scaler.scale=1e12")
    assert main([*TINY, *words, "train.max_consecutive_overflows=2", "run.name=run"]) == 4
    found = diagnose_run("run").examination
    assert (found.cause, found.step) == ("backward", 2)
    assert "the loss equals the recorded loss" in found.remarks
    assert [remedy.words for remedy in found.remedies if remedy.helped] == [("scaler=dynamic",)]


@pytest.mark.long
def test_random_bits_of_a_repeated_step_are_those_of_training_for_each_learner():
    words = ("dataset.train_samples=16", "train.batch_size=8", "train.max_steps=4", "precision=nvfp4_emulated",
             "checkpoint.every_epochs=null")  # fmt: skip
    assert main(["model=dcgan", *words, "run.name=run"]) == 0
    for learner in ("discriminator", "generator"):
        assert "the loss equals the recorded loss" in diagnose_run("run", step=3, learner=learner).examination.remarks


@pytest.mark.parametrize(("learner", "compared"), [("discriminator", True), ("generator", False)])
def test_the_step_of_a_later_learner_is_compared_with_none_that_lacks_the_update_before_it(learner, compared):
    words = ("model=dcgan", "dataset.train_samples=16", "train.batch_size=8", "precision=amp_static", "scaler.scale=64")
    found = diagnose_config(compose(words), learner=learner).examination
    assert found.cause == "none"
    assert ("gradients within " in found.verdict) is compared


def test_of_a_run_that_an_exception_ended_the_next_step_is_examined():
    assert main([*TINY, "precision=fp16_dynamic", "run.name=run"]) == 0
    record, failure = Path("outputs/run/run.json"), Path("outputs/run/failure")
    record.write_text(record.read_text().replace('"status": "done"', '"status": "failed"'))
    failure.mkdir()
    (failure / "traceback.txt").write_text("IndexError: index out of range in self")  # of the exception
    found = diagnose_run("run").examination
    assert "the checkpoint of step" in found.remarks[0]
    (failure / "diagnosis.json").write_text("{")
    with pytest.raises(StorageError):
        diagnose_run("run")


def _damage(name):
    data = Path("outputs/run/checkpoints", name)
    data.write_bytes(data.read_bytes()[:-1])
    return data


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it():
    words = ("train.epochs=1", "checkpoint.every_steps=1", "checkpoint.keep=6", "run.name=run")
    assert main([*TINY, "precision=fp16_dynamic", *words]) == 0
    damaged = _damage("step-00000006.pt")
    remarks = diagnose_run("run").examination.remarks
    assert remarks[0] == "step 6, from the checkpoint of step 5"
    assert remarks[1].startswith(f"{damaged} is damaged: ")
    assert remarks[1].endswith("; using the checkpoint before it")
    _damage("step-00000003.pt")
    remarks = diagnose_run("run", step=4).examination.remarks
    assert remarks[0] == "step 4, from the checkpoint of step 2, and 1 step trained in memory"
    assert "the loss equals the recorded loss" in remarks


def test_a_damaged_checkpoint_of_the_step_that_ended_a_run_gives_way_to_the_one_before_it():
    assert main([*ENDED, "checkpoint.every_steps=1", "run.name=run"]) == 4
    damaged = _damage("step-00000002.pt")
    remarks = diagnose_run("run").examination.remarks
    assert remarks[1].startswith(f"{damaged} is damaged: ")
    assert remarks[1].endswith("; the weights of step 1 are used")
    assert remarks[2] == "the loss equals the recorded loss"
