"""The doctor and the diagnosis of a loop that is not mptrain's find what the commands find, and change nothing."""

from __future__ import annotations

import ast
import copy
import json
import random
import re
from collections import UserDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import mptrain
from mptrain.config.compose import compose
from mptrain.lab import other_loop
from mptrain.lab.diagnosis.diagnose import diagnose_config
from mptrain.lab.doctor.check import check_scaling
from mptrain.run.build.parts import build
from mptrain.system.errors import ConfigError
from tests import faulty_networks

Pair = namedtuple("Pair", "images labels")


def loss_of(model, batch):
    images, labels = batch
    return cross_entropy(model(images).float(), labels)


def loop_with(fault):
    """The words, the FP32 model and the first batch of a configuration with a fault."""
    words = (*faulty_networks.with_fault(fault), "train.batch_size=16")
    parts, _ = build(compose((*words, "precision=fp32")))
    batch = parts.prepare(next(iter(parts.loaders["train"].batches(0))))
    return words, parts.model, (batch.inputs, batch.targets)


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    return model, (torch.randn(16, 8), torch.randint(4, (16,)))


#: Words for runs of mptrain, which a loop does not have.
KEYS = re.compile(r"\b(scaler|precision|optimizer|train|dataset|diagnostics)[.\w]*=[^\"]")

FAULTS = ("none", "rms_norm", "mask_fill", "mask_buffer", "large_between", "exp_by_hand", "sqrt_at_zero", "shrink")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["amp_dynamic", "fp16_dynamic"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_loop_has_the_findings_of_the_command(fault, precision):
    words, model, batch = loop_with(fault)
    report = check_scaling(compose((*words, f"precision={precision}", "scaler=torch")), lambda _: None)
    found = mptrain.doctor(model, loss_of, batch, precision)
    expected = [(one.kind, one.where, one.operator, one.what) for one in (*report.findings, *report.minor)]
    assert [(one.kind, one.where, one.operator, one.what) for one in found.findings] == expected
    assert found.exit_code == (4 if report.findings else 0)
    assert found.ok == (not report.findings)
    assert not KEYS.search(str(found))


@pytest.mark.long
@pytest.mark.parametrize("precision", ["amp_dynamic", "fp16_dynamic"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_diagnosis_names_the_module_and_operator_that_the_command_names(fault, precision):
    words, model, batch = loop_with(fault)
    expected = diagnose_config(compose((*words, f"precision={precision}", "scaler=torch"))).examination
    found = mptrain.diagnose(model, loss_of, batch, precision)
    if expected.cause == "none":
        assert (found.findings, found.ok) == ((), True)
        return
    first = found.findings[0]
    assert (first.kind, first.module, first.operator) == (expected.cause, expected.module, expected.operator)
    helped = [one for one in expected.remedies if one.helped]
    assert bool(first.hint) >= bool(helped)
    assert first.minor == any(not one.words for one in helped)
    assert not KEYS.search(str(found))


def state_of(model, batch, optimizer):
    """Everything of a caller that an examination could change."""
    return copy.deepcopy(
        {
            "weights": model.state_dict(),
            "gradients": [one.grad for one in model.parameters()],
            "trained": [one.requires_grad for one in model.parameters()],
            "modes": [one.training for one in model.modules()],
            "hooks": [len(one._forward_pre_hooks) + len(one._forward_hooks) for one in model.modules()],
            "batch": batch,
            "optimizer": optimizer.state_dict(),
            "random": (torch.get_rng_state(), random.getstate(), [*np.random.get_state()[1]]),
            "torch": (torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads()),
            "tf32": (torch.backends.cudnn.conv.fp32_precision == "tf32", torch.backends.cudnn.allow_tf32),
            "reduced": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        }
    )


@pytest.mark.parametrize("precision", ["amp_dynamic", "fp16_dynamic"])
@pytest.mark.parametrize("examine", [mptrain.doctor, mptrain.diagnose])
def test_nothing_of_the_caller_changes_by_a_bit(examine, precision):
    model, batch = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss_of(model, batch).backward()
    optimizer.step()
    model[1].eval()

    def loss_fn(model, batch):
        random.random(), np.random.rand()
        inputs, labels = batch
        return cross_entropy(model(inputs.mul_(1 + torch.rand(1))).float(), labels)

    before = state_of(model, batch, optimizer)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as the caller may have it
        assert examine(model, loss_fn, batch, precision, optimizer=optimizer).ok
    torch.testing.assert_close(state_of(model, batch, optimizer), before, rtol=0, atol=0, equal_nan=True)


def test_a_sound_model_has_loss_scales_and_a_report_in_words():
    model, batch = small()
    found = mptrain.doctor(model, loss_of, batch)
    assert (found.findings, found.exit_code) == ((), 0)
    assert 2.0**10 in found.loss_scales
    first, *notes = str(found).splitlines()
    assert first == found.summary
    assert first.startswith("Sequential in amp_dynamic: no problems found; usable loss scales: 2^")
    assert notes
    assert all(line.startswith("note: ") for line in notes)
    assert json.loads(json.dumps(found.to_dict()))["loss_scales"] == [*found.loss_scales]


@pytest.mark.parametrize(
    "form", [list, tuple, lambda pair: Pair(*pair), lambda pair: {"x": pair}, lambda pair: UserDict(x=pair)]
)
def test_a_batch_has_any_form(form):
    model, pair = small()

    def loss_fn(model, batch):
        assert type(batch) is type(form(pair))
        return loss_of(model, batch["x"] if hasattr(batch, "keys") else batch)

    assert mptrain.doctor(model, loss_fn, form(pair), "fp16_dynamic").ok


def test_targets_and_what_the_loss_computes_keep_their_dtype():
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 1), {"x": torch.randn(8, 4), "y": 1e6 + torch.randn(8, 1), "lengths": [4] * 8}

    def loss_fn(model, batch):
        assert batch["y"].dtype != torch.float16
        noisy = batch["x"] + torch.randn(8, 4)  # float32, as FSDP casts it
        return mse_loss(model(noisy).float() * 1e-3, batch["y"] * 1e-6)

    assert mptrain.doctor(model, loss_fn, batch, "fp16_dynamic").ok


def test_tokens_and_a_model_that_computes_its_loss_are_examined():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(16, 32), nn.Linear(32, 16)

        def forward(self, ids, weights):
            losses = cross_entropy(
                self.head(self.embedding(ids)).flatten(0, 1).float(), ids.flatten(), reduction="none"
            )
            return {"loss": (losses * weights.flatten()).mean()}

    torch.manual_seed(0)
    batch = {"ids": torch.randint(16, (4, 6)), "weights": torch.ones(4, 6)}
    assert mptrain.doctor(Language(), lambda model, batch: model(**batch)["loss"], batch, "fp16_dynamic").ok


def test_only_parameters_of_the_optimizer_are_trained():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4)), (torch.randn(16, 8), torch.randint(4, (16,)))
    alone = torch.optim.SGD(model[1].parameters(), 0.1)

    def loss_fn(model, batch):
        return loss_of(model[1], batch)

    assert [one.kind for one in mptrain.doctor(model, loss_fn, batch).findings] == ["no_gradient"]
    assert not mptrain.doctor(model, loss_fn, batch, optimizer=alone).findings


