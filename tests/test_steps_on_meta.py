"""No step waits for the device, nor leaves a tensor on the host: every model in every mode, and every scaler in every mode.

What `test_no_host_reads` says of the sources of a step, this says of what runs in it, networks and losses included.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.on_meta import device, look_at, parts_of  # noqa: F401 - one is a fixture

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS, PRECISIONS, SCALERS, OPTIMIZERS = (
    sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    for group in ("model", "precision", "scaler", "optimizer")
)
#: Networks whose forward pass or loss waits, the operator that does, and why.
WAITS = {
    ("fasterrcnn_resnet50",): ("nonzero", "which proposals of each picture are kept depends on their scores"),
    ("deepspeech2",): ("_ctc_loss", "the lengths of the sentences are read where cuDNN does not compute the loss"),
    ("deepspeech2_small",): ("_ctc_loss", "the same"),
    ("causal_lm",): ("item", "transformers reads its masks, to leave out those that hide nothing"),
    ("sequence_classifier",): ("item", "the same"),
    ("big_lstm_small", "model.softmax=adaptive"): (
        "bincount",
        "each cluster computes the rows of its own tokens alone",
    ),
}
pytestmark = pytest.mark.usefixtures("device")


#: The modes in which the default tests try every model: weights and activations of both dtypes, autocast, both with a scale.
USUAL = ("amp_dynamic", "fp16_dynamic")
NETWORKS = [(name,) for name in MODELS] + [key for key in WAITS if len(key) > 1]


@pytest.mark.parametrize(
    "modes",
    [USUAL, pytest.param(tuple(sorted({*PRECISIONS} - {*USUAL})), marks=pytest.mark.slow)],
    ids=["usual modes", "other modes"],
)
@pytest.mark.workload
@pytest.mark.parametrize("network", NETWORKS, ids=" ".join)
def test_a_step_of_every_model_in_every_mode_waits_for_nothing_but_what_is_documented(network, modes, record_property):
    record_property("combinations", len(modes))
    found = {mode: look_at(*parts_of(network[0], mode, *network[1:])).found for mode in modes}
    if network not in WAITS:
        assert {mode: one for mode, one in found.items() if one} == {}
    else:
        operator, _ = WAITS[network]
        assert {mode: one for mode, one in found.items() if [operator in line for line in one] != [True]} == {}


@pytest.mark.workload
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_with_every_scaler_in_every_mode_waits_for_nothing(precision, record_property):
    found = {scaler: look_at(*parts_of("mlp", precision, scaler=scaler)).found for scaler in SCALERS}
    record_property("combinations", len(found))
    assert {scaler: one for scaler, one in found.items() if one} == {}


#: Optimizers with torch's interface: the host reads once a step if the update is skipped.
READ_BY_HOST = ("timm", "torch")
OTHERWISE = (
    *((f"optimizer={name}",) for name in OPTIMIZERS if name not in READ_BY_HOST),
    ("train.batch_size=5", "train.accumulate=2"),
    ("train.clip_norm=1.0", "train.ema_decay=0.99"),
    ("train.channels_last=true", "schedule=cosine", "schedule.warmup=2"),
)


@pytest.mark.workload
@pytest.mark.parametrize("words", OTHERWISE, ids=" ".join)
def test_so_do_steps_with_other_parts(words):
    for precision, model in itertools.product(("amp_dynamic", "fp16_dynamic"), ("mlp", "dcgan")):
        assert look_at(*parts_of(model, precision, *words)).found == [], (precision, model)


@pytest.mark.workload
@pytest.mark.parametrize("name", READ_BY_HOST)
def test_an_optimizer_with_torchs_interface_costs_one_read_of_the_host_and_no_more(name):
    for precision in ("amp_dynamic", "fp16_dynamic"):
        assert look_at(*parts_of("mlp", precision, f"optimizer={name}")).found == [
            "NotImplementedError: Cannot copy out of meta tensor; no data!"
        ]


READS = {
    "item": lambda loss: loss.item(),
    "tolist": lambda loss: loss.tolist(),
    "bool": lambda loss: bool(loss > 0),
    "float": float,
    "cpu": lambda loss: loss.cpu(),
    "numpy": lambda loss: loss.detach().numpy(),
    "nonzero": lambda loss: loss.nonzero(),
    "mask": lambda loss: loss.view(1)[loss.view(1) > 0],
    "assigned mask": lambda loss: loss.new_zeros(3)[loss.view(1).expand(3) > 0],
    "masked_select": lambda loss: loss.masked_select(loss > 0),
    "unique": lambda loss: loss.unique(),
    "repeats": lambda loss: torch.repeat_interleave(loss.long().view(1)),
    "equal": lambda loss: torch.equal(loss, loss),
    "number": lambda loss: loss * torch.tensor(2.0),
    "copied number": lambda loss: torch.tensor(2.0, device=loss.device),
    "new number": lambda loss: loss.new_tensor([2.0]),
    "copied tensor": lambda loss: torch.ones(3).to(loss.device),
    "host": lambda loss: torch.ones(3) + 1,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_each_kind_of_wait_is_found_where_it_is_planted(read):
    parts, batch = parts_of("mlp", "amp_dynamic")
    learner = parts.learners[0]
    loss_of = learner.objective.loss

    def planted(model, micro):
        loss = loss_of(model, micro)
        read(loss.detach())
        return loss

    learner.objective = replace(learner.objective, loss=planted)
    assert look_at(parts, batch).found


def test_what_is_left_on_the_host_is_found():
    parts, batch = parts_of("mlp", "fp16_dynamic")
    parts.learners[0].updates = torch.zeros(1, dtype=torch.int64)
    assert look_at(parts, batch).found
    parts, batch = parts_of("cnn", "fp32")
    next(iter(parts.model.modules())).register_buffer("left", torch.zeros(3))
    assert look_at(parts, batch).found  # the guard waits to know whether to restore it
