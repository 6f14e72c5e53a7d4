"""``mptrain compare --logs``: verdicts on the runs of any program, read from the logs that it wrote."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.cli.blocks import print_blocks
from mptrain.cli.command import Outcome
from mptrain.cli.messages import say
from mptrain.report.html_and_markdown import write_page
from mptrain.report.page import Section
from mptrain.runlog.atomic_files import folder_at_once, write_atomically
from mptrain.study.commands.compare import answer
from mptrain.study.comparison.logs.compare_logs import compare
from mptrain.study.pages.certificate_page import certificate_page, outcome_blocks
from mptrain.study.sweep.runner import fresh_place
from mptrain.system.errors import EXIT_OK, UsageError
from mptrain.system.records import as_json

if TYPE_CHECKING:
    from argparse import Namespace


def compare_logged(arguments: Namespace) -> Outcome:
    """Compare arms by the logs of their runs, and write a certificate.

    Args:
        arguments: Parsed command line: ``ARM=LOGS ...``, and options such as ``--metric NAME``.

    Returns:
        The verdicts, with the exit code 0.

    Raises:
        MptrainError: An option is missing or does not fit, or a log cannot be read. Nothing is written then.
    """
    for option in ("jobs", "launcher", "by", "anyway"):
        if getattr(arguments, option):
            raise UsageError(f"--{option} has no effect on --logs", "leave it out")
    arms: dict[str, list[str]] = {}
    for word in arguments.overrides:
        name, _, pattern = word.partition("=")
        arms.setdefault(name, []).append(pattern)
    if arguments.words or not arms:
        what = f"{arguments.words[0]} has no arm" if arguments.words else "compare --logs needs arms"
        raise UsageError(what, "write for example mptrain compare --logs 'bf16=a/*.csv' 'fp8=b/*.csv' --metric loss")
    if not arguments.metric:
        raise UsageError("compare --logs needs --metric", "name a column of the logs: --metric loss")
    if bad := next((word for word in arguments.where if "=" not in word), None):
        raise UsageError(f"--where {bad} has no value", f"write --where {bad}=VALUE")
    found = compare(
        logs=arms,
        metric=arguments.metric,
        margin=arguments.margin,
        target=arguments.target,
        not_inferior=bool(arguments.not_inferior),
        at=arguments.at or "last",
        pair=bool(arguments.pair),
        looks=arguments.looks or 1,
        better=arguments.better,
        reference=arguments.reference,
        where=dict(word.split("=", 1) for word in arguments.where),
        pattern=arguments.pattern or "",
    )
    folder = fresh_place(Path("outputs"), "comparisons")
    page = folder / "certificate.html"
    with folder_at_once(folder) as draft:  # after judging: a refused one leaves no folder
        write_page(certificate_page(found), draft, draft / page.name, draft / "certificate.md")
        write_atomically(draft / "certificate.json", json.dumps(json.loads(as_json(asdict(found))), indent=1) + "\n")

    def display() -> None:
        print_blocks(Section("", tuple(outcome_blocks(found))))
        say(f"\ncertificate={page}")

    data = {"logs": found, "folder": str(folder), "html": str(page)}
    return Outcome(EXIT_OK, display, lambda: answer(data))
