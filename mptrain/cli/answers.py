"""Objects that commands print with ``--json``, as pydantic models around the values that the text is made of.

The JSON Schema of each, made from its types and docstrings, is a file in ``schemas/``. A new field keeps the version;
one that is gone, renamed or has another meaning raises it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from mptrain.cli.doctor import Machine
from mptrain.cli.messages import writing
from mptrain.comparison.logs.compare_logs import LogComparison
from mptrain.comparison.results import Comparison, RunMeasures, read_comparisons
from mptrain.numerics.forecast import ScaleForecast
from mptrain.report.recipe_blocks import read_verdict
from mptrain.report.report_files import ReportFiles
from mptrain.report.run_blocks import OpenedRun, open_or_reason, open_with_history, scale_words
from mptrain.report.run_history import Overflows
from mptrain.report.sweep_points import BUCKETS, MeasuredRun, read_points
from mptrain.runlog.diagnosis_file import Examination, Fix
from mptrain.runlog.run_state import RunState
from mptrain.runlog.sweeps import SweepJob, SweepPaths, is_sweep, read_sweep
from mptrain.system.masking import masked
from mptrain.system.records import as_json

if TYPE_CHECKING:
    from mptrain.report.forecast_page import Recommendation
    from mptrain.report.run_list import FoundRun
    from mptrain.run.evaluation import Evaluation


class Data(BaseModel):
    """Part of an object that a command prints with ``--json``."""

    model_config = ConfigDict(from_attributes=True, frozen=True)

    @classmethod
    def of(cls, source: object, **known: Any) -> Self:
        """Return the data with the values given, and all others from the attributes of that name of an object."""
        names = cls.model_fields.keys() - known.keys()
        return cls.model_validate({**{name: getattr(source, name) for name in names}, **known})


class Answer(Data):
    """Object that a command prints with ``--json``; ``SCHEMA`` is its name and version, its field ``schema``."""

    SCHEMA: ClassVar[str]


def print_answer(answer: Answer) -> None:
    """Print an object on standard output as one line of strict JSON, without secrets.

    Raises:
        StorageError: Standard output cannot be written.
    """
    with writing():
        print(as_json({"schema": answer.SCHEMA, **_decodable(masked(answer.model_dump()))}), flush=True)


def _decodable(value: Any) -> Any:
    """Return a value whose texts have escapes in place of lone surrogates (undecodable bytes), which JSON lacks."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_decodable(key): _decodable(item) for key, item in value.items()}
    return [_decodable(item) for item in value] if isinstance(value, (list, tuple)) else value


class Tensor(Data):
    """Overflows of a parameter's gradient.

    Attributes:
        kinds: ``inf`` and ``nan`` to number of overflows.
        first: First step that overflowed there, and ``last`` the last one, counted from 1.
    """

    kinds: dict[str, int]
    first: int
    last: int


class Learner(Data):
    """Records of one learner (a model with its optimizer) of a run.

    Attributes:
        attempts: Number of attempted steps.
        updates: Number of applied updates.
        skipped: Number of skipped updates.
        loss_scale: ``first``, ``min``, ``max`` and ``last`` loss scale; empty without steps.
        overflows: Phase of the loss scaler (calibrating, growth probe, unexpected) to number of overflows.
        tensors: Parameters whose gradients overflowed, by name, the most frequent first.
    """

    attempts: int
    updates: int
    skipped: int
    loss_scale: dict[str, float]
    overflows: dict[str, int]
    tensors: dict[str, Tensor]


class Run(Data):
    """Run as its report shows it.

    Attributes:
        state: Content of ``run.json``: status, reason of the end, hint, command, parts, attempts.
        killed: Whether its status is running although no process works on it.
        watched: Whether another program trained, watched by ``mptrain.watch``.
        steps: Number of attempted steps, skipped ones included.
        learners: Records of each learner by name; ``main`` if there is only one.
        overflows: First and last overflow events, as in ``events.jsonl``, with step, loss scale and tensors.
        events: Unusual events, the first and last ones: step, kind and text.
        notes: Problems when reading the records, one sentence each.
        summary: Content of ``summary.json``: the final metric, throughput and memory; empty while it runs.
    """

    state: RunState
    killed: bool
    watched: bool
    steps: int
    learners: dict[str, Learner]
    overflows: tuple[dict[str, Any], ...]
    events: tuple[tuple[int, str, str], ...]
    notes: tuple[str, ...]
    summary: dict[str, Any]

    @classmethod
    def opened(cls, run: OpenedRun) -> Self:
        """Return the data of a run that was opened for a report."""
        history, learners = run.history, {}
        for name, one in history.learners.items():
            found, path = history.overflows.get(name, Overflows()), one.scale_path()
            named = dict(found.worst(len(found.offenders)))
            learners[name] = Learner.of(
                one, skipped=one.refused, loss_scale=path, overflows=found.counts, tensors=named
            )
        own = {"learners": learners, "killed": run.dead, "watched": run.is_watched, "summary": run.run.summary}
        kept = {"overflows": history.overflow_rows.kept(), "events": history.occurrences.kept()}
        return cls.of(history, state=run.run.state, **own, **kept)


