"""Evaluation of a saved run, also on another device, in another precision mode or by class, and its export."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from mptrain.config.compose import reload
from mptrain.config.config_diff import describe_change, diff
from mptrain.config.schema import Config
from mptrain.config.targets import Given
from mptrain.engine.checkpointing import load_weights, require_same_labels, require_same_schema
from mptrain.engine.evaluate import evaluate, measuring
from mptrain.engine.parts import Parts
from mptrain.engine.weights_io import has_averages, in_dtype, is_weight, plain_weights, weights_file
from mptrain.precision.apply import count_out_of_range, describe_clamped
from mptrain.report.notebook import Shown, dataframe
from mptrain.report.page import Block, Text
from mptrain.run.build.parts import build
from mptrain.run.build.workload import build_dataset
from mptrain.run.consistency import changed_code, changed_evaluation_data, require_same_units, trained_on
from mptrain.run.network_export import ExportedNetwork, export_network
from mptrain.run.new_inputs import open_new_inputs
from mptrain.runlog.atomic_files import storage_errors, write_together
from mptrain.runlog.checkpoints import CheckpointStore, LoadedCheckpoint
from mptrain.runlog.directory import find_run, require_target
from mptrain.runlog.record_writer import beside, read_trained
from mptrain.runlog.strict_json import indented_json, read_object
from mptrain.system.errors import DataError, UsageError, either
from mptrain.system.process_state import settings_restored
from mptrain.system.records import EvalRecord
from mptrain.system.words import elided, number
from mptrain.workloads.base.dataset import Dataset
from mptrain.workloads.base.datasets.from_python import PATH as FROM_PYTHON

if TYPE_CHECKING:
    from mptrain.report.plotting import Drawing

#: Mistakes that are kept, and the width and height in pixels of a picture of one.
MOST, _SIDE, _LINE = 24, 112, 14


@dataclass(frozen=True)
class Mistake:
    """Sample that a classifier got wrong: what it is, and the class and probability that the network gave it."""

    sample: str
    true: str
    predicted: str
    probability: float
    text: str = ""


@dataclass(frozen=True, repr=False)
class ByClass(Shown):
    """Answers of a classifier by class, which Python and notebooks show as their confusion matrix.

    Attributes:
        split: Name of the split.
        class_names: Names of the C classes.
        confusion: Numbers of samples by true class and class that the network said, C rows of C; samples with an output
            that is not finite are missing.
        not_finite: Number of these.
        mistakes: The most certain mistakes, the most certain first.
        pictures: Those whose samples are pictures, as a PNG file; empty for other data.
    """

    split: str
    class_names: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    not_finite: int
    mistakes: tuple[Mistake, ...]
    pictures: bytes

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """The confusion matrix: rows are true classes, and columns the classes that the network said."""
        return self.confusion

    @override
    def blocks(self) -> Sequence[Block]:
        from mptrain.report.run_page import confusion_blocks

        return confusion_blocks(self.split, self.class_names, self.confusion, self.not_finite)

    def to_dataframe(self) -> Any:
        """Return the confusion matrix as a `pandas.DataFrame`: rows are true classes, columns those that were said.

        Raises:
            EnvironmentRefused: pandas is not installed.
        """
        frame = dataframe(self.confusion, index=self.class_names, columns=self.class_names)
        return frame.rename_axis(index="is", columns="said")

    def plot(self) -> Drawing:
        """Return the confusion matrix as a figure, which a notebook shows: shares of each true class, and counts."""
        from mptrain.report.run_page import confusion_figure

        title = "\n".join(block.text for block in self.blocks() if isinstance(block, Text))
        return confusion_figure(self.class_names, self.confusion, title)


def by_class(parts: Parts, split: str, *, average: bool) -> ByClass:
    """Measure the answers by class on a split; UsageError is raised if the run does not classify samples."""
    names = tuple(map(str, parts.dataset.facts().get("class_names", ())))
    numbers = {name: index for index, name in enumerate(names)}
    if "top1" not in parts.task.shares or len(names) < 2:
        raise UsageError("a confusion matrix is for classification: this task gives samples no classes", "leave it out")
    loader = parts.loaders[split]
    confusion = np.zeros((len(names), len(names)), dtype=np.int64)
    wrong: list[tuple[float, int, int, int]] = []
    not_finite = 0
    order = loader.order(0).tolist()
    with measuring(parts, average=average) as (model, prepare, autocast):
        for batch_index, batch in enumerate(loader.batches(epoch=0)):
            asked = order[batch_index * loader.batch_size : (batch_index + 1) * loader.batch_size]
            prepared = prepare(batch)
            with autocast:
                answers = parts.task.predict(model, prepared)
            known = asked if len(asked) == batch.samples else itertools.repeat(-1)  # unusable samples are left out
            for index, true, answer in zip(known, batch.targets.tolist(), answers, strict=False):
                if answer["class"] is None:
                    not_finite += 1
                    continue
                if (predicted := numbers.get(answer["class"], -1)) < 0:
                    what = f"the network says class {answer['class']}, and the data have {len(names)} classes"
                    raise UsageError(what, "give its last layer num_classes outputs, and train it again")
                confusion[true, predicted] += 1
                if predicted != true and index >= 0:
                    wrong.append((answer["probability"], index, true, predicted))
    wrong.sort(reverse=True)
    shown = wrong[:MOST]
    samples = [loader.split.fetch([index], 0, 0).inputs[0] for _, index, _, _ in shown]
    text_of: Callable[[Tensor], str] = getattr(parts.dataset, "text_of", lambda sample: "")
    mistakes = [
        Mistake(_name(parts, split, index), names[true], names[predicted], probability, text_of(sample))
        for (probability, index, true, predicted), sample in zip(shown, samples, strict=True)
    ]
    pictures = samples and all(sample.dim() == 3 and sample.shape[0] in (1, 3) for sample in samples)
    return ByClass(
        split,
        names,
        tuple(tuple(map(int, row)) for row in confusion),
        not_finite,
        tuple(mistakes),
        _grid(samples, mistakes) if pictures else b"",
    )


def _name(parts: Parts, split: str, index: int) -> str:
    paths = getattr(getattr(parts.loaders[split].split, "listing", None), "paths", None)
    return paths[index] if paths else f"{split} {index}"


def _grid(samples: list[Tensor], mistakes: list[Mistake]) -> bytes:
    """Return a PNG file with pictures in rows of eight, and below each its true class, and what was said."""
    from PIL import Image, ImageDraw, ImageFont

    columns, high = min(8, len(samples)), _SIDE + 3 * _LINE
    sheet = Image.new("RGB", (columns * (_SIDE + 8), -(-len(samples) // columns) * high), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for index, (sample, mistake) in enumerate(zip(samples, mistakes, strict=True)):
        pixels = sample.float()
        if sample.dtype != torch.uint8:
            pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-6) * 255
        array = pixels.round().byte().expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
        left, upper = index % columns * (_SIDE + 8), index // columns * high
        resampling = Image.Resampling.NEAREST if max(array.shape) < _SIDE else Image.Resampling.BILINEAR
        sheet.paste(Image.fromarray(array).resize((_SIDE, _SIDE), resampling), (left, upper))
        pen.text((left, upper + _SIDE), f"is {elided(mistake.true, 17)}", "black", font)
        caption = f"{elided(mistake.predicted, 11)} {number(mistake.probability)}"
        pen.text((left, upper + _SIDE + _LINE), caption, (180, 40, 0), font)
    output = io.BytesIO()
    sheet.save(output, "PNG")
    return output.getvalue()


#: What a program needs of a run's ``data.json`` to use its exported network: it stands in an ONNX file.
_FOR_USE = ("labels", "preparation", "output_names", "target_mean", "target_std")

#: Keys of other files to evaluate a run on; and those by which an evaluation holds out a part of them, instead of
#: taking all of it as test data.
_PLACES = ("dataset.root", "dataset.path", "dataset.val_path", "dataset.test_path")
_SHARES = ("dataset.val_share", "dataset.val_samples", "dataset.test_share")


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Result of evaluating a checkpoint of a run on its validation and test data.

    Attributes:
        root: The run directory, which is only read.
        step: Training steps attempted before the checkpoint.
        averaged: Whether averaged weights (``train.ema_decay``) were evaluated.
        records: One record of metrics per split.
        notes: Differences in configuration or data between this evaluation and the run, one sentence each.
        by_class: Answers of a classifier by class, if requested.
    """

    root: Path
    step: int
    averaged: bool
    records: tuple[EvalRecord, ...]
    notes: tuple[str, ...]
    by_class: ByClass | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics by name on the last split: the test data, where there are any."""
        return dict(self.records[-1].metrics)

    def __repr__(self) -> str:
        lines = [f"{self.root}, step {self.step:,}", *self.notes]
        for record in self.records:
            metrics = (f"{name} {number(value)}" for name, value in record.metrics.items())
            lines.append(f"{record.split}, {record.samples:,} samples: {', '.join(metrics)}")
        return "\n".join(lines)


@settings_restored()
def evaluate_run(
    run: str,
    overrides: Sequence[str],
    which: str,
    *,
    average: bool,
    by_classes: bool = False,
    given: Mapping[str, Given] = MappingProxyType({}),
    dataset: Dataset | None = None,
) -> Evaluation:
    """Evaluate a checkpoint of a run, ``last`` or ``best``, on the validation and test splits of its data.

    ``run`` is the run directory, or ``last`` for the run that was started last. Overrides change the run's
    configuration, such as ``device=cpu`` or ``precision.eval=fp32``. ``average`` evaluates the average of the weights
    if there is one, and ``by_classes`` also measures the answers of a classifier by class, on the last split. A Python
    program gives parts by group (``given``), and a ``dataset`` to evaluate on in place of the run's.

    Raises:
        MptrainError: There is no usable checkpoint, or data or device are missing.
    """
    directory = find_run(run)
    text = directory.read_config()
    config = reload(text, overrides, given=given)
    store = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep)
    loaded = store.load(cast('Literal["last", "best"]', which))
    keys = {word.partition("=")[0].lstrip("+~") for word in overrides}
    elsewhere = not keys.isdisjoint(_PLACES) and keys.isdisjoint(_SHARES)
    dataset = dataset or (build_dataset(config, read_object(directory.paths.data)) if elsewhere else None)
    parts = built(config, loaded, dataset)
    require_same_units(directory, parts)
    progress = loaded.state["progress"]
    splits = [name for name in ("val", "test") if name in parts.loaders]
    if not splits:
        raise DataError(f"{parts.dataset.name} has neither validation nor test data", "there is nothing to evaluate on")
    step, epoch = progress["step"], progress["epoch"]
    measured = [
        evaluate(parts, parts.loaders[name], name, step, epoch, lambda: False, average=average, intervals=True)
        for name in splits
    ]
    records = tuple(outcome.record for outcome in measured if outcome is not None)
    changes = diff(text, config.yaml)
    notes = [describe_change(*change) for change in changes]
    notes += (*changed_code(directory.root, parts), *trained_on(read_trained(directory.root), parts))
    notes += getattr(dataset, "warnings", ())  # of data that are not the run's
    notes += dict.fromkeys(doubt for outcome in measured if outcome is not None for doubt in outcome.doubts)
    notes += changed_evaluation_data(directory.root, records, [key for key, _, _ in changes])
    return Evaluation(
        root=directory.root,
        step=step,
        averaged=average and bool(parts.averages()) and has_averages(loaded.state),
        records=records,
        notes=tuple(notes),
        by_class=by_class(parts, splits[-1], average=average) if by_classes else None,
    )


def built(config: Config, loaded: LoadedCheckpoint, dataset: Dataset | None = None) -> Parts:
    """Build a saved run to evaluate it, with the weights of a checkpoint; ``dataset`` replaces the configured one."""
    parts, _ = build(config, weights=False, trains=False, dataset=dataset)
    require_same_schema(loaded.state)
    require_same_labels(parts, loaded.state)
    load_weights(parts, loaded.state)
    return parts


Form: TypeAlias = Literal["state_dict", "safetensors", "onnx", "torch_export"]

#: Endings of the names of exported files, the usual one first.
FORMS: dict[Form, tuple[str, ...]] = {
    "state_dict": (".pt", ".pth", ".bin", ".ckpt", ""),
    "safetensors": (".safetensors",),
    "onnx": (".onnx",),
    "torch_export": (".pt2",),
}


@dataclass(frozen=True)
class Export:
    """Result of exporting a run's checkpoint to a file.

    Attributes:
        data: Copy of the run's description of its data (labels, preparation) beside the file; does not exist without.
        path: The exported file.
        form: Its form, one of `FORMS`.
        step: Training steps attempted before the checkpoint.
        averaged: Whether the weights are averages (``train.ema_decay``).
        tensors: Number of tensors.
        network: The network in the file and its check; None if the file has weights alone.
        warnings: Differences between the exported and the trained weights, one sentence each.
    """

    data: Path
    path: Path
    form: Form
    config: Config
    step: int
    averaged: bool
    tensors: int
    bytes: int
    network: ExportedNetwork | None = None
    warnings: tuple[str, ...] = ()


@settings_restored()
def export_run(
    run: str,
    which: Literal["last", "best"] = "last",
    dtype: torch.dtype = torch.float32,
    *,
    average: bool = True,
    form: Form | None = None,
    output: Path | None = None,
    trusted: Sequence[str] = (),
    given: Mapping[str, Given] = MappingProxyType({}),
) -> Export:
    """Write the weights of a checkpoint to a file, or the network with its weights.

    Args:
        run: The run directory, or ``last`` for the run that was started last.
        which: Checkpoint to export, ``last`` or ``best``.
        dtype: Dtype of all floating-point tensors in the file; FP16 saturates at 65504.
        average: Whether to export the average of the weights if there is one.
        form: ``state_dict``, for `torch.load` with ``weights_only=True``, ``safetensors``, ``onnx`` or
            ``torch_export``; None takes that of the ending of ``output``, or ``state_dict``. The last two contain the
            network: the run is built with its data, and the file is checked before it is written (`export_network`).
        output: Target file, replaced if it exists. None writes to a file in the run's ``export`` folder.
        trusted: Overrides of ``extensions.allow``, which name the packages that the configuration may call.
        given: What a Python program gives in place of what the configuration names, by group.

    Raises:
        UsageError: There is no such form, or the name of the file ends in that of another one.
        MptrainError: There is no usable checkpoint, the network cannot be exported, or the file cannot be written.
    """
    form = form_of(output, form)
    directory = find_run(run)
    if output is not None:
        if not output.parent.is_dir():
            what = f"there is no folder {output.parent} for {output.name}"
            raise UsageError(what, "make it, or choose another --output")
        for target in (output, output.with_name(f"{output.name}.json"), beside(output)):
            require_target(target, directory.paths.export)
    text = directory.read_config()
    config = reload(text, trusted, given=given)
    config = replace(config, overrides=tuple(directory.read_overrides()))
    loaded = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep).load(which)
    require_same_schema(loaded.state)
    averaged = average and has_averages(loaded.state)
    trained = plain_weights(loaded.state, average=averaged)
    clamped = {
        name: count
        for name, value in trained.items()
        if is_weight(name, value) and value.is_floating_point() and (count := count_out_of_range(value, dtype))
    }
    if output is None:
        name = f"{which}{'-average' if averaged else ''}-{str(dtype).removeprefix('torch.')}{FORMS[form][0]}"
        output = directory.paths.export / name
    data = output.with_name(f"{output.name}.json")
    card = read_object(directory.paths.data, missing_ok=True)
    network = None
    if form == "onnx" or form == "torch_export":
        absent = config.dataset.path == FROM_PYTHON or config.dataset.arguments.get("path", "") is None
        absent = absent and config.dataset.given is None  # the samples are in a program: others of their shape do
        inputs = open_new_inputs(directory.paths.data, "tensors") if absent else None
        parts = built(reload(text, [*trusted, "precision=fp32", "device=cpu"], given=given), loaded, inputs)
        facts: dict[str, Any] = {name: card[name] for name in _FOR_USE if name in card}
        network = export_network(parts, trained if averaged else {}, dtype, form, facts)
        content = network.content
    else:
        content = weights_file(in_dtype(trained, dtype), output)
    if output.parent == directory.paths.export:
        with storage_errors(output.parent):
            output.parent.mkdir(exist_ok=True)
    files: dict[Path, str | bytes] = {output: content}
    if card:
        files[data] = indented_json(card)
    if directory.root.absolute() not in output.absolute().parents:
        files[beside(output)] = b"".join(sorted(read_trained(directory.root)))
    write_together(files)
    step, warnings = loaded.state["progress"]["step"], (describe_clamped(clamped, dtype),) if clamped else ()
    return Export(data, output, form, config, step, averaged, len(trained), len(content), network, warnings)


def form_of(output: Path | None, form: Form | None) -> Form:
    """Return the form of an exported file that is asked for, or that the ending of its name says; raise UsageError."""
    if form not in (None, *FORMS):
        raise UsageError(f"there is no form {form!r} of exported files", f"choose {either([*FORMS])}")
    if output is None:
        return form or "state_dict"
    if output.is_dir():
        raise UsageError(f"--output {output} is a folder", "write the path of a file")
    allowed: list[Form] = [form] if form else [*FORMS]
    for name in allowed:
        if output.suffix in FORMS[name]:
            return name
    raise UsageError(
        f"--output {output}: {f'--format {form}' if form else 'export'} writes no files that end in '{output.suffix}'",
        f"end the name in {either([ending for name in allowed for ending in FORMS[name] if ending])}",
    )
