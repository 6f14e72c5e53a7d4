from __future__ import annotations

import re
import sys
import warnings

import pytest
import torch
from torch import nn

from mptrain.config.compose import compose
from mptrain.precision.apply import autocast, set_matmul_precision
from mptrain.precision.upcast import products
from mptrain.run.build.parallelism import require_copies
from mptrain.run.build.parts import _parameters, build_learners
from mptrain.system.errors import ConfigError
from mptrain.workloads.base.task import Objective
from tests.small_runs import TINY, parts_of


@pytest.mark.parametrize(
    ("precision", "channels_last"),
    [("fp32", "true"), ("fp16_dynamic", "true"), ("fp16_pure", "true"), ("bf16", "false")],
)
def test_masters_gradients_and_state_have_the_memory_layout_of_their_parameters(monkeypatch, precision, channels_last):
    parts, _ = parts_of(
        "model=resnet18", "dataset.train_samples=16", "train.batch_size=8", f"precision={precision}",
        f"train.channels_last={channels_last}",
    )  # fmt: skip
    [learner] = parts.learners
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    layouts = []
    monkeypatch.setattr(type(learner.weights.rule), "apply", spy(layouts))
    with parts.plan.products.context:
        learner.loss(parts.model, batch).backward()
        learner.weights.gradients.accumulate()
    learner.weights.update(learner.judge(), learner.rate(), learner.scale)
    parameters = [layout(p) for p in parts.model.parameters()]
    masters = [layout(value) for value in parts.full_precision().values()]
    assert masters == parameters
    assert (parameters == [layout(torch.empty(p.shape)) for p in parts.model.parameters()]) == (
        channels_last == "false"
    )
    assert sum(len(weights) for weights, *_ in layouts) == len(parameters)
    for weights, grads, momentum in layouts:
        assert weights == grads == momentum


def test_a_network_too_large_to_build_is_a_wrong_configuration():
    with pytest.raises(ConfigError, match=r"perceptron\.mlp cannot be built with model\.hidden="):
        parts_of("model=mlp", "model.hidden=[99999999999999999999]")


