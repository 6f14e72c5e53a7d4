import math

from mptrain.system.words import (
    counted,
    digits,
    duration,
    elided,
    listed,
    metrics,
    moment,
    number,
    plain,
    rate,
    scale_path,
    share,
    signed,
)
from tests.loops import each


@each(
    ("value", "error", "text"),
    [
        (0.91837, 0.0021, "0.9184"),
        (0.91837, 0.3, "0.92"),
        (103.4217, 1.24, "103.4"),
        (0.95717, None, "0.9572"),
        (-1.5, None, "\u22121.500"),
        (1234567.0, None, "1.23e+06"),
        (0.0, None, "0"),
        (math.nan, None, "\u2013"),
        (-math.inf, None, "\u2212∞"),
        (0.5, math.nan, "0.5000"),
        (None, None, "\u2013"),
    ],
)
def test_numbers_have_as_many_decimals_as_their_error_allows(value, error, text):
    assert number(value, error) == text


def test_differences_always_have_a_sign_but_zero():
    assert [signed(value, 0.001) for value in (0.002, -0.002, 0.0)] == ["+0.0020", "\u22120.0020", "0.0000"]


def test_a_small_share_is_not_rounded_to_nothing():
    assert [share(value) for value in (0.0009, 0.22, 0.0, None)] == ["0.09 %", "22 %", "0", "\u2013"]


def test_control_characters_and_marks_of_direction_become_visible():
    assert plain("a\x1b[31m\u202eb\x00\udce9") == "a\\x1b[31m\\u202eb\\x00\\udce9"
    assert plain("two\n lines\t") == "two lines"
    assert plain("two\r\n\tlines\x07", lines=True) == "two\n\tlines\\x07"


def test_a_long_name_keeps_its_beginning_and_its_end():
    assert elided("precision=fp16_static scale=1048576", 20) == "precision=fp…1048576"
    assert len(elided("x" * 5000, 24)) == 24
    assert elided("short", 5) == "short"


def test_a_scale_says_its_way():
    assert scale_path({"first": 128.0, "min": 128.0, "max": 128.0, "last": 128.0}) == "128"
    assert scale_path({"first": 65536.0, "min": 1024.0, "max": 65536.0, "last": 2048.0}) == (
        "2^16 to 2^11, between 2^10 and 2^16"
    )
    assert scale_path({"first": 65536.0, "min": 16384.0, "max": 65536.0, "last": 16384.0}) == "2^16 to 2^14"
    back = {"first": 1024.0, "min": 1024.0, "max": 4096.0, "last": 1024.0}
    assert scale_path(back) == "2^10 to 2^10, between 2^10 and 2^12"
    assert scale_path({"first": 1.0}) == ""


def test_small_words():
    assert [counted(count, "run") for count in (0, 1, 1200)] == ["no runs", "1 run", "1,200 runs"]
    assert [duration(seconds) for seconds in (0, 42, 59.6, 725, 10810, math.nan, -1)] == [
        "0:00", "0:42", "1:00", "12:05", "3:00:10", "\u2013", "\u2013",
    ]  # fmt: skip
    assert moment("2026-01-02T03:04:05.678+00:00") == "2026-01-02 03:04:05 UTC"
    assert moment("yesterday") == "yesterday"


def test_of_a_long_list_the_first_names_and_the_number_of_the_others_are_said():
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
    assert listed([str(name) for name in range(2000)], 1, "; ") == "0; and 1,999 more"


@each(("value", "text"), [(65536.0, "65536"), (1000.0, "1000"), (0.5, "0.5"), (1.0, "1")])
def test_a_scale_with_all_digits(value, text):
    assert digits(value) == text


def test_rates_and_metrics():
    assert [rate(value) for value in (4215.2, 3.14159, None)] == ["4,215", "3.14", "\u2013"]
    assert metrics({"loss": 0.1, "top1": 0.9}) == "top1 0.9000  loss 0.1000"
