from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.numerics.forecast import MARGIN, MOST_TAKEN, GradientHistory
from mptrain.numerics.overflow_limits import EXPONENTS
from mptrain.system.records import StepRecord
from tests.histograms_by_hand import counted, look
from tests.loops import each


def forecast_of(*records, steps=()):
    history = GradientHistory()
    for record in records:
        history.add(record)
    return history.forecast(steps)


def step(number, norm, overflow=False, scale=1.0, loss=1.0):
    return StepRecord("main", number, number, 0, loss, scale, overflow, overflow, norm, 0.1)


def between(low, high, count=300, seed=0):
    """Magnitudes spread evenly over the powers of two from one exponent to another; none is a power of two itself."""
    generator = torch.Generator().manual_seed(seed)
    return (2 ** (low + (high - low) * torch.rand(count, generator=generator))).float()


@each("exponent", [0, 3, 7, 10, 15, 20])
def test_shares_are_those_of_gradients_that_are_really_scaled_and_rounded(exponent):
    one, other = between(-40, -4), torch.cat([between(-30, 0, seed=1), torch.zeros(100)])
    weights = between(-33, 2, seed=2)
    at = forecast_of(look(1, {"a": one.tolist(), "b": other.tolist()}, {"w": weights.tolist()})).scales[exponent]
    halves = [(values * 2.0**exponent).half() for values in (one, other)]
    lost = [int(((half == 0) & (values != 0)).sum()) for half, values in zip(halves, (one, other), strict=True)]
    assert at.lost == pytest.approx(sum(lost) / 600)
    assert at.worst_lost.share == pytest.approx(max(share / 300 for share in lost))
    assert at.zeros == pytest.approx((sum(lost) + 100) / 700)
    assert at.weights_lost == pytest.approx(((weights * 2.0**exponent).half() == 0).float().mean().item())
    taken = [1 - (values[half != 0].double().sum() / values.double().sum()).item() for values, half in zip((one, other), halves, strict=True)]  # fmt: skip
    assert at.taken.share == pytest.approx(max(taken), rel=0.3, abs=1e-9)
    everything = torch.cat([one, other, weights]) * 2.0**exponent
    assert at.overflowing == int(everything.half().isinf().any())


def test_the_range_of_one_magnitude_is_known_by_hand():
    found = forecast_of(*(look(at, {"conv": [1.5 * 2.0**-30] * 8}, {"conv.weight": [1.0]}) for at in (1, 2)))
    # 1.5 * 2^-30 is above 2^-25 from a scale of 2^5 on; a gradient of 1 overflows from 2^16 on (65536 >= 65520).
    assert (found.lowest, found.highest, found.recommended) == (5, 15, 15 - MARGIN)
    assert found.has_range
    assert [each.starved for each in found.scales[3:7]] == [2, 2, 0, 0]
    assert [each.overflow_share for each in found.scales[14:18]] == [0, 0, 1, 1]
    assert (found.largest.where, found.largest.step, found.steps) == ("conv.weight", 1, 2)


def test_one_step_below_65520_does_not_overflow():
    assert forecast_of(look(1, {}, {"w": [65519.0 / 2**10]})).highest == 10
    assert forecast_of(look(1, {}, {"w": [65520.0 / 2**10]})).highest == 9


def test_many_lost_values_that_hold_nothing_do_not_count():
    dust = [2.0**-60] * 1000
    found = forecast_of(look(1, {"conv": [*dust, *[0.01] * 10]}))
    assert found.lowest == 0
    assert found.scales[0].lost > 0.98


def test_a_module_that_is_lost_counts_however_small_its_part_of_the_whole():
    found = forecast_of(look(1, {"first": [1.5 * 2.0**-33] * 2, "last": [0.25] * 1000}))
    assert found.lowest == 8
    assert (found.scales[7].taken.name, found.scales[7].taken.share) == ("first", 1.0)


def test_the_smallest_right_scale_is_right_at_every_look():
    late = look(100, {"conv": [1.5 * 2.0**-36] * 4})
    found = forecast_of(look(1, {"conv": [1.5 * 2.0**-28] * 4}), late)
    assert found.lowest == 11
    assert found.scales[10].taken.step == 100
    assert found.scales[5].starved == 1


def test_scaled_gradients_give_the_same_forecast():
    values, weights = between(-33, -6).tolist(), between(-20, 1).tolist()
    plain = forecast_of(look(1, {"a": values}, {"w": weights}))
    scaled = forecast_of(look(1, {"a": [v * 512 for v in values]}, {"w": [w * 512 for w in weights]}, scale=512.0))
    assert scaled.scales == plain.scales
    assert (scaled.lowest, scaled.highest) == (plain.lowest, plain.highest)