class Point(Data):
    """Point of a sweep or comparison: one run.

    Attributes:
        job: The job that trains it; ``name`` is its run directory below the folder.
        words: Key to value of the overrides in which the points differ.
        problem: Reason why the run cannot be read; empty if there is none.
        metric: Final metric; null if it is not done or not finite.
        skip_rate: Share of skipped updates, 0 to 1; null if no step is recorded.
    """

    job: SweepJob
    words: dict[str, str]
    problem: str
    metric: float | None
    skip_rate: float | None


class Report(Data):
    """Written report of a folder.

    Attributes:
        folder: The folder, to which paths of compared runs are relative.
        kind: Kind of the folder; ``runs`` for one that has only the report of several runs.
        title: Title of the report.
        status: Status in words.
        lead: Main result in one or a few sentences.
        html: Path of the HTML page, and ``markdown`` of the Markdown document.
        run: Records of a run; null for other folders.
        points: Runs of a sweep, comparison or recipe.
        comparisons: Comparisons by the name of their group in a recipe, which is empty for a single one.
        expectations: Content of a recipe's verdict.json; empty without.
    """

    folder: str
    kind: Literal["run", "sweep", "comparison", "recipe", "runs"]
    title: str
    status: str
    lead: str
    html: str
    markdown: str
    run: Run | None
    points: tuple[Point, ...]
    comparisons: dict[str, Comparison]
    expectations: dict[str, Any]

    @classmethod
    def written(cls, folder: Path, files: ReportFiles) -> Self:
        """Return the data of a report; the records are read once more."""
        comparison, page = SweepPaths(folder).comparison, files.page
        kind = page.over.split()[1]
        groups = read_comparisons(comparison) if comparison.exists() else {}
        sweep = read_sweep(folder) if is_sweep(folder) else None
        return cls.of(
            page,
            folder=str(folder),
            kind=kind,
            status=page.status.text,
            html=str(files.html),
            markdown=str(files.md),
            run=None if groups or sweep or kind == "runs" else Run.opened(open_with_history(folder, BUCKETS)),
            points=read_points(sweep, lambda path: open_or_reason(path, BUCKETS)) if sweep else (),
            comparisons=groups,
            expectations=read_verdict(folder).fields,
        )


class ReportAnswer(Answer):
    """Object that ``mptrain report --json`` prints: a report for each folder."""

    SCHEMA = "mptrain.report/1"
    reports: tuple[Report, ...]

    @classmethod
    def written(cls, reports: Mapping[Path, ReportFiles]) -> Self:
        """Return the data of written reports by folder."""
        return cls(reports=tuple(Report.written(folder, files) for folder, files in reports.items()))


class CompareAnswer(Answer):
    """Object that ``mptrain compare --json`` prints.

    Attributes:
        comparison: The comparison; null if single runs cannot be judged.
        folder: Folder with comparison.json and the report, to which paths of runs are relative; empty without one.
        html: Path of the report; empty without one.
        no_verdict: Reason why there is no verdict; empty if there is one.
        runs: The single runs that cannot be judged, with their paths as given.
        differing: Configuration keys in which these differ, to the value of each run.
        logs: The comparison of logs (``--logs``); null for others. ``folder`` has its certificate.
    """

    SCHEMA = "mptrain.compare/1"
    comparison: Comparison | None = None
    folder: str = ""
    html: str = ""
    no_verdict: str = ""
    runs: tuple[RunMeasures, ...] = ()
    differing: dict[str, tuple[str, ...]] = {}
    logs: LogComparison | None = None


class LargestGradient(Data):
    """Largest unscaled gradient of the sampled steps, in the module or parameter ``where``."""

    step: int
    largest: float
    where: str


class LearnerForecast(Data):
    """Static loss scales recommended for a learner. Exponents are those of two.

    Attributes:
        sentence: The recommendation, or the reason for none.
        reasons: Reasons, one sentence each.
        overrides: Overrides that set the recommended scale; empty if there is none.
        recommended: Exponent of that scale; null if there is none.
        has_range: Whether a scale is usable at every step, from the exponent ``lowest`` to ``top``.
        too_few: Whether more histograms or steps are needed before a scale can be recommended.
        scales: Forecast of every scale from 2^0 to 2^24.
    """

    sentence: str
    reasons: tuple[str, ...]
    overrides: tuple[str, ...]
    recommended: int | None
    has_range: bool
    lowest: int | None
    top: int | None
    too_few: bool
    largest: LargestGradient | None
    scales: tuple[ScaleForecast, ...]


