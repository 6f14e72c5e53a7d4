"""Planted faults, each found by name in one look, with a remedy that was tried on that very step."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from examinations import read_examination
from planted import ALLOWED, SHORT, plant
from small_runs import TINY

from mptrain.cli.main import main
from mptrain.config.compose import compose
from mptrain.inspection.diagnosis import diagnose_config, diagnose_run
from mptrain.system.errors import ConfigError

pytestmark = pytest.mark.workload


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A folder with a package of faults in it, from which one step of some words can be looked at."""
    plant(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def look(*words, step=1):
        config = compose([ALLOWED[2], *words], config_dirs=[ALLOWED[1]])
        return diagnose_config(config, step).found

    return look


def network(kind, *words):
    return ("model=planted", f"model.kind={kind}", "dataset.train_samples=64", "train.batch_size=16", *words)


def train(*words):
    return main([*ALLOWED, *words, *SHORT, "run.name=run"])


def recorded():
    return [json.loads(line) for line in Path("outputs/run/steps.jsonl").read_text().splitlines()]


def contents(root):
    """Digest and time of every file that diagnose has no business with."""
    files = [path for path in root.rglob("*") if path.is_file() and "diagnosis" not in path.relative_to(root).parts]
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def row(found, name):
    return next(one for one in found.modules if one.name == name)


FP16 = ("precision=fp16_static", "scaler.scale=131072")


def test_an_overflow_in_one_convolutions_backward_is_mended_by_a_lower_scale(theirs):
    found = theirs(*network("backward", *FP16))
    assert (found.cause, found.module, found.operator) == ("backward", "body.2", "convolution_backward")
    assert [one.name for one in found.modules if one.breaks] == ["body.2"]
    [remedy] = found.remedies
    assert remedy.words == ("scaler=dynamic",)
    assert remedy.helped
    assert remedy.text.startswith("a dynamic loss scale, first 2^16,")
    assert remedy.outcome == "correct on this batch"


def test_a_scale_that_comes_down_by_itself_needs_no_remedy(theirs):
    found = theirs(*network("backward", "precision=fp16_dynamic", "scaler.init_scale=131072"))
    assert (found.remedies[0].words, found.remedies[0].helped) == ((), True)
    assert "until the loss scale has fallen to 2^16, as usual" in found.remedies[0].text


def test_gradients_that_only_a_scale_below_one_fits_get_one(theirs):
    found = theirs(*network("loud", *FP16))
    assert (found.cause, found.module, found.operator) == ("backward", "last.0.1", "mul")
    assert "within LouderBackward" in found.verdict
    [scale] = found.remedies
    assert scale.helped
    [word] = scale.words
    assert 0 < float(word.removeprefix("scaler.scale=")) <= 0.25


@pytest.mark.parametrize(("precision", "kept"), [("fp16_static", "norms,LocalResponseNorm,"), ("amp_static", "")])
def test_an_overflow_in_one_convolutions_forward_is_mended_by_fp32_around_it(theirs, precision, kept):
    found = theirs(*network("forward", f"precision={precision}"))
    assert (found.cause, found.module, found.operator) == ("forward", "body.1", "convolution")
    assert "returns inf in float16 for finite inputs" in found.verdict
    assert (found.remedies[-1].words, found.remedies[-1].helped) == ((f"precision.keep_fp32=[{kept}body]",), True)


@pytest.mark.parametrize("name", ["inputs", "targets"])
def test_an_inf_input_and_a_nan_label_are_named_with_their_sample(theirs, name):
    found = theirs("model=line", "precision=amp_static", f"dataset.{'inf' if name == 'inputs' else 'nan'}=true")
    place, kind = (3, "inf") if name == "inputs" else (5, "nan")
    assert found.cause == "input"
    assert found.verdict == f"the batch itself is not finite: {name} contain {kind} in 1 of 32 samples (index {place})"
    assert (found.remedies[0].helped, found.remedies[0].outcome) == (True, "without this sample the step is finite")


def test_inputs_that_are_too_large_for_fp16_alone_are_told_from_faulty_ones(theirs):
    found = theirs("model=line", "precision=fp16_static", "dataset.large=true")
    assert found.cause == "input"
    assert "the values are finite in FP32" in found.verdict
    assert (found.remedies[-1].words, found.remedies[-1].helped) == (("precision=amp_bf16",), True)


def test_a_loss_that_is_no_number_by_its_formula_is_told_from_the_network(theirs):
    found = theirs("model=line", "precision=amp_dynamic", "task.logarithm=true")
    assert (found.cause, found.operator) == ("loss", "log")
    assert [one.helped for one in found.remedies] == [False, False, None]
    assert "no precision and no loss scale fixes its formula" in found.remedies[-1].outcome


def test_a_batch_norm_with_huge_activations_is_worth_knowing(theirs):
    found = theirs(*network("batchnorm", *FP16))
    assert found.cause == "none"
    assert found.notes[0].startswith("body.3 (BatchNorm2d) has FP16 values up to")
    assert row(found, "body.2").forward.largest > 0.25 * 65504


def test_a_frozen_parameter_is_worth_knowing(theirs):
    found = theirs(*network("frozen", "precision=fp16_dynamic"))
    assert found.notes == ("1 of the parameters is frozen and not trained: body.0.bias",)


def test_a_softmax_over_65536_entries_loses_its_probabilities_in_fp16(theirs):
    found = theirs(*network("softmax", *FP16))
    assert found.cause == "none"
    assert found.notes[0].startswith("_softmax in last.0.inner (Softmax) loses values to FP16 underflow: 100 %")
    # The softmax alone answers in FP16 again, so what is around it has to be kept as well.
    assert (found.remedies[0].words, found.remedies[0].helped) == (
        ("precision.keep_fp32=[norms,LocalResponseNorm,last.0]",), True,
    )  # fmt: skip


def test_a_softmax_by_hand_whose_sum_overflows_is_found_though_everything_else_stays_finite(theirs):
    found = theirs(*network("by_hand", *FP16))
    assert (found.cause, found.module, found.operator) == ("forward", "last.0.inner", "sum")
    assert "the loss and the gradients stay finite" in found.verdict
    assert any(note.startswith("only zero gradients reach body.0") for note in found.notes)
    assert found.remedies[-1].helped


@pytest.mark.parametrize("kind", ["sparse", "masked"])
def test_zeros_that_fp32_has_as_well_are_not_lost(theirs, kind):
    found = theirs(*network(kind, *FP16))
    assert not [note for note in found.notes if "underflow" in note]
    assert found.remedies == ()


def test_values_that_are_kept_in_fp32_and_lost_in_the_cast_behind_it_are_still_lost(theirs):
    found = theirs(*network("faint", "precision=fp16_static", "scaler.scale=1"))
    assert found.notes[0].startswith("exp in last.0.0 (Faint) loses values to FP16 underflow")
    [remedy] = found.remedies
    assert remedy.words[0] == "precision.keep_fp32=[norms,LocalResponseNorm,last.0]"
    assert remedy.helped


def test_a_division_by_zero_asks_for_no_lower_learning_rate(theirs):
    found = theirs(*network("divides", "precision=fp32"))
    [remedy] = found.remedies
    assert (remedy.text, remedy.words, remedy.helped) == ("check div in last.0 (Divides)", (), None)
    assert "FP32 is not finite either, and no weight is large" in remedy.outcome


def test_large_operands_in_fp32_ask_for_a_lower_learning_rate(theirs):
    found = theirs(*network("large", "precision=fp32"))
    assert found.remedies[-1].text.startswith("a lower optimizer.lr")
    assert "the inputs of mul reach" in found.remedies[-1].outcome


def test_a_custom_function_in_the_wrong_dtype_is_named_with_its_module(theirs):
    found = theirs(*network("square", *FP16))
    assert found.notes[0].startswith(
        "SquareBackward in last.0 (Calls) returns a gradient in float32 for an input in float16"
    )


def test_a_custom_function_that_torch_refuses_is_named_instead_of_a_traceback(theirs):
    found = theirs(*network("mixes", *FP16))
    assert (found.cause, found.module, found.operator) == ("refused", "last.0", "index_add_")
    assert "in the backward pass of last.0 (Calls) within MixesBackward" in found.verdict
    assert found.remedies[-1].helped


@pytest.mark.parametrize(
    ("words", "cause", "where"),
    [
        (network("backward", *FP16), "backward", "body.2"),
        (network("forward", "precision=fp16_static"), "forward", "body.1"),
        (("model=line", "precision=amp_dynamic", "dataset.nan=true"), "input", None),
        (("model=line", "precision=fp16_static", "task.logarithm=true"), "loss", "(loss)"),
    ],
)
def test_a_run_that_ended_is_explained_from_what_it_left_and_left_as_it_is(theirs, capsys, words, cause, where):
    assert train(*words, "train.one_batch=true") == 4
    assert "mptrain diagnose outputs/run" in capsys.readouterr().err
    last = recorded()[-1]
    before = contents(Path("outputs/run"))
    assert main(["diagnose", "outputs/run", ALLOWED[2]]) == 0
    assert contents(Path("outputs/run")) == before
    found = read_examination(Path("outputs/run/diagnosis/step-000003.json"))
    assert (found.cause, found.module, found.step) == (cause, where, last["step"])
    assert found.loss_scale == last["loss_scale"]
    assert found.loss == last["loss"] if cause == "backward" else last["loss"] is None
    output = capsys.readouterr().out
    assert "repeated step 3, which ended the run" in output
    assert output.rstrip().endswith("outputs/run/diagnosis/step-000003.html")
    page = Path("outputs/run/diagnosis/step-000003.html").read_text()
    assert "Fixes tested" in page
    assert found.verdict[1:40].replace("'", "&#39;") in page


def test_weights_that_were_not_kept_are_said_to_be_missing(theirs, capsys):
    words = network("plain", "precision=fp16_static", "scaler.scale=16777216", "scaler.on_overflow=apply")
    assert train(*words) == 4
    capsys.readouterr()
    assert main(["diagnose", "outputs/run", ALLOWED[2]]) == 6
    assert "has no checkpoint: none was saved before its weights became non-finite" in capsys.readouterr().err
    assert main(["diagnose", "outputs/run", ALLOWED[2], "--step", "1"]) == 0
    assert "Only gradients overflow" in capsys.readouterr().out


def test_a_run_that_went_well_is_looked_at_where_it_would_go_on(theirs, capsys):
    assert train(*network("plain", "precision=fp16_dynamic")) == 0
    found = diagnose_run("run", ALLOWED[2:]).found
    assert (found.cause, found.step, found.remedies) == ("none", 7, ())
    assert found.remarks == ("step 7, from the checkpoint of step 6",)
    capsys.readouterr()
    assert main(["diagnose", "run", ALLOWED[2], "precision=fp32", "--step", "3", "--all"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "step 3, from the start, and 2 steps trained in memory" in output
    assert "with precision=fp32, unlike the run itself" in output
    assert "has FP16 values" not in output
    assert "Of 65,504: largest magnitude relative to" in output
    assert (
        "Finite values can still be wrong: mptrain doctor with the same words checks the gradients at every loss scale."
        in output
    )


def test_a_step_of_a_run_is_the_one_that_was_trained(theirs):
    assert train(*network("plain", "precision=amp_dynamic"), "checkpoint.every_steps=2") == 0
    losses = [step["loss"] for step in recorded()]
    assert [diagnose_run("run", ALLOWED[2:], step=step).found.loss for step in (1, 3, 6)] == [
        losses[0],
        losses[2],
        losses[5],
    ]


def test_an_injected_fault_is_there_when_its_step_is_looked_at():
    words = (*TINY, "precision=fp16_dynamic", "inject.step=2", "inject.value=nan")
    forward = diagnose_config(compose([*words, "inject.tensor=activation:3"]), 2).found
    assert (forward.cause, forward.module) == ("forward", "3")
    backward = diagnose_config(compose([*words, "inject.tensor=activation_gradient:3"]), 2).found
    assert (backward.cause, backward.module) == ("backward", "3")
    assert diagnose_config(compose([*words, "inject.tensor=input"]), 2).found.cause == "input"
    assert diagnose_config(compose([*words, "inject.tensor=weight:3.bias"]), 2).found.cause == "weights"
    gradient = diagnose_config(compose([*words, "inject.tensor=gradient:3.bias"]), 2).found
    assert (gradient.cause, gradient.module) == ("backward", "3")
    assert diagnose_config(compose([*words, "inject.tensor=input"]), 1).found.cause == "none"


def test_gradients_without_a_scale_are_given_one_that_was_tried():
    found = diagnose_config(compose(("model=transformer", "precision=fp16_noscale", "train.batch_size=4"))).found
    assert "of the nonzero FP16 gradients are below 2^-14 at loss scale 1" in found.notes[0]
    [remedy] = found.remedies
    assert remedy.helped
    assert remedy.words[0] == "scaler=static"
    scale = int(remedy.words[1].removeprefix("scaler.scale="))
    assert 2**12 <= scale <= 2**22
    assert scale & (scale - 1) == 0


def test_a_step_behind_the_end_is_refused():
    config = compose(TINY)
    with pytest.raises(ConfigError, match="training ends at step 18"):
        diagnose_config(config, 19)


def test_a_run_without_steps_left_gets_no_command_that_trains_none(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loud = ("model=cnn", "dataset.train_samples=32", "train.batch_size=16", "train.epochs=1", "run.name=loud")
    words = (*loud, "precision=fp16_static", "scaler.scale=16777216", "checkpoint.every_epochs=1")
    assert main([*words]) == 4
    capsys.readouterr()
    assert main(["diagnose", "outputs/loud"]) == 0
    said = capsys.readouterr().out
    assert "the run has no steps left to train" in said
    assert "mptrain resume" not in said
