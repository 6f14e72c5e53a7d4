"""Page of a classifier's answers by class: figures of each class, the confusion matrix, and the worst mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mptrain.numerics.words import UNKNOWN, counted, elided, number
from mptrain.report import plotting
from mptrain.report.page import Block, Cell, Page, Picture, Plot, Plots, Text, section, table

#: Classes that a figure of the confusion matrix may have, and confusions that are listed.
_MOST_DRAWN, _MOST_LISTED = 40, 20

Confusion = Sequence[Sequence[int]]
Mistakes = Sequence[tuple[str, str, str, float, str]]


def by_class_page(
    title: str, split: str, names: Sequence[str], confusion: Confusion, not_finite: int, mistakes: Mistakes, png: bytes
) -> Page:
    """Return the page.

    Args:
        title: Name of the run.
        split: Name of the split.
        names: Names of the C classes.
        confusion: Numbers of samples, C rows of the true class with C columns of the class that the network said.
        not_finite: Number of samples with an output that is not finite, which have no class.
        mistakes: Name of the sample, true class, class that was said, its probability, and the sample's text, if any.
        png: Pictures of the mistakes; empty for none.
    """
    total = sum(map(sum, confusion)) + not_finite
    right = sum(row[place] for place, row in enumerate(confusion))
    lead = f"{right:,} of {counted(total, 'sample')} of {split} are right ({right / max(1, total):.2%})."
    lost = f"{counted(not_finite, 'output')} are not finite, and in no class." if not_finite else ""
    shown = [[sample, true, said, number(share), elided(text, 120)] for sample, true, said, share, text in mistakes]
    return Page(
        over="mptrain answers by class",
        title=title,
        status=Cell(""),
        lead=lead,
        sections=(
            section("Classes", *([Text(lost, "bad")] if lost else []), class_table(names, confusion)),
            section("Confusions", _matrix(names, confusion), _confused(names, confusion)),
            section(
                "Most certain mistakes",
                Picture("by-class-mistakes.png", "The mistakes of which the network was most certain.", png)
                if png
                else None,
                table(
                    ("sample", "is", "said", "probability", "text" if any(row[4] for row in shown) else None),
                    shown,
                    (3,),
                ),
            ),
        ),
    )


def class_table(names: Sequence[str], confusion: Confusion) -> Block:
    """Return the table of the classes with the number of samples, precision, recall and F1, the worst recall first."""
    rows = []
    for place, name in enumerate(names):
        samples, said = sum(confusion[place]), sum(row[place] for row in confusion)
        right = confusion[place][place]
        precision = right / said if said else math.nan
        recall = right / samples if samples else math.nan
        f1 = 2 * right / (samples + said) if samples + said else math.nan
        rows.append((recall, [name, f"{samples:,}", *map(_share, (precision, recall, f1))]))
    rows.sort(key=lambda row: math.inf if math.isnan(row[0]) else row[0])
    return table(("class", "samples", "precision", "recall", "F1"), [row for _, row in rows], (1, 2, 3, 4))


def _share(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:.3f}"


def _confused(names: Sequence[str], confusion: Confusion) -> Block:
    found = [
        (count, names[true], names[said])
        for true, row in enumerate(confusion)
        for said, count in enumerate(row)
        if count and true != said
    ]
    found.sort(key=lambda one: -one[0])
    rows = [[true, said, f"{count:,}"] for count, true, said in found[:_MOST_LISTED]]
    note = f"The {_MOST_LISTED} most frequent of {len(found):,}." if len(found) > _MOST_LISTED else ""
    return table(("is", "said", "samples"), rows, (2,), note)


def _matrix(names: Sequence[str], confusion: Confusion) -> Block | None:
    """Return the confusion matrix as a figure, each row as shares of its class; None for too many classes."""
    if len(names) > _MOST_DRAWN:
        return None
    side = max(2.6, 0.24 * len(names) + 1.2)
    with plotting.drawing("confusion", side) as figure:
        (axes,) = figure.panels()
        shares = [[count / max(1, sum(row)) for count in row] for row in confusion]
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.grid(visible=False)
        for true, row in enumerate(confusion):
            for said, count in enumerate(row):
                if count and len(names) <= 20:
                    dark = shares[true][said] > 0.5
                    axes.text(
                        said, true, f"{count:,}", ha="center", va="center", color="white" if dark else "black", size=8
                    )
        plotting.category_y_axis(axes, names)
        plotting.ticks_at(axes.xaxis, range(len(names)), lambda place: elided(names[int(place)], 12))
        axes.tick_params(axis="x", rotation=90 if max(map(len, names)) > 3 else 0, length=0)
        axes.set_xlabel("the network said")
        axes.set_ylabel("true class")
    return Plots((Plot("confusion", "Samples by true class and the class that the network said.", figure.svg),))
