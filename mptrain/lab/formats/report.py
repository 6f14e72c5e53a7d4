"""Report of the looks at a network in number formats: a verdict on each, and the layers to keep in FP32.

The verdicts follow from the error of the gradients alone, by bands that cover all values. What networks with such
errors lost in training is measured and described in docs/formats.md; an error between the bands' ends decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import nn
from typing_extensions import override

from mptrain.engine.module_trail import without_wrappers
from mptrain.lab.formats.layers import KeptLayers
from mptrain.lab.formats.look import Coverage, FormatErrors
from mptrain.numerics.quantization import RULES
from mptrain.report.notebook import Shown
from mptrain.report.page import Block, Bullets, Cell, Table, Text, Tone
from mptrain.system.errors import UsageError, did_you_mean
from mptrain.system.words import listed, percent, scale_in_words


class Band(NamedTuple):
    """Range of errors of gradients, up to ``most``, and the verdict on a format with such an error."""

    most: float
    verdict: str
    tone: Tone


#: Bands of the error (`FormatErrors.error`), ascending; the last one has no end. Of 64 trainings (docs/formats.md) the
#: loss grew by .03 nats or more in 1 of 22, 0 of 11, 8 of 16 and 14 of 15.
BANDS = (
    Band(0.13, "no damage expected", "good"),
    Band(0.30, "little or no damage expected", ""),
    Band(0.60, "damage possible", "warn"),
    Band(math.inf, "damage expected", "bad"),
)

#: Share of the FLOPs below which the first sentence says how little was looked at.
MOST_JUDGED = 0.9

#: Number of products and parameters that are named in a sentence.
NAMED = 4


def band_of(errors: FormatErrors) -> Band:
    """Return the band of a format's error; the last one if a gradient is not finite."""
    return next((band for band in BANDS if errors.finite and errors.error <= band.most), BANDS[-1])


@dataclass(frozen=True)
class StepFormats:
    """Formats at one step.

    Attributes:
        step: Number of the step, from 1; None of a loop whose steps are not counted.
        samples: Number of samples in its batch.
        parameters: Number of parameters that were compared.
        compared: Share of the elements of all gradients that were compared.
        nothing: Parameters whose gradients are zero, but for rounding, and were not compared.
        coverage: Products of the step, and the share of their FLOPs that was in a format.
        formats: Errors in each format.
        keep: Layers to keep in FP32, by format; those of the first band are left out. None if not looked for.
    """

    step: int | None
    samples: int
    parameters: int
    compared: float
    nothing: tuple[str, ...]
    coverage: Coverage
    formats: tuple[FormatErrors, ...]
    keep: Mapping[str, KeptLayers] | None


