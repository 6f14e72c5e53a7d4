from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.engine.step import train_step
from mptrain.optimizer import SGD
from mptrain.precision.apply import DTYPES, autocast, cast_model, clamp_to_range, input_dtype, set_matmul_precision
from mptrain.precision.keep_fp32 import kept_modules
from mptrain.precision.policy import NORMS
from mptrain.precision.upcast import products
from mptrain.system.errors import ConfigError
from tests.loops import each
from tests.precision.modes import NAMES, Named, images, mode
from tests.small_runs import TINY, parts_of

CPU = torch.device("cpu")


class Derived(nn.BatchNorm2d):
    """A user's own normalisation."""


@each(
    ("entry", "found"),
    [
        ("Conv2d", ["0", "4"]),
        ("LayerNorm", ["8"]),
        ("9", ["9"]),
        ("[049]", ["0", "4", "9"]),
        ("norms", ["1", "5", "8"]),
        ("Identity", ["3"]),
        ("_BatchNorm", ["1"]),
        ("InstanceNorm3d", []),
    ],
)
def test_modules_are_kept_by_class_base_class_name_and_pattern(entry, found):
    assert sorted(kept_modules(Named(), (entry,))) == found


def test_a_derived_class_is_kept_by_its_own_name_by_its_base_and_as_a_norm():
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"inner": Derived(2)}))
    for entry in ("Derived", "BatchNorm2d", "norms", "1.inner", "1.*"):
        assert list(kept_modules(model, (entry,))) == ["1.inner"], entry


def test_every_normalisation_layer_of_torch_counts_as_a_norm():
    layers = [name for name, value in vars(nn).items() if isinstance(value, type) and issubclass(value, nn.Module)]
    classes = {name for name in layers if "Norm" in name and not name.startswith("Lazy")}
    assert classes - {"LocalResponseNorm"} == set(NORMS)


def test_entries_that_match_nothing_are_all_reported_with_the_nearest_name():
    with pytest.raises(ConfigError) as refusal:
        kept_modules(nn.Sequential(nn.Linear(2, 2), Derived(2)), ("Derved", "layer9.*", "norms"))
    first, second = refusal.value.problems
    assert "precision.keep_fp32: 'Derved' matches no module" in first.what
    assert first.hint == "did you mean Derived?"
    assert "'layer9.*'" in second.what
    assert "qualified name" in second.hint


@each("name", NAMES)
def test_every_shipped_mode_runs_in_its_dtypes(name):
    policy, model = mode(name), Named()
    kept = cast_model(model, policy)
    once = type(model[8])
    assert cast_model(model, policy).keys() == kept.keys()
    assert type(model[8]) is once
    assert bool(kept) == bool(policy.keep_fp32)
    assert input_dtype(policy) == DTYPES[policy.parameters]
    for path, module in model.named_modules():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                assert tensor.dtype == (torch.float32 if path in kept else DTYPES[policy.parameters]), path
    assert model[1].num_batches_tracked.dtype == torch.int64
    seen = {}
    for index, module in enumerate(model):
        module.register_forward_hook(lambda _, __, output, index=index: seen.__setitem__(index, output.dtype))
    with products(policy, CPU).context:
        with autocast(policy, CPU):
            loss = F.cross_entropy(model(images(input_dtype(policy))).float(), torch.tensor([0, 1, 2, 3]))
        (loss * 256).backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert seen[0] == seen[4] == seen[9] == DTYPES[policy.compute]
    for path, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype, path
        assert parameter.grad.isfinite().all(), path


@each("kept", [nn.LayerNorm(64), nn.LocalResponseNorm(3), nn.GroupNorm(2, 64), nn.Linear(64, 64)])
@each("name", ["fp16_dynamic", "bf16", "amp_dynamic"])
def test_a_kept_module_computes_in_fp32_and_answers_in_the_dtype_it_was_given(kept, name):
    kept = copy.deepcopy(kept)
    reference = copy.deepcopy(kept)
    policy = mode(name, keep_fp32=[type(kept).__name__])
    model = nn.Sequential(kept)
    cast_model(model, policy)
    given = (torch.randn(5, 64, 3) if not isinstance(kept, (nn.LayerNorm, nn.Linear)) else torch.randn(5, 64)).to(
        DTYPES[policy.compute]
    )
    with autocast(policy, CPU):
        output = model(given)
    assert output.dtype == given.dtype
    assert all(parameter.dtype == torch.float32 for parameter in kept.parameters())
    assert torch.equal(output, reference(given.float()).to(given.dtype))
    if not policy.autocast:
        assert model[0](input=given).dtype == given.dtype


