"""Evaluation of a model on a split, and after each epoch, with its records, examples and decisions that follow."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.engine.fingerprints import sample_digests
from mptrain.engine.parts import EarlyStoppingState
from mptrain.engine.sample_metrics import SampleMetrics
from mptrain.engine.weights_io import set_extra_states
from mptrain.numerics.tensors import saturated, whole
from mptrain.runlog.atomic_files import storage_errors, write_atomically
from mptrain.runlog.run_paths import CAPTIONS
from mptrain.schedule.plateau import improves
from mptrain.system.errors import ConfigError, Problem, did_you_mean
from mptrain.system.process_state import other_random_numbers
from mptrain.system.records import EpochRecord, EvalRecord
from mptrain.workloads.base.task import Exhibit, Pictures, Sounds, Texts

if TYPE_CHECKING:
    from mptrain.engine.options import EarlyStopping, TrainOptions
    from mptrain.engine.parts import Parts, Progress
    from mptrain.engine.step import Learner
    from mptrain.engine.telemetry import Telemetry
    from mptrain.schedule.plateau import Plateau
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.loader import Loader
    from mptrain.workloads.base.task import Task


#: Largest sample value of a 16-bit recording.
_FULL_SCALE = 32767


def on_host(shown: Exhibit) -> Exhibit:
    """Return a copy of a task's pictures or sounds in CPU memory as float32; texts are returned unchanged."""
    if isinstance(shown, Texts):
        return shown
    if isinstance(shown, Sounds):
        return replace(shown, samples=shown.samples.float().cpu())
    return replace(shown, pixels=shown.pixels.float().cpu())


def keep_exhibits(folder: Path, step: int, exhibits: Mapping[str, Exhibit]) -> list[str]:
    """Write the pictures, texts and sounds that a task shows to files, replacing those of the same step.

    Pictures become one grid, ``NAME-STEP.png``. Texts become ``NAME-STEP.tsv``, whose first line has the column names.
    Each sound becomes ``NAME-N-STEP.wav``, 16 bits per sample. Captions are written to ``captions.json`` by ``NAME`` or
    ``NAME-N``. Returns the names of the other files. The folder is created if there is something to write. Raises
    StorageError if a file cannot be written.
    """
    files: dict[str, bytes] = {}
    captions: dict[str, str] = {}
    for name, shown in exhibits.items():
        if isinstance(shown, Texts):
            files[f"{name}-{step:06d}.tsv"] = _table(shown)
        elif isinstance(shown, Sounds):
            for number, samples in enumerate(shown.samples, start=1):
                files[f"{name}-{number}-{step:06d}.wav"] = _recording(samples, shown.rate)
            captions |= {f"{name}-{number}": said for number, said in enumerate(shown.captions, start=1)}
        else:
            files[f"{name}-{step:06d}.png"] = _sheet(shown)
            captions[name] = shown.caption
    if files:
        with storage_errors(folder):
            folder.mkdir(exist_ok=True)
    for file, content in files.items():
        write_atomically(folder / file, content)
    if any(captions.values()):
        write_atomically(folder / CAPTIONS, json.dumps(captions, indent=2, ensure_ascii=False).encode(errors="replace"))
    return list(files)


def _sheet(pictures: Pictures) -> bytes:
    from PIL import Image
    from torchvision.utils import make_grid

    columns = pictures.columns or max(1, round(len(pictures.pixels) ** 0.5))
    grid = make_grid(pictures.pixels.nan_to_num(), nrow=columns, padding=1).clamp(0, 1)
    pixels = (grid * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def _table(texts: Texts) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, dialect="excel-tab", lineterminator="\n")
    for row in (texts.columns, *texts.rows):
        # Python before 3.13 does not quote a carriage return, and a reader would take it as the end of the row.
        writer.writerow([text.replace("\r\n", "\n").replace("\r", "\n") for text in row])
    return file.getvalue().encode(errors="replace")