def test_steps_between_looks_count_by_their_norms():
    sampled_steps = [look(1, {}, {"w": [0.5]}), look(9, {}, {"w": [1.0]})]
    norms = [step(1, 1.0), step(5, 32.0), step(9, 1.0), step(12, 2.0)]
    found = forecast_of(*sampled_steps, steps=norms)
    # Ratios of the largest gradient to the norm: 1/2 at step 1, 1 at step 9, so sqrt(1/2) half-way.
    assert found.steps == 4
    limits = [next(k for k in range(40) if largest * 2**k >= 65520) for largest in (0.5, 32 * math.sqrt(0.5), 1.0, 2.0)]
    for one in found.scales:
        assert one.overflow_share == sum(limit <= one.exponent for limit in limits) / 4
    assert found.highest == min(limits) - 1


@each("high", [4, 1000])
@each("others", [2, 4])
def test_samples_prove_no_scale_at_which_the_norms_of_other_steps_overflow(high, others):
    sampled_steps = [look(at, {}, {"w": [0.5]}) for at in range(1, 40)]
    norms = [step(at, 1.0) for at in range(1, 300)] + [step(at, float(high)) for at in range(300, 300 + others)]
    found = forecast_of(*sampled_steps, steps=norms)
    shares = [one.overflow_share for one in found.scales]
    assert shares[found.evidence.by_samples] < 0.01
    calm = forecast_of(*sampled_steps, steps=norms[:299]).evidence.by_samples
    assert (found.evidence.by_samples < calm) == (others > 3)


def test_a_step_that_overflowed_in_the_run_overflows_from_its_own_scale_on():
    norms = [step(1, 1.0), step(2, math.inf, overflow=True, scale=2.0**12), step(3, math.nan, True, 8.0, math.nan)]
    found = forecast_of(look(1, {}, {"w": [1.0]}), steps=norms)
    assert found.steps == 2  # a loss that is not finite is no matter of the scale
    assert found.highest == 11


def test_looks_that_overflowed_or_say_nothing_tell_only_that():
    found = forecast_of(look(1, {"a": [math.nan]}, scale=16.0, overflow=True))
    assert (found.scales, found.recommended, found.largest) == ((), None, None)
    assert len(found.sampled_steps) == 1
    unusable = look(1, {"a": [1.0]}, scale=0.0), look(2), look(4, {"a": [1.0]}, scale=math.nan)
    assert forecast_of(*unusable, look(5, {"a": [1.0]})).unusable == 3
    mixed = forecast_of(look(1, {"a": [1.0]}), look(2, {"a": [math.inf, 2.0**-40]}, scale=1024.0, overflow=True))
    assert [each.overflowing for each in mixed.scales[8:12]] == [0, 0, 1, 1]
    assert (mixed.lowest, mixed.highest) == (0, 9)


@pytest.mark.parametrize("records", [[], [look(1)], [look(1, {"a": [0.0, 0.0]})], [look(1, {"a": [1.0]}, scale=0.0)]])
def test_without_gradients_nothing_is_recommended(records):
    found = forecast_of(*records)
    assert found.recommended is None
    assert not found.has_range


def test_in_an_empty_range_the_largest_safe_scale_is_recommended():
    found = forecast_of(*(look(at, {"first": [2.0**-40] * 3, "last": [8.0]}) for at in (1, 2)))
    assert (found.lowest, found.highest, found.recommended) == (15, 12, 12)
    assert not found.has_range


def test_no_scale_is_below_1_or_above_2_to_the_24():
    found = forecast_of(look(1, {"a": [70000.0]}))
    assert (found.highest, found.recommended, found.has_range) == (None, None, False)
    assert found.scales[0].overflowing == 1
    tiny = forecast_of(*(look(at, {"a": [2.0**-30] * 4}) for at in (1, 2)))
    assert (tiny.highest, tiny.recommended) == (24, 24)
    assert forecast_of(look(1, {"a": [2.0**-60] * 4})).lowest is None


def test_tensors_that_are_kept_wider_than_others_do_not_count():
    half, wide = counted([1.0], "float16"), counted([1e6, 1e-20])
    mixed = forecast_of(look(1, {"conv": half, "norm": wide}, {"w": half, "norm.weight": wide}))
    assert mixed.largest.largest == 1.0
    assert mixed.lowest == 0
    assert forecast_of(look(1, {"conv": counted([1.0]), "norm": wide})).largest.largest == 1e6