@dataclass(frozen=True, repr=False)
class FormatsReport(Shown):
    """Result of `mptrain.formats`: number formats for the products of a network; ``print`` and notebooks show it.

    Attributes:
        subject: Name of the network.
        steps: The steps that were looked at; the verdicts are those of the last one.
        shared: Other names of modules that share a layer's weight, by name of the layer.
        linear: Qualified names of the modules that are `torch.nn.Linear`, which alone filters let through.
        remarks: How the state before the step was found, one sentence each.
    """

    subject: str
    steps: tuple[StepFormats, ...]
    shared: Mapping[str, tuple[str, ...]]
    linear: frozenset[str] = frozenset()
    remarks: tuple[str, ...] = ()

    @property
    def last(self) -> StepFormats:
        """The last step that was looked at."""
        return self.steps[-1]

    def verdict(self, name: str) -> str:
        """Return the verdict on a format in words; UsageError if it was not looked at."""
        return band_of(self._errors(name)).verdict

    def keep(self, name: str) -> tuple[str, ...]:
        """Return the qualified names of the modules to keep in FP32 or BF16 for a format; empty for none.

        Raises UsageError if the format was not looked at, or its layers were not looked for and it may need some.
        """
        if self.last.keep is None:
            if band_of(self._errors(name)) == BANDS[0]:
                return ()
            raise UsageError(f"the layers to keep in FP32 for {name} were not looked for", "give keep=0.2")
        self._errors(name)
        return self.last.keep[name].modules if name in self.last.keep else ()

    def filter(self, name: str) -> LinearFilter:
        """Return a filter for torchao: whether a linear layer, by its qualified name, is to be in a format.

        It is the ``filter_fn`` of ``torchao.quantization.quantize_`` and the ``module_filter_fn`` of
        ``torchao.float8.convert_to_float8_training``.
        """
        return LinearFilter(frozenset(each for kept in self.keep(name) for each in (kept, *self.shared.get(kept, ()))))

    def _errors(self, name: str) -> FormatErrors:
        errors = next((errors for errors in self.last.formats if errors.name == name), None)
        if errors is None:
            known = [errors.name for errors in self.last.formats]
            raise UsageError(f"{name} was not looked at", did_you_mean(name, known) or f"it was: {', '.join(known)}")
        return errors

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        verdicts = {errors.name: self.verdict(errors.name) for errors in self.last.formats}
        said = {"result": self.sentences(), "notes": self.notes()}
        steps = [asdict(step) for step in self.steps]
        return {"subject": self.subject, **said, "verdicts": verdicts, "steps": steps}

    def sentences(self) -> tuple[str, ...]:
        """Return the result in sentences; the first one says how much was looked at if that is little."""
        last = self.last
        groups = {band.verdict: [errors.name for errors in last.formats if band_of(errors) == band] for band in BANDS}
        named = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in groups.items() if names)
        result = f"{self.subject}{_at(last)}: {named}"
        judged, unknown = last.coverage.judged, last.coverage.unknown
        gaps = [
            f"only {percent(judged, 1)} of the products' FLOPs were looked at: the rest was not recognised as a layer's"
            if judged < MOST_JUDGED
            else "",
            f"products of unknown size were not looked at: {listed([*unknown], NAMED)}" if unknown else "",
            f"only {percent(last.compared, 1)} of the gradients' elements were compared: the others are zero"
            if last.compared < MOST_JUDGED
            else "",
        ]
        return (*filter(None, gaps), result)

    def notes(self) -> tuple[str, ...]:
        """Return what limits the result, one sentence each."""
        last, number = self.last, len(self.steps)
        others = sorted(last.coverage.others.items(), key=lambda item: -item[1])
        layers = last.coverage.layers
        linear = sum(count for name, count in layers.items() if name.rpartition(".")[0] in self.linear)
        of_linear = linear / sum(layers.values())
        wrong = {errors.name: _worst(errors) for errors in last.formats if band_of(errors) in BANDS[:2]}
        sentences = [
            f"emulated: {'one step' if number == 1 else f'{number} steps'} of {last.samples} samples each, on operands "
            "rounded to the format and multiplied in FP32; it tells the error, not the speed or memory of a GPU, and "
            "says nothing of later steps",
            f"{percent(last.coverage.judged, 1)} of the FLOPs of products that were seen were in a format"
            + (f"; not: {listed([name for name, _ in others], NAMED)}" if others else ""),
            f"not compared, because zero but for rounding in FP32: {listed(last.nothing, NAMED)}"
            if last.nothing
            else "",
            *(
                f"{name}: errors above {percent(BANDS[2].most)} in {listed(names, NAMED)}"
                for name, names in wrong.items()
                if names
            ),
            f"filters for torchao let through torch.nn.Linear alone, {percent(of_linear, 1)} of these FLOPs"
            if last.keep is not None and of_linear < 1
            else "",
            "in trials, keeping the last layer alone in FP32 did as well as keeping the layers named (docs/formats.md)"
            if last.keep
            else "",
            *self.remarks,
        ]
        return tuple(filter(None, sentences))

    @override
    def blocks(self) -> Sequence[Block]:
        first, *more = self.sentences()
        layers = self.layers()
        return (
            Text(first, "warn" if more else ""),
            *map(Text, more),
            self.table(),
            *((layers,) if layers is not None else ()),
            Bullets(self.notes()),
        )

    def table(self) -> Table:
        """Return a table of the formats, with the error at each step that was looked at."""
        rows = []
        for at, errors in enumerate(self.last.formats):
            band = band_of(errors)
            worst = max(errors.parameters, key=lambda name: errors.parameters[name], default="")
            history = [shown(step.formats[at]) for step in self.steps]
            rows.append(
                (
                    Cell(errors.name),
                    *(Cell(text) for text in history[:-1]),
                    Cell(history[-1], band.tone),
                    Cell(percent(errors.zeros)),
                    Cell(scale_in_words(errors.loss_scale) if errors.loss_scale != 1 else ""),
                    Cell(f"{worst} ({percent(errors.parameters[worst])})" if worst else ""),
                    Cell(band.verdict, band.tone),
                )
            )
        steps = [f"error{_at(step)}" for step in self.steps]
        head = ("format", *steps, "zeros", "loss scale", "largest in", "verdict")
        return Table(head, tuple(rows), frozenset(range(1, len(steps) + 2)), optional=("loss scale", "zeros"))

    def layers(self) -> Table | None:
        """Return a table of the layers to keep in FP32; None if that was not asked for or no format needs any."""
        rows = []
        for name, kept in (self.last.keep or {}).items():
            after = shown(kept.errors[-1]) if kept.errors else ""
            words = ", ".join(kept.modules) or ("no single one helps" if kept.steps else "nothing fits in the budget")
            before = shown(self._errors(name))
            rows.append(tuple(map(Cell, (name, words, percent(kept.share), before, after))))
        head = ("format", "keep in FP32", "of the FLOPs", "error", "then")
        return Table(head, tuple(rows), frozenset({2, 3, 4})) if rows else None


def _worst(errors: FormatErrors) -> list[str]:
    """Return the parameters with an error beyond the last but one band, the largest first."""
    beyond = [name for name, error in errors.parameters.items() if error > BANDS[2].most]
    return sorted(beyond, key=lambda name: -errors.parameters[name])


def _at(step: StepFormats) -> str:
    return "" if step.step is None else f" at step {step.step:,}"


class LinearFilter(NamedTuple):
    """Filter of torchao: is true for `torch.nn.Linear` modules but those with given qualified names.

    Names of a wrapped or compiled network are those of the network inside.
    """

    kept: frozenset[str]

    def __call__(self, module: nn.Module, name: str) -> bool:
        """Return whether a module, by its qualified name, is to be in a low-precision format."""
        return isinstance(module, nn.Linear) and without_wrappers(name) not in self.kept


def shown(errors: FormatErrors) -> str:
    """Return the error of a format in words."""
    return percent(errors.error) if errors.finite else "not finite"


def require_formats(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of formats without repetitions; UsageError if one is unknown."""
    for name in names:
        if name not in RULES:
            close = did_you_mean(name, RULES)
            raise UsageError(
                f"unknown format {name}", f"did you mean {close}?" if close else f"one of {', '.join(RULES)}"
            )
    return tuple(dict.fromkeys(names))
