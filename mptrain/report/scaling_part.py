"""The part of a run's report about its loss scales: where they went, which steps overflowed, which updates were skipped."""

from __future__ import annotations

from mptrain.records import MAX_TENSORS
from mptrain.report.history import Offender, Overflows
from mptrain.report.page import Block, Cell, Plot, Table, Text, plots, table
from mptrain.report.run_parts import OpenedRun
from mptrain.report.scale_figures import Panel, loss_scale_figure, skipped_figure
from mptrain.report.wording import counted, elided, scale

#: Parameters that overflowed: rows of the figure, and of the table.
_MOST_ROWS, _MOST_NAMED = 6, 12


def scaling_blocks(opened: OpenedRun) -> list[Block | None]:
    """Scales with their overflows, when updates were skipped, and a table of the overflows."""
    history = opened.history
    if not history.learners:
        return []
    blocks: list[Block | None] = []
    refused = sum(learner.refused for learner in history.learners.values())
    overflows = sum(sum(each.counts.values()) for each in history.overflows.values())
    if not history.scaled and not overflows:
        blocks.append(Text("Losses were not scaled (scale 1 throughout), and no gradient overflowed."))
        return blocks
    panels = [
        Panel(name if len(history.learners) > 1 else "", [learner.loss_scale], _overflows_of(opened, name))
        for name, learner in history.learners.items()
    ]
    offenders = _worst(opened, _MOST_ROWS)
    caption = (
        f"Loss scale over steps, {counted(overflows, 'overflow')}. {_phases_in_words(overflows)}{_named(offenders)}"
    )
    blocks.append(
        plots(
            Plot("loss-scale", caption, loss_scale_figure("loss-scale", panels, offenders)),
            Plot(
                "skipped", f"When updates were skipped: {_skips(refused)}.", skipped_figure("skipped", history.learners)
            )
            if refused
            else None,
        )
    )
    if not refused:
        blocks.append(Text("No update was skipped."))
    blocks += [_offender_table(opened), _overflow_table(opened)]
    return blocks


def _skips(refused: int) -> str:
    return f"{counted(refused, 'update')}, as a share of the steps in each stretch of the run"


def _phases_in_words(overflows: int) -> str:
    if not overflows:
        return ""
    return (
        "Calibrating: the scale descends from its first value. Growth probe: the scale had just grown. Unexpected: neither. "
        "Only the last kind is a reason to worry."
    )


def _worst(opened: OpenedRun, most: int) -> list[tuple[str, Offender]]:
    """The parameters that were named in most overflows, of all learners; with the learner's name where there are several."""
    several = len(opened.history.learners) > 1
    found = [
        (f"{learner}: {name}" if several else name, offender)
        for learner, overflows in opened.history.overflows.items()
        for name, offender in overflows.worst(most)
    ]
    return sorted(found, key=lambda item: -item[1].count)[:most]


def _named(offenders: list[tuple[str, Offender]]) -> str:
    """Where the overflows were, for a caption."""
    if not offenders:
        return ""
    shown = ", ".join(f"{elided(name, 40)} ({offender.count:,})" for name, offender in offenders[:3])
    return f" Below: the parameters whose gradients were not finite, most often {shown}."


def _offender_table(opened: OpenedRun) -> Table | None:
    """The parameters whose gradients were not finite, those that were so most often first."""
    offenders = _worst(opened, _MOST_NAMED)
    if not offenders:
        return None
    everyone = sum(len(overflows.offenders) for overflows in opened.history.overflows.values())
    rows: list[list[Cell | str]] = []
    for name, offender in offenders:
        phases = ", ".join(f"{phase} {marks.count:,}" for phase, marks in offender.marks.items())
        kinds = [f"{offender.kinds.get(kind, 0):,}" for kind in ("inf", "nan")]
        rows.append([name, f"{offender.count:,}", *kinds, phases, f"{offender.first:,}", f"{offender.last:,}"])
    left = everyone - len(rows)
    note = f"{counted(left, 'parameter')} named less often left out. " if left else ""
    note += f"An overflow names {MAX_TENSORS} parameters at most; events.jsonl says of each how many there were."
    head = ("parameter", "overflows", "inf", "NaN", "phases", "first step", "last step")
    return table(head, rows, numeric=(1, 2, 3, 5, 6), note=note)


def _overflows_of(opened: OpenedRun, learner: str) -> list[Overflows]:
    found = opened.history.overflows.get(learner)
    return [found] if found else []


def _overflow_table(opened: OpenedRun) -> Table | None:
    ends, several = opened.history.overflow_rows, len(opened.history.learners) > 1
    if not ends.count:
        return None
    rows: list[list[Cell | str]] = []
    for event in ends.kept():
        tensors, count = event.get("tensors") or [], int(event.get("count") or 0)
        named = ", ".join(f"{name} ({kind})" for name, kind in tensors[:3])
        more = f" and {count - 3:,} more" if count > 3 else ""
        loss = str(event.get("loss", ""))
        rows.append(
            [
                f"{event['step']:,}",
                *([str(event["learner"])] if several else []),
                Cell(str(event["phase"]), "bad" if event["phase"] == "unexpected" else ""),
                scale(event["loss_scale"]),
                Cell(loss, "" if loss == "finite" else "bad"),
                named + more,
            ]
        )
    head = (
        "step",
        *(["learner"] if several else []),
        "phase",
        "loss scale",
        "loss",
        "tensors with inf or NaN gradients",
    )
    note = f"{counted(ends.between, 'overflow')} in between left out; events.jsonl has all." if ends.between else ""
    return table(head, rows, numeric=(0,), note=note)
