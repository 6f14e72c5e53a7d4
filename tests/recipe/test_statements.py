"""Parsing of the lines under ``expect``, and rejection of all other text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import each

from mptrain.recipe.statements import Names, Quantity, StatementError, in_groups, read_statement


def test_a_difference_between_arms_has_two_sides_and_an_amount():
    found = read_statement("s2^0.top1 < fp32.top1 by 0.5")
    assert found.left == Quantity("s2^0", "top1")
    assert found.right == Quantity("fp32", "top1")
    assert (found.relation, found.amount, found.is_ratio) == ("<", 0.5, False)


@each(
    ("text", "value"),
    [
        ("2^24", 2.0**24),
        ("2^-24", 2.0**-24),
        ("-2^3", -8.0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1e-3", 1e-3),
        ("-7", -7.0),
        ("inf", math.inf),
        ("-inf", -math.inf),
    ],
)
def test_numbers_are_written_as_people_write_them(text, value):
    assert read_statement(f"a.loss > {text}").right == value


def test_a_number_on_the_left_changes_sides():
    found = read_statement("0.95 < a.skip_rate")
    assert (found.left, found.relation, found.right) == (Quantity("a", "skip_rate"), ">", 0.95)


def test_an_x_makes_the_amount_a_factor():
    found = read_statement("amp.terms_per_second > fp32.terms_per_second by 1.5x")
    assert (found.amount, found.is_ratio) == (1.5, True)


def test_blanks_do_not_matter():
    assert read_statement(" a.top1=b.top1\n  within   2^-5 ") == read_statement("a.top1=b.top1 within 2^-5")
    assert read_statement("a.top1=b.top1 within 2^-5").amount == 2.0**-5


@each(
    ("text", "says"),
    [
        ("a.top1", "exactly one <, > or ="),
        ("", "exactly one <, > or ="),
        ("a.top1 <= b.top1", "exactly one <, > or ="),
        ("a.top1 == b.top1", "exactly one <, > or ="),
        ("a < b.top1", "'a' is neither ARM.MEASURE nor a number"),
        ("1 < 2", "both sides of the comparison are numbers"),
        ("a.top1 < a.top1", "the same measure of the same arm"),
        ("a.top1 < b.top1 within 0.5", "'<' must be used with 'by'"),
        ("a.top1 = b.top1 by 0.5", "'=' must be used with 'within'"),
        ("a.top1 < b.top1 by much", "'much' is not an amount"),
        ("a.top1 < b.top1 by -0.5", "'-0.5' is not an amount"),
        ("a.top1 < b.top1 by inf", "'inf' is not an amount"),
        ("a.top1 < b.top1 by 0.5x", "'0.5x' is not an amount"),
        ("a.top1 < b.top1 by 1 by 2", "'1 by 2' is not an amount"),
        ("a.top1 by 2 < b.top1", "an amount must follow by or within"),
        ("a.top1 < 2^99999", "cannot be represented as a float"),
        ("a.top1 < 0^-1", "cannot be represented as a float"),
        ("a/b/c.top1 < 1", "neither ARM.MEASURE"),
        ("a.top1 < __import__('os').x", "neither ARM.MEASURE"),
    ],
)
def test_what_is_no_statement_is_refused_and_says_why(text, says):
    with pytest.raises(StatementError, match=says.replace("^", r"\^").replace("(", r"\(")) as caught:
        read_statement(text)
    assert caught.value.hint


@given(st.text(max_size=60))
def test_any_text_is_a_statement_or_refused(text):
    try:
        found = read_statement(text)
    except StatementError:
        return
    assert found.relation in "<>="


@given(st.text(alphabet="ab.<>= 0129^-+einfxbywth", max_size=40))
def test_text_of_the_same_letters_is_a_statement_or_refused(text):
    try:
        found = read_statement(text)
    except StatementError:
        return
    assert isinstance(found.left, Quantity)


FLAT = Names((), ("fp32", "s2^0"), ("sum",))
GROUPED = Names(("sgd", "adam"), ("fp32", "pure"), ("sum",))


def test_a_statement_about_arms_holds_in_each_group():
    found = in_groups(read_statement("pure.top1 < fp32.top1"), GROUPED)
    assert [(group, str(one.left), str(one.right)) for group, one in found] == [
        ("sgd", "sgd/pure.top1", "sgd/fp32.top1"),
        ("adam", "adam/pure.top1", "adam/fp32.top1"),
    ]


def test_arithmetic_belongs_to_no_group():
    [(group, one)] = in_groups(read_statement("sum.value = 2048 within 0"), GROUPED)
    assert (group, str(one.left)) == ("", "sum.value")
    assert str(in_groups(read_statement("pure.loss > sum.value"), GROUPED)[1][1].right) == "sum.value"


def test_a_group_that_is_named_is_the_only_one():
    [(group, one)] = in_groups(read_statement("sgd/pure.top1 < adam/fp32.top1"), GROUPED)
    assert (group, str(one.right)) == ("", "adam/fp32.top1")


def test_without_groups_a_statement_holds_once():
    assert in_groups(read_statement("s2^0.top1 < fp32.top1"), FLAT) == [("", read_statement("s2^0.top1 < fp32.top1"))]


@pytest.mark.parametrize(
    ("text", "names", "says", "hint"),
    [
        ("s2^1.top1 < fp32.top1", FLAT, "no arm 's2^1'", "did you mean s2^0?"),
        ("sdg/pure.top1 < 1", GROUPED, "no arm 'sdg/pure'", "did you mean sgd/pure?"),
        ("sgd/pure.top1 < fp32.top1", GROUPED, "is named with its group", "name both as GROUP/ARM"),
        ("fp32.loss < inf", FLAT, "cannot be compared with inf", "write ARM.failed = 0"),
    ],
)
def test_arms_that_there_are_not_are_named(text, names, says, hint):
    with pytest.raises(StatementError) as caught:
        in_groups(read_statement(text), names)
    assert says in str(caught.value)
    assert hint in caught.value.hint
