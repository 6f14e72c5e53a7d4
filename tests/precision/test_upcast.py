from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.precision.census import OperatorCensus
from mptrain.precision.upcast import ATTENTION, NOT_TRAINED_IN_FP16, PRODUCTS, SUMS, Upcast, products, uses_upcast
from tests.loops import each
from tests.precision.modes import NAMES, images, mode

CPU = torch.device("cpu")
HALF = [torch.float16, torch.bfloat16]


def draw(*shape, dtype):
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_matrix_products_are_fp32_products_rounded_once(dtype):
    a, b, c, v = draw(9, 33, dtype=dtype), draw(33, 7, dtype=dtype), draw(9, 7, dtype=dtype), draw(33, dtype=dtype)
    batch_a, batch_b, batch_c = (draw(3, *shape, dtype=dtype) for shape in ((4, 5), (5, 6), (4, 6)))
    with Upcast():
        results = {
            "mm": torch.mm(a, b),
            "addmm": torch.addmm(c, a, b),
            "addmm scaled": torch.addmm(c, a, b, beta=0.5, alpha=2.0),
            "bmm": torch.bmm(batch_a, batch_b),
            "baddbmm": torch.baddbmm(batch_c, batch_a, batch_b),
            "mv": torch.mv(a, v),
            "dot": torch.dot(v, v),
            "linear": F.linear(a, b.t(), c[0]),
        }
    wide_a, wide_b, wide_c = a.float(), b.float(), c.float()
    expected = {
        "mm": wide_a @ wide_b,
        "addmm": torch.addmm(wide_c, wide_a, wide_b),
        "addmm scaled": torch.addmm(wide_c, wide_a, wide_b, beta=0.5, alpha=2.0),
        "bmm": torch.bmm(batch_a.float(), batch_b.float()),
        "baddbmm": torch.baddbmm(batch_c.float(), batch_a.float(), batch_b.float()),
        "mv": torch.mv(wide_a, v.float()),
        "dot": torch.dot(v.float(), v.float()),
        "linear": torch.addmm(wide_c[0], wide_a, wide_b),
    }
    for name, result in results.items():
        assert result.dtype == dtype, name
        assert torch.equal(result, expected[name].to(dtype)), name


@pytest.mark.parametrize("dtype", HALF)
def test_accumulation_is_in_fp32_where_half_would_stop_counting(dtype):
    """A sum of 4,097 ones: FP16 counts to 2048, BF16 to 256."""
    ones = torch.ones(1, 4097, dtype=dtype)
    with Upcast():
        assert (ones @ ones.t()).float().item() == torch.tensor(4097.0).to(dtype).float().item()


@each("dtype", HALF)
@each(
    "arguments",
    [{}, {"padding": 1}, {"stride": 2, "padding": 1}, {"groups": 2}, {"dilation": 2}, {"bias": False}],
)
def test_convolutions_are_fp32_convolutions_rounded_once_forward_and_backward(dtype, arguments):
    given = draw(2, 4, 9, 9, dtype=dtype).requires_grad_()
    layer = nn.Conv2d(4, 6, 3, **arguments).to(dtype)
    wide_given = given.detach().float().requires_grad_()
    wide_layer = nn.Conv2d(4, 6, 3, **arguments)
    wide_layer.load_state_dict(layer.state_dict())
    with Upcast():
        output = layer(given)
        upstream = draw(*output.shape, dtype=dtype)
        output.backward(upstream)
    wide_output = wide_layer(wide_given)
    wide_output.backward(upstream.float())
    assert output.dtype == dtype
    assert torch.equal(output, wide_output.to(dtype))
    assert torch.equal(given.grad, wide_given.grad.to(dtype))
    for half, wide in zip(layer.parameters(), wide_layer.parameters(), strict=True):
        assert half.grad.dtype == dtype
        assert torch.equal(half.grad, wide.grad.to(dtype))


def test_to_the_machine_every_product_is_fp32():
    half = torch.randn(4, 4).half()
    batch, vector = half.expand(2, 4, 4), half[0]
    image, kernel = images().half(), torch.randn(2, 3, 3, 3).half().requires_grad_()
    operations = {
        "mm": lambda: half @ half,
        "addmm": lambda: torch.addmm(half, half, half),
        "bmm": lambda: torch.bmm(batch, batch),
        "baddbmm": lambda: torch.baddbmm(batch, batch, batch),
        "mv": lambda: torch.mv(half, vector),
        "addmv": lambda: torch.addmv(vector, half, vector),
        "dot": lambda: torch.dot(vector, vector),
        "convolution_backward": lambda: F.conv2d(image, kernel).sum().backward(),
    }
    for name, operation in operations.items():
        with OperatorCensus() as census, Upcast():
            operation()
        assert census.products[name] == {torch.float32: 1}, name
        assert set().union(*census.products.values()) == {torch.float32}, name