def _recording(samples: Tensor, rate: int) -> bytes:
    from scipy.io import wavfile

    levels = (samples.nan_to_num().clamp(-1, 1) * _FULL_SCALE).round().to(torch.int16).numpy()
    file = io.BytesIO()
    wavfile.write(file, rate, levels)
    return file.getvalue()


@dataclass(frozen=True)
class EvalResult:
    """Metrics of a model on a split, and pictures, texts or sounds that the task shows, by name, if requested."""

    record: EvalRecord
    exhibits: dict[str, Exhibit] = field(default_factory=dict)


def evaluate(
    parts: Parts,
    loader: Loader,
    split: str,
    step: int,
    epoch: int,
    stop: Callable[[], bool],
    *,
    average: bool = True,
    exhibit: bool = False,
    intervals: bool = False,
) -> EvalResult | None:
    """Evaluate a run's current weights on all samples of a split; None if aborted. All ranks must call this together.

    Sums are accumulated on the device and read at the end. With several ranks, each measures its part of every batch;
    the metrics cover all samples, each counted once. The split is not shuffled; ``step`` and ``epoch`` are for the
    record. ``stop``, called between batches, aborts the evaluation. ``average`` evaluates the running average of the
    weights if there is one, ``exhibit`` collects what the task shows of the first batch, on rank 0, and ``intervals``
    computes 95 % confidence intervals of the metrics over the choice of samples.
    """
    gathered, comm = SampleMetrics(), parts.comm
    exhibits: dict[str, Exhibit] = {}
    with measuring(parts, average=average) as (model, prepare, autocast):
        for batch in loader.batches(epoch=0):
            if stop():
                return None
            if batch.is_dummy:
                gathered.skip()
                continue
            prepared = prepare(batch)
            with autocast:
                if exhibit and comm.is_rank_zero and not gathered.samples:
                    exhibits = parts.task.exhibits(model, prepared)
                sums = parts.task.measure(model, prepared)
                gathered.add(prepared, sums, parts.task.answers(model, prepared), sample_digests(batch))
    gathered = gathered.over(comm)
    metrics = gathered.metrics(parts.task)
    reach = gathered.intervals(parts.task, metrics) if intervals else {}
    record = EvalRecord(split, step, epoch, gathered.samples, metrics, reach, gathered.digest)
    return EvalResult(record, {name: on_host(shown) for name, shown in exhibits.items()})


@contextlib.contextmanager
def measuring(
    parts: Parts, *, average: bool
) -> Iterator[tuple[nn.Module, Callable[[Batch], Batch], contextlib.AbstractContextManager[object]]]:
    """Give the model of an evaluation, in its mode and precision, the preparation of batches, and a forward's autocast.

    All ranks must enter this together. Afterwards the model and the generators of random numbers are as before.
    """
    wide = parts.policy.eval == "fp32" and parts.policy.half
    prepare = parts.prepare_float32 if wide else parts.prepare
    inert = contextlib.nullcontext()
    products, autocast = (inert, inert) if wide else (parts.plan.products.context, parts.plan.autocast)
    model = gather_model(parts)
    with in_evaluation_mode(parts, model, _weights_to_measure(parts, model, wide=wide, average=average)), products:
        yield model, prepare, autocast


@contextlib.contextmanager
def in_evaluation_mode(
    parts: Parts, model: nn.Module, weights: contextlib.AbstractContextManager[None] | None = None
) -> Iterator[None]:
    """Evaluate a model inside the ``with`` block: no gradients, separate random numbers, and its buffers restored.

    ``weights`` is entered before the model is in its evaluation mode, and left after it.
    """
    was_training = model.training
    parts.plan.guard.snapshot()
    try:
        with weights or contextlib.nullcontext():
            model.eval()
            try:
                with torch.no_grad(), other_random_numbers(parts.device, parts.comm.rank):
                    yield
            finally:
                model.train(was_training)
    finally:
        parts.plan.guard.restore(torch.ones(1, device=parts.device))  # a model may keep state in its buffers


