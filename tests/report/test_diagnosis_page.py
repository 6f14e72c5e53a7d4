"""The page of a step diagnosis shows the cause, the remedies and the range of every module, and escapes markup."""

from __future__ import annotations

from dataclasses import replace

from mptrain.lab.pages.diagnosis_page import diagnosis_page, write_diagnosis
from mptrain.report.html_and_markdown import html
from mptrain.report.run_blocks import operator_blocks, summary
from mptrain.runlog.diagnosis_file import Examination, ModuleRow, Remedy, ValueRange
from tests.report.policy import without_script

NEAR = ModuleRow(
    "body.0", "Conv2d", 2, "float16", ValueRange(60000.0, 0.6, 0.0, 0, 0), ValueRange(1.0, 0.0, 0.5, 0, 0), ""
)
BROKEN = ModuleRow(
    "<b>x</b>", "Net", 1, "float16", ValueRange(9.0, 0.0, 0.0, 0, 0), ValueRange(8.0, 0.0, 0.0, 3, 0), "backward"
)
LOSS = ModuleRow("(loss)", "", 0, "float32", ValueRange(1e6, 0.0, 0.0, 0, 0), None, "")
OPERATORS = {
    "operators": [
        {"phase": "backward", "operator": "mm", "inputs": "float16", "outputs": "float16", "calls": 3},
        {"phase": "forward", "operator": "exp", "inputs": "float32", "outputs": "float32", "calls": 1},
    ],
    "casts": [{"phase": "forward", "from": "float32", "to": "float16", "calls": 1}],
}
FOUND = Examination(
    subject="outputs/run", learner="generator", step=1234, loss=2.5, loss_scale=65536.0, precision="fp16_static",
    device="cpu", cause="backward", module="<b>x</b>", operator="mm", verdict="only gradients overflow: <script>",
    notes=("a note",), remarks=("a remark",), modules=(NEAR, BROKEN, LOSS), operators=OPERATORS,
    remedies=(
        Remedy(("scaler.scale=8",), "a lower scale", False, "it loses much"), Remedy(("scaler.scale=2",), "keep it", True, "finite"),
    ),
)  # fmt: skip


def test_the_page_goes_from_the_verdict_to_the_operators():
    page = diagnosis_page(FOUND)
    assert page.status.text == "fails in the backward pass alone"
    assert page.lead == "Only gradients overflow: <script>."
    assert [section.title for section in page.sections if section.blocks] == [
        "Step", "Notes", "Fixes tested", "Values by module", "Operator dtypes",
    ]  # fmt: skip
    text = without_script(html(page))
    assert "&lt;script&gt;" in text
    assert "<b>x</b>" not in text
    assert "2^16" in text


def test_a_step_that_is_skipped_as_usual_has_not_failed():
    remedies = (Remedy((), "no change is needed: steps are skipped", True, "finite"),)
    status = diagnosis_page(replace(FOUND, remedies=remedies)).status
    assert (status.text, status.tone) == ("skipped, as usual", "good")
    finite = replace(BROKEN, backward=replace(NEAR.backward, inf=0))
    assert diagnosis_page(replace(FOUND, remedies=remedies, modules=(finite,))).status.tone == "bad"


def modules():
    return diagnosis_page(FOUND).sections[4].blocks[0]


def test_modules_are_in_the_order_of_calls_with_the_break_marked():
    assert [row[0].text for row in modules().rows] == ["body.0", "<b>x</b>", "(loss)"]
    assert [row[-1].text for row in modules().rows] == ["", "first not finite (backward)", ""]
    assert modules().rows[0][1].text == "Conv2d, 2 calls"


def test_numbers_near_the_end_of_fp16_catch_the_eye():
    near, broken, loss = (dict(zip(modules().head, row, strict=True)) for row in modules().rows)
    size, share, subnormal = (near[f"forward {name}"] for name in ("largest", "of 65,504", "below 2^-14"))
    assert (size.text, share.text, share.tone, subnormal.tone) == ("6e+04", "92 %", "warn", "warn")
    assert broken["backward largest"].text == "inf"
    assert (loss["forward of 65,504"].text, loss["backward largest"].text) == ("", "")


def test_a_finite_step_is_good_and_has_nothing_to_try():
    page = diagnosis_page(replace(FOUND, cause="none", remedies=(), notes=()))
    assert (page.status.text, page.status.tone) == ("finite", "good")
    assert "mptrain doctor" in page.lead
    assert "doctor" not in diagnosis_page(FOUND).lead
    assert not page.sections[2].blocks


def test_operators_are_summed_up_and_listed_forward_first():
    assert summary(OPERATORS).startswith("Of 4 operators in one step, 3 returned float16, 1 returned float32; 1 cast")
    _, every = operator_blocks(OPERATORS)
    assert [row[1].text for row in every.blocks[0].rows] == ["exp", "mm", "cast"]
    assert [cell.text for cell in every.blocks[0].rows[2]] == ["forward", "cast", "float32", "float16", "1"]
    assert operator_blocks({}) == []


def test_three_files_are_written_and_replaced(tmp_path):
    for verdict in ("older", FOUND.verdict):
        path = write_diagnosis(tmp_path / "diagnosis", replace(FOUND, verdict=verdict))
    assert sorted(one.name for one in path.parent.iterdir()) == [
        f"step-001234-generator.{ending}" for ending in ("html", "json", "md")
    ]
    assert "older" not in without_script(path.read_text())