def test_nothing_else_is_touched():
    wide, half, counts = torch.randn(4, 4), torch.randn(4, 4).half(), torch.arange(6).reshape(2, 3)
    operations = {
        "fp32 mm": lambda: wide @ wide,
        "fp64 mm": lambda: wide.double() @ wide.double(),
        "half add": lambda: half + half,
        "half exp": half.exp,
        "half sum": half.sum,
        "softmax": lambda: half.softmax(1),
        "integers": lambda: counts @ counts.t(),
        "half batch norm": lambda: F.batch_norm(half, torch.zeros(4), torch.ones(4), training=True),
    }
    for name, operation in operations.items():
        plain = operation()
        with Upcast():
            inside = operation()
        assert inside.dtype == plain.dtype, name
        assert torch.equal(inside, plain), name


def test_channels_last_is_preserved_forward_and_backward():
    given = images().half().to(memory_format=torch.channels_last).requires_grad_()
    layer = nn.Conv2d(3, 8, 3).half().to(memory_format=torch.channels_last)
    with Upcast():
        output = layer(given)
        output.backward(torch.ones_like(output))
    for tensor in (output, given.grad, layer.weight.grad):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def attention(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("dtype", HALF)
def test_attention_is_fp32_attention_rounded_once_forward_and_backward(dtype):
    half = [draw(2, 3, 17, 8, dtype=dtype).requires_grad_() for _ in range(3)]
    wide = [tensor.detach().float().requires_grad_() for tensor in half]
    upstream = draw(2, 3, 17, 8, dtype=dtype)
    with Upcast():
        output = attention(*half)
        output.backward(upstream)
    expected = attention(*wide)
    # Backward goes from the rounded answer, as it is in memory.
    logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*wide, is_causal=True)[1]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        upstream.float(), *wide, expected.to(dtype).float(), logsumexp, 0.0, True
    )
    assert torch.equal(output, expected.to(dtype))
    for tensor, grad in zip(half, grads, strict=True):
        assert torch.equal(tensor.grad, grad.to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_the_statistics_of_attention_stay_fp32(dtype):
    with Upcast():
        _, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(draw(1, 1, 4, 8, dtype=dtype) for _ in range(3))
        )
    assert logsumexp.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALF)