@contextlib.contextmanager
def _weights_to_measure(parts: Parts, model: nn.Module, *, wide: bool, average: bool) -> Iterator[None]:
    """Give the model itself the weights and dtypes requested inside the ``with`` block.

    The tensors stay the same objects with other data, because closures, hooks and attributes may refer to them; in a
    copy of the model they would lead to the original.
    """
    values = {name: whole(value) for name, value in parts.averages().items()} if average else {}
    wide = wide and parts.policy.parameters != "float32"
    if wide:
        values = {**{name: whole(value) for name, value in parts.full_precision().items()}, **values}
    tensors: dict[str, Tensor] = {name: one for name, one in model.named_parameters() if wide or name in values}
    tensors |= dict(model.named_buffers()) if wide else {}
    tensors = {name: one for name, one in tensors.items() if one.is_floating_point()}
    before = [(one, one.data) for one in tensors.values()]
    kept: list[Any] = [module for module in model.modules() if wide and hasattr(module, "answers_in")]
    answers = [module.answers_in for module in kept]
    try:
        for name, one in tensors.items():
            dtype = torch.float32 if wide else one.dtype
            one.data = torch.empty_like(one.data, dtype=dtype).copy_(saturated(values.get(name, one.data), dtype))
        for module in kept:
            module.answers_in = torch.float32
        if tensors:
            _join_recurrent_weights(model)
        yield
    finally:
        for one, data in before:
            one.data = data
        for module, dtype in zip(kept, answers, strict=True):
            module.answers_in = dtype


def _join_recurrent_weights(model: nn.Module) -> None:
    """Lay the weights of each recurrent layer out as cuDNN needs them; else it would do so in each call."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def gather_model(parts: Parts) -> nn.Module:
    """Return a run's model in training dtypes, or a gathered copy if sharded. All ranks must call this."""
    if parts.blank is None:
        return parts.model
    model = copy.deepcopy(parts.blank)
    copies: dict[int, Tensor] = {}
    for path, module in parts.model.named_modules():
        own = model.get_submodule(path)._buffers  # training may have made or reshaped some
        for name, buffer in module._buffers.items():
            own[name] = None if buffer is None else copies.setdefault(id(buffer), buffer.detach().clone())
    set_extra_states(model, parts.model.state_dict(), "the model")
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    values = {name: saturated(whole(value), dtypes[name]) for name, value in parts.model.named_parameters()}
    return with_values(model, values)


def without_storage(model: nn.Module) -> nn.Module:
    """Return a copy of a model with its parameters on the meta device: with shapes and dtypes, but without memory."""
    blank = copy.deepcopy(model)
    return with_values(blank, {name: torch.empty_like(p, device="meta") for name, p in blank.named_parameters()})


