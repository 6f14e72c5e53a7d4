"""Number formats of a network: errors of one emulated step, verdicts, layers to keep, and what was not looked at."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mptrain
from mptrain.lab.formats.look import CAP, Coverage, FormatErrors, flops
from mptrain.lab.formats.report import BANDS, FormatsReport, StepFormats, band_of
from mptrain.numerics.quantization import RULES, quantize
from mptrain.precision.emulation import EmulatedProducts, ProductCall
from mptrain.system.errors import ConfigError, NumericsError, UsageError


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 10))


def batch(samples=64, features=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, features, generator=generator), torch.randint(0, 10, (samples,), generator=generator)


def loss(model, given):
    inputs, targets = given
    return F.cross_entropy(model(inputs), targets)


def test_errors_are_those_of_the_gradients_by_hand():
    model, given = network(), batch()
    seen = mptrain.formats(model, loss, given, ["mxfp4"]).last.formats[0]

    def gradients(*modes):
        model.zero_grad()
        with modes[0] if modes else torch.enable_grad():
            loss(model, given).backward()
        return {name: parameter.grad.double() for name, parameter in model.named_parameters()}

    wide, low = gradients(), gradients(EmulatedProducts(model, RULES["mxfp4"]))
    errors = {name: float((low[name] - grad).norm() / grad.norm()) for name, grad in wide.items()}
    assert seen.parameters == pytest.approx(errors, rel=1e-9)
    sizes = {name: grad.numel() for name, grad in wide.items()}
    mean = sum(errors[name] * sizes[name] for name in errors) / sum(sizes.values())
    assert seen.error == pytest.approx(mean, rel=1e-9)
    together = [torch.cat([each[name].flatten() for name in wide]) for each in (wide, low)]
    assert seen.by_norm == pytest.approx(float((together[1] - together[0]).norm() / together[0].norm()), rel=1e-9)
    lost = int(((together[1] == 0) & (together[0] != 0)).sum())
    assert lost > 0
    assert seen.zeros == lost / int((together[0] != 0).sum())
    assert seen.loss_scale == 1


def test_nothing_of_the_callers_changes():
    model = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(48), nn.Dropout(0.5), nn.Linear(48, 10))
    model[0].weight.grad = torch.ones(48, 32)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = mptrain.formats(model, loss, batch())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model[0].weight.grad, torch.ones(48, 32))
    assert model[3].weight.grad is None
    # A bias before batch norm has no gradient but rounding, in FP32 too.
    assert report.last.nothing == ("0.bias",)
    assert "not compared, because zero but for rounding in FP32: 0.bias" in repr(report)
    assert [errors.name for errors in report.last.formats][:3] == ["fp16", "bf16", "fp8_tensor"]
    assert all("0.bias" not in errors.parameters for errors in report.last.formats)


def test_the_same_look_gives_the_same_numbers():
    reports = [mptrain.formats(network(), loss, batch(), ["nvfp4", "fp8_tensor"]).to_dict() for _ in range(2)]
    assert reports[0] == reports[1]


def test_more_bits_have_smaller_errors():
    formats = {errors.name: errors.error for errors in mptrain.formats(network(), loss, batch()).last.formats}
    assert formats["fp16"] < formats["bf16"] < formats["mxfp8"] < formats["nvfp4"] < CAP
    assert formats["mxfp8"] <= formats["mxfp4"]


def test_fp16_has_the_largest_loss_scale_at_which_it_is_finite():
    errors = mptrain.formats(network(), lambda model, given: 30000 * loss(model, given), batch(), ["fp16"]).last.formats
    assert errors[0].finite
    assert 1 < errors[0].loss_scale < 2**16
    assert errors[0].error < 0.01
    beyond = mptrain.formats(network(), lambda model, given: 1e9 * loss(model, given), batch(), ["fp16"])
    assert not beyond.last.formats[0].finite
    assert beyond.verdict("fp16") == BANDS[-1].verdict
    assert "not finite" in repr(beyond)


@pytest.mark.parametrize(
    ("factor", "words"), [(math.inf, "not finite in FP32 already"), (0.0, "all gradients of this step are zero")]
)
def test_a_step_without_gradients_has_no_verdict(factor, words):
    with pytest.raises(NumericsError, match=words):
        mptrain.formats(network(), lambda model, given: factor * loss(model, given), batch())


def test_bands_cover_all_errors():
    def verdict(error, by_norm=1.0):
        return band_of(FormatErrors("x", error, by_norm, 0.0, 1.0, {})).verdict

    assert [band.most for band in BANDS] == sorted(band.most for band in BANDS)
    assert verdict(0.0) == BANDS[0].verdict
    assert all(verdict(band.most) == band.verdict for band in BANDS)
    assert verdict(CAP) == verdict(0.0, math.inf) == verdict(math.nan) == BANDS[-1].verdict


class Outlier(nn.Module):
    """A layer with weights below the smallest E4M3 number, and its scale afterwards."""

    def __init__(self):
        super().__init__()
        self.first, self.small, self.head = nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 10)
        with torch.no_grad():
            self.small.weight.mul_(2.0**-12)

    def forward(self, x):
        return self.head(torch.relu(self.small(torch.relu(self.first(x))) * 2.0**12))


def test_the_layer_that_spoils_a_format_is_kept_first():
    torch.manual_seed(0)
    # a large loss, so that its gradients need no scale
    report = mptrain.formats(Outlier(), lambda model, given: 500 * loss(model, given), batch(), ["fp8_unscaled"], 0.7)
    kept = report.last.keep["fp8_unscaled"]
    assert report.keep("fp8_unscaled")[0] == "small"
    assert kept.errors[0].error < 0.5 * report.last.formats[0].error
    assert 0 < kept.share <= 0.7
    assert "\nfp8_unscaled  small" in repr(report)
    chosen = report.filter("fp8_unscaled")
    assert not chosen(nn.Linear(2, 2), "small")
    assert chosen(nn.Linear(2, 2), "other")
    assert not chosen(nn.ReLU(), "other")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_torchao_converts_the_layers_that_the_filter_lets_through():
    float8 = pytest.importorskip("torchao.float8")
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    report = mptrain.formats(model, loss, batch(), "mxfp4", 0.4)
    assert repr(report).startswith("Sequential: ")
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(model, module_filter_fn=report.filter("mxfp4"), config=config)
    low = {str(at) for at, module in enumerate(model) if type(module).__name__ == "Float8Linear"}
    assert report.keep("mxfp4")
    assert low == {"0", "2", "4"} - {*report.keep("mxfp4")}


def test_no_layer_beyond_the_budget_is_kept():
    report = mptrain.formats(network(), loss, batch(), ["mxfp4"], 1e-6)
    assert report.keep("mxfp4") == ()
    assert "nothing fits in the budget" in repr(report)
    without = mptrain.formats(network(), loss, batch(), ["bf16", "mxfp4"])
    assert without.last.keep is None
    assert without.keep("bf16") == ()
    with pytest.raises(UsageError, match="layers to keep in FP32 for mxfp4 were not looked for"):
        without.filter("mxfp4")


def test_a_tied_head_is_kept_by_both_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(self.table(tokens))

    tokens = torch.arange(10)
    report = mptrain.formats(Tied(), lambda model, given: F.cross_entropy(model(given), given), tokens, ["mxfp4"], 1.0)
    assert report.keep("mxfp4") == ("table",)
    assert report.filter("mxfp4").kept == {"table", "head"}


def test_little_that_was_looked_at_is_the_first_sentence():
    class Mostly(nn.Module):
        """Attention over long sequences of few numbers."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            h = self.linear(x)
            return F.scaled_dot_product_attention(h, h, h)

    x = torch.randn(1, 2, 256, 8, generator=torch.Generator().manual_seed(0))
    report = mptrain.formats(Mostly(), lambda model, given: model(given).square().mean(), x, ["mxfp8"])
    judged = report.last.coverage.judged
    assert 0 < judged < 0.1
    assert report.sentences()[0].startswith("only ")
    assert repr(report).startswith("only ")
    assert report.notes()[1].endswith("not: attention in the model")


