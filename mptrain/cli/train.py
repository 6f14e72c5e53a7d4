"""Training, resuming and evaluating a run from the command line: output before and after it, and exit codes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mptrain import __version__
from mptrain.cli import command
from mptrain.cli.display import PlainLines
from mptrain.cli.messages import print_rows, say, supports_colour, warn
from mptrain.config.compose import allow_argument, allowed_packages, search_path
from mptrain.parallel.torchrun import torchrun_command
from mptrain.precision.support import unaligned_in_words
from mptrain.run.attempt import RunInfo, RunOutcome
from mptrain.run.describe import describe_parts
from mptrain.run.evaluation import Evaluation, evaluate_run
from mptrain.run.resume import launch
from mptrain.run.resume import resume as resume_run
from mptrain.runlog.atomic_files import readable_bytes, write_atomically
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_state import memory_in_words
from mptrain.runlog.strict_json import read_object
from mptrain.system import words as words
from mptrain.system.errors import EXIT_OK
from mptrain.system.records import EventRecord, Record

if TYPE_CHECKING:
    from mptrain.cli.answer import Answer
    from mptrain.config.schema import Config
    from mptrain.engine.options import LogOptions
    from mptrain.run.evaluation import ByClass
    from mptrain.runlog.record_writer import Sink


def train(config: Config, sinks: Sequence[Sink] = ()) -> int:
    """Train one configuration, with a display of its progress and a summary at the end.

    Args:
        config: Validated configuration.
        sinks: Sinks that receive the run's records in addition to the display.

    Returns:
        The exit code 0.

    Raises:
        MptrainError: The run ends early for any reason; the run directory records it too.
    """
    return _close(launch(config, lambda info: [*displays(info), *sinks]), config.extensions.allow)


def resume(run: str, overrides: Sequence[str]) -> int:
    """Resume training a run from its last checkpoint, with a display of its progress and a summary at the end.

    Args:
        run: The run directory, or ``last`` for the run that was started last.
        overrides: Changes of the run's configuration that apply from now on.

    Returns:
        The exit code 0.

    Raises:
        MptrainError: The run cannot be resumed, or ends early for any reason.
    """
    return _close(resume_run(run, overrides, displays), allowed_packages(overrides))


def evaluate(
    run: str, overrides: Sequence[str], which: str = "last", *, average: bool = True, by_class: bool = False
) -> command.Outcome:
    """Evaluate a checkpoint of a run on its validation and test data; return its metrics with confidence intervals.

    Args:
        run: The run directory, or ``last`` for the run that was started last.
        overrides: Overrides for the evaluation, such as ``precision.eval=fp32`` or ``device=cpu``.
        which: Checkpoint to evaluate, ``last`` or ``best``.
        average: Whether to evaluate the averaged weights, if the run has them.
        by_class: Whether to write a page of a classifier's answers by class into the run's directory.

    Raises:
        MptrainError: The run has no usable checkpoint, or its data or device is missing.
    """
    evaluation = evaluate_run(run, overrides, which, average=average, by_classes=by_class)

    per_class = evaluation.by_class

    def show() -> None:
        _say_evaluation(evaluation, which)  # first, because the page may not be writable
        if per_class:
            from mptrain.cli.blocks import print_blocks
            from mptrain.report.run_page import class_table

            page = _write_by_class(evaluation.root, per_class)
            print_blocks(class_table(per_class.class_names, per_class.confusion))
            say(f"by_class={page}")

    def data() -> Answer:
        from mptrain.cli.answer import EvalAnswer

        page = _write_by_class(evaluation.root, per_class) if per_class else None
        return EvalAnswer.evaluated(evaluation, which, page)

    return command.Outcome(EXIT_OK, show, data)


def _write_by_class(root: Path, by_class: ByClass) -> Path:
    from mptrain.report.html_and_markdown import write_page
    from mptrain.report.run_page import by_class_page

    mistakes = [
        (mistake.sample, mistake.true, mistake.predicted, mistake.probability, mistake.text)
        for mistake in by_class.mistakes
    ]
    page = by_class_page(
        root.name,
        by_class.split,
        by_class.class_names,
        by_class.confusion,
        by_class.not_finite,
        mistakes,
        by_class.pictures,
    )
    if by_class.pictures:
        write_atomically(root / "by-class-mistakes.png", by_class.pictures, durable=False)
    return write_page(page, root, root / "by-class.html", root / "by-class.md").html


def _say_evaluation(evaluation: Evaluation, which: str) -> None:
    weights = "averaged" if evaluation.averaged else "raw"
    if sys.stdout.isatty():
        _print_evaluation(evaluation, which, weights)
        return
    lines = [f"run={evaluation.root} checkpoint={which} step={evaluation.step} weights={weights}"]
    lines += [f"note={note}" for note in evaluation.notes]
    for record in evaluation.records:
        metrics = " ".join(f"{name}={value:.6g}" for name, value in record.metrics.items())
        reach = (f" {name}_95={low:.6g},{high:.6g}" for name, (low, high) in record.intervals.items())
        lines.append(f"split={record.split} samples={record.samples} {metrics}{''.join(reach)}")
    for line in lines:
        say(line)


def _print_evaluation(evaluation: Evaluation, which: str, weights: str) -> None:
    """Print an evaluation for a reader: the checkpoint, then each split with its metrics and their intervals."""
    rows = [("checkpoint", f"{which}, step {evaluation.step:,}, {weights} weights")]
    rows += [("note", note) for note in evaluation.notes]
    for record in evaluation.records:
        for name in words.metric_order(record.metrics):
            low, high = record.intervals.get(name, (None, None))
            reach = f", 95 % CI {low:.4f} to {high:.4f}" if low is not None else ""
            rows.append((f"{record.split} {name}", f"{record.metrics[name]:.4f}{reach}"))
        rows.append((f"{record.split} samples", f"{record.samples:,}"))
    print_rows(f"evaluated {evaluation.root}", rows)


def displays(info: RunInfo) -> Sequence[Sink]:
    """Print the model, data, precision, scaler, device and length of a run; return its displays."""
    config, parts = info.config, info.parts
    title = f"{config.model_title} {config.precision.name}"
    ranks = f", {spread}, {config.distributed.kind}" if (spread := parts.comm.describe()) else ""
    support = f"; {info.support.reason}" if info.support.reason else ""
    start = f", resuming from {info.from_step:,}" if info.from_step else ""
    rows = [
        *describe_parts(config, parts).items(),
        ("dimensions", unaligned_in_words(parts.model) if parts.policy.half else ""),
        ("device", f"{parts.device}{ranks}{support}"),
        ("steps", f"{info.planned:,}{start}"),
        ("run", str(info.root)),
        *(("note", note) for note in info.notes),
    ]
    print_rows(f"mptrain {__version__}", rows)
    warn(info.warnings)
    return [
        _Remarks(),
        make_display(config.log, sys.stdout, title=title, term=parts.task.term),
    ]


def make_display(log: LogOptions, stream: IO[str], title: str = "", term: str = "samples") -> Sink:
    """Create the sink that displays a training run: a live panel on a terminal, else ``key=value`` lines.

    Args:
        log: Options that set how often lines are printed.
        stream: Output stream. A terminal gets the live panel unless ``TERM=dumb``; NO_COLOR disables its colours.
        title: Name of the model and precision for the panel's frame.
        term: Plural noun for the terms of the loss, in which throughput is counted.
    """
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        from mptrain.cli.panel import LivePanel

        return LivePanel(stream, title, colours=supports_colour(stream))
    return PlainLines(stream, log.lines, term)


class _Remarks:
    """Sink that prints the warnings of a run as they occur, and the memory that was counted before its first step."""

    def take(self, record: Record) -> None:
        if isinstance(record, EventRecord) and record.kind == "warning":
            warn([record.fields["message"]])
        elif isinstance(record, EventRecord) and record.kind == "memory":
            print_rows("counted before training", [("memory", memory_in_words(record.fields))])

    def close(self) -> None:
        """Do nothing; everything is already printed."""


def _close(outcome: RunOutcome, packages: Sequence[str]) -> int:
    if outcome.already_done:
        say(f"{outcome.root} is already done")
    resume = torchrun_command("mptrain resume")
    print_closing(outcome.root, outcome.summary, resume, allow_argument(packages), search_path(packages))
    return EXIT_OK


def print_closing(
    run: Path, summary: Mapping[str, Any], resume: str = "mptrain resume", trust: str = "", path: str = ""
) -> None:
    """Print the outcome of a finished run, and the commands that report, evaluate, export or resume it.

    Args:
        run: Run directory.
        summary: Content of its ``summary.json``.
        resume: Command that resumes the run on the same number of ranks.
        trust: Suffix that allows the run's own code in these commands, with a leading space (see
            `mptrain.config.compose`).
        path: Prefix that lets these commands find it, with a trailing space.
    """
    rows = []
    metric, name, split = summary.get("metric"), summary.get("metric_name") or "metric", summary.get("metric_split", "")
    metrics: Mapping[str, float] = summary.get(split) or {}
    steps, planned = summary.get("steps", 0), summary.get("planned_steps", 0)
    if metric is not None:
        interval = (summary.get("intervals") or {}).get(name)
        reach = (
            f", 95 % CI over {split or 'evaluated'} samples {interval[0]:.4f} to {interval[1]:.4f}" if interval else ""
        )
        rows.append((name, f"{metric:.4f} on {split or 'the last evaluation'}{reach}"))
        rows.append(("also", words.metrics({other: value for other, value in metrics.items() if other != name})))
    elif metrics:
        rows.append((split, words.metrics(metrics)))
    if summary.get("best_val") is not None:
        rows.append(("best", f"{summary['best_val']:.4f} on val"))
    if early := summary.get("stopped_early"):
        rows.append(("stopped", f"early: {early}"))
    elif _ran_out_of_time(summary):
        minutes = f"train.max_minutes={summary['max_minutes']:g}"
        rows.append(("stopped", f"{minutes} reached after {steps:,} of {planned:,} steps"))
    learners = summary.get("learners") or {}
    for learner, counts in learners.items():
        updates = counts["updates"]
        whose = f"{learner}: " if len(learners) > 1 else ""
        done = f"{steps:,} attempted, {words.counted(updates, 'update')}, {_skipped(counts)}"
        rows += [("steps", f"{whose}{done}"), ("loss scale", f"{whose}{words.scale_path(counts['scale'])}")]
    speed = f"{words.rate(summary.get('terms_per_second', 0.0))} {summary.get('term', 'samples')}/s"
    peak, samples, quoted = summary.get("peak_memory"), RunPaths(run).samples, shlex.quote(str(run))
    rows += [
        ("speed", f"{speed}, {words.duration(summary.get('train_seconds', 0.0))} of training"),
        ("memory", f"{readable_bytes(peak)} peak" if peak else ""),
        ("run", str(run)),
        ("samples", str(samples) if samples.is_dir() else ""),
        ("report", f"mptrain report {quoted}"),
        ("evaluate", f"{path}mptrain eval {quoted}{trust}" if metric is not None or metrics else ""),
        ("predict", _prediction(run, f"{path}mptrain predict {quoted} FILE{trust}")),
        ("export", f"{path}mptrain export {quoted}{trust}"),
        ("resume", f"{path}{resume} {quoted} {' '.join(_longer(summary))}{trust}"),
    ]
    print_rows("done", rows)


def _prediction(run: Path, command: str) -> str:
    """Return the command, or for tensors the call, that predicts; empty if nothing says how new inputs are read."""
    inputs = read_object(RunPaths(run).data, missing_ok=True).get("inputs")
    return f"mptrain.open_run({str(run)!r}).predict(tensor)" if inputs == "tensors" else command if inputs else ""


def _ran_out_of_time(summary: Mapping[str, Any]) -> bool:
    return summary.get("max_minutes") is not None and summary.get("steps", 0) < summary.get("planned_steps", 0)


def _longer(summary: Mapping[str, Any]) -> list[str]:
    """Return the overrides that double the limits that ended the run, or disable early stopping."""
    if summary.get("stopped_early"):
        return ["train.early_stopping=null"]
    longer = []
    if _ran_out_of_time(summary):
        longer.append(f"train.max_minutes={2 * (summary['max_minutes'] or 1):g}")
    if (most := summary.get("max_steps")) and summary.get("steps", 0) >= most:
        longer.append(f"train.max_steps={2 * most}")
    done, planned = summary.get("epochs", 0), summary.get("planned_epochs")
    if not longer or (planned and done >= planned):
        longer.append(f"train.epochs={2 * max(planned or done, 1)}")
    return longer


def _skipped(learner: Mapping[str, Any]) -> str:
    kinds = ", ".join(f"{count} {phase}" for phase, count in learner["overflows"].items() if count)
    if not learner["skipped"] and not kinds:
        return "none skipped"
    share = words.share(learner["skip_rate"])
    return f"{learner['skipped']:,} skipped ({share})" + (f"; overflows: {kinds}" if kinds else "")
