"""Planted faults, each found by name in one look, with a remedy that was tried on that very step."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from mptrain.cli.main import main
from mptrain.config.compose import compose
from mptrain.lab.diagnosis.diagnose import diagnose_config, diagnose_run
from mptrain.system.errors import ConfigError
from tests.examinations import read_examination
from tests.planted import ALLOWED, SHORT, plant
from tests.small_runs import TINY

pytestmark = pytest.mark.workload


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A folder with a package of faults in it, from which one step of some words can be looked at."""
    plant(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def look(*words, step=1):
        config = compose([ALLOWED[2], *words], config_dirs=[ALLOWED[1]])
        return diagnose_config(config, step).examination

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


FP16 = ("precision=fp16_static", "scaler.scale=131072")
NORMS = "precision.keep_fp32=[norms,LocalResponseNorm,"

#: Words of a step, and what is found: cause, module and operator; a part of the verdict; how the first note begins; words and
#: success of the remedy that counts (the last one, or the first where it says so) and a part of its text and outcome.
FOUND = {
    "one convolution's backward": (
        network("backward", *FP16),
        {"place": ("backward", "body.2", "convolution_backward"), "words": ("scaler=dynamic",), "helped": True,
         "outcome": "correct on this batch"},
    ),
    "a scale that comes down by itself": (
        network("backward", "precision=fp16_dynamic", "scaler.init_scale=131072"),
        {"remedy": 0, "words": (), "helped": True, "text": "until the loss scale has fallen to 2^16, as usual"},
    ),
    "one convolution's forward": (
        network("forward", "precision=fp16_static"),
        {"place": ("forward", "body.1", "convolution"), "verdict": "returns inf in float16 for finite inputs",
         "words": (f"{NORMS}body]",), "helped": True},
    ),
    "one convolution's forward under autocast": (
        network("forward", "precision=amp_static"),
        {"place": ("forward", "body.1", "convolution"), "words": ("precision.keep_fp32=[body]",), "helped": True},
    ),
    "an input of inf": (
        ("model=line", "precision=amp_static", "dataset.inf=true"),
        {"cause": "input", "verdict": "inputs contain inf in 1 of 32 samples (index 3)", "remedy": 0, "helped": True},
    ),
    "a label of NaN": (
        ("model=line", "precision=amp_static", "dataset.nan=true"),
        {"cause": "input", "verdict": "targets contain nan in 1 of 32 samples (index 5)", "remedy": 0, "helped": True},
    ),
    "inputs too large for FP16 alone": (
        ("model=line", "precision=fp16_static", "dataset.large=true"),
        {"cause": "input", "verdict": "the values are finite in FP32", "words": ("precision=amp_bf16",), "helped": True},
    ),
    "a formula that is no number": (
        ("model=line", "precision=amp_dynamic", "task.logarithm=true"),
        {"cause": "loss", "helped": None, "outcome": "no precision and no loss scale fixes its formula"},
    ),
    "a batch norm with huge activations": (
        network("batchnorm", *FP16), {"cause": "none", "note": "body.2 (Conv2d) has FP16 values up to"},
    ),
    "a frozen parameter": (
        network("frozen", "precision=fp16_dynamic"),
        {"note": "1 of the parameters is frozen and not trained: body.0.bias"},
    ),
    "a softmax over 65536 entries": (  # it alone answers in FP16 again, so what is around it has to be kept as well
        network("softmax", *FP16),
        {"cause": "none", "note": "_softmax in last.0.inner (Softmax) loses values to FP16 underflow: 100 %",
         "remedy": 0, "words": (f"{NORMS}last.0]",), "helped": True},
    ),
    "a softmax by hand whose sum overflows": (
        network("by_hand", *FP16),
        {"place": ("forward", "last.0.inner", "sum"), "verdict": "the loss and the gradients stay finite", "helped": True},
    ),
    "zeros that FP32 has as well": (network("sparse", *FP16), {"remedies": 0}),
    "masks that FP32 has as well": (network("masked", *FP16), {"remedies": 0}),
    "values that the cast behind FP32 loses": (
        network("faint", "precision=fp16_static", "scaler.scale=1"),
        {"note": "exp in last.0.0 (Faint) loses values to FP16 underflow", "remedies": 1, "helped": True},
    ),
    "a division by zero": (
        network("divides", "precision=fp32"),
        {"remedies": 1, "text": "check div in last.0 (Divides)", "words": (), "helped": None,
         "outcome": "FP32 is not finite either, and no weight is large"},
    ),
    "large operands in FP32": (
        network("large", "precision=fp32"), {"text": "a lower optimizer.lr", "outcome": "the inputs of mul reach"},
    ),
    "a custom function in the wrong dtype": (
        network("square", *FP16),
        {"note": "SquareBackward in last.0 (Calls) returns a gradient in float32 for an input in float16"},
    ),
    "a custom function that torch refuses": (
        network("mixes", *FP16),
        {"place": ("refused", "last.0", "index_add_"), "helped": True,
         "verdict": "in the backward pass of last.0 (Calls) within MixesBackward"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_fault_is_named_and_its_remedy_tried(theirs, name):
    words, expected = FOUND[name]
    found = theirs(*words)
    if "place" in expected:
        assert (found.cause, found.module, found.operator) == expected["place"]
    assert found.cause == expected.get("cause", found.cause)
    assert expected.get("verdict", "") in found.verdict
    if "note" in expected:
        assert found.notes[0].startswith(expected["note"])
    if "remedies" in expected:
        assert len(found.remedies) == expected["remedies"]
    if expected.keys() & {"words", "helped", "text", "outcome"}:
        remedy = found.remedies[expected.get("remedy", -1)]
        assert remedy.words == expected.get("words", remedy.words)
        assert remedy.helped is expected.get("helped", remedy.helped)
        assert expected.get("text", "") in remedy.text
        assert expected.get("outcome", "") in remedy.outcome


def test_only_the_module_that_overflows_breaks(theirs):
    found = theirs(*network("backward", *FP16))
    assert [one.name for one in found.modules if one.breaks] == ["body.2"]


def test_gradients_that_only_a_scale_below_one_fits_get_one(theirs):
    found = theirs(*network("loud", *FP16))
    assert (found.cause, found.module, found.operator) == ("backward", "last.0.1", "mul")
    [scale] = found.remedies
    [word] = scale.words
    assert scale.helped
    assert 0 < float(word.removeprefix("scaler.scale=")) <= 0.25


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
    found = diagnose_run("run", ALLOWED[2:]).examination
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
    assert [diagnose_run("run", ALLOWED[2:], step=step).examination.loss for step in (1, 3, 6)] == [
        losses[0],
        losses[2],
        losses[5],
    ]


def test_an_injected_fault_is_there_when_its_step_is_looked_at():
    words = (*TINY, "precision=fp16_dynamic", "inject.step=2", "inject.value=nan")
    forward = diagnose_config(compose([*words, "inject.tensor=activation:3"]), 2).examination
    assert (forward.cause, forward.module) == ("forward", "3")
    backward = diagnose_config(compose([*words, "inject.tensor=activation_gradient:3"]), 2).examination
    assert (backward.cause, backward.module) == ("backward", "3")
    assert diagnose_config(compose([*words, "inject.tensor=input"]), 2).examination.cause == "input"
    assert diagnose_config(compose([*words, "inject.tensor=weight:3.bias"]), 2).examination.cause == "weights"
    gradient = diagnose_config(compose([*words, "inject.tensor=gradient:3.bias"]), 2).examination
    assert (gradient.cause, gradient.module) == ("backward", "3")
    assert diagnose_config(compose([*words, "inject.tensor=input"]), 1).examination.cause == "none"


def test_gradients_without_a_scale_are_given_one_that_was_tried():
    found = diagnose_config(compose(("model=transformer", "precision=fp16_noscale", "train.batch_size=4"))).examination
    assert "of the nonzero FP16 gradients are below 2^-14 at loss scale 1" in found.notes[0]
    [remedy] = found.remedies
    assert remedy.helped
    assert remedy.words == ("scaler=dynamic",)


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
