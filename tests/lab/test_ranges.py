"""From measured distances to modules, scales and findings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mptrain.engine.module_trail import LOSS
from mptrain.engine.observer import Operation
from mptrain.lab.doctor.findings import findings, proposals, why_no_range, with_words
from mptrain.lab.step.ranges import (
    GradientErrors,
    OutputErrors,
    ScalingEvidence,
    UsableScales,
    by_module,
    scales_of,
)
from mptrain.numerics.formats import BFLOAT16, FLOAT16
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


def test_an_error_that_falls_with_every_doubling_is_underflow_and_no_fault_of_the_arithmetic():
    falling = replace(
        HEALTHY, errors={0: 0.8, 1: 0.4, 2: 0.2, 3: math.inf}, shifts={0: 0.8, 1: 0.4, 2: 0.0, 3: math.inf}
    )
    [module] = modules(falling)
    assert (module.wrong, module.underflows, module.good) == (False, True, [])
    [module] = modules(replace(falling, errors=dict.fromkeys(range(3), 0.2) | {3: math.inf}))
    assert (module.wrong, module.underflows) == (True, False)


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
    assert [scale for scale in (0.5, 1.0, 2.0, 3.0, 8.0, 16.0) if scales.suits(scale)] == [2.0]
    assert scales_of(modules(HEALTHY)).suits(3.0) is True


def test_an_error_at_every_scale_names_the_module_nearest_to_the_loss():
    wrong = replace(HEALTHY, errors={0: 0.5, 1: 0.2, 2: 0.2, 3: math.inf})
    more = (replace(wrong, name="later.weight"), replace(HEALTHY, name="last.weight"))
    found = findings(evidence(wrong, *more))
    assert kinds(found) == [("error", ("later",))]
    assert "off by 10 % at the best scale, rounding explains 0.78 %; 1 more module affected" in found[0].what
    odd = evidence(wrong, *more, breaks=("odd",), keep_backward=("odd",), keep_fp32=("norms",))
    found = findings(odd)
    assert kinds(found) == [("error", ("odd",))]
    words, *others = proposals(found, odd)
    assert (words, others) == ("precision.keep_fp32=[norms,odd]", ["precision=bf16", "precision=amp_dynamic"])
    assert with_words(found, words)[0].hint.endswith("or set precision.keep_fp32=[norms,odd]")
    assert with_words(found, None) == found


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


def test_causes_are_said_and_what_follows_from_them_is_not():
    never = replace(HEALTHY, errors=dict.fromkeys(range(4), math.inf))
    outputs = {"norm": OutputErrors(half=math.inf, explained=0.01, fp32=1e-6)}
    constants = [("norm", "add", 1e-8, "zero")]
    found = findings(evidence(never, constants=constants, epsilons={"norm": "eps"}, outputs=outputs))
    assert kinds(found) == [("constant", ("norm",))]
    assert found[0].what == "eps=1e-08 rounds to zero in FP16, whose smallest number is 6e-08 (add)"


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


@pytest.mark.parametrize(
    ("changes", "allowed", "good"),
    [
        ({"expected": 0.25}, 0.25, [0, 1, 2]),  # twice what the forward pass does
        ({"expected": math.inf}, 0.08, [1, 2]),
        ({"shifts": {0: 0.17, 1: 0.15, 2: 0.0, 3: math.inf}}, 0.08, [1, 2]),
        ({"expected": 2.6, "shifts": {0: 1.9, 1: 0.9, 2: 0.0, 3: math.inf}}, 0.5, [1, 2]),  # half of it is gone
    ],
)
def test_gradient_may_lose_so_much_to_underflow(changes, allowed, good):
    [module] = modules(replace(HEALTHY, **changes))
    assert (module.allowed_loss, module.good) == (allowed, good)


@pytest.mark.parametrize(
    ("changes", "nothing"),
    [
        ({"reference": 1e-15, "fp32": 1e-8, "errors": dict.fromkeys(range(4), 1e-3)}, True),  # a bias before a norm
        ({"reference": 0.0, "fp32": 0.0, "expected": 0.0, "errors": dict.fromkeys(range(4), 0.0)}, True),
        ({"reference": 1e-12, "fp32": 1e-19}, False),  # small, and right in FP32
    ],
)
def test_gradient_that_is_zero_but_for_rounding_is_not_judged(changes, nothing):
    found = evidence(HEALTHY, replace(HEALTHY, name="other.bias", **changes))
    assert [module.nothing for module in found.modules] == [False, nothing]
    assert not nothing or findings(found) == []


ANYWHERE = dict.fromkeys(range(4), 1.0)
NOWHERE = dict.fromkeys(range(4), math.inf)
DRIFTING = replace(HEALTHY, errors={0: 2e-3, 1: 2e-3, 2: 1.0, 3: 1.9})
HIGH = replace(HEALTHY, name="high.weight", shifts={0: 1.0, 1: 1.0, 2: 0.0, 3: math.inf})
LOW_ERRORS = {0: 0.0, 1: 0.0, 2: math.inf, 3: math.inf}
LOW = replace(HEALTHY, name="low.weight", errors=LOW_ERRORS, shifts=LOW_ERRORS)
BENT = replace(HEALTHY, fp32_shift=0.3, errors=ANYWHERE)


@pytest.mark.parametrize(
    ("parameters", "more", "said", "words"),
    [
        ([HEALTHY], {}, [], ""),
        ([DRIFTING], {}, [("drift", ("layer",))], "although finite"),
        ([DRIFTING], {"breaks": ("odd",)}, [("drift", ("odd",))], ""),
        (
            [BENT, replace(HEALTHY, name="last.weight")],
            {"breaks": ("odd",)},
            [("proportion", ("odd",))],
            "1 module (layer) change by up to 15 %",
        ),
        ([replace(HEALTHY, fp32=0.4, errors=ANYWHERE)], {}, [("fp32", ("layer",))], "by 20 % in FP32 already"),
        ([replace(HEALTHY, errors=NOWHERE)], {}, [("overflow", ("layer",))], ""),
        ([HIGH, LOW], {}, [("range", ("high", "low"))], "high needs 2^2 or more, low 2^1 or less"),
        (
            [HEALTHY],
            {"scales": {"main": (1.0, True)}},
            [("scale", ("scaler",))],
            "scale 1 is outside the usable range 2^1 to 2^2: gradients underflow, first in layer, by 25 %",
        ),
        ([HEALTHY], {"scales": {"main": (2.0, True)}}, [], ""),
        ([HEALTHY], {"scales": {"main": (1.0, False)}}, [], ""),
        ([HEALTHY], {"scales": {"generator": (8.0, True)}}, [("scale", ("learners.generator.scaler",))], "too high"),
    ],
)
def test_findings_about_gradients_and_scales(parameters, more, said, words):
    found = findings(evidence(*parameters, **more))
    assert kinds(found) == said
    assert words in "".join(one.what for one in found)


def test_where_fp32_is_not_finite_nothing_is_said_of_scales():
    found = ScalingEvidence("float16", fp32_finite=False, breaks_fp32=[broken("odd", "div", "backward", "NaN", 3.0)])
    assert kinds(findings(found)) == [("fp32", ("odd",))]
    assert why_no_range(found, findings(found))


@pytest.mark.parametrize(("operator", "minor"), [("nll_loss", False), ("mse_loss", False), ("logsumexp", True)])
def test_a_right_loss_in_half_precision_is_a_fault_where_its_gradient_shrinks_with_training(operator, minor):
    (found,) = findings(evidence(HEALTHY, narrow=[(LOSS, operator)]))
    assert (found.kind, found.minor) == ("narrow", minor)


MASK, SOFTMAX = {"constants": [("attention", "masked_fill", -1e9, "infinite")]}, {"narrow": [("attention", "softmax")]}


@pytest.mark.parametrize(
    ("cause", "operator", "said"),
    [
        (SOFTMAX, "bmm", ["narrow", "output"]),
        (SOFTMAX, "_softmax", ["narrow"]),
        (MASK, "bmm", ["constant", "output"]),
        (MASK, "masked_fill", ["constant"]),
    ],
)
def test_cause_explains_its_own_infinities_alone(cause, operator, said):
    found = evidence(
        HEALTHY,
        outputs={"attention": replace(BEYOND, largest=1.0)},
        breaks_half=[broken("attention", operator, "forward", "inf", 800.0)],
        **cause,
    )
    assert [finding.kind for finding in findings(found)] == said


def test_output_a_little_wrong_in_fp32_is_a_fault_of_half():
    outputs = {"norm": OutputErrors(half=7.0, explained=0.02, fp32=0.011, own=7.0)}
    assert kinds(findings(evidence(HEALTHY, outputs=outputs))) == [("output", ("norm",))]
    outputs = {"norm": OutputErrors(half=0.1, explained=0.02, fp32=0.011, own=0.1)}
    assert kinds(findings(evidence(HEALTHY, outputs=outputs))) == [("fp32", ("norm",))]
