"""Objects of ``mptrain recommend --json``, ``mptrain diagnose --json`` and ``mptrain doctor --json``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import Self

from mptrain.cli.answer import Answer, Data
from mptrain.lab.doctor.machine import Machine
from mptrain.numerics.forecast import ScaleForecast, UnseenTensor
from mptrain.report.forecast_blocks import MeasuredRun
from mptrain.report.html_and_markdown import ReportFiles
from mptrain.report.run_blocks import scale_words
from mptrain.runlog.diagnosis_file import Examination, Fix

if TYPE_CHECKING:
    from mptrain.lab.formats.report import FormatsReport
    from mptrain.lab.pages.loss_scale_pages import Recommendation


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
        unseen: Modules and parameters whose gradients FP16 may have rounded to zero unseen, all-zero ones first. With
            any, no scale is recommended: ``sentence`` has the command of the run to look at next.
        scales: Forecast of every scale from 2^0 to 2^24; empty if none can be forecast.
    """

    sentence: str
    reasons: tuple[str, ...]
    overrides: tuple[str, ...]
    recommended: int | None
    has_range: bool
    lowest: int | None
    top: int | None
    too_few: bool
    unseen: tuple[UnseenTensor, ...]
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
    def written(cls, recommendation: Recommendation, files: ReportFiles) -> Self:
        """Return the data of a recommendation whose report was written."""
        learners = {}
        for sentence, (name, forecast) in zip(
            recommendation.sentences(), recommendation.forecasts.items(), strict=True
        ):
            words = scale_words(recommendation.opened.settings, name if len(recommendation.forecasts) > 1 else "")
            overrides = [] if forecast.recommended is None else f"{words}{2**forecast.recommended}".split()
            learners[name] = LearnerForecast.of(
                forecast, sentence=sentence, reasons=recommendation.reasons(name), overrides=overrides
            )
        paths = {"run": str(recommendation.opened.run.paths.root), "html": str(files.html), "markdown": str(files.md)}
        return cls.of(
            recommendation,
            **paths,
            learners=learners,
            measured=recommendation.measured.kinds if recommendation.measured else {},
        )


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
        """Return the data of a checked data set (`mptrain.lab.doctor.data_check.DataReport`), and of a model."""
        return cls(data=DataSet.of(report, verdict=verdict, classes=classes), model=model)


class FormatErrors(Data):
    """Errors of one step's gradients in a number format.

    Attributes:
        name: Name of the format.
        error: Mean relative error of the parameters' gradients, weighted by their elements, from 0 to 2.
        by_norm: Relative error of all gradients together; null if one is not finite.
        zeros: Share of the elements that became zero.
        loss_scale: Loss scale; 1 for none.
        parameters: Relative error by parameter, from 0 to 2.
    """

    name: str
    error: float
    by_norm: float | None
    zeros: float
    loss_scale: float
    parameters: dict[str, float]


class KeptLayers(Data):
    """Layers to keep in FP32 with a number format.

    Attributes:
        modules: Names of the modules, the most effective first; empty if none within the budget helps.
        share: Their share of the products' FLOPs.
        error: Error of the gradients with them in FP32; null without any.
    """

    modules: tuple[str, ...]
    share: float
    error: float | None


class FormatsStep(Data):
    """Number formats at a step.

    Attributes:
        step: Number of the step, from 1; null if steps are not counted.
        samples: Number of samples in its batch.
        judged: Share of the products' FLOPs that was in a format.
        not_judged: FLOPs of the other products that were seen, by operator and module.
        unknown: Calls of operators whose FLOPs are not known, by operator and module.
        parameters: Number of parameters that were compared.
        compared: Their share of the elements of all gradients.
        nothing: Parameters that were not, because their gradients are zero but for rounding in FP32.
        formats: Errors in each format.
        keep: Layers to keep in FP32, by format; null without ``--keep``.
    """

    step: int | None
    samples: int
    judged: float
    not_judged: dict[str, int]
    unknown: dict[str, int]
    parameters: int
    compared: float
    nothing: tuple[str, ...]
    formats: tuple[FormatErrors, ...]
    keep: dict[str, KeptLayers] | None


class FormatsAnswer(Answer):
    """Object that ``mptrain formats --json`` prints.

    Attributes:
        subject: Name of the network.
        result: The result in sentences; the first one says how much was looked at if that is little.
        verdicts: Verdict by format, from the last step.
        steps: The steps that were looked at.
        notes: What limits the result, one sentence each.
        html: Path of the page; empty if none was written.
    """

    SCHEMA = "mptrain.formats/1"
    subject: str
    result: tuple[str, ...]
    verdicts: dict[str, str]
    steps: tuple[FormatsStep, ...]
    notes: tuple[str, ...]
    html: str

    @classmethod
    def reported(cls, report: FormatsReport, html: str) -> Self:
        """Return the data of a report."""
        steps = []
        for step in report.steps:
            keep = {
                name: KeptLayers(
                    modules=kept.modules, share=kept.share, error=kept.errors[-1].error if kept.errors else None
                )
                for name, kept in (step.keep or {}).items()
            }
            formats = [
                FormatErrors.of(errors, by_norm=errors.by_norm if errors.finite else None) for errors in step.formats
            ]
            of = step.coverage
            steps.append(
                FormatsStep.of(
                    step,
                    judged=of.judged,
                    not_judged=of.others,
                    unknown=of.unknown,
                    formats=formats,
                    keep=None if step.keep is None else keep,
                )
            )
        verdicts = {errors.name: report.verdict(errors.name) for errors in report.last.formats}
        return cls.of(
            report, result=report.sentences(), verdicts=verdicts, steps=steps, notes=report.notes(), html=html
        )