def test_a_mask_given_by_keyword_is_widened_with_the_rest(dtype):
    query, key, value = (draw(1, 1, 5, 8, dtype=dtype) for _ in range(3))
    mask = torch.zeros(5, 5, dtype=dtype).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    with Upcast():
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        causal = attention(query, key, value)
    assert output.isfinite().all()
    assert torch.allclose(output.float(), causal.float(), atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layers", [1, 2])
def test_an_lstm_under_autocast_is_an_fp32_lstm_whose_results_are_rounded(dtype, layers):
    lstm, given = nn.LSTM(6, 7, layers, batch_first=True), torch.randn(3, 9, 6).to(dtype).float()
    rounded = nn.LSTM(6, 7, layers, batch_first=True)
    rounded.load_state_dict({name: value.to(dtype).float() for name, value in lstm.state_dict().items()})
    with Upcast():
        with torch.autocast("cpu", dtype=dtype):
            output, (hidden, cell) = lstm(given)
        output.float().square().mean().backward()
    expected, (expected_hidden, expected_cell) = rounded(given)
    expected.square().mean().backward()
    assert {output.dtype, hidden.dtype, cell.dtype} == {dtype}
    if layers == 1:
        assert torch.equal(output, expected.to(dtype))
        assert torch.equal(hidden, expected_hidden.to(dtype))
        assert torch.equal(cell, expected_cell.to(dtype))
    tolerance = 8 * torch.finfo(dtype).eps
    assert torch.allclose(output.float(), expected, atol=tolerance)
    for (name, own), other in zip(lstm.named_parameters(), rounded.parameters(), strict=True):
        assert own.grad.dtype == torch.float32, name
        assert torch.allclose(own.grad, other.grad, atol=tolerance * other.grad.abs().max().item()), name


@pytest.mark.parametrize("dtype", HALF)
def test_an_lstm_stored_in_half_agrees_with_fp32_up_to_rounding(dtype):
    lstm, given = nn.LSTM(6, 7, batch_first=True).to(dtype), torch.randn(3, 9, 6).to(dtype)
    wide = copy.deepcopy(lstm).float()
    with Upcast(), OperatorCensus() as census:
        output, _ = lstm(given)
        output.float().square().mean().backward()
    expected, _ = wide(given.float())
    expected.square().mean().backward()
    assert set().union(*census.products.values()) == {dtype}
    assert torch.allclose(output.float(), expected, atol=8 * torch.finfo(dtype).eps)
    for own, other in zip(lstm.parameters(), wide.parameters(), strict=True):
        assert own.grad.dtype == dtype
        assert torch.allclose(own.grad.float(), other.grad, atol=32 * torch.finfo(dtype).eps * other.grad.abs().max())


@pytest.mark.parametrize("dtype", HALF)
def test_the_gradients_of_a_frequent_token_are_summed_in_fp32(dtype):
    embedding, tokens = nn.Embedding(3, 4).to(dtype), torch.zeros(8192, dtype=torch.int64)
    upstream = torch.rand(8192, 4).to(dtype)
    with Upcast():
        embedding(tokens).backward(upstream)
    assert embedding.weight.grad.dtype == dtype
    assert torch.equal(embedding.weight.grad[0], upstream.double().sum(0).to(dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_the_gradients_of_a_layer_norm_in_half_precision_are_summed_in_fp32(dtype):
    half, upstream = nn.LayerNorm(16).to(dtype), torch.rand(4096, 16).to(dtype)
    given = draw(4096, 16, dtype=dtype)
    wide = nn.LayerNorm(16)
    with Upcast():
        half(given).backward(upstream)
    wide(given.float()).backward(upstream.float())
    assert half.bias.grad.dtype == half.weight.grad.dtype == dtype
    assert torch.equal(half.bias.grad, wide.bias.grad.to(dtype))
    assert torch.allclose(half.weight.grad.float(), wide.weight.grad, atol=torch.finfo(dtype).eps * 64)


def test_every_operator_exists_in_this_torch_and_sums_are_no_products():
    assert all(isinstance(operator, torch._ops.OpOverload) for operator in PRODUCTS | SUMS)
    assert not PRODUCTS & SUMS
    assert NOT_TRAINED_IN_FP16 | ATTENTION < PRODUCTS


@pytest.mark.parametrize("name", [name for name in NAMES if mode(name).compute == "float16"])
def test_an_lstm_trains_in_fp16_on_any_cpu(name, monkeypatch):
    monkeypatch.setattr("mptrain.precision.upcast.has_native_half", lambda dtype: True)
    lstm, given = nn.LSTM(8, 16), draw(5, 2, 8, dtype=torch.float32)
    with products(mode(name), CPU).context, torch.autocast("cpu", torch.float16):
        lstm(given)[0].float().sum().backward()
    assert lstm.weight_hh_l0.grad.isfinite().all()
    assert lstm.weight_hh_l0.grad.any()


@pytest.mark.parametrize("name", [name for name in NAMES if mode(name).half])
def test_sums_are_wide_also_where_products_are_native(name, monkeypatch):
    monkeypatch.setattr("mptrain.precision.upcast.has_native_half", lambda dtype: True)
    alone = SUMS | ATTENTION | (NOT_TRAINED_IN_FP16 if mode(name).compute == "float16" else set())
    assert products(mode(name), CPU).context.operators == alone
    assert products(mode(name, cpu_kernels="upcast"), CPU).context.operators == PRODUCTS | SUMS
    assert not isinstance(products(mode(name, cpu_kernels="native"), CPU).context, Upcast)
    assert not isinstance(products(mode(name), CPU, compiled=True).context, Upcast)
    assert not isinstance(products(mode(name), torch.device("cuda", 0)).context, Upcast)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_it", [False, True])
def test_products_are_widened_where_a_cpu_lacks_the_arithmetic_and_as_asked(name, has_it, monkeypatch):
    monkeypatch.setattr("mptrain.precision.upcast.has_native_half", lambda dtype: has_it)
    half = mode(name).half
    assert uses_upcast(mode(name), CPU) == (half and not has_it)
    assert uses_upcast(mode(name, cpu_kernels="upcast"), CPU) == half
    assert not uses_upcast(mode(name, cpu_kernels="native"), CPU)
    assert not uses_upcast(mode(name, cpu_kernels="upcast"), torch.device("cuda", 0))
    assert isinstance(products(mode(name, cpu_kernels="upcast"), CPU).context, Upcast) == half


@each("dtype", [torch.float16, torch.bfloat16])
@each(
    "product",
    [
        lambda half: half @ half.float(),
        lambda half: torch.addmm(half.float()[0], half, half),
        lambda half: torch.bmm(half[None].float(), half[None]),
        lambda half: torch.mv(half, half[0].float()),
        lambda half: torch.nn.functional.conv2d(half[None, None], half[None, None].float()),
    ],
)
def test_operands_of_two_dtypes_are_refused_as_they_are_without_widening(dtype, product):
    half = torch.ones(4, 4, dtype=dtype)
    with pytest.raises(RuntimeError) as plain:
        product(half)
    with Upcast(), pytest.raises(RuntimeError) as widened:
        product(half)
    assert str(widened.value).splitlines()[0] == str(plain.value).splitlines()[0]
