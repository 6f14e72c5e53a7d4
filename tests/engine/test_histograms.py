import json
import math

import pytest
import torch
from torch import nn

from mptrain.engine.histograms import Histograms, HistogramWatch, NoProbe
from mptrain.engine.step import train_step
from mptrain.numerics.exponents import nonzero, total
from mptrain.numerics.tensors import read_counts
from mptrain.system.records import HistogramRecord
from tests.small_runs import TINY, Kept, loop_of, parts_of


def test_the_first_step_and_every_so_manieth_are_looked_at():
    probe = Histograms(every=10)
    assert [step for step in range(1, 31) if probe.watch("main", step) is not None] == [1, 10, 20, 30]
    assert NoProbe().watch("main", 1) is None


def looked_at(*overrides, step=1):
    """The parts after one step under a watch, and its record."""
    parts, _ = parts_of(*TINY, *overrides)
    parts.model.train()
    batch = parts.prepare(next(parts.loaders["train"].batches(0, start=0)))
    (learner,) = parts.learners
    watch = HistogramWatch("main", step)
    before = {name: value.clone() for name, value in learner.weights.masters.full_precision().items()}
    gradients = {}
    judge = learner.judge

    def keep(loss=None, **wanted):
        gradients.update({name: value.clone() for name, value in learner.weights.gradients.by_name().items()})
        return judge(loss, **wanted)

    learner.judge = keep
    with torch.no_grad():
        activations = outputs_of(parts, batch)
    _NoRing().record(train_step(learner, parts.model, batch, parts.plan, watch))
    record, *_ = watch.records()
    return parts, record, before, gradients, activations


class _NoRing:
    def record(self, *values):
        pass


def outputs_of(parts, batch):
    found = {}
    handles = [
        module.register_forward_hook(lambda module, inputs, output, name=name: found.update({name: output.clone()}))
        for name, module in parts.model.named_modules()
        if not list(module.children())
    ]
    with parts.plan.products.context, parts.plan.autocast:
        parts.model(batch.inputs)
    for handle in handles:
        handle.remove()
    return found


def by_hand(tensor):
    values = tensor.double().flatten()
    finite = values[values.isfinite() & (values != 0)].abs()
    exponents = torch.floor(torch.log2(finite)).int().tolist()
    return {exponent: exponents.count(exponent) for exponent in set(exponents)}


def as_dict(counts):
    return {counts.lowest + at: count for at, count in enumerate(counts.counts) if count}


@pytest.mark.parametrize("precision", ["fp32", "amp_static", "fp16_static", "fp16_pure"])
def test_every_kind_is_counted_as_it_is(precision):
    parts, record, before, gradients, activations = looked_at(f"precision={precision}")
    assert record.loss_scale == float(parts.learners[0].scale)
    assert record.tensors.keys() == {"activations", "activation_gradients", "weight_gradients", "weights", "updates"}
    names = [name for name in activations if not isinstance(parts.model.get_submodule(name), nn.Flatten)]
    assert list(record.tensors["activations"]) == names == list(reversed(record.tensors["activation_gradients"]))
    for name in names:
        counts = record.tensors["activations"][name]
        assert as_dict(counts) == by_hand(activations[name]), name
        assert counts.dtype == str(activations[name].dtype).removeprefix("torch.")
        assert total(counts) == activations[name].numel()
        assert counts.largest == activations[name].abs().max().item()
    for kind, tensors in (("weight_gradients", gradients), ("weights", before)):
        assert {name: as_dict(counts) for name, counts in record.tensors[kind].items()} == {
            name: by_hand(tensor) for name, tensor in tensors.items()
        }
    after = parts.learners[0].weights.masters.working()
    for name, counts in record.tensors["updates"].items():
        update = after[name] - before[name]
        assert as_dict(counts) == by_hand(update)
        moving, same = record.unchanged[name]
        half = before[name].half()
        assert moving == nonzero(counts)
        assert same == int(((half.float() + update).half() == half)[update != 0].sum())


def test_gradients_carry_the_scale():
    one = looked_at("precision=fp32", "scaler=static", "scaler.scale=1")[1]
    eight = looked_at("precision=fp32", "scaler=static", "scaler.scale=8")[1]
    for kind in ("activation_gradients", "weight_gradients"):
        for name, counts in one.tensors[kind].items():
            assert eight.tensors[kind][name].lowest == counts.lowest + 3
            assert eight.tensors[kind][name].counts == counts.counts
    assert eight.tensors["updates"] == one.tensors["updates"]


def test_micro_batches_add_up():
    whole = looked_at("precision=fp32")[1]
    parts = looked_at("precision=fp32", "train.accumulate=4")[1]
    for name, counts in whole.tensors["activations"].items():
        assert total(parts.tensors["activations"][name]) == total(counts)
        assert parts.tensors["activations"][name].largest == pytest.approx(counts.largest, rel=1e-5)
    assert {name: total(c) for name, c in parts.tensors["weights"].items()} == {
        name: total(c) for name, c in whole.tensors["weights"].items()
    }


