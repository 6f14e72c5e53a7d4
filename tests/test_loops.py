import pytest
import torch

from tests.loops import each


def test_each_value_is_tried_and_a_failure_names_it(monkeypatch):
    tried = []

    @each("factor", [1, 2])
    @each(("one", "other"), [(3, 4), (5, 6)])
    def small(one, other, factor, limit):
        tried.append((one, other, factor))
        assert one * factor < limit

    small(limit=11)
    assert tried == [(3, 4, 1), (5, 6, 1), (3, 4, 2), (5, 6, 2)]
    with pytest.raises(AssertionError) as failure:
        small(limit=7)
    assert str(failure.value) == "factor=2, one=5, other=6"
    assert "assert (5 * 2) < 7" in str(failure.value.__cause__)
    tried.clear()
    monkeypatch.setenv("TEST_ROW", str(failure.value))
    small(limit=11)
    assert tried == [(5, 6, 2)]
    monkeypatch.setenv("TEST_ROW", "factor=2, one=5, other=66")
    with pytest.raises(AssertionError, match="factor=2") as failure:
        small(limit=11)
    assert "no row of this test is in TEST_ROW=factor=2, one=5, other=66" in str(failure.value.__cause__)


def not_raised():
    with pytest.raises(ValueError, match="never"):
        pass


@pytest.mark.parametrize("fails", [not_raised, lambda: pytest.fail("as a timeout does"), lambda: {}["gone"]])
def test_whatever_fails_has_the_name_of_its_value(fails):
    @each("value", [1, 2])
    def small(value):
        if value == 2:
            fails()

    with pytest.raises(AssertionError) as failure:
        small()
    assert str(failure.value) == "value=2"


def test_a_function_has_the_number_of_its_case_for_a_name():
    @each(("change", "least"), [(abs, 0), (lambda value: value, 0), (lambda value: -value, 1)])
    def small(change, least):
        assert change(2) >= least

    with pytest.raises(AssertionError) as failure:
        small()
    assert str(failure.value) == "least=1, case 3 of 3"


def test_values_that_are_skipped_end_no_loop_unless_all_are():
    tried = []

    @each("value", [1, 2])
    def odd(value, most):
        if value > most:
            pytest.skip("too large")
        tried.append(value)

    odd(most=1)
    assert tried == [1]
    with pytest.raises(pytest.skip.Exception):
        odd(most=0)


def test_each_round_draws_anew_and_a_loop_without_values_is_refused():
    drawn = []
    each("count", [1, 1])(lambda count: drawn.append(torch.rand(count)[0].item()))()
    torch.manual_seed(0)
    assert drawn == [torch.rand(1).item()] * 2
    with pytest.raises(AssertionError, match="no values of value"):
        each("value", [])
    with pytest.raises(pytest.xfail.Exception, match="known"):
        each("value", [1, 2])(lambda value: pytest.xfail("known"))()
