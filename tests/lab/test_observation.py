import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mptrain.engine.module_trail import LOSS, ModuleTrail
from mptrain.lab.step.observation import HalfArithmetic
from tests.loops import each

HALF = torch.linspace(-2, 2, 12, dtype=torch.float16).view(3, 4)
MASK = HALF > 0


def seen(compute, tensor=HALF):
    observer = HalfArithmetic(ModuleTrail())
    with observer:
        compute(tensor)
    return observer


def constants(compute, tensor=HALF):
    return {(one.operator, one.value, one.becomes) for one in seen(compute, tensor).constants}


@each(
    ("compute", "operator", "value", "becomes"),
    [
        (lambda x: x.relu() + 1e-8, "add", 1e-8, "zero"),
        (lambda x: x.relu().add_(1e-8), "add_", 1e-8, "zero"),
        (lambda x: x.clamp_min(1e-12), "clamp_min", 1e-12, "zero"),
        (lambda x: F.normalize(x * MASK), "clamp_min", 1e-12, "zero"),
        (lambda x: x + 1e-8, "add", 1e-8, "unneeded"),
        (F.normalize, "clamp_min", 1e-12, "unneeded"),
        (lambda x: x * -1e9, "mul", -1e9, "infinite"),
        (lambda x: torch.where(MASK, x, -1e9), "scalar_tensor", -1e9, "infinite"),
        (lambda x: x - torch.tensor(1e9), "sub", 1e9, "infinite"),
        (lambda x: x + 10**6, "add", 1e6, "infinite"),
    ],
)
def test_a_constant_that_fp16_does_not_hold_is_seen(compute, operator, value, becomes):
    assert constants(compute) == {(operator, value, becomes)}
    assert constants(compute, HALF.float()) == set()


def test_a_constant_that_torch_refuses_is_seen_before():
    observer = HalfArithmetic(ModuleTrail())
    with observer, pytest.raises(RuntimeError, match="without overflow"):
        HALF.masked_fill(MASK, -1e9)
    [constant] = observer.constants
    assert constant == (LOSS, "masked_fill", -1e9, "infinite")


@each(
    "compute",
    [
        lambda x: x.masked_fill(MASK, float("-inf")),
        lambda x: x.masked_fill(MASK, torch.finfo(torch.float16).min),
        lambda x: x + 6e-8,
        lambda x: x + 0.0,
        lambda x: x * 1e-9,  # the product vanishes, but guards nothing
        lambda x: x * 2.0**-18 * 3e7,  # torch multiplies in FP32 and rounds the product
        lambda x: (x * 2.0**-20).mul_(1e8) + 1e3,
        lambda x: x + (70000 - 70000),
        lambda x: x.float() + 1e-8,
        lambda x: F.layer_norm(x, (4,), eps=1e-12),  # whose kernel adds it in FP32
    ],
)
def test_what_fp16_holds_or_does_not_need_to_is_not_seen(compute):
    assert constants(compute) == set()


def test_bf16_holds_them_all():
    assert constants(lambda x: (x + 1e-12) * -1e9, HALF.bfloat16()) == set()


def test_operators_that_autocast_would_widen_are_seen_by_module():
    class Attention(nn.Module):
        def forward(self, scores):
            return scores.softmax(1).float().exp()

    model, trail = nn.Sequential(Attention()), ModuleTrail()
    observer = HalfArithmetic(trail)
    with trail.followed(model), observer:
        F.cross_entropy(model(HALF).half(), torch.tensor([0, 1, 2]))
    assert set(observer.narrow) == {("0", "softmax"), (LOSS, "log_softmax"), (LOSS, "nll_loss")}


def test_sums_that_are_made_in_fp32_are_not_seen():
    assert not seen(lambda x: x.sum(dtype=torch.float32)).narrow
    assert set(seen(lambda x: x.sum()).narrow) == {(LOSS, "sum")}


def test_the_backward_pass_is_left_alone():
    """Its sums, as those of the gradients of biases, are torch's own."""
    layer = nn.Linear(4, 2).half()
    output = layer(HALF.requires_grad_()).float().sum()
    observer = HalfArithmetic(ModuleTrail())
    with observer:
        output.backward()
    assert not observer.narrow


def test_casts_to_half_precision_are_counted_by_dtype():
    assert dict(seen(lambda x: x.bfloat16().to(x.dtype)).casts) == {(LOSS, "bfloat16"): 1, (LOSS, "float16"): 1}
    assert dict(seen(lambda x: x.float()).casts) == {}
