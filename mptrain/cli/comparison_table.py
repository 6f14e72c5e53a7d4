"""Terminal output of a comparison: a table with a row for each arm (all runs of one configuration), then remarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.comparison.configurations import ABSENT, config_differences, flat_settings
from mptrain.config.config_diff import IGNORED
from mptrain.config.value_checks import show
from mptrain.numerics import words
from mptrain.report.page import Bullets, Section, table
from mptrain.runlog import readable_bytes

if TYPE_CHECKING:
    from mptrain.comparison.results import Comparison, RunMeasures


def print_comparison(comparison: Comparison, title: str = "") -> None:
    """Print the table of a comparison with a row per arm, the reason for each verdict, and the checks of fairness.

    An arm is all runs of one configuration, which differ in their seeds.

    Args:
        comparison: The judged comparison.
        title: Heading above the table; empty for none.

    Raises:
        StorageError: Standard output cannot be written.
    """
    from mptrain.report.comparison_blocks import outcome_blocks

    print_blocks(Section(title, tuple(outcome_blocks(comparison))))


def print_side_by_side(runs: Sequence[RunMeasures], reason: str) -> None:
    """Print single runs beside each other, with the settings in which they differ, and no verdict.

    Args:
        runs: Measures of two or more runs.
        reason: Why there is no verdict.

    Raises:
        StorageError: Standard output cannot be written.
    """
    first, *others = runs
    differing = dict.fromkeys(key for run in others for key in config_differences(first.config, run.config, IGNORED))
    metrics = dict.fromkeys(name for run in runs for name in words.metric_order(run.metrics))
    rows = [
        ("ended", [run.status for run in runs]),
        *((key, [show(flat_settings(run.config).get(key, ABSENT)) for run in runs]) for key in differing),
        *((f"{name} on {first.split}", [words.number(run.metrics.get(name)) for run in runs]) for name in metrics),
        ("steps", [f"{run.steps:,}" for run in runs]),
        ("skipped", [f"{run.skipped:,}" for run in runs]),
        (f"{first.term}/s", [words.rate(run.terms_per_second or None) for run in runs]),
        ("peak memory", [readable_bytes(run.peak_memory) if run.peak_memory else words.UNKNOWN for run in runs]),
    ]
    seeds = (
        "single runs: what differs may be chance; to compare, train each arm with several seeds (mptrain help compare)"
    )
    print_blocks(
        table(("", *(run.path for run in runs)), [(name, *cells) for name, cells in rows]),
        Bullets((f"no verdict: {reason}", seeds)),
    )
