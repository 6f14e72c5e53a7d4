import pytest
from loops import each


def test_each_value_is_tried_and_a_failure_names_it():
    tried = []

    @each("factor", [1, 2])
    @each(("one", "other"), [(3, 4), (5, 6)])
    def small(one, other, factor, limit):
        tried.append((one, other, factor))
        assert one * factor < limit

    small(limit=11)
    assert tried == [(3, 4, 1), (5, 6, 1), (3, 4, 2), (5, 6, 2)]
    with pytest.raises(AssertionError, match="factor=2") as failure:
        small(limit=7)
    assert str(failure.value.__cause__) == "one=5, other=6" or str(failure.value.__cause__) == "one=3, other=4"


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


def test_a_loop_without_values_is_refused():
    with pytest.raises(AssertionError, match="no values of value"):
        each("value", [])