@pytest.mark.parametrize("precision", ["amp_dynamic", "fp32"])
def test_a_sample_that_is_not_finite_is_named(precision):
    model, (inputs, labels) = small()
    inputs[3, 1] = torch.nan
    found = mptrain.diagnose(model, loss_of, (inputs, labels), precision)
    assert [(one.kind, one.minor) for one in found.findings] == [("input", False)]
    assert "values of batch[0] contain nan in 1 of 16 samples (index 3)" in found.findings[0].what
    assert found.findings[0].hint == "clean data: without this sample the step is finite"
    model, (inputs, labels) = small()
    inputs[3, 1] = torch.inf
    found = mptrain.diagnose(model, lambda model, batch: loss_of(model, batch[0]), [(inputs, labels), torch.ones(3)])
    assert found.findings[0].what == "the batch itself is not finite: values of batch[0][0] contain inf"
    assert found.findings[0].hint == "clean data: the batch cannot be divided into samples"


def test_a_loss_scale_that_is_too_high_is_a_note_with_the_scale_that_comes():
    model, batch = small()
    found = mptrain.diagnose(model, loss_of, batch, loss_scale=2.0**30)
    assert found.ok
    assert found.summary == "Sequential in amp_dynamic at loss scale 2^30: the step is skipped, as usual"
    assert found.findings[0].what.startswith("only gradients overflow: ")
    assert "no change is needed: steps are skipped until the loss scale has fallen to 2^" in found.findings[0].hint
    assert mptrain.diagnose(model, loss_of, batch, loss_scale=8.0).findings == ()


def autocasting(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


@pytest.mark.parametrize(
    ("change", "loss_fn", "precision", "error", "words"),
    [
        (nn.Module.half, loss_of, "amp_dynamic", ConfigError, "parameters in torch.float16"),
        (None, autocasting, "amp_dynamic", ConfigError, "loss_fn or the model uses autocast"),
        (None, lambda model, batch: model(batch[0]), "amp_dynamic", ConfigError, r"a tensor of shape \[16, 4\]"),
        (None, lambda model, batch: 0.5, "amp_dynamic", ConfigError, "loss_fn returned a float"),
        (None, lambda model, batch: model(batch), "amp_dynamic", TypeError, "must be Tensor"),
        (None, loss_of, "fp8", ConfigError, "fp8"),
        (None, loss_of, "fp32", ConfigError, "nothing to check"),
    ],
)
def test_what_cannot_be_examined_is_refused(change, loss_fn, precision, error, words):
    model, batch = small()
    if change is not None:
        change(model)
    with pytest.raises(error, match=words):
        mptrain.doctor(model, loss_fn, batch, precision)


def test_a_wrapped_model_is_examined_without_its_wrapper():
    model, batch = small()
    assert mptrain.doctor(nn.DataParallel(model), loss_of, batch) == mptrain.doctor(model, loss_of, batch)


@pytest.mark.parametrize("check", [mptrain.doctor, mptrain.diagnose])
def test_a_loss_of_another_model_than_the_one_that_is_given_is_refused(check):
    model, batch = small()
    with pytest.raises(ConfigError, match="does not depend on a parameter of the model that loss_fn is given"):
        check(model, lambda _, given: loss_of(model, given), batch)


def test_each_phrase_that_is_put_into_words_of_torch_occurs():
    texts = []
    for path in Path(other_loop.__file__).parents[1].rglob("*.py"):
        if path.name == "loop_checks.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts.append("".join(str(one.value) if isinstance(one, ast.Constant) else "1" for one in parts))
    assert [phrase for phrase in other_loop._PHRASES if not any(phrase in text for text in texts)] == []


def test_what_a_model_casts_to_half_itself_is_said_to_be_in_half():
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x):
            return (self.inner(x).half() * 1e4 * 1e4).float()

    torch.manual_seed(0)
    batch = torch.randn(4, 8), torch.randint(4, (4,))
    found = mptrain.doctor(Casting(), loss_of, batch, "amp_dynamic")
    assert "in FP32 too" not in str(found)
    assert "the model computes it there itself, whatever the precision" in str(found)