def test_small_updates_of_fp16_weights_are_seen_to_change_nothing():
    shares = {}
    for rate in (1e-6, 1e-1):
        record = looked_at("precision=fp16_static", f"optimizer.lr={rate}", "schedule=constant")[1]
        pairs = [record.unchanged[name] for name in record.unchanged if name.endswith("weight")]
        shares[rate] = sum(same for _, same in pairs) / sum(moving for moving, _ in pairs)
    assert shares[1e-6] > 0.95 > 0.5 > shares[1e-1]


def test_weights_updated_in_half_precision_show_lost_updates():
    words = ("precision=fp16_pure", "precision.optimizer_state=parameters", "optimizer.lr=1e-5", "schedule=constant")
    _, record, before, gradients, _ = looked_at(*words)
    name = next(name for name in before if name.endswith("weight"))
    moving, same = record.unchanged[name]
    assert moving == int((gradients[name] != 0).sum())
    assert same / moving > 0.9


def test_a_refused_step_has_no_updates_and_shows_what_overflowed():
    parts, record, *_ = looked_at("precision=fp16_static", "scaler.scale=1e9")
    assert record.overflow
    assert "updates" not in record.tensors
    assert record.unchanged == {}
    assert any(counts.inf or counts.nan for counts in record.tensors["activation_gradients"].values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in parts.model.modules())


def test_an_activation_that_is_changed_in_place_counts_as_it_was():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    watch = HistogramWatch("main", 1)
    inputs = torch.randn(16, 4)
    kept = {}
    with watch.passes(model):
        hidden = nn.functional.linear(inputs, model[0].weight, model[0].bias)
        kept["0"] = hidden.detach().clone()
        model(inputs).sum().backward()
    counts = {key: counted[0] for key, counted in watch._counts.items()}
    before = read_counts(counts["activations", "0"].tolist(), torch.float32)
    after = read_counts(counts["activations", "1"].tolist(), torch.float32)
    assert as_dict(before) == by_hand(kept["0"])
    assert as_dict(after) == by_hand(kept["0"].relu())
    gradient = read_counts(counts["activation_gradients", "0"].tolist(), torch.float32)
    assert gradient.zeros == int((kept["0"] <= 0).sum())


def test_a_run_writes_a_line_for_each_learner_and_step_looked_at(tmp_path):
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, "diagnostics=histograms", "diagnostics.every=4", "train.max_steps=9", kept=kept)
    loop.run()
    loop.storage.writer.close()
    assert [record.step for record in kept.of(HistogramRecord)] == [1, 4, 8]
    lines = loop.storage.paths.histograms.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 4, 8]


def test_a_gan_has_a_line_for_each_of_its_networks(tmp_path):
    kept = Kept()
    words = ("model=dcgan", "dataset=synthetic", "dataset.image_size=16", "dataset.train_samples=32", "model.width=4")
    loop = loop_of(tmp_path, *words, "train.batch_size=16", "diagnostics=histograms", "train.max_steps=1", kept=kept)
    loop.run()
    found = {record.learner: record for record in kept.of(HistogramRecord)}
    assert found.keys() == {learner.name for learner in loop.parts.learners}
    for name, learner in ((learner.name, learner) for learner in loop.parts.learners):
        assert found[name].tensors["weights"].keys() == set(learner.weights.names)


def test_lstm_outputs_and_states_are_counted_together(tmp_path):
    kept = Kept()
    words = ("model=char_lstm", "diagnostics=histograms", "train.max_steps=1", "train.batch_size=8")
    loop_of(tmp_path, *words, kept=kept).train_epoch()
    (record,) = kept.of(HistogramRecord)
    assert all(math.isfinite(counts.largest) for named in record.tensors.values() for counts in named.values())
    assert any("lstm" in name.lower() or "rnn" in name.lower() for name in record.tensors["activations"])


class GivesItsOwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return self.token


def test_a_parameter_that_is_given_as_output_keeps_no_hook():
    model = nn.ModuleDict({"token": GivesItsOwnParameter()})
    watch = HistogramWatch("main", 1)
    inputs = torch.randn(4, 3)
    with watch.passes(model):
        (inputs + model["token"](inputs)).sum().backward()
    token = model["token"].token
    assert not token._backward_hooks
    count = int(watch._counts["activation_gradients", "token"][0].sum())
    (inputs + token).sum().backward()
    assert int(watch._counts["activation_gradients", "token"][0].sum()) == count


def test_a_tensor_that_is_given_twice_counts_once():
    class Same(nn.Module):
        def forward(self, inputs):
            found = inputs * 2
            return found, [found, None, found.argmax()]

    watch = HistogramWatch("main", 1)
    with watch.passes(model := Same()):
        model(torch.ones(5, requires_grad=True))[0].sum().backward()
    for kind in ("activations", "activation_gradients"):
        assert total(read_counts(watch._counts[kind, ""][0].tolist(), torch.float32)) == 5
