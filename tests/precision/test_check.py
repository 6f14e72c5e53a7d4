from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.engine.module_trail import ModuleTrail
from mptrain.precision.apply import autocast, cast_model, input_dtype
from mptrain.precision.census import OperatorCensus, check_step
from mptrain.precision.upcast import products
from mptrain.system.errors import EnvironmentRefused
from mptrain.workloads.language.models.lstm import lstm_language_model
from mptrain.workloads.language.models.transformer import transformer_language_model
from tests.loops import each
from tests.precision.modes import NAMES, Named, images, mode

CPU = torch.device("cpu")


def one_step(policy, model, given=None):
    """A forward and backward pass under a census, as the engine's first step is."""
    trail = ModuleTrail(check_finite=False)
    kept, census = cast_model(model, policy), OperatorCensus(trail.module)
    given = (images() if given is None else given).to(input_dtype(policy))
    with census.inside(products(policy, CPU)).context, trail.followed(model):
        with autocast(policy, CPU):
            loss = F.cross_entropy(model(given).float(), torch.tensor([0, 1, 2, 3]))
        loss.backward()
    return kept, census


@each("name", NAMES)
@each("kernels", ["native", "upcast"])
def test_an_honest_model_passes_in_every_mode(name, kernels):
    policy, model = mode(name, cpu_kernels=kernels), Named()
    kept, census = one_step(policy, model)
    check_step(policy, model, kept, census)
    assert set().union(*census.products.values()) == {getattr(torch, policy.compute)}
    assert {"convolution", "convolution_backward", "mm"} <= census.products.keys()


LANGUAGE = {
    "lstm": lambda: lstm_language_model(vocabulary_size=11, lanes=4, embedding_size=8, hidden_size=8, layers=2),
    "transformer": lambda: transformer_language_model(vocabulary_size=11, sequence_length=6, width=8, heads=2),
}


def language_step(policy, model):
    """The same for a language model, whose inputs are whole numbers."""
    kept, census = cast_model(model, policy), OperatorCensus()
    tokens = torch.randint(11, (4, 6))
    more = {"lane": torch.arange(4), "fresh": torch.zeros(4, dtype=torch.bool)} if hasattr(model, "hidden") else {}
    with census.inside(products(policy, CPU)).context:
        with autocast(policy, CPU):
            loss = F.cross_entropy(model(tokens, **more).float().flatten(0, 1), tokens.flatten())
        loss.backward()
    return kept, census


@each("name", NAMES)
@each("kind", LANGUAGE)
def test_language_models_pass_in_every_mode(name, kind):
    policy, model = mode(name, cpu_kernels="upcast"), LANGUAGE[kind]()
    kept, census = language_step(policy, model)
    check_step(policy, model, kept, census)
    assert set().union(*census.products.values()) == {getattr(torch, policy.compute)}
    if kind == "transformer":
        for operator in ("attention_for_cpu", "attention_for_cpu_backward"):
            assert sum(census.products[f"_scaled_dot_product_flash_{operator}"].values()) == 2
    elif policy.parameters == "float32" or (
        policy.parameters == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):  # elsewhere an LSTM of half weights is a chain of small products
        for operator in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
            assert sum(census.products[operator].values()) == 2


def test_a_product_of_whole_numbers_is_not_counted():
    numbers = torch.arange(6).reshape(2, 3)
    with OperatorCensus() as census:
        assert (numbers @ numbers.t()).tolist() == [[5, 14], [14, 50]]
    assert not census.products