def test_what_fp16_cut_off_is_noticed():
    scale = 256.0
    values = between(-45, -10, count=2000) * scale
    seen = counted(values.half().tolist(), "float16")
    found = forecast_of(look(1, {"a": seen}, scale=scale))
    assert found.smallest_seen == 2.0**-32
    whole = forecast_of(look(1, {"a": counted([1.0, 0.5], "float16")}))
    assert (whole.smallest_seen, whole.unseen) == (2.0**-24, ())
    assert forecast_of(look(1, {"a": counted(values.tolist())}, scale=scale)).smallest_seen == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(2.0**-50, 2.0**10), min_size=1, max_size=6), st.lists(st.floats(2.0**-40, 2.0**10), max_size=6)
        ),
        min_size=1,
        max_size=4,
    )
)  # fmt: skip
def test_more_scale_never_loses_more_nor_overflows_less(sampled_steps):
    found = forecast_of(*(look(at, {"a": one}, {"w": other}) for at, (one, other) in enumerate(sampled_steps, 1)))
    for smaller, larger in zip(found.scales, found.scales[1:], strict=False):
        assert larger.lost <= smaller.lost
        assert larger.taken.share <= smaller.taken.share
        assert larger.starved <= smaller.starved
        assert larger.overflow_share >= smaller.overflow_share
        assert larger.overflowing >= smaller.overflowing
    if found.has_range:
        assert found.lowest <= found.recommended <= found.top <= found.highest
        assert all(found.scales[at].taken.share <= MOST_TAKEN for at in range(found.lowest, 25))
    if found.recommended is not None:
        assert found.recommended in EXPONENTS
        assert not found.scales[found.recommended].overflowing


def test_between_looks_a_half_step_that_was_clean_at_its_scale_stays_so():
    """By its norm step 2 would overflow from 2^10 on; it was clean there."""
    seen = look(1, {"a": counted([64.0], "float16")})
    norms = [step(1, 1.0), step(2, 1.0), step(3, math.inf, overflow=True, scale=2.0**20)]
    assert forecast_of(seen, steps=norms).highest == 9
    norms[1] = step(2, 1.0, scale=2.0**11)
    found = forecast_of(seen, steps=norms)
    assert [at.overflow_share for at in found.scales[9:13]] == [0, 2 / 3, 2 / 3, 1]
    wide = forecast_of(look(1, {"a": [64.0]}), steps=norms)
    assert [at.overflow_share for at in wide.scales[9:13]] == [0, 1, 1, 1]


def varying(deviation, count, middle=0.0, least=-24.0):
    """Looks whose largest gradients have logarithms of that standard deviation, at the quantiles of a normal distribution."""
    places = [NormalDist(middle, deviation).inv_cdf((at + 0.5) / count) for at in range(count)]
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [look(at, {"a": [2.0**least], "b": [2.0 ** places[place]]}) for at, place in enumerate(shuffled, 1)]


def test_one_look_names_no_scale_however_many_steps_are_on_record():
    found = forecast_of(look(1, {}, {"w": [0.5]}), steps=[step(at, 1.0) for at in range(1, 1000)])
    assert (found.too_few, found.recommended) == (True, None)
    assert (found.lowest, found.highest) == (0, 16)


@pytest.mark.parametrize(("steps", "named"), [(298, False), (299, True)])
def test_a_short_record_names_no_scale_however_calm_it_is(steps, named):
    found = forecast_of(
        *(look(at, {}, {"w": [0.5]}) for at in range(1, 40)), steps=[step(at, 1.0) for at in range(1, steps + 1)]
    )
    assert (found.recommended is not None) == named
    assert found.too_few == (not named)
    assert found.has_range == named


def test_looks_that_vary_leave_headroom_and_few_of_them_leave_more():
    sure = {count: forecast_of(*varying(1.5, count)).evidence.by_samples for count in (3, 10, 30, 300)}
    assert sure[3] < sure[10] < sure[30] <= sure[300]
    # Largest gradients around 1: 99 % of the steps stay below 2^(1.5 * 2.326), so 2^12 is the largest scale that holds.
    assert sure[300] == 12
    assert forecast_of(*varying(1.5, 300)).evidence.with_more == 12


