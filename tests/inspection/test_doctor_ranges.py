"""From measured distances to modules, scales and findings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mptrain.inspection.doctor_findings import findings, proposals, why_no_range, with_words
from mptrain.inspection.doctor_ranges import (
    GradientErrors,
    OutputErrors,
    ScalingEvidence,
    UsableScales,
    by_module,
    scales_of,
)
from mptrain.numerics.formats import BFLOAT16, FLOAT16
from mptrain.probe.observer import Operation
from mptrain.system.records import ExponentCounts

HEALTHY = GradientErrors(
    "layer.weight",
    elements=4,
    reference=2.0,
    fp32=1e-6,
    expected=1e-3,
    fp32_shift=0.0,
    errors={0: 0.5, 1: 2e-3, 2: 2e-3, 3: math.inf},
    shifts={0: 0.5, 1: 0.0, 2: 0.0, 3: math.inf},
)


def modules(*parameters, order=()):
    return by_module(parameters, FLOAT16, order)


def evidence(*parameters, **more):
    return ScalingEvidence("float16", modules(*parameters), **more)


def broken(module, operator, phase, kind, largest):
    """Return an operator that makes something infinite, or no number, out of finite values up to a magnitude."""
    out = ExponentCounts("float16", 0, int(kind == "inf"), int(kind == "NaN"), 0.0, 0, ())
    return Operation(phase, module, "", operator, ("float16",), (out,), True, largest)


def kinds(found):
    return [(finding.kind, finding.where) for finding in found]


def test_the_parameters_of_a_module_are_one_gradient():
    other = replace(HEALTHY, name="layer.bias", reference=1.5, elements=5, errors=dict.fromkeys(range(4), 0.0))
    [module] = modules(HEALTHY, other)
    assert (module.name, module.elements, module.reference) == ("layer", 9, 2.5)
    assert module.errors == {0: 0.2, 1: 8e-4, 2: 8e-4, 3: math.inf}
    assert module.fp32 == pytest.approx(math.sqrt(2) * 1e-6 / 2.5)


def test_modules_come_in_the_order_of_their_calls():
    names = ["b.weight", "a.weight", "never.weight"]
    found = modules(*(replace(HEALTHY, name=name) for name in names), order=["", "a", "b"])
    assert [module.name for module in found] == ["a", "b", "never"]


def test_good_scales_are_finite_and_lose_next_to_nothing():
    [module] = modules(HEALTHY)
    assert module.good == [1, 2]
    assert module.tolerance == 2**-7
    assert module.best == 1e-3
    assert by_module([HEALTHY], BFLOAT16)[0].tolerance == 2**-4


def test_underflow_may_change_no_more_than_twice_what_the_forward_pass_does():
    [module] = modules(replace(HEALTHY, expected=0.25))
    assert module.allowed_loss == 0.25
    assert module.good == [0, 1, 2]
    [module] = modules(replace(HEALTHY, expected=math.inf))
    assert module.good == [1, 2]


def test_a_gradient_may_lose_eight_per_cent_of_its_norm_to_underflow():
    shifts = {0: 0.17, 1: 0.15, 2: 0.0, 3: math.inf}
    [module] = modules(replace(HEALTHY, shifts=shifts))
    assert module.good == [1, 2]


def test_an_error_that_falls_with_every_doubling_is_underflow_and_no_fault_of_the_arithmetic():
    falling = replace(
        HEALTHY, errors={0: 0.8, 1: 0.4, 2: 0.2, 3: math.inf}, shifts={0: 0.8, 1: 0.4, 2: 0.0, 3: math.inf}
    )
    [module] = modules(falling)
    assert (module.wrong, module.underflows, module.good) == (False, True, [])
    [module] = modules(replace(falling, errors=dict.fromkeys(range(3), 0.2) | {3: math.inf}))
    assert (module.wrong, module.underflows) == (True, False)


def test_a_gradient_that_is_half_gone_is_wrong_whatever_the_forward_pass_makes_of_it():
    [module] = modules(replace(HEALTHY, expected=2.6, shifts={0: 1.9, 1: 0.9, 2: 0.0, 3: math.inf}))
    assert (module.expected, module.allowed, module.good) == (1.3, 0.5, [1, 2])


def test_a_scale_beyond_those_that_were_tried_is_judged_by_what_is_known():
    scales = UsableScales(tried=(0, 1, 2, 3), good=(0, 2), overflows=3)
    assert [scales.suits(2.0**one) for one in (-1, 0, 1, 2, 3, 30)] == [None, True, False, True, False, False]
    assert not scales.suits(2.0**1.5)
    assert UsableScales(tried=(0, 1), good=(1,), overflows=None).suits(0.25) is False
    assert UsableScales(tried=(0, 1), good=(1,), overflows=None).suits(2.0**9) is None


def test_an_output_behind_one_that_rounding_makes_infinite_is_judged_all_the_same():
    errors = OutputErrors(half=0.9, explained=math.inf, fp32=0.0)
    assert errors.allowed(0.01) == 0.01
    assert replace(errors, explained=0.1).allowed(0.01) == 0.2


def test_the_good_scales_of_a_network_are_those_of_all_modules():
    later = replace(HEALTHY, name="later.weight", shifts={0: 0.0, 1: 0.0, 2: math.inf, 3: math.inf})
    scales = scales_of(modules(HEALTHY, replace(later, errors={0: 0.0, 1: 0.0, 2: math.inf, 3: math.inf})))
    assert (scales.tried, scales.good, scales.overflows, scales.best) == ((0, 1, 2, 3), (1,), 2, 1)
    assert [scales.suits(scale) for scale in (0.5, 1.0, 2.0, 3.0, 8.0, 16.0)] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]


def test_a_scale_between_two_good_ones_suits():
    assert scales_of(modules(HEALTHY)).suits(3.0) is True


def test_nothing_is_found_in_what_is_sound():
    assert findings(evidence(HEALTHY)) == []


def test_a_gradient_that_is_zero_but_for_rounding_is_not_judged():
    """As that of a bias before a norm, which takes it away again."""
    bias = replace(HEALTHY, name="other.bias", reference=1e-15, fp32=1e-8, errors=dict.fromkeys(range(4), 1e-3))
    found = evidence(HEALTHY, bias)
    assert [module.nothing for module in found.modules] == [False, True]
    assert findings(found) == []


def test_a_gradient_that_is_zero_is_not_judged():
    zero = replace(
        HEALTHY, name="zero.bias", reference=0.0, fp32=0.0, expected=0.0, errors=dict.fromkeys(range(4), 0.0)
    )
    assert findings(evidence(HEALTHY, zero)) == []


def test_a_small_gradient_that_fp32_gets_right_is_judged():
    small = replace(HEALTHY, name="small.weight", reference=1e-12, fp32=1e-19)
    assert [module.nothing for module in modules(HEALTHY, small)] == [False, False]


def test_an_error_at_every_scale_names_the_module_nearest_to_the_loss():
    wrong = replace(HEALTHY, errors={0: 0.5, 1: 0.2, 2: 0.2, 3: math.inf})
    more = (replace(wrong, name="later.weight"), replace(HEALTHY, name="last.weight"))
    found = findings(evidence(wrong, *more))
    assert kinds(found) == [("error", ("later",))]
    assert "off by 10 % at the best scale, rounding explains 0.78 %; 1 more module affected" in found[0].what
    odd = evidence(wrong, *more, breaks=("odd",), keep_backward=("odd",), keep_fp32=("norms",))
    found = findings(odd)
    assert kinds(found) == [("error", ("odd",))]
    words, other = proposals(found, odd)
    assert (words, other) == ("precision.keep_fp32=[norms,odd]", "precision=bf16")
    assert with_words(found, words)[0].hint.endswith("or set precision.keep_fp32=[norms,odd]")
    assert with_words(found, None) == found


def test_an_error_that_grows_with_a_scale_while_all_is_finite_is_one_of_scaling():
    drifting = replace(HEALTHY, errors={0: 2e-3, 1: 2e-3, 2: 1.0, 3: 1.9})
    assert kinds(findings(evidence(drifting))) == [("drift", ("layer",))]
    assert kinds(findings(evidence(drifting, breaks=("odd",)))) == [("drift", ("odd",))]


def test_fp32_gradients_that_change_with_the_scale_hide_what_half_makes_of_them():
    bent = replace(HEALTHY, fp32_shift=0.3, errors=dict.fromkeys(range(4), 1.0))
    found = findings(evidence(bent, replace(HEALTHY, name="last.weight"), breaks=("odd",)))
    assert kinds(found) == [("proportion", ("odd",))]
    assert "1 module (layer) change by up to 15 %" in found[0].what


def test_what_is_wrong_in_fp32_is_no_matter_of_half():
    found = findings(evidence(replace(HEALTHY, fp32=0.4, errors=dict.fromkeys(range(4), 1.0))))
    assert kinds(found) == [("fp32", ("layer",))]
    assert "by 20 % in FP32 already" in found[0].what


def test_the_first_output_that_rounding_does_not_explain_is_named():
    outputs = {
        "a": OutputErrors(half=0.03, explained=0.02, fp32=1e-6, own=0.03),
        "b": OutputErrors(half=0.05, explained=0.02, fp32=1e-6, own=0.05),
        "c": OutputErrors(half=0.9, explained=0.02, fp32=1e-6, own=0.001),
    }
    found = findings(evidence(HEALTHY, outputs=outputs))
    assert kinds(found) == [("output", ("b",))]
    assert "off by 5 % against FP64, rounding explains 2 %" in found[0].what
    outputs["a"] = OutputErrors(half=0.5, explained=0.02, fp32=0.4, own=0.5)
    assert ("fp32", ("a",)) in kinds(findings(evidence(HEALTHY, outputs=outputs)))


BEYOND = OutputErrors(half=math.inf, explained=0.02, fp32=1e-6, own=math.inf, largest=1e6)
FED = OutputErrors(half=math.inf, explained=0.02, fp32=1e-6, own=0.0, largest=1.0)


def test_what_is_known_of_one_module_hides_nothing_of_another():
    found = evidence(
        replace(HEALTHY, errors=dict.fromkeys(range(4), math.inf)),
        narrow=[("block.soft", "softmax")],
        outputs={"block.soft": replace(FED, half=1e-4), "block.wide": BEYOND, "block.norm": FED, "head": FED},
        breaks_half=[broken("block.wide", "addmm", "forward", "inf", 4e4)],
    )
    assert kinds(findings(found)) == [("narrow", ("block.soft",)), ("output", ("block.wide",))]
    assert "not finite: addmm returns inf for finite inputs up to 4e+04" in findings(found)[1].what


def test_a_module_whose_output_is_too_large_is_kept_together_with_what_makes_it_smaller():
    found = evidence(HEALTHY, outputs={"block.wide": BEYOND, "block.norm": FED}, keep_fp32=("norms",))
    assert next(proposals(findings(found), found)) == "precision.keep_fp32=[norms,block]"
    found = evidence(HEALTHY, outputs={"block.norm": FED, "block.wide": BEYOND}, autocast=True)
    assert list(proposals(findings(found), found)) == ["precision=amp_bf16"]


@pytest.mark.parametrize(("operator", "said"), [("bmm", ["narrow", "output"]), ("_softmax", ["narrow"])])
def test_a_softmax_in_half_explains_its_own_infinities_alone(operator, said):
    found = evidence(
        HEALTHY,
        narrow=[("attention", "softmax")],
        outputs={"attention": replace(BEYOND, largest=1.0)},
        breaks_half=[broken("attention", operator, "forward", "inf", 800.0)],
    )
    assert [finding.kind for finding in findings(found)] == said


@pytest.mark.parametrize(("operator", "said"), [("bmm", ["constant", "output"]), ("masked_fill", ["constant"])])
def test_a_mask_explains_its_own_infinities_alone(operator, said):
    found = evidence(
        HEALTHY,
        constants=[("attention", "masked_fill", -1e9, "infinite")],
        outputs={"attention": replace(BEYOND, largest=1.0)},
        breaks_half=[broken("attention", operator, "forward", "inf", 800.0)],
    )
    assert [finding.kind for finding in findings(found)] == said


def test_where_fp32_is_not_finite_nothing_is_said_of_scales():
    found = ScalingEvidence("float16", fp32_finite=False, breaks_fp32=[broken("odd", "div", "backward", "NaN", 3.0)])
    assert kinds(findings(found)) == [("fp32", ("odd",))]
    assert "div in the backward pass returns NaN in FP32 too" in findings(found)[0].what
    assert "loss scales are not evaluated" in why_no_range(found, findings(found))


def test_gradients_that_are_finite_nowhere_are_named():
    never = replace(HEALTHY, errors=dict.fromkeys(range(4), math.inf))
    assert kinds(findings(evidence(never))) == [("overflow", ("layer",))]


def test_causes_are_said_and_what_follows_from_them_is_not():
    never = replace(HEALTHY, errors=dict.fromkeys(range(4), math.inf))
    outputs = {"norm": OutputErrors(half=math.inf, explained=0.01, fp32=1e-6)}
    constants = [("norm", "add", 1e-8, "zero")]
    found = findings(evidence(never, constants=constants, epsilons={"norm": "eps"}, outputs=outputs))
    assert kinds(found) == [("constant", ("norm",))]
    assert found[0].what == "eps=1e-08 rounds to zero in FP16, whose smallest number is 6e-08 (add)"


def test_scales_that_exclude_each_other_are_named_with_their_modules():
    high = replace(HEALTHY, name="high.weight", shifts={0: 1.0, 1: 1.0, 2: 0.0, 3: math.inf})
    low = replace(HEALTHY, name="low.weight", errors={0: 0.0, 1: 0.0, 2: math.inf, 3: math.inf})
    found = findings(evidence(high, replace(low, shifts={0: 0.0, 1: 0.0, 2: math.inf, 3: math.inf})))
    assert kinds(found) == [("range", ("high", "low"))]
    assert "high needs 2^2 or more, low 2^1 or less" in found[0].what


@pytest.mark.parametrize(("scale", "constant", "wrong"), [(1.0, True, True), (2.0, True, False), (1.0, False, False)])
def test_a_constant_scale_has_to_be_a_good_one(scale, constant, wrong):
    found = findings(evidence(HEALTHY, scales={"main": (scale, constant)}))
    assert bool(found) is wrong
    if wrong:
        assert (
            "scale 1 is outside the usable range 2^1 to 2^2: gradients underflow, first in layer, by 25 %"
            in found[0].what
        )


def test_a_learner_of_several_is_named():
    found = findings(evidence(HEALTHY, scales={"generator": (8.0, True)}))
    assert kinds(found) == [("scale", ("learners.generator.scaler",))]


def test_a_cast_to_the_other_half_precision_is_named_with_what_it_loses():
    def cast(compute):
        (finding,) = findings(ScalingEvidence(compute, casts=(("a", "float16"), ("b", "bfloat16"), ("b", "bfloat16"))))
        return finding.kind, finding.where, finding.what

    assert cast("float16") == (
        "cast",
        ("b",),
        "casts to BF16 in a network that computes in FP16, which loses three bits of each value",
    )
    assert cast("bfloat16")[1:] == (
        ("a",),
        "casts to FP16 in a network that computes in BF16, which loses values outside FP16's range",
    )


def test_a_module_that_is_kept_already_is_not_to_be_kept_again():
    wrong = OutputErrors(half=0.9, explained=0.0, fp32=0.0, own=0.9)
    for kept, words in (((), "[stem.wide]"), (("stem.wide",), "[stem.wide,stem]"), (("stem.wide", "stem"), None)):
        found = evidence(HEALTHY, outputs={"stem.wide": wrong}, keep_fp32=kept)
        proposed = next(proposals(findings(found), found))
        assert proposed == (f"precision.keep_fp32={words}" if words else "precision=bf16")