def test_a_kept_module_of_several_outputs_answers_all_of_them_in_that_dtype():
    model = nn.Sequential(nn.LSTM(4, 3))
    cast_model(model, mode("fp16_dynamic", keep_fp32=["LSTM"]))
    output, (hidden, cell) = model[0](torch.randn(5, 2, 4).half())
    assert {output.dtype, hidden.dtype, cell.dtype} == {torch.float16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@each("name", NAMES)
def test_a_kept_module_given_integers_answers_as_one_not_kept(name):
    tokens = torch.tensor([[1, 2], [0, 2]])
    plain, kept = (nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2)) for _ in range(2))
    cast_model(plain, mode(name, keep_fp32=[]))
    cast_model(kept, mode(name, keep_fp32=["Embedding"]))
    assert kept[0].weight.dtype == torch.float32
    assert kept[0](tokens).dtype == plain[0](tokens).dtype
    assert torch.equal(kept[0](tokens), kept[0].weight[tokens].to(plain[0].weight.dtype))
    with products(mode(name), CPU).context, autocast(mode(name), CPU):
        assert kept(tokens).dtype == plain(tokens).dtype


def test_a_copy_cast_to_fp32_answers_in_fp32():
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2))
    cast_model(model, mode("fp16_dynamic", keep_fp32=["Embedding"]))
    wide = copy.deepcopy(model).float()
    tokens = torch.tensor([1, 2])
    assert wide[0](tokens).dtype == wide(tokens).dtype == torch.float32
    assert model[0](tokens).dtype == torch.float16


def test_a_kept_module_within_a_kept_module_answers_in_fp32():
    model = nn.Sequential(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2)), nn.Linear(2, 2))
    cast_model(model, mode("fp16_dynamic", keep_fp32=["0", "Embedding"]))
    with products(mode("fp16_dynamic"), CPU).context:
        assert model[0](torch.tensor([1, 2])).dtype == torch.float16
        assert model[0][0](torch.tensor([1, 2])).dtype == torch.float32
        assert model(torch.tensor([1, 2])).dtype == torch.float16


def test_keeping_one_of_two_modules_that_share_a_matrix_is_refused():
    def tied():
        model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3))
        model[1].weight = model[0].weight
        return model

    with pytest.raises(ConfigError, match=r"precision.keep_fp32 keeps 0.weight, which is shared with 1.weight"):
        cast_model(tied(), mode("fp16_dynamic", keep_fp32=["Embedding"]))
    for policy in (mode("fp16_dynamic", keep_fp32=["0", "1"]), mode("amp_dynamic", keep_fp32=["0"])):
        model = tied()
        cast_model(model, policy)
        assert model[1].weight is model[0].weight
        assert model[0].weight.dtype == torch.float32


@each("name", NAMES)
def test_an_lstm_is_cast_with_its_flat_weights_and_a_copy_of_it_has_its_own(name):
    policy, model = mode(name), nn.Sequential(nn.LSTM(4, 3, 2, batch_first=True))
    cast_model(model, policy)
    given = torch.randn(2, 5, 4).to(input_dtype(policy))
    twin = copy.deepcopy(model)

    def answer(network):
        with products(policy, CPU).context, autocast(policy, CPU):
            return network[0](given)[0]

    before = answer(model)
    assert before.dtype == DTYPES[policy.compute]
    assert torch.equal(answer(twin), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(answer(model), before)
    assert not answer(twin).any()
    assert twin.float()[0](given.float())[0].dtype == torch.float32
    assert all(flat is own for flat, own in zip(model[0]._flat_weights, model[0].parameters(), strict=True))


@pytest.mark.parametrize("name", ["fp16_dynamic", "amp_dynamic"])
def test_a_deep_copy_of_a_kept_module_still_computes_in_fp32(name):
    policy = mode(name, keep_fp32=["LayerNorm", "BatchNorm2d", "Linear"])
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    cast_model(model, policy)
    twin = copy.deepcopy(model)
    given = (torch.randn(4, 16) * 100).half()
    assert type(twin[0]) is type(model[0])
    assert isinstance(twin[0], nn.LayerNorm)
    assert type(twin[0]).__name__ == "LayerNorm"
    with autocast(policy, CPU):
        assert torch.equal(twin(given), model(given))
    twin[1].weight.data.zero_()
    assert model[1].weight.any()


@pytest.mark.parametrize("name", ["fp16_dynamic", "bf16"])
def test_kept_weights_and_statistics_are_not_rounded_on_the_way(name):
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), nn.Linear(16, 16))
    model[1][1].running_var.fill_(1e6)
    before = copy.deepcopy(model)
    cast_model(model, mode(name, keep_fp32=["1"]))
    for key, value in model[1].state_dict().items():
        assert torch.equal(value, before[1].state_dict()[key]), key
    assert torch.equal(model[0].weight, before[0].weight.to(model[0].weight.dtype))
    assert not torch.equal(model[0].weight.float(), before[0].weight)
    assert isinstance(model[0].weight, nn.Parameter)