def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Replace all parameters of a model by other tensors, without copying them, and return the model.

    Tied parameters stay tied; the tensor of the first name is used.
    """
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                full_name = f"{path}.{name}" if path else name
                made[id(parameter)] = nn.Parameter(values[full_name].detach(), requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
    return model


def with_weights(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Copy values of any dtype into parameters of a copy by name, in place, and return it; FP16 saturates."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in values:
                parameter.copy_(saturated(values[name], parameter.dtype))
    _join_recurrent_weights(model)
    return model


class Validation:
    """Evaluation of a run on validation and test data; ``samples`` is the folder for what the task shows."""

    def __init__(self, parts: Parts, samples: Path, progress: Progress, telemetry: Telemetry, monitor: Monitor) -> None:
        self._parts, self._samples, self._monitor = parts, samples, monitor
        self._progress, self._telemetry = progress, telemetry

    def end_epoch(self, completed: int, stop: Callable[[], bool], *, last: bool = False) -> bool:
        """Evaluate on the validation data, if any, and record the epoch; False, and no record, if ``stop`` aborts.

        ``last`` says that training ends here, so that settings may be chosen by this evaluation: it has intervals.
        """
        progress, telemetry = self._progress, self._telemetry
        telemetry.step_log.flush()
        telemetry.report_faulty_samples()
        if "val" in self._parts.loaders and not self.run("val", completed, stop, intervals=last):
            return False
        for log in telemetry.step_log.learner_logs:
            totals = progress.learners[log.name]
            telemetry.sink.take(
                EpochRecord(
                    learner=log.name,
                    epoch=progress.epoch + 1,
                    step=progress.step,
                    updates=log.updates,
                    skipped=totals.epoch_skipped,
                    train_loss=totals.epoch_loss / totals.epoch_losses if totals.epoch_losses else math.nan,
                    loss_scale=log.last.loss_scale if log.last else math.nan,
                    lr=log.last.lr if log.last else math.nan,
                    val=progress.last["val"] if "val" in self._parts.loaders else {},
                    seconds=round(progress.epoch_seconds, 3),
                    terms_per_second=round(progress.epoch_terms / max(progress.epoch_seconds, 1e-9), 1),
                )
            )
        progress.evaluated_at = progress.step
        if "val" in self._parts.loaders:
            self._monitor.after_validation(completed)
        return True

    def run(self, split: str, epoch: int, stop: Callable[[], bool], *, intervals: bool) -> bool:
        """Evaluate the run on ``val`` or ``test`` and record the metrics; False if ``stop`` aborts it.

        On validation data it also writes what the task shows, and keeps the best metric.
        """
        parts, progress, telemetry = self._parts, self._progress, self._telemetry
        telemetry.show("evaluating")
        outcome = evaluate(
            parts,
            parts.loaders[split],
            split,
            progress.step,
            epoch,
            stop=stop,
            exhibit=split == "val",
            intervals=intervals,
        )
        if outcome is None:
            return False
        telemetry.report_faulty_samples()  # last exchange between ranks before the evaluation is recorded
        metrics = outcome.record.metrics
        telemetry.sink.take(outcome.record)
        if files := keep_exhibits(self._samples, progress.step, outcome.exhibits):  # empty except on rank 0
            telemetry.event("samples", files=files)
        if parts.task.metric is not None and parts.task.metric not in metrics:
            raise ConfigError(
                f"the metric of the task is {parts.task.metric}, but its summarise() returns {', '.join(metrics)}",
                "let summarise() return a value of that name, or set another name as metric",
            )
        progress.last[split], progress.intervals[split] = metrics, outcome.record.intervals
        if split == "val" and parts.task.metric is not None:
            value, best = metrics[parts.task.metric], progress.best
            sign = 1.0 if parts.task.higher_is_better else -1.0
            if not math.isnan(value) and (best is None or sign * value > sign * best):
                progress.best = value
        return True


def monitored(task: Task, options: EarlyStopping | Plateau) -> tuple[str, bool | None]:
    """Return the name of a monitored metric, and whether higher is better, None if that is not known."""
    name = options.metric or task.metric or "loss"
    if options.mode is not None:
        return name, options.mode == "max"
    if name == task.metric:
        return name, task.higher_is_better
    return name, False if name.split("_")[-1] == "loss" else None


def require_monitored(parts: Parts, train: TrainOptions) -> None:
    """Raise ConfigError if there is no validation data, no monitored metric of the name, or no direction for it.

    A metric that only an evaluation can name is looked for in the evaluation of one batch. All ranks must call this.
    """
    asked: list[tuple[str, EarlyStopping | Plateau]] = [
        (f"{'' if learner.name == 'main' else f'learners.{learner.name}.'}schedule", learner.reduction.rule)
        for learner in parts.learners
        if learner.reduction
    ]
    if train.early_stopping is not None:
        asked.insert(0, ("train.early_stopping", train.early_stopping))
    if asked and "val" not in parts.loaders:
        hint = (
            "choose data with a validation split (dataset.val_share=0.1 holds out samples of image_folder and others), "
            "or another schedule and train.early_stopping=null"
        )
        what = f"needs validation data, and {parts.dataset.name} has none"
        raise ConfigError([Problem(f"{key} {what}", hint) for key, _ in asked])
    problems = []
    found: dict[str, float] = {}
    for key, options in asked:
        name, higher = monitored(parts.task, options)
        if name != parts.task.metric:
            found = found or _metrics_of_one_batch(parts)
        if name != parts.task.metric and name not in found:
            guess = did_you_mean(name, found)
            hint = f"did you mean {key}.metric={guess}?" if guess else f"the validation has {', '.join(found)}"
            problems.append(Problem(f"{key}.metric={name}: the validation has no such metric", hint))
        elif higher is None:
            hint = f"set {key}.mode=max if a higher {name} is better, else {key}.mode=min"
            problems.append(Problem(f"{key}.metric={name}: it is not known whether higher is better", hint))
    if problems:
        raise ConfigError(problems)


def _metrics_of_one_batch(parts: Parts) -> dict[str, float]:
    outcome = evaluate(parts, parts.loaders["val"].first_batch(), "val", 0, 0, stop=lambda: False)
    return outcome.record.metrics if outcome else {}


def early_stop(task: Task, options: EarlyStopping | None, state: EarlyStoppingState) -> str:
    """Return why a run ends early, such as ``top1 did not improve for 5 validations; best 0.99 at epoch 3``, or "".

    Options of None disable it. The state of another metric counts for nothing.
    """
    if options is None or state.bad < options.patience or state.metric != monitored(task, options)[0]:
        return ""
    delta = f" by more than {options.min_delta:g}" if options.min_delta else ""
    best = "it was never finite" if state.best is None else f"best {state.best:.4g} at epoch {state.epoch}"
    span = f"{state.bad} validation{'s' if state.bad > 1 else ''}"
    return f"{state.metric} did not improve{delta} for {span}; {best}"


class Monitor:
    """Observer of validation metrics that ends training early and reduces learning rates, as configured."""

    def __init__(self, parts: Parts, train: TrainOptions, progress: Progress, telemetry: Telemetry) -> None:
        self._parts, self._options = parts, train.early_stopping
        self._progress, self._telemetry = progress, telemetry

    @property
    def stopped(self) -> bool:
        """True if training ends early."""
        return bool(early_stop(self._parts.task, self._options, self._progress.early_stopping))

    def after_validation(self, epoch: int) -> None:
        """Update all states after an epoch's validation. All ranks must call this and use the metrics of rank 0."""
        learners = [learner for learner in self._parts.learners if learner.reduction]
        if self._options is None and not learners:
            return
        metrics = self._parts.comm.broadcast_object(self._progress.last["val"])
        for learner in learners:
            self._reduce(learner, metrics)
        if self._options is not None:
            self._watch(self._options, metrics, epoch)

    def _reduce(self, learner: Learner, metrics: Mapping[str, float]) -> None:
        assert learner.reduction is not None
        rule = learner.reduction.rule
        name, higher = monitored(self._parts.task, rule)
        if learner.reduction.after_validation(name, float(metrics[name]), higher=bool(higher)):
            lr = learner.reduction.lr * learner.reduction.state.factor
            why = f"{name} did not improve for {rule.patience + 1} validations"
            self._telemetry.event("rate_reduced", learner=learner.name, lr=lr, why=why)

    def _watch(self, options: EarlyStopping, metrics: Mapping[str, float], epoch: int) -> None:
        name, higher = monitored(self._parts.task, options)
        state, value = self._progress.early_stopping, float(metrics[name])
        if state.metric != name:
            state = EarlyStoppingState(name)
        if improves(value, state.best, options.min_delta, "abs", higher=bool(higher)):
            state = EarlyStoppingState(name, value, epoch)
        else:
            state = replace(state, bad=state.bad + 1)
        self._progress.early_stopping = state
        if why := early_stop(self._parts.task, options, state):
            self._telemetry.event("stopped_early", why=why)