def test_weights_that_are_computed_are_not_judged():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 48)), nn.ReLU(), nn.Linear(48, 10))
    coverage = mptrain.formats(model, loss, batch(), ["mxfp8"]).last.coverage
    assert set(coverage.layers) == {"2.weight"}
    assert coverage.others == {"addmm in 0": 2 * 64 * 32 * 48, "mm in 0": 2 * 64 * 32 * 48}
    three, two = 3 * 2 * 64 * 48 * 10, 2 * 2 * 64 * 32 * 48
    assert coverage.judged == three / (three + two)


def test_a_bilinear_layer_is_named_without_a_size():
    model = nn.Bilinear(8, 8, 4)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    made = nn.ModuleDict({"linear": nn.Linear(8, 8), "pair": model})
    report = mptrain.formats(
        made, lambda model, given: model["pair"](model["linear"](given), given).square().mean(), x, ["mxfp8"]
    )
    assert report.last.coverage.unknown == {"trilinear in pair": 3}
    assert report.sentences()[0] == "products of unknown size were not looked at: trilinear in pair"


def test_flops_of_fused_attention_are_those_of_its_products():
    q, k = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 7, 8)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    once = 2 * 6 * 5 * 7 * 8
    assert flops(ProductCall(forward, (q, k, k), q)) == 2 * once
    assert flops(ProductCall(backward, (q, q, k, k, q), q)) == 5 * once
    assert flops(ProductCall(torch.ops.aten.mv.default, (torch.zeros(3, 4), torch.zeros(4)), q)) == 24
    assert flops(ProductCall(torch.ops.aten._trilinear.default, (q, q, q), q)) is None