@each("seed", range(3))
@each("count", [3, 10, 30])
def test_where_a_scale_is_named_it_overflows_at_less_than_one_step_in_a_hundred(seed, count):
    """Looks drawn out of a thousand steps, whose gradients slowly grow and vary beside: 1 % of all drawings may err."""
    generator = torch.Generator().manual_seed(seed)
    exponents = (torch.randn(1000, generator=generator) + torch.linspace(-2, 1, 1000)).tolist()
    drawn = torch.randperm(1000, generator=generator)[:count].sort().values.tolist()
    found = forecast_of(*(look(at + 1, {"a": [2.0**-20, 2.0 ** exponents[at]]}) for at in drawn))
    if found.recommended is not None:
        assert sum(e + found.recommended >= math.log2(65520) for e in exponents) < 10


def test_a_record_of_clean_steps_in_half_proves_the_scales_that_held():
    half = counted([2.0**-4], "float16")
    sampled_steps = [
        look(1, {"a": half}, scale=2.0**10),
        look(200, {"a": counted([2.0**-1], "float16")}, scale=2.0**10),
    ]
    held = [step(at, 1.0, scale=2.0**10) for at in range(1, 300)]
    assert forecast_of(*sampled_steps, steps=held).evidence.by_record == 10
    assert forecast_of(*sampled_steps, steps=held[:-1]).evidence.by_record is None  # 298 steps: the bound is 1.0 %
    once = [*held, step(300, math.inf, overflow=True, scale=2.0**11)]
    assert forecast_of(*sampled_steps, steps=once).evidence.by_record is None
    longer = [*once, *(step(at, 1.0, scale=2.0**10) for at in range(301, 474))]
    found = forecast_of(*sampled_steps, steps=longer)
    assert (found.evidence.by_record, found.evidence.held, found.evidence.recorded) == (10, 472, 473)
    assert found.recommended is not None
    assert found.recommended <= 10
    wide = [look(1, {"a": [2.0**-14]}), look(200, {"a": [2.0**-11]})]
    assert forecast_of(*wide, steps=longer).evidence.by_record is None


def test_an_overflow_on_record_is_never_contradicted():
    sampled_steps = [look(at, {"a": [2.0**-6]}) for at in range(1, 40)]
    steps = [step(at, 1.0) for at in range(1, 40)]
    assert forecast_of(*sampled_steps, steps=steps).highest == 21
    steps += [step(at, 1.0) for at in range(41, 400)]
    found = forecast_of(*sampled_steps, steps=[*steps, step(400, math.inf, overflow=True, scale=2.0**9)])
    assert (found.highest, found.top) == (8, 8)
    assert found.recommended <= 8


def test_an_empty_range_names_a_scale_once_looks_suffice():
    few, many = (forecast_of(*varying(1.5, count, least=-39.0)) for count in (4, 300))
    assert (few.too_few, few.recommended) == (True, None)
    assert (many.too_few, many.recommended, many.has_range) == (False, 11, False)


def test_where_most_looks_overflowed_nothing_is_sure():
    lost = [look(at, {"a": [math.inf]}, scale=2.0**20, overflow=True) for at in range(3, 9)]
    found = forecast_of(look(1, {"a": [2.0**-9]}), look(2, {"a": [2.0**-9]}), *lost)
    assert (found.too_few, found.recommended) == (True, None)


def halved(values, scale=1.0, dtype="float16"):
    """The histogram of gradients that FP16 keeps at a loss scale."""
    return counted((torch.as_tensor(values, dtype=torch.float64) * scale).half().tolist(), dtype)


def bounds(found):
    evidence = found.evidence
    named = (found.lowest, found.highest, found.top, found.recommended, evidence.by_samples, evidence.by_record)
    return [one for one in named if one is not None], found.scales


@each("dtype", ["float16", "float32"])
@each(
    ("first", "zeros_alone"),
    [([0.0] * 50, 2), ([0.0] * 50 + [2.0**-24] * 8, 0), ([0.0] * 2000 + [2.0**-20] * 4, 0), ([3 * 2.0**-24, 2.0**-23] * 9 + [0.0] * 40, 0)],
)  # fmt: skip
def test_of_a_module_that_fp16_may_have_lost_nothing_is_bounded(first, zeros_alone, dtype):
    """The FP32 tensor is one of autocast beside FP16 ones: a copy."""
    last = counted([0.5, 0.25], "float16")
    records = [look(at, {"first": counted(first, dtype), "last": last}) for at in (1, 2)]
    found = forecast_of(*records, steps=[step(at, 1.0) for at in range(1, 400)])
    assert [(one.name, one.steps, one.all_zero) for one in found.unseen] == [("first", 2, zeros_alone)]
    assert bounds(found) == ([], ())
    assert not found.is_answered
    assert not found.has_range