class RecommendAnswer(Answer):
    """Object that ``mptrain recommend --json`` prints.

    Attributes:
        run: The run directory.
        learners: Recommendation of each learner by name.
        measured: Results of the sweep by its other varied keys; empty without ``--sweep``.
        unlike: Warning that the sweep differs from the run; empty if it does not.
        notes: Notes about unreadable records and about a run that has not ended.
        html: Path of the HTML page, and ``markdown`` of the Markdown document.
    """

    SCHEMA = "mptrain.recommend/1"
    run: str
    learners: dict[str, LearnerForecast]
    measured: dict[str, tuple[MeasuredRun, ...]]
    unlike: str
    notes: tuple[str, ...]
    html: str
    markdown: str

    @classmethod
    def written(cls, found: Recommendation, files: ReportFiles) -> Self:
        """Return the data of a recommendation whose report was written."""
        learners = {}
        for sentence, (name, one) in zip(found.sentences(), found.forecasts.items(), strict=True):
            words = scale_words(found.opened.settings, name if len(found.forecasts) > 1 else "")
            overrides = [] if one.recommended is None else f"{words}{2**one.recommended}".split()
            learners[name] = LearnerForecast.of(
                one, sentence=sentence, reasons=found.reasons(name), overrides=overrides
            )
        paths = {"run": str(found.opened.run.paths.root), "html": str(files.html), "markdown": str(files.md)}
        return cls.of(found, **paths, learners=learners, measured=found.measured.kinds if found.measured else {})


class DiagnoseAnswer(Answer):
    """Object that ``mptrain diagnose --json`` prints.

    Attributes:
        diagnosis: The diagnosis: the cause, its module and operator, and all remedies tried.
        modules_left_out: Number of modules that it leaves out; 0 with ``--all``.
        fix: The first remedy that helped and can be written as overrides; null if there is none.
        html: Path of the page; empty without a run.
    """

    SCHEMA = "mptrain.diagnose/1"
    diagnosis: Examination
    modules_left_out: int
    fix: Fix | None
    html: str


class Copies(Data):
    """Files with the same pixels, and the splits and classes of each.

    Attributes:
        leak: Whether they are in several splits.
        conflict: Whether they are in several classes.
    """

    names: tuple[str, ...]
    splits: tuple[str, ...]
    labels: tuple[str, ...]
    leak: bool
    conflict: bool


class DataSet(Data):
    """Result of reading the files of a data set.

    Attributes:
        verdict: Number of problems in words.
        stopping: Problem of each file or sample that would stop training.
        hints: Advice on those of ``stopping`` that cannot be skipped.
        skipped: Problem of each file or sample that training would skip.
        remarks: Modification of each file that training would use in modified form.
        problems: Number of groups of copies that leak or conflict.
        copies: Groups of files with the same pixels.
        read: Number of files read, of ``files``.
        shape: Shape of a sample in words.
        labels: Names of the classes by index; empty without.
        samples: Number of samples of each split.
        classes: Number of samples of each class, by split.
        warnings: Warnings about the data.
    """

    verdict: str
    stopping: dict[str, str]
    hints: dict[str, str]
    skipped: dict[str, str]
    remarks: dict[str, str]
    problems: int
    copies: tuple[Copies, ...]
    read: int
    files: int
    shape: str
    labels: tuple[str, ...]
    samples: dict[str, int]
    classes: dict[str, list[int]]
    warnings: tuple[str, ...]


class Finding(Data):
    """Problem of a model in a precision.

    Attributes:
        kind: Kind of problem.
        where: Modules, parameters or buffers; an empty name is the model itself, ``(loss)`` the loss.
        what: Description in one sentence, with its measured value.
        hint: Advice, with the overrides that help.
        keep: Modules to keep in FP32 to fix it; empty if that does not fix it.
        operator: Operator in which it arises; empty if unknown.
        phase: ``forward`` or ``backward``; empty if it arises in none.
    """

    kind: str
    where: tuple[str, ...]
    what: str
    hint: str
    keep: tuple[str, ...]
    operator: str
    phase: str


class ModuleErrors(Data):
    """Gradient errors of a module, relative to the norm of its gradient.

    Attributes:
        name: Name of the module; empty for the model itself.
        fp32: Error in FP32.
        expected: Error that the forward pass in half precision causes.
        best: Error that the backward pass adds at its best loss scale.
        allowed: Largest acceptable error.
        good: Exponents of the usable loss scales.
    """

    name: str
    fp32: float
    expected: float
    best: float
    allowed: float
    good: tuple[int, ...]


