"""Products of layers in emulated formats: which layer each belongs to, what is computed, and what stays as it was."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mptrain.numerics.quantization import FINE, RULES, quantize
from mptrain.precision.emulation import EmulatedProducts

X = torch.linspace(-1.0, 1.0, 320).sin().mul(3).cos().view(4, 5, 16)
IMAGES = torch.linspace(0.0, 40.0, 486).sin().view(2, 3, 9, 9)
OUTPUT, OF_INPUT, OF_WEIGHT = "output", "input gradient", "weight gradient"


class Attention(nn.Module):
    """Layers in a row, three that share an input, and attention."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = torch.relu(self.second(torch.tanh(self.first(x))))
        return F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h)) + h


class Einsums(nn.Module):
    """Weights in einsum, ``@`` and bmm, and one that is used twice."""

    def __init__(self):
        super().__init__()
        self.w, self.c = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(3, 16, 8) / 4)

    def forward(self, x):
        h = torch.relu(torch.einsum("bti,oi->bto", x, self.w)) @ self.w
        return torch.einsum("bti,kio->btko", h, self.c).sum(1), torch.bmm(h[:3], self.c)


class Tied(nn.Module):
    """Head that is the embedding, with dropout and a norm between."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Dropout(0.3)

    def forward(self, tokens):
        return F.linear(self.drop(self.norm(self.table(tokens))), self.table.weight)


def squares(outputs):
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(part.float().square().mean() for part in parts if isinstance(part, torch.Tensor))


def in_segments(reentrant):
    return lambda model: squares(checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 4, 3, groups=2, stride=2),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
    )


FAMILIES = {
    "attention": (Attention, lambda model: squares(model(X))),
    "checkpoints": (Attention, in_segments(False)),
    "reentrant checkpoints": (Attention, in_segments(True)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda m: squares(m(X))),
    "convolutions": (convolutions, lambda model: squares(model(IMAGES))),
    "convolutions of sequences": (
        lambda: nn.Sequential(nn.Conv1d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 3)),
        lambda model: squares(model(X.transpose(1, 2))),
    ),
    "gru": (lambda: nn.GRU(16, 8), lambda model: squares(model(X)[0])),
    "lstm": (lambda: nn.LSTM(16, 8, 2, bidirectional=True), lambda model: squares(model(X)[0])),
    "einsum": (Einsums, lambda model: squares(model(X))),
    "tied": (Tied, lambda model: F.cross_entropy(model(torch.arange(20)), torch.arange(20))),
}


def step(model, loss, mode=None, autocast=False):
    """Return the loss, the gradients by name, the buffers and the random state after one step from the same state."""
    model.load_state_dict(model.initial)
    model.zero_grad()
    torch.manual_seed(1)
    with mode or contextlib.nullcontext():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(model)
        value.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"loss": value.detach(), **grads, **buffers, "random": torch.get_rng_state()}


def family(name):
    torch.manual_seed(0)
    build, loss = FAMILIES[name]
    model = build()
    model.initial = {key: value.clone() for key, value in model.state_dict().items()}
    return model, loss


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_pass_without_a_format_is_untouched_and_every_product_of_a_layer_has_its_name(name, autocast):
    model, loss = family(name)
    plain, calls = step(model, loss, autocast=autocast), []
    watched = step(model, loss, EmulatedProducts(model, None, report=calls.append), autocast)
    for key, value in plain.items():
        if "lstm" in name:  # split into single products
            torch.testing.assert_close(
                watched[key], value, rtol=0.02 if autocast else 1e-5, atol=1e-2 if autocast else 1e-6
            )
        else:
            assert torch.equal(watched[key], value), key
    assert not any(call.emulated for call in calls)
    roles = Counter((call.layer, call.role) for call in calls if call.role)
    layers = {key for key, parameter in model.named_parameters() if parameter.ndim > 1}
    assert {layer for layer, _ in roles} == layers
    for layer in layers:
        assert roles[layer, OF_WEIGHT] == roles[layer, OUTPUT] or "checkpoints" in name
        assert roles[layer, OF_WEIGHT] >= 1


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rule", ["fp8_tensor", "mxfp4", "nvfp4"])
def test_every_family_has_other_gradients_in_a_format_and_those_of_before_without(name, rule):
    model, loss = family(name)
    before = step(model, loss)
    changed = step(model, loss, EmulatedProducts(model, RULES[rule], generator=torch.Generator().manual_seed(0)))
    again = step(model, loss)
    assert all(torch.equal(again[key], value) for key, value in before.items())
    assert torch.equal(changed["random"], before["random"])
    weights = [key for key, parameter in model.named_parameters() if parameter.ndim > 1]
    for key in weights:
        error = (changed[key] - before[key]).norm() / before[key].norm()
        assert 1e-3 < error < 3, (key, error)


def test_the_three_products_of_a_linear_layer_are_those_of_rounded_operands():
    layer, x = nn.Linear(48, 32), torch.randn(64, 48, generator=torch.Generator().manual_seed(3)).requires_grad_()
    for name in ("fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "mxfp8_floor", "mxfp4"):
        rule = RULES[name]
        with EmulatedProducts(layer, rule):
            out = layer(x)
            grad = torch.linspace(-2, 3, out.numel()).sin().view_as(out)
            of_x, of_weight, of_bias = torch.autograd.grad(out, (x, layer.weight, layer.bias), grad)
        weight = layer.weight.detach()

        def rounded(values, dim, role, rule=rule):
            return quantize(values.detach(), rule, dim=dim, operand=role)

        expected = rounded(x, 1, "input") @ rounded(weight, 1, "weight").T + layer.bias
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        expected = rounded(grad, 1, "gradient") @ rounded(weight, 0, "weight")
        torch.testing.assert_close(of_x, expected, rtol=1e-5, atol=1e-5)
        expected = rounded(grad, 0, "gradient").T @ rounded(x, 0, "input")
        torch.testing.assert_close(of_weight, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(of_bias, grad.sum(0))


def test_a_pointwise_convolution_is_a_linear_layer():
    linear, convolution = nn.Linear(32, 32, bias=False), nn.Conv2d(32, 32, 1, bias=False)
    with torch.no_grad():
        convolution.weight.copy_(linear.weight.view(32, 32, 1, 1))
    images = torch.randn(2, 32, 4, 4, generator=torch.Generator().manual_seed(3)).requires_grad_()
    pixels = images.detach().movedim(1, -1).reshape(-1, 32).requires_grad_()
    for name in ("fp8_tensor", "fp8_block", "mxfp8", "mxfp4"):
        results = []
        for layer, x in ((linear, pixels), (convolution, images)):
            with EmulatedProducts(layer, RULES[name]):
                out = layer(x)
                loss = out.sin().sum()
                results.append([out, *torch.autograd.grad(loss, (x, layer.weight))])
        flat, spatial = results
        torch.testing.assert_close(spatial[0].movedim(1, -1).reshape(-1, 32), flat[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(spatial[1].movedim(1, -1).reshape(-1, 32), flat[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(spatial[2].view(32, 32), flat[2], rtol=1e-5, atol=1e-4)


def test_kept_layers_and_products_of_activations_stay_in_fp32():
    model, loss = family("attention")
    calls = []
    kept = {"query.weight", "key.weight", "value.weight"}
    step(model, loss, EmulatedProducts(model, RULES["mxfp8"], kept, calls.append))
    emulated = {call.layer for call in calls if call.emulated}
    assert emulated == {"first.weight", "second.weight"}
    assert {call.layer for call in calls if not call.emulated} == {*kept, ""}


def test_all_layers_kept_is_the_untouched_pass():
    model, loss = family("convolutions")
    before, names = step(model, loss), [name for name, _ in model.named_parameters()]
    after = step(model, loss, EmulatedProducts(model, RULES["mxfp4"], names))
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_an_overflow_reaches_the_gradients():
    layer = nn.Linear(16, 16)
    for name in ("fp8_tensor", "mxfp8", "mxfp4", "nvfp4"):
        layer.zero_grad()
        with EmulatedProducts(layer, RULES[name], generator=torch.Generator()):
            (layer(X[0]).sum() * float("inf")).backward()
        assert not layer.weight.grad.isfinite().any(), name


def test_half_precision_products_are_named_and_not_emulated():
    model, loss = family("attention")
    plain, calls = step(model, loss, autocast=True), []
    changed = step(model, loss, EmulatedProducts(model, RULES["mxfp4"], report=calls.append), autocast=True)
    assert all(torch.equal(changed[key], value) for key, value in plain.items())
    assert not any(call.emulated for call in calls)
    assert {call.layer for call in calls} - {""} == {name for name, p in model.named_parameters() if p.ndim > 1}


def test_products_of_other_parameters_and_of_none_are_not_the_models():
    model, other = nn.Linear(16, 16), nn.Linear(16, 16)
    calls = []
    with EmulatedProducts(model, RULES["mxfp8"], report=calls.append):
        squares(other(model(X)) @ X.transpose(1, 2)).backward()
    assert Counter(call.layer for call in calls if call.role) == {"weight": 2}
    assert len([call for call in calls if call.role is None]) >= 4


def test_settings_and_hooks_are_as_before():
    model, loss = family("lstm")
    enabled = torch._C._get_mkldnn_enabled(), torch.backends.cudnn.enabled
    with pytest.raises(RuntimeError, match="size"), EmulatedProducts(model, RULES["mxfp8"]):
        model(torch.zeros(3, 3, 3))
    assert (torch._C._get_mkldnn_enabled(), torch.backends.cudnn.enabled) == enabled
    step(model, loss, EmulatedProducts(model, RULES["mxfp8"]))
    assert (torch._C._get_mkldnn_enabled(), torch.backends.cudnn.enabled) == enabled
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_mode_is_entered_again_after_the_weights_have_changed():
    layer = nn.Linear(16, 16, bias=False)
    mode = EmulatedProducts(layer, RULES["mxfp8"])
    with mode:
        first = layer(X)
    with torch.no_grad():
        layer.weight.mul_(-1)
    with mode:
        assert torch.equal(layer(X), -first)
        with torch.no_grad():
            layer.weight.mul_(-1)
        assert torch.equal(layer(X), first)


@pytest.mark.parametrize("case", ["linear", "pointwise", "convolution", "strided", "groups", "transposed"])
def test_transforms_of_operands_cancel_but_for_rounding(case):
    """With nearly all bits left, a rule with a Hadamard transform gives the gradients of FP32."""
    layers = {
        "linear": nn.Linear(24, 10),
        "pointwise": nn.Conv2d(3, 8, 1),
        "convolution": nn.Conv2d(3, 8, 3, padding=1),
        "strided": nn.Conv2d(3, 8, 3, stride=2),
        "groups": nn.Conv2d(3, 6, 3, groups=3),
        "transposed": nn.ConvTranspose2d(3, 8, 3, stride=2),
    }
    layer, x = layers[case], torch.randn(*((18, 24) if case == "linear" else (2, 3, 9, 9)))
    grads = []
    for rule in (None, replace(FINE, hadamard=True)):
        layer.zero_grad()
        with EmulatedProducts(layer, rule):
            squares(layer(x)).backward()
        grads.append(layer.weight.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)


def test_of_two_parameters_the_second_is_the_layers():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.table = nn.Linear(16, 12, bias=False), nn.Parameter(torch.randn(6, 16))

        def forward(self, x):
            return self.query(self.table) + x

    model, calls = Learned(), []
    with EmulatedProducts(model, RULES["mxfp8"], report=calls.append):
        squares(model(torch.ones(1))).backward()
    assert [(call.layer, call.role) for call in calls] == [
        ("query.weight", OUTPUT),
        ("query.weight", OF_WEIGHT),
        ("query.weight", OF_INPUT),
    ] or {(call.layer, call.role) for call in calls} == {
        ("query.weight", role) for role in (OUTPUT, OF_WEIGHT, OF_INPUT)
    }
    calls.clear()
    with EmulatedProducts(model, RULES["mxfp8"], {"query.weight"}, calls.append):
        squares(model(torch.ones(1))).backward()
    assert not any(call.emulated for call in calls)


def test_parameters_in_one_memory_have_their_own_names():
    flat = torch.randn(2 * 256)
    model = nn.ModuleList([nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)])
    for at, layer in enumerate(model):
        layer.weight = nn.Parameter(flat[at * 256 : (at + 1) * 256].view(16, 16))
    calls = []
    with EmulatedProducts(model, RULES["mxfp8"], {"0.weight"}, calls.append):
        squares(model[1](model[0](X))).backward()
    assert {call.layer for call in calls if call.emulated} == {"1.weight"}
    assert {call.layer for call in calls if not call.emulated} == {"0.weight"}


def test_a_weight_that_is_given_other_values_without_notice_is_rounded_again():
    layer = nn.Linear(16, 16, bias=False)
    with EmulatedProducts(layer, RULES["mxfp8"]):
        first = layer(X)
        layer.weight.data.mul_(-1)
        assert torch.equal(layer(X), -first)


def test_memory_of_a_weight_that_is_gone_is_no_others():
    class Renormed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            self.layer.weight.data = torch.renorm(self.layer.weight.data, 2, 0, 1.0)
            h = x + 1
            return h @ h.transpose(1, 2)

    model, calls = Renormed(), []
    with EmulatedProducts(model, RULES["mxfp8"], report=calls.append):
        model(X)
    assert [call.layer for call in calls] == [""]


@pytest.mark.long
def test_a_compiled_part_runs_as_it_is_written():
    part = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    model = nn.Sequential(part, nn.Linear(16, 4))
    part.compile(backend="aot_eager")
    squares(model(X)).backward()
    model.zero_grad()
    with EmulatedProducts(model, RULES["mxfp8"], report=(calls := []).append):
        squares(model(X)).backward()
    assert {call.layer for call in calls if call.emulated} == {"0.0.weight", "1.weight"}