@each("dtype", ["float32", "bfloat16"])
def test_zeros_of_other_dtypes_are_zeros(dtype):
    records = [look(at, {"first": counted([0.0] * 50, dtype), "last": counted([0.5, 0.0], dtype)}) for at in (1, 2)]
    found = forecast_of(*records)
    assert (found.unseen, found.lowest, found.is_answered) == ((), 0, True)


def test_exact_zeros_beside_large_gradients_change_nothing():
    """As of units that are off: FP16 would show more small values if many had vanished."""
    values = torch.cat([between(-9, -2), torch.zeros(9000)]).tolist()
    plain, half = (
        forecast_of(*(look(at, {"a": counted(values, dtype)}, scale=1.0) for at in (1, 2)))
        for dtype in ("float32", "float16")
    )
    assert (half.unseen, half.lowest, half.recommended) == ((), plain.lowest, plain.recommended)


@each(
    ("sizes", "scales", "seen"),
    [
        ([1.0, 0.0, 0.5, 0.25], [1.0] * 4, True),  # a head without a box in one batch
        ([1.0, 0.0, 0.0, 0.25], [1.0] * 4, False),  # as often without as with one
        ([1.0, 0.0, 2.0**-15, 0.25], [1.0] * 4, False),  # gradients come close to vanishing elsewhere
        ([0.0, 2.0**-3, 2.0**-3, 2.0**-3], [1.0, 2.0**16, 2.0**16, 2.0**16], False),  # large for their scale alone
        ([0.0, 2.0**5, 2.0**5, 2.0**5], [1.0, 2.0**16, 2.0**16, 2.0**16], True),
    ],
)  # fmt: skip
def test_a_gradient_is_exactly_zero_where_it_is_far_from_vanishing_at_most_steps(sizes, scales, seen):
    records = [
        look(at, {"head": counted([size] * 9, "float16"), "last": counted([8.0], "float16")}, scale=scale)
        for at, (size, scale) in enumerate(zip(sizes, scales, strict=True), 1)
    ]
    found = forecast_of(*records)
    assert (found.unseen == ()) == seen
    assert seen or (found.unseen[0].name == "head" and bounds(found) == ([], ()))


def test_a_parameter_that_never_has_a_gradient_is_not_seen_and_one_that_rests_is():
    modules = {"a": counted([0.5, 0.25], "float16")}
    rests = [look(at, modules, {"w": counted([0.0 if at == 1 else 0.5], "float16")}) for at in (1, 2)]
    assert forecast_of(*rests).recommended is not None
    found = forecast_of(*(look(at, modules, {"w": counted([0.0] * 4, "float16")}) for at in (1, 2)))
    assert ([one.name for one in found.unseen], bounds(found)) == (["w"], ([], ()))


def test_without_outputs_of_modules_parameters_show_what_underflows():
    found = forecast_of(*(look(at, {}, {"w": [1.5 * 2.0**-30] * 8, "v": [1.0]}) for at in (1, 2)))
    assert found.lowest == 5


SHAPES = {
    "normal": lambda count, generator: torch.randn(count, generator=generator),
    "product": lambda count, generator: torch.randn(2, count, generator=generator).prod(0),
    "lognormal": lambda count, generator: torch.exp(2.5 * torch.randn(count, generator=generator)),
    "laplace": lambda count, generator: torch.randn(count, generator=generator) * torch.rand(count, generator=generator).log(),
}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(SHAPES)), st.integers(-45, -2), st.integers(0, 20), st.sampled_from([0.0, 0.5, 0.95])),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 16),
    st.integers(0, 1 << 20),
)  # fmt: skip
def test_no_scale_is_called_usable_at_which_the_true_gradients_lose_too_much(modules, exponent, seed):
    """Each module has two groups of gradients some doublings apart, of which it may lose one unseen, and exact zeros."""
    generator, true = torch.Generator().manual_seed(seed), {}
    for at, (shape, size, apart, off) in enumerate(modules):
        both = SHAPES[shape](1500, generator).double() * 2.0**size
        both[:700] *= 2.0**-apart
        true[str(at)] = both * (torch.rand(1500, generator=generator) >= off)
    records = [look(n, {name: halved(one, 2.0**exponent) for name, one in true.items()}, scale=2.0**exponent) for n in (1, 2)]  # fmt: skip
    found = forecast_of(*records)
    if not found.has_range:
        return
    for scale in (found.lowest, found.recommended):
        for values in true.values():
            whole = values.abs().sum()
            kept = values[(values * 2.0**scale).half() != 0].abs().sum()
            # Magnitudes are known by their exponents alone.
            assert 1 - kept / whole <= 1.3 * MOST_TAKEN