def test_wrong_arguments_are_refused_by_name():
    with pytest.raises(UsageError, match="unknown format fp8_tensors") as refused:
        mptrain.formats(network(), loss, batch(), "fp8_tensors")
    assert "fp8_tensor" in refused.value.hint
    with pytest.raises(UsageError, match="keep=20"):
        mptrain.formats(network(), loss, batch(), keep=20)
    report = mptrain.formats(network(), loss, batch(), "mxfp8")
    with pytest.raises(UsageError, match="nvfp4 was not looked at"):
        report.verdict("nvfp4")


def test_a_conv_network_and_an_lstm_have_a_verdict():
    torch.manual_seed(0)
    images = torch.randn(8, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    report = mptrain.formats(model, loss, (images, torch.arange(8)))
    assert report.last.coverage.judged == 1
    assert report.last.nothing == ("0.bias",)
    lstm = nn.LSTM(8, 16)
    report = mptrain.formats(lstm, lambda model, given: model(given)[0].square().mean(), torch.randn(5, 4, 8))
    assert report.last.coverage.judged == 1
    assert all(errors.finite for errors in report.last.formats)


def test_steps_are_columns_and_the_verdict_is_of_the_last():
    def at(step, error):
        errors = FormatErrors("mxfp8", error, error, 0.0, 1.0, {"weight": error})
        return StepFormats(step, 8, 1, 1.0, (), Coverage({"weight": 10}, {}, {}), (errors,), {})

    report = FormatsReport("net", (at(1, 0.9), at(21, 0.1)), {})
    assert report.verdict("mxfp8") == BANDS[0].verdict
    assert report.sentences() == ("net at step 21: no damage expected: mxfp8",)
    head = report.table().head
    assert head[1:3] == ("error at step 1", "error at step 21")


def test_quantized_operands_are_what_is_multiplied():
    """The oracle of the first test, for one product: a look is no better than its operands."""
    weight, given = network()[0].weight.detach(), batch()[0]
    with EmulatedProducts(model := network(), RULES["fp8_row"]):
        out = model[0](given)
    by_hand = quantize(given, RULES["fp8_row"], dim=1) @ quantize(weight, RULES["fp8_row"], dim=1, operand="weight").T
    torch.testing.assert_close(out, by_hand + model[0].bias)


def test_a_network_without_recognised_products_has_no_verdict():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 10)))
    with pytest.raises(ConfigError, match=r"no product of this step was recognised as a layer's.*addmm in 0"):
        mptrain.formats(model, loss, batch())


def test_products_that_are_not_in_fp32_are_not_judged():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10)

        def forward(self, x):
            h = F.linear(x.bfloat16(), self.narrow.weight.bfloat16()).float()
            return self.head(torch.relu(self.wide(x) + h))

    report = mptrain.formats(Mixed(), loss, batch(), ["mxfp8"])
    coverage = report.last.coverage
    assert "narrow.weight" not in coverage.layers
    assert coverage.others == {"mm in the model": 2 * 2 * 64 * 32 * 32}
    assert report.sentences()[0].startswith("only ")