@pytest.mark.parametrize(
    ("group", "raised", "said"),
    [
        ("model", "FileNotFoundError('no x.bin')", "FileNotFoundError: no x.bin"),
        ("model", "AssertionError", "AssertionError: AssertionError"),
        ("dataset", "KeyError('x')", "KeyError: 'x'"),
    ],
)
def test_what_a_users_constructor_raises_is_told_as_theirs(tmp_path, monkeypatch, group, raised, said):
    (tmp_path / "own_parts.py").write_text(f"def broken(**given):\n    raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    with pytest.raises(ConfigError, match=f"(?m)own_parts.broken cannot be built with .*{re.escape(said)}$") as refused:
        parts_of(f"{group}._target_=own_parts.broken", "extensions.allow=[own_parts]")
    assert refused.value.hint == "--traceback shows where it failed"


def spy(layouts):
    def apply(rule, group, grads, stride):
        layouts.append([[layout(t) for t in tensors] for tensors in (group.weights, grads, *group.state.values())])

    return apply


def layout(tensor):
    """Size and strides; the stride of a dimension of size 1 says nothing."""
    return tensor.shape, tuple(0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def test_the_name_of_a_module_means_its_parameters_and_not_those_of_its_namesakes():
    model = nn.ModuleDict({"net1": nn.Linear(1, 1), "net10": nn.Linear(1, 1)})
    names = [name for name, _ in model.named_parameters()]

    def trained_by(*modules):
        return list(_parameters(model, Objective("main", modules, None), compose([])))

    assert trained_by("net1") == ["net1.weight", "net1.bias"]
    assert trained_by("net1.bias", "net10") == names[1:]
    assert trained_by("") == names
    with pytest.raises(ConfigError, match=r"trains generator, but .*cnn has only the modules net1, net10"):
        trained_by("generator")


def test_weights_move_after_a_module_gave_its_parameters_other_storage():
    parts, _ = parts_of(*TINY, "precision=fp32")
    [learner] = parts.learners
    for parameter in parts.model.parameters():
        parameter.data = parameter.data.clone()  # as cuDNN's recurrent networks do when they make theirs one block
    before = [parameter.clone() for parameter in parts.model.parameters()]
    learner.loss(parts.model, parts.prepare(next(parts.loaders["train"].batches(0)))).backward()
    learner.weights.update(learner.judge(), learner.rate(), learner.scale)
    assert not any(map(torch.equal, before, parts.model.parameters()))


class Pair(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.one, self.two, self.spare = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(1, 1)
        if tied:
            self.two.weight = self.one.weight


@pytest.mark.parametrize(
    ("tied", "modules", "named"),
    [
        (False, (("one", "two"), ("two",)), "two.weight"),
        (True, (("one",), ("two",)), "one.weight, which is also two.weight"),
    ],
)
def test_a_parameter_that_two_learners_train_is_refused_by_name(tied, modules, named):
    first, second = (Objective(name, own, None) for name, own in zip(("a", "b"), modules, strict=True))
    with pytest.raises(ConfigError, match=rf"the learners a and b both train {named}"):
        build_learners(compose([]), (first, second), Pair(tied=tied), {}, 10)


def test_two_objectives_of_one_learner_are_refused():
    objectives = [Objective("a", (name,), None) for name in ("one", "two")]
    with pytest.raises(ConfigError, match="two objectives of the learner a"):
        build_learners(compose([]), (*objectives,), Pair(tied=False), {}, 10)


def test_parameters_of_no_learner_get_no_gradient():
    model = Pair(tied=False)
    objective = Objective("main", ("one",), lambda net, batch: net.two(net.one(batch)).float().mean())
    [learner] = build_learners(compose([]), (objective,), model, {}, 10)
    with learner.only_trainable():
        learner.loss(model, torch.ones(2, 3)).backward()
    assert model.one.weight.grad is not None
    assert model.two.weight.grad is None
    assert model.two.weight.requires_grad


def test_a_model_that_cannot_be_copied_is_refused_where_evaluation_copies_it():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.utils.weight_norm(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="cannot be copied") as caught:
        require_copies(compose(["distributed=fsdp2"]), model, sharded=True)
    assert "parametrizations" in caught.value.problems[0].hint
    require_copies(compose(["precision=fp16_dynamic"]), model, sharded=False)


def test_a_last_batch_of_one_sample_that_cannot_be_evaluated_is_refused_before_training(monkeypatch):
    def measure(self, model, batch):
        if batch.samples == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        raise AssertionError("only the single sample is tried")

    monkeypatch.setattr("mptrain.workloads.classification.task.Classify.measure", measure)
    with pytest.raises(ConfigError, match=r"train.batch_size=36 leaves a batch of one sample out of 397 in test"):
        parts_of("model=cnn", "train.batch_size=36", "dataset.train_samples=72")


def test_transformer_layers_are_evaluated_as_they_are_trained():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    policy = compose(["precision=amp_dynamic"]).precision
    set_matmul_precision(policy)
    try:
        with torch.no_grad(), products(policy, torch.device("cpu")).context, autocast(policy, torch.device("cpu")):
            assert layer.eval()(torch.randn(2, 5, 8)).isfinite().all()
    finally:
        set_matmul_precision(compose(["precision=fp32"]).precision)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_classifier_of_torchvision_by_its_path_is_answered_with_its_option():
    with pytest.raises(ConfigError, match=r"torchvision\.models\.resnet18 cannot be built") as refused:
        parts_of("model._target_=torchvision.models.resnet18", "dataset=synthetic", "dataset.image_size=32")
    assert refused.value.hint.startswith("set model=torchvision model.name=resnet18 ")


def test_a_model_that_hands_on_any_keywords_is_told_the_number_of_classes_alone():
    words = ("model=cnn", "~model.widths", "model._target_=torchvision.models.squeezenet1_1", "dataset=synthetic")
    parts, _ = parts_of(*words, "dataset.image_size=32")
    assert parts.model.num_classes == parts.dataset.facts()["num_classes"] != 1000
