"""What an average of the weights means for evaluation and resume."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import nn

from mptrain.engine.evaluate import evaluate, measuring
from mptrain.system.records import EvalRecord
from tests.small_runs import TINY, Kept, continue_loop, loop_of, whole_and_resumed


def measured(loop, **choices):
    return evaluate(loop.parts, loop.parts.loaders["val"], "val", 0, 0, lambda: False, **choices).record.metrics


@pytest.mark.parametrize(
    ("precision", "wide"),
    [
        ("fp32", "same"),
        ("amp_dynamic", "fp32"),
        ("fp16_dynamic", "same"),
        ("fp16_dynamic", "fp32"),
        ("bf16_pure", "same"),
    ],
)
def test_what_is_evaluated_is_the_average_and_training_does_not_notice(tmp_path, precision, wide):
    kept = Kept()
    words = (*TINY, f"precision={precision}", "train.ema_decay=0.9", f"precision.eval={wide}")
    loop = loop_of(tmp_path, *words, kept=kept)
    loop.run()
    before = {name: value.clone() for name, value in loop.parts.model.state_dict().items()}
    of_average, of_weights = measured(loop), measured(loop, average=False)
    assert kept.of(EvalRecord)[-2].metrics == of_average
    assert of_average["loss"] != of_weights["loss"]
    assert all(torch.equal(value, before[name]) for name, value in loop.parts.model.state_dict().items())
    with torch.no_grad():
        for name, parameter in loop.parts.model.named_parameters():
            parameter.copy_(loop.parts.averages()[name])
        for learner in loop.parts.learners:
            learner.weights.masters.load_full_precision(loop.parts.averages())
    assert measured(loop, average=False) == of_average


def test_ten_steps_and_ten_more_have_the_same_average_as_twenty(tmp_path):
    words = (*TINY, "precision=fp16_dynamic", "train.ema_decay=0.99", "train.epochs=4", "train.max_steps=20")
    whole, second = whole_and_resumed(tmp_path, *words, after=10)
    for name, value in whole.parts.averages().items():
        assert torch.equal(value, second.parts.averages()[name])


def test_an_average_that_is_switched_on_later_begins_with_the_saved_weights_and_says_so(tmp_path):
    loop = loop_of(tmp_path, *TINY, "train.max_steps=3")
    loop.run()
    later = continue_loop(loop, *TINY, "train.max_steps=6", "train.ema_decay=0.9")
    assert any("starts from the saved weights" in note for note in later.notes)
    for name, value in later.parts.averages().items():
        assert torch.equal(value, loop.parts.full_precision()[name])


def test_the_average_of_an_lstm_is_evaluated_with_joined_weights_and_training_keeps_its_own(tmp_path, monkeypatch):
    """cuDNN would join weights with other memory in every call."""
    joined = []
    words = ("model=char_lstm", "train.ema_decay=0.9", "train.batch_size=4", "train.max_steps=1")
    parts = loop_of(tmp_path, *words).parts
    places = {name: one.data_ptr() for name, one in parts.model.named_parameters()}
    monkeypatch.setattr(
        torch.nn.LSTM, "flatten_parameters", lambda self: joined.append([one.data_ptr() for one in self.parameters()])
    )
    for average in (True, False):
        joined.clear()
        with measuring(parts, average=average) as (model, *_):
            assert model is parts.model
            assert len(joined) == average * sum(isinstance(module, torch.nn.LSTM) for module in model.modules())
            assert not {*places.values()} & {one for layer in joined for one in layer}
        assert {name: one.data_ptr() for name, one in model.named_parameters()} == places


class Entangled(nn.Module):
    """A network whose closure, hook, weak reference, cache and lock a copy would not carry over, or refuse."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 10)
        self.register_buffer("seen", torch.zeros(()))
        self.apply_first = lambda x: self.first(x).relu()
        self.first.register_forward_hook(lambda module, args, out: out + self.gate(args[0]))
        self.other, self.cache, self.lock = weakref.ref(self.head), [], threading.Lock()

    def forward(self, images):
        with self.lock, torch.no_grad():
            self.seen.add_(1)
        self.cache = [self.apply_first(images.flatten(1)), self.head.weight.tanh()]
        return self.other()(self.cache[0])


class Plain(Entangled):
    def forward(self, images):
        flat = images.flatten(1)
        return self.head((nn.functional.linear(flat, self.first.weight, self.first.bias) + self.gate(flat)).relu())


@pytest.mark.parametrize(("precision", "wide"), [("fp32", "same"), ("fp16_dynamic", "fp32"), ("bf16_pure", "fp32")])
def test_a_network_with_references_to_itself_is_evaluated_with_the_weights_asked_for(
    tmp_path, monkeypatch, precision, wide
):
    words = (*TINY, f"precision={precision}", "train.ema_decay=0.9", f"precision.eval={wide}", "train.max_steps=12")
    monkeypatch.setattr("mptrain.run.build.parts.build_model", lambda *_: Entangled())
    torch.manual_seed(0)
    loop = loop_of(tmp_path, *words)
    loop.run()
    parts = loop.parts
    before = {name: (one.data_ptr(), one._version, one.clone()) for name, one in parts.model.state_dict().items()}
    found = measured(loop)
    for name, one in parts.model.state_dict().items():
        place, version, value = before[name]
        assert (one.data_ptr(), torch.equal(one, value)) == (place, True)
        assert one._version == version or name == "seen"
    plain = Plain()
    plain.load_state_dict({**{name: one.float() for name, one in parts.model.state_dict().items()}, **parts.averages()})
    if wide == "same":
        plain.to(parts.model.head.weight.dtype)
    with torch.no_grad():
        sums = torch.zeros((), dtype=torch.float64)
        for batch in map(parts.prepare_float32, parts.loaders["val"].batches(epoch=0)):
            sums += nn.functional.cross_entropy(plain(batch.inputs), batch.targets, reduction="sum")
    assert found["loss"] == pytest.approx(sums.item() / 200, rel=1e-5)
    assert found["loss"] != pytest.approx(measured(loop, average=False)["loss"], rel=1e-3)