class Model(Data):
    """Result of checking the first step of a model in a precision.

    Attributes:
        verdict: Number of problems, and the usable loss scales, in words.
        findings: Problems, causes first; empty if there is none.
        modules: Gradient errors by module; empty if the passes failed.
        usable_exponents: Exponents of the loss scales usable for all modules; empty if none is, or none is judged.
        reference: Dtype of the reference gradients; empty if the passes failed.
        samples: Number of samples of the step.
        notes: Remarks on the check, and on the configured loss scale.
    """

    verdict: str
    findings: tuple[Finding, ...]
    modules: tuple[ModuleErrors, ...]
    usable_exponents: tuple[int, ...]
    reference: str
    samples: int
    notes: tuple[str, ...]


class DoctorAnswer(Answer):
    """Object that ``mptrain doctor --json`` prints; the parts that were not asked for are null.

    Attributes:
        machine: Environment and devices: ``mptrain doctor`` without further words.
        data: The data set.
        model: The model in its precision; null if only the data is checked, or stops training.
    """

    SCHEMA = "mptrain.doctor/1"
    machine: Machine | None = None
    data: DataSet | None = None
    model: Model | None = None

    @classmethod
    def checked(cls, report: object, verdict: str, classes: dict[str, list[int]], model: Model | None = None) -> Self:
        """Return the data of a checked data set (`mptrain.inspection.data_check.DataReport`), and of a model."""
        return cls(data=DataSet.of(report, verdict=verdict, classes=classes), model=model)


class EvaluatedSplit(Data):
    """Metrics of a split.

    Attributes:
        split: ``val`` or ``test``.
        samples: Number of samples.
        metrics: Values by metric name.
        intervals: Lower and upper bound of the 95 % confidence interval over the choice of samples, by metric name.
    """

    split: str
    samples: int
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]


class ClassAnswers(Data):
    """Answers of a classifier by class.

    Attributes:
        split: Name of the split.
        class_names: Names of the C classes.
        confusion: Numbers of samples by true class and class that the network said, C rows of C; samples with an output
            that is not finite are missing.
        not_finite: Number of these.
        page: Path of the page, with the most certain mistakes.
    """

    split: str
    class_names: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    not_finite: int
    page: str


class EvalAnswer(Answer):
    """Object that ``mptrain eval --json`` prints.

    Attributes:
        run: The run directory.
        checkpoint: ``last`` or ``best``.
        step: Training steps attempted before the checkpoint.
        averaged: The averaged weights (``train.ema_decay``) were evaluated.
        splits: Metrics of each split.
        notes: Differences in configuration or data between this evaluation and the run, one sentence each.
        by_class: Answers by class; null without ``--by-class``.
    """

    SCHEMA = "mptrain.eval/1"
    run: str
    checkpoint: Literal["last", "best"]
    step: int
    averaged: bool
    splits: tuple[EvaluatedSplit, ...]
    notes: tuple[str, ...]
    by_class: ClassAnswers | None

    @classmethod
    def evaluated(cls, found: Evaluation, checkpoint: str, page: Path | None) -> Self:
        """Return the data of an evaluation, and of its page by class."""
        by_class = ClassAnswers.of(found.by_class, page=str(page)) if found.by_class else None
        splits = tuple(map(EvaluatedSplit.of, found.records))
        return cls.of(found, run=str(found.root), checkpoint=checkpoint, splits=splits, by_class=by_class)


class ListedRun(Data):
    """Run in a list.

    Attributes:
        path: The run directory.
        status: ``done``, ``failed``, ``preempted``, ``running``, or ``killed`` while running.
        started: Start of its last attempt in UTC, ISO 8601; empty if unknown.
        overrides: Its ``KEY=VALUE`` overrides.
        steps: Number of attempted steps at the end of its last attempt; null if that has not ended.
        metric_name: Name of its final metric; null without one, and ``metric`` its value.
        reason: Reason why it ended; empty if it is done.
    """

    path: str
    status: str
    started: str
    overrides: tuple[str, ...]
    steps: int | None
    metric_name: str | None
    metric: float | None
    reason: str


class RunsAnswer(Answer):
    """Object that ``mptrain runs --json`` prints.

    Attributes:
        runs: Runs below the folder that fit the filters, the newest first or sorted; with ``--prune`` those to remove.
        notes: Runs that cannot be read, and with ``--prune`` those that stay, one sentence each.
        removed: Paths of the runs that ``--prune`` has removed.
    """

    SCHEMA = "mptrain.runs/1"
    runs: tuple[ListedRun, ...]
    notes: tuple[str, ...]
    removed: tuple[str, ...] = ()

    @classmethod
    def found(cls, runs: Sequence[FoundRun], notes: Sequence[str], removed: Sequence[str] = ()) -> Self:
        """Return the data of runs that were found."""
        return cls(runs=tuple(map(ListedRun.of, runs)), notes=tuple(notes), removed=tuple(removed))