@each("name", NAMES)
def test_trap_34_35_autocast_is_a_region_that_ends_and_is_never_shared(name):
    policy = mode(name)
    with autocast(policy, CPU) as _:
        inside = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu")
    assert inside is policy.autocast
    assert not policy.autocast or dtype == DTYPES[policy.compute]
    assert not torch.is_autocast_enabled("cpu")
    assert not policy.autocast or autocast(policy, CPU) is not autocast(policy, CPU)


def test_trap_34_no_update_happens_within_an_autocast_region(monkeypatch):
    seen, apply = [], SGD.apply
    monkeypatch.setattr(SGD, "apply", lambda *given: (seen.append(torch.is_autocast_enabled("cpu")), apply(*given))[1])
    parts, _ = parts_of(*TINY, "precision=amp_dynamic")
    train_step(parts.learners[0], parts.model, parts.prepare(next(parts.loaders["train"].batches(0))), parts.plan)
    assert seen
    assert not any(seen)


def precisions():
    backends = torch.backends
    return [backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision]


@pytest.fixture
def _products_as_they_were():
    backends = torch.backends
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = precisions()
    yield
    for place, value in zip(places, before, strict=True):
        place.fp32_precision = value


@pytest.mark.usefixtures("_products_as_they_were")
@each("name", NAMES)
def test_trap_41_only_the_mode_tf32_uses_tf32(name):
    for earlier in ("tf32", "fp32"):
        set_matmul_precision(mode(earlier))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            set_matmul_precision(mode(name))
        assert precisions() == (["tf32"] * 3 if name == "tf32" else ["ieee"] * 3)
        # torch's own code, its compiler among it, still asks the older switches, and they refuse to contradict.
        assert torch.backends.cuda.matmul.allow_tf32 == (name == "tf32")
        assert torch.backends.cudnn.allow_tf32 == (name == "tf32")
        assert (torch.get_float32_matmul_precision() != "highest") == (name == "tf32")
    matmul = torch.backends.cuda.matmul
    assert not matmul.allow_fp16_reduced_precision_reduction
    assert not matmul.allow_bf16_reduced_precision_reduction


@each("name", NAMES)
def test_finite_values_stay_finite_in_every_mode_and_each_change_is_counted(name):
    policy, model = mode(name, keep_fp32=["1"]), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    largest, inf = torch.finfo(torch.float32).max, float("inf")
    model[0].register_buffer("mask", torch.tensor([0.0, -inf, -largest, 1.0]))
    with torch.no_grad():
        for linear in model:
            linear.weight.copy_(torch.tensor([[7e4, -1e6], [65504.0, 0.1]]))
    exact = model[1].weight.clone()
    counts = clamp_to_range(model, policy)
    assert (
        counts == {"float32": {}, "float16": {"0.weight": 2, "0.mask": 1}, "bfloat16": {"0.mask": 1}}[policy.parameters]
    )
    cast_model(model, policy)
    limit = torch.finfo(DTYPES[policy.parameters]).max
    assert model[0].mask.tolist() == [0, -inf, -limit, 1]
    assert model[0].weight.isfinite().all()
    assert torch.equal(model[1].weight, exact)