def test_shares_of_grouped_and_transposed_convolutions_count_each_product_alike():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 4, 3, groups=2), nn.Flatten())
    images = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    report = mptrain.formats(model, lambda model, given: model(given).square().mean(), images, ["mxfp8"])
    of = 2 * 2 * 8 * 4 * 4 * 9, 2 * 2 * 8 * 4 * 4 * 2 * 9
    assert report.last.coverage.layers == {"0.weight": 2 * of[0], "1.weight": 3 * of[1]}


def test_experts_in_one_grouped_product_are_not_judged():
    if not hasattr(torch.ops.aten, "_grouped_mm"):
        pytest.skip("this torch has no grouped products")
    first, second = torch.zeros(12, 4), torch.zeros(3, 4, 5)
    grouped = torch.ops.aten._grouped_mm.default
    assert flops(ProductCall(grouped, (first, second), first)) == 2 * 12 * 4 * 5
    assert flops(ProductCall(grouped, (torch.zeros(4, 12), torch.zeros(12, 5)), first)) == 2 * 4 * 12 * 5


def test_gradients_that_are_zero_are_no_all_clear():
    model = network()
    with torch.no_grad():
        model[2].weight.zero_()
    report = mptrain.formats(model, loss, batch(), ["mxfp8"])
    assert report.last.nothing == ("0.bias", "0.weight")
    assert report.last.compared == 490 / (490 + 33 * 48)
    assert report.sentences()[0] == "only 23.6 % of the gradients' elements were compared: the others are zero"


def test_a_layer_that_is_lost_beside_a_large_one_is_named():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.deep, self.head = nn.Linear(32, 2000), nn.Linear(32, 16), nn.Linear(16, 10)

        def forward(self, x):
            return self.table(x)[:, :10] + self.head(torch.relu(self.deep(x * 1e-4)))

    report = mptrain.formats(Wide(), lambda m, b: 500 * loss(m, b), batch(), ["fp8_unscaled"])
    assert report.last.formats[0].error < BANDS[1].most
    assert any(
        note.startswith("fp8_unscaled: errors above 60 % in ") and "deep.weight" in note for note in report.notes()
    )


def test_a_model_in_fp64_is_looked_at_in_fp32():
    inputs, targets = batch()
    report = mptrain.formats(network().double(), loss, (inputs.double(), targets), ["mxfp8"])
    assert report.last.coverage.judged == 1


def test_large_activations_are_no_missing_gradients():
    report = mptrain.formats(
        network(), lambda m, b: F.cross_entropy(m[2](m[1](m[0](b[0])) * 3e36) * 3e-37, b[1]), batch()
    )
    assert report.last.nothing == ()


def test_a_parameter_of_the_model_itself_has_no_module_to_keep():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 10) / 6)

        def forward(self, x):
            return x @ self.weight

    report = mptrain.formats(Root(), loss, batch(), ["mxfp4"], keep=1.0)
    assert report.keep("mxfp4") == ()
    assert report.filter("mxfp4").kept == frozenset()


def test_a_filter_knows_the_names_of_a_compiled_network_and_what_it_lets_through():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv1d(1, 4, 3), nn.Linear(120, 10)

        def forward(self, x):
            return self.linear(self.conv(x[:, None]).flatten(1))

    report = mptrain.formats(Both(), loss, batch(), ["mxfp4"], keep=1.0)
    conv, linear = 2 * 2 * 64 * 30 * 4 * 3, 3 * 2 * 64 * 120 * 10
    assert report.last.coverage.layers == {"conv.weight": conv, "linear.weight": linear}
    share = f"{100 * linear / (conv + linear):.1f}".rstrip("0").rstrip(".")
    assert any(
        "filters for torchao let through torch.nn.Linear alone" in note and share in note for note in report.notes()
    )
    kept = report.keep("mxfp4")[0]
    chosen = report.filter("mxfp4")
    assert not chosen(nn.Linear(1, 1), kept)
    assert not chosen(nn.Linear(1, 1), f"_orig_mod.{kept}")
    assert report.to_dict()["notes"] == report.notes()
