"""What an average of the weights means for evaluation and resume."""

from __future__ import annotations

import pytest
import torch
from small_runs import TINY, Kept, continue_loop, loop_of, whole_and_resumed

from mptrain.engine.evaluate import _model_to_measure, evaluate
from mptrain.system.records import EvalRecord


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
    """cuDNN would join the weights of a copy in every call."""
    joined = []
    monkeypatch.setattr(torch.nn.LSTM, "flatten_parameters", lambda self: joined.append(self))  # noqa: PLW0108 - bound
    words = ("model=char_lstm", "train.ema_decay=0.9", "train.batch_size=4", "train.max_steps=1")
    parts = loop_of(tmp_path, *words).parts
    own = [module for module in parts.model.modules() if isinstance(module, torch.nn.LSTM)]
    joined.clear()
    copies = [module for module in _model_to_measure(parts, wide=False, average=True).modules() if module in joined]
    assert len(copies) == len(own) > 0
    assert not any(layer in joined for layer in own)
    assert _model_to_measure(parts, wide=False, average=False) is parts.model