class Promotes(nn.Module):
    """A model that computes one of its products in FP32 without a word: FP32 tensors of its own promote the others."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(8, 8)

    def forward(self, given):
        hidden = self.front(given)
        with torch.autocast("cpu", enabled=False):
            return (hidden + torch.zeros(8)) @ torch.ones(8, 5)


class Casts(nn.Module):
    """A model that asks by name for FP32 in one of its products, as routers do."""

    def __init__(self, given=torch.Tensor.float) -> None:
        super().__init__()
        self.front = nn.Linear(8, 8)
        self.back = nn.Linear(8, 5)
        self.given = given

    def forward(self, given):
        hidden = self.given(self.front(given))
        with torch.autocast("cpu", enabled=False):
            return F.linear(hidden.float(), self.back.weight.float(), self.back.bias.float())


@each("name", [name for name in NAMES if mode(name).half])
@each("cast", ["float", "relu of it", "view of it"])
def test_a_product_of_tensors_that_the_code_casts_to_fp32_itself_is_accepted(name, cast):
    given = {"float": torch.Tensor.float, "relu of it": lambda one: one.to(torch.float32).relu()}
    policy = mode(name, keep_fp32=[])
    model = Casts(given.get(cast, lambda one: one.type(torch.float32).t().contiguous().t()))
    kept, census = one_step(policy, model, torch.randn(4, 8))
    assert {one.dtype for one in census.product_calls} == {torch.float32, getattr(torch, policy.compute)}
    check_step(policy, model, kept, census)


@each("name", ["amp_dynamic", "amp_bf16"])
def test_fp32_that_nobody_asked_for_is_caught_where_autocast_is_off(name):
    class Off(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.back = nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, given):
            with torch.autocast("cpu", enabled=False):
                beside = self.back(given)
            return beside + self.front(given)[:, :5]

    policy, model = mode(name, keep_fp32=[]), Off()
    with pytest.raises(EnvironmentRefused, match=r"products were torch\.float32 in back"):
        check_step(policy, model, *one_step(policy, model, torch.randn(4, 8)))


def _line_of(function, words):
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if words in line)


@each("name", [name for name in NAMES if mode(name).half])
@each("kernels", ["native", "upcast"])
def test_a_model_that_promotes_to_float_inside_is_caught_with_operator_and_dtype(name, kernels):
    policy, model = mode(name, cpu_kernels=kernels, keep_fp32=[]), Promotes()
    kept, census = one_step(policy, model, torch.randn(4, 8))
    with pytest.raises(EnvironmentRefused) as refusal:
        check_step(policy, model, kept, census)
    assert f"precision={name} means parameters" in str(refusal.value)
    place = f"in Promotes (test_check.py:{_line_of(Promotes.forward, 'torch.ones')})"
    assert f"2 mm products were torch.float32 {place}" in str(refusal.value)
    assert "move these products into a module of their own" in refusal.value.hint
    assert "precision.keep_fp32" in refusal.value.hint


@pytest.mark.parametrize("name", [name for name in NAMES if mode(name).half])
def test_a_norm_that_is_kept_in_fp32_excuses_no_product(name):
    policy, model = mode(name, keep_fp32=["norms"]), nn.Sequential(Promotes(), nn.LayerNorm(5))
    kept, census = one_step(policy, model, torch.randn(4, 8))
    assert kept.keys() == {"1"}
    with pytest.raises(EnvironmentRefused, match=r"2 mm products were torch\.float32"):
        check_step(policy, model, kept, census)


def test_a_model_that_casts_to_half_in_an_fp32_run_is_caught():
    class Halves(nn.Linear):
        def forward(self, given):
            return F.linear(given.half(), self.weight.half()).float()

    policy, model = mode("fp32"), Halves(8, 5)
    kept, census = one_step(policy, model, torch.randn(4, 8))
    with pytest.raises(EnvironmentRefused, match=r"products were torch\.float16"):
        check_step(policy, model, kept, census)


@pytest.mark.parametrize(("layer", "dtype"), [(9, torch.float32), (8, torch.float16)])
def test_a_parameter_of_another_dtype_is_caught(layer, dtype):
    policy, model = mode("fp16_dynamic"), Named()
    kept, census = one_step(policy, model)
    model[layer].weight.data = model[layer].weight.data.to(dtype)
    with pytest.raises(EnvironmentRefused, match=rf"parameter {layer}\.weight is {dtype}"):
        check_step(policy, model, kept, census)


@pytest.mark.parametrize("name", ["fp16_dynamic", "amp_dynamic"])
def test_a_kept_layer_with_a_matrix_multiplies_in_fp32_by_request(name):
    policy, model = mode(name, keep_fp32=["9"]), Named()
    kept, census = one_step(policy, model)
    check_step(policy, model, kept, census)
    assert census.products["addmm"] == {torch.float32: 1}


@pytest.mark.parametrize("name", ["amp_dynamic", "amp_bf16"])
def test_products_that_autocast_leaves_alone_on_a_cpu_break_no_promise(name):
    policy = mode(name)
    model = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.spectral_norm(nn.Linear(images()[0].numel(), 10)))
    kept, census = one_step(policy, model)
    assert census.products["mv"].keys() == {torch.float32}
    check_step(policy, model, kept, census)


@each("name", [name for name in NAMES if mode(name).half])
def test_the_module_that_promotes_is_named_and_training_accepts_it_as_advised(name):
    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), Promotes())

    policy = mode(name, keep_fp32=[])
    with pytest.raises(EnvironmentRefused, match=r"2 mm products were torch\.float32 in 2 \(") as refusal:
        check_step(policy, (refused := model()), *one_step(policy, refused))
    assert refusal.value.hint.startswith("add 2 to precision.keep_fp32")
    policy = mode(name, keep_fp32=["2"])
    check_step(policy, (kept := model()), *one_step(policy, kept))


@each("name", [name for name in NAMES if mode(name).half])
def test_a_model_of_which_every_product_is_kept_in_fp32_is_refused(name):
    policy, model = mode(name, keep_fp32=["Linear"]), nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    with pytest.raises(EnvironmentRefused, match="every product of the model is computed in FP32"):
        check_step(policy, model, *one_step(policy, model))


class Elementwise(nn.Module):
    """No product at all."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5, 192))

    def forward(self, given):
        return (given.flatten(1).unsqueeze(1) * self.scale).tanh().mean(2)


@each("name", [name for name in NAMES if mode(name).half])
def test_a_model_without_products_computes_in_half_or_is_refused(name):
    policy, model = mode(name), Elementwise()
    kept, census = one_step(policy, model)
    expected = pytest.raises(EnvironmentRefused, match=r"no operator of the model ran in .*, and autocast casts only")
    with expected if policy.autocast else contextlib.nullcontext():
        check_step(policy, model, kept, census)


def test_products_that_the_census_does_not_know_are_not_taken_for_none(monkeypatch):
    monkeypatch.setattr("mptrain.precision.census.PRODUCTS", frozenset())
    policy, model = mode("fp16_dynamic"), Named()
    kept, census = one_step(policy, model)
    with pytest.raises(EnvironmentRefused, match="no known product ran in the step, not even in 0"):
        check_step(policy, model, kept, census)
    check_step(mode("fp16_dynamic", force=True), model, kept, census)


class Whitens(nn.Module):
    """Has no parameters, decomposes in FP32, and multiplies in the dtype of its input."""

    def forward(self, given):
        with torch.no_grad():
            wide = given.float() - given.float().mean(0)
        variance = torch.diag(wide.var(0) + 0.1) + 0 * given.float().mean()
        return given @ torch.linalg.inv(torch.linalg.cholesky(variance)).to(given.dtype)


@each("name", NAMES)
def test_decompositions_whose_gradients_are_products_need_no_module_kept(name):
    policy, model = mode(name), nn.Sequential(nn.Flatten(), nn.Linear(192, 8), Whitens(), nn.Linear(8, 5))
    check_step(policy, model, *one_step(policy, model))
