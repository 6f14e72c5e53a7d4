"""Doctor and diagnosis of one step of a training loop that is not mptrain's, from its model, batch and loss.

So a loop is examined by the code that examines runs: every precision and remedy builds these parts anew.
"""

from __future__ import annotations

import contextlib
import copy
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.config.compose import compose, recompose
from mptrain.config.schema import Config
from mptrain.engine.module_trail import LOSS, unwrapped
from mptrain.lab.diagnosis.diagnose import diagnose_config
from mptrain.lab.doctor.check import check_scaling, scale_notes, verdict
from mptrain.lab.doctor.findings import why_no_range
from mptrain.lab.doctor.updates import lost_in_loop
from mptrain.lab.finding import Finding, label
from mptrain.lab.pages.diagnosis_page import NAMES
from mptrain.lab.step.ranges import scales_of
from mptrain.precision.keep_fp32 import cast_floating
from mptrain.runlog.diagnosis_file import Examination
from mptrain.system.errors import EXIT_NUMERICS, EXIT_OK, ConfigError, instance
from mptrain.system.process_state import other_random_numbers, settings_restored
from mptrain.system.torch_private import disable_current_modes, storage_key, tree_leaves, tree_map
from mptrain.system.words import listed, scale_in_words
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import Dataset, IndependentSamples
from mptrain.workloads.base.task import OneNetworkTask

#: Function of a model and a batch: the loss, a tensor with one element.
LossFunction: TypeAlias = Callable[[nn.Module, Any], Tensor]

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LoopBatch(Batch):
    """Batch in the form in which a loop has it: tensors in nested lists, tuples, mappings, or anything else.

    ``extras`` has all its tensors by their place, such as ``batch[0]``.

    Attributes:
        value: The batch itself.
        model_inputs: Places of the floating-point tensors that a model in half precision is given in half precision.
        is_even: Whether the batch is only tensors whose first dimensions are equal: those of the samples.
    """

    value: Any = None
    model_inputs: frozenset[str] = frozenset()
    is_even: bool = False

    @classmethod
    def of(cls, value: Any, find_inputs: Callable[[Mapping[str, Tensor]], Sequence[str]]) -> LoopBatch:
        """Return the batch of a value. ``find_inputs`` returns the places of the tensors that the model is given."""
        tensors = dict(_tensors(value))
        given = [name for name in find_inputs(tensors) if tensors[name].ndim]
        floating = [name for name in given if tensors[name].is_floating_point()]
        first = next(iter((*floating, *given)), "")
        inputs = tensors.get(first, torch.zeros(1, dtype=torch.int64, device="cpu"))
        leaves = [leaf for leaf in tree_leaves(value) if leaf is not None]
        even = len(leaves) == len(tensors) and len({tensor.shape[:1] for tensor in leaves}) == 1
        return cls(inputs, inputs, extras=tensors, value=value, model_inputs=frozenset(floating), is_even=even)

    @property
    @override
    def samples(self) -> int:
        return len(self.inputs) if self.is_even else 1

    @override
    def cast(self, dtype: torch.dtype) -> LoopBatch:
        if not dtype.is_floating_point:  # that of inputs without floating-point values, such as tokens
            return self
        names = self.model_inputs if dtype in _HALVES else self.extras
        return self._changed(lambda name, tensor: cast_floating(tensor, dtype) if name in names else tensor)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {f"values of {name}": tensor for name, tensor in self.extras.items()}

    def rebuilt(self) -> Any:
        """Return the batch in the form of the loop, with copies of its present tensors, which the loop may change."""
        with disable_current_modes():  # no operators of the loop
            return _rebuilt(self.value, {name: tensor.detach().clone() for name, tensor in self.extras.items()})

    @override
    def _each(self, change: Callable[[Tensor], Tensor]) -> LoopBatch:
        return self._changed(lambda _, tensor: change(tensor))

    def _changed(self, change: Callable[[str, Tensor], Tensor]) -> LoopBatch:
        tensors = {name: change(name, tensor) for name, tensor in self.extras.items()}
        first = next((tensors[name] for name, tensor in self.extras.items() if tensor is self.inputs), self.inputs)
        return replace(self, inputs=first, targets=first, extras=tensors)


def _tensors(value: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    for key, inner in _inside(value).items():
        yield from _tensors(inner, f"{name}[{key!r}]")


def _inside(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _rebuilt(value: Any, tensors: Mapping[str, Tensor], name: str = "batch") -> Any:
    inner = {key: _rebuilt(child, tensors, f"{name}[{key!r}]") for key, child in _inside(value).items()}
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)  # also what transformers' tokenizers return
        for key, child in inner.items():
            made[key] = child
        return made
    if isinstance(value, list | tuple):
        return type(value)(*inner.values()) if hasattr(value, "_fields") else type(value)(inner.values())
    return tensors.get(name, value)


class OtherLoop:
    """Model, loss function and batch that a caller has given of a training loop; nothing of them is changed.

    Raises ConfigError if the model is not in FP32 or cannot be copied, or the loss is no tensor with one element.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, batch: Any, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.model, self.loss_fn = unwrapped(model), loss_fn
        params = list(self.model.parameters())
        if halves := {param.dtype for param in params} & {*_HALVES}:
            raise ConfigError(
                f"the model has parameters in {halves.pop()}",
                "give it in FP32: a precision casts a copy of it; only doctor(precision=None) takes it as it is",
            )
        self.device = params[0].device if params else torch.device("cpu")
        groups = [] if optimizer is None else optimizer.param_groups
        trained = params if optimizer is None else [param for group in groups for param in group["params"]]
        self._trained = {id(param) for param in trained if param.requires_grad}
        self.batch = LoopBatch.of(batch, lambda tensors: self._find_inputs(batch, tensors))

    def copied(self) -> nn.Module:
        """Return a copy of the model in training mode. One in half precision casts what it is given, as FSDP does.

        Modules that the caller has put into evaluation mode stay in it, unless the whole model is in that mode.
        """
        try:
            made = copy.deepcopy(self.model)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"the model cannot be copied: {error}", "give one that copy.deepcopy takes") from error
        for own, other in zip(self.model.parameters(), made.parameters(), strict=True):
            other.requires_grad_(id(own) in self._trained)
        if made.training:
            made.train = types.MethodType(_keep_modes, made)  # type: ignore[method-assign]
        made.register_forward_pre_hook(_cast_to_model, with_kwargs=True)
        return made

    def _find_inputs(self, batch: Any, tensors: Mapping[str, Tensor]) -> list[str]:
        """Compute the loss once, in FP32, and return the places of the tensors that a module of the model is given."""
        given = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        names = {key: name for name, tensor in given.items() for key in _memory(tensor)}
        seen: dict[str, None] = {}

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_autocast_enabled(self.device.type):
                raise ConfigError("loss_fn or the model uses autocast", "leave it out: precision= chooses autocast")
            seen.update(dict.fromkeys(names[key] for key in _memory((args, kwargs)) if key in names))

        model = self.copied().train()
        for module in model.modules():
            module.register_forward_pre_hook(look, with_kwargs=True)
        loss = self.loss_fn(model, _rebuilt(batch, given))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else instance(loss)
            raise ConfigError(f"loss_fn returned {got}", "return the loss, a tensor with one element")
        trained = [param for param in model.parameters() if param.requires_grad]
        if not trained:
            raise ConfigError("no parameter of the model is trained", "give the optimizer of this model, or none")
        reached = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else ()
        if all(grad is None for grad in reached):
            what = "the loss does not depend on a parameter of the model that loss_fn is given"
            raise ConfigError(what, "compute it with its first argument, which is a copy of the model")
        return list(seen)


def _memory(values: Any) -> list[int]:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
    return [storage_key(tensor.untyped_storage()) for tensor in tensors]


def _keep_modes(model: nn.Module, mode: bool = True) -> nn.Module:
    return model


def _cast_to_model(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast floating-point arguments to the dtype of a model's parameters, if that is another than FP32."""
    dtypes = [param.dtype for param in model.parameters() if param.dtype in (*_HALVES, torch.float64)]
    return tree_map(lambda leaf: cast_floating(leaf, dtypes[0]), (args, kwargs)) if dtypes else (args, kwargs)


# A configuration builds its parts by name, without arguments, so they find the loop here.
_LOOP: ContextVar[OtherLoop] = ContextVar("loop")


def loop_model() -> nn.Module:
    """Return a copy of the model of the loop under examination."""
    return _LOOP.get().copied()


class LoopData(IndependentSamples, Dataset):
    """Data set, and its training split, with one sample: the batch of the loop under examination."""

    name, workers, val, test, in_memory = "loop", 0, None, None, True

    def __init__(self) -> None:
        self.train, self.faults = self, Faults()

    def __len__(self) -> int:
        return 1

    @override
    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        return _LOOP.get().batch.to(torch.device("cpu")).clone()

    @override
    def facts(self) -> dict[str, Any]:
        return {}

    @override
    def card(self) -> dict[str, Any]:
        return {}


class LoopTask(OneNetworkTask):
    """Task with the loss of the loop under examination, and without metrics."""

    metric, higher_is_better = None, False

    @override
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, LoopBatch)
        return _LOOP.get().loss_fn(model, batch.rebuilt()).float().reshape(())

    @override
    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {}


#: Nodes of the configuration of a loop that name its parts, and words for it.
_PARTS = {
    "model": {"_target_": f"{__name__}.loop_model"},
    "dataset": {"_target_": f"{__name__}.LoopData"},
    "task": {"_target_": f"{__name__}.LoopTask"},
    "extensions": {"allow": [__name__]},
}
_WORDS = (
    *("optimizer=sgd", "schedule=constant", "train.batch_size=1", "train.channels_last=false"),
    "train.max_consecutive_overflows=1000",  # a loop of torch has no such end
)


@contextlib.contextmanager
def loop_config(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    words: Sequence[str],
) -> Iterator[Config]:
    """Yield a configuration whose parts are those of a loop, and restore random numbers and torch's settings.

    Raises ConfigError as `OtherLoop`, or if the words, such as ``precision=amp_dynamic``, are invalid.
    """
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    with contextlib.ExitStack() as restore:
        for setting in (settings_restored(), other_random_numbers(device)):
            restore.enter_context(setting)
        for mode in (torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False)):
            restore.enter_context(mode)
        restore.callback(_LOOP.reset, _LOOP.set(OtherLoop(model, loss_fn, batch, optimizer)))
        config = compose((*_WORDS, f"device={device}", *words))
        yield recompose({**config.tree, **_PARTS}, allow=(__name__,))


#: Phrases about mptrain's own runs, and what they are for another loop.
_PHRASES: Final = {
    "with mptrain diagnose and precision=fp32": 'with mptrain.diagnose(..., precision="fp32")',
    "set scaler=static scaler.scale=": "set a constant loss scale of ",
    "mptrain recommend evaluates more steps": "mptrain.watch and mptrain.recommend evaluate more steps",
    "checkpoint, with scaler.on_overflow=skip": "checkpoint, and skip updates that overflow",
    "a lower optimizer.lr or train.clip_norm": "a lower learning rate or gradient clipping",
    "clean data, or dataset.on_error=skip if the data set detects such samples": "clean data",
    " (standardise them in the data set)": "",
    "step 1 is finite": "the step is finite",
}


@dataclass(frozen=True)
class LoopReport:
    """Result of `doctor` or `diagnose`; ``str`` gives it as text for people.

    Attributes:
        summary: The result in one sentence.
        findings: Problems, causes first, and minor findings, which are notes; empty if nothing is wrong. Each has
            ``kind``, ``module`` (all in ``where``), ``operator``, ``what``, ``hint`` (a remedy in terms of
            torch; empty if none is known) and ``minor``. Modules have qualified names, empty for the model itself and
            ``(loss)`` for the loss function outside the model.
        notes: Further observations, one sentence each.
        loss_scales: Powers of two at which the gradients of every module are right, ascending; empty if there are
            none, and for a diagnosis.
    """

    summary: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    loss_scales: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no finding is a problem."""
        return all(finding.minor for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """Exit code of ``mptrain doctor`` with these findings: 0 if ``ok``, else 4."""
        return EXIT_OK if self.ok else EXIT_NUMERICS

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {"ok": self.ok, "exit_code": self.exit_code, **asdict(self)}

    def __str__(self) -> str:
        lines = [self.summary]
        for finding in self.findings:
            names = listed(["the loss" if name == LOSS else label(name) for name in finding.where])
            lines.append(f"{'note' if finding.minor else 'problem'}: {names}{': ' * bool(names)}{finding.what}")
            lines += [f"  remedy: {finding.hint}"] if finding.hint else []
        return "\n".join([*lines, *(f"note: {sentence}" for sentence in self.notes)])


def doctor(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    precision: str | None = "amp_dynamic",
    optimizer: torch.optim.Optimizer | None = None,
) -> LoopReport:
    """Check whether a model's training step is right in a half precision, as ``mptrain doctor`` does.

    The gradients at loss scales from 2^0 to 2^24 are compared with those in FP64, or in FP32 where the model does not
    run in FP64. It takes some 40 steps. Copies of the model compute them, without dropout: weights, buffers, gradients,
    modes and random numbers stay as they are.

    Args:
        model: The model with FP32 parameters, on any one device; wrapped by DDP or compiled, what is inside counts.
        loss_fn: Function of the model and the batch: the loss, a tensor with one element. It uses the model that it is
            given, and neither autocast, nor ``backward``, nor a loss scale.
        batch: The batch, on any device: dense tensors in nested lists, tuples and mappings, which are moved to that of
            the model. If parameters are in half precision, so are the floating-point tensors that the model is given.
        precision: Mode of ``mptrain list precision``. ``amp_dynamic`` and ``amp_bf16`` are autocast with FP16 and
            BF16, ``fp16_dynamic`` and ``bf16`` parameters in these with FP32 norm layers and master weights. None for a
            model whose weights are in FP16 or BF16 already: it is checked as it is, without master weights.
        optimizer: Optimizer, whose parameters alone are trained; None for all that require gradients. With half
            weights, what rounding loses of its next update is a note, which copies of both have found.

    Raises:
        ConfigError: The precision is unknown or not half, the model is not FP32 or cannot be copied, or ``loss_fn``
            returns no tensor with one element. An error that it raises in FP32 is raised as it is.
        EnvironmentRefused: The device does not support the precision.
    """
    lost: Finding | None = None
    unseen: tuple[str, ...] = ()
    if precision is None:
        words = _as_it_is(model)
        lost, unseen = _lost_updates(model, loss_fn, batch, optimizer)
        model, optimizer, precision = _widened(model, optimizer), None, f"its own {_half_of(model)}"
    else:
        words = _words(precision, None)
    with loop_config(model, loss_fn, batch, optimizer, words) as config:
        report = check_scaling(config, lambda _: None, lambda word: _in_torch(config, [word]))
    good = scales_of(report.modules).good if not why_no_range(report.evidence, report.findings) else ()
    return LoopReport(
        summary=f"{type(unwrapped(model)).__name__} in {precision}: {verdict(report)}",
        findings=(
            *map(_phrased, (*report.findings, *report.minor)),
            *filter(None, [lost]),
        ),
        notes=(
            *scale_notes(report),
            *report.notes[: len(report.notes) - len(report.minor)],
            *unseen,
        ),
        loss_scales=tuple(2.0**exponent for exponent in good),
    )


def _as_it_is(model: nn.Module) -> list[str]:
    """Return overrides that cast an FP32 copy of a model with half weights back to their dtypes."""
    inner, half = unwrapped(model), _half_of(model)
    kept = [
        name
        for name, module in inner.named_modules()
        if any(parameter.dtype == torch.float32 for parameter in module.parameters(recurse=False))
    ]
    mode = "bf16_pure" if half == "bfloat16" else "fp16_pure"
    return [f"precision={mode}", *([f"precision.keep_fp32=[{','.join(kept)}]"] if kept else [])]


def _half_of(model: nn.Module) -> str:
    """Return the half precision in which the weights of a model are stored."""
    halves = {parameter.dtype for parameter in unwrapped(model).parameters()} & {*_HALVES}
    if len(halves) != 1:
        held = " and ".join(sorted(str(dtype) for dtype in halves)) or "no half precision"
        raise ConfigError(f"precision=None, and the model's weights are in {held}", "choose a precision")
    return str(halves.pop()).removeprefix("torch.")


def _widened(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> nn.Module:
    """Return an FP32 copy of a model, which trains the same parameters."""
    wide, trained = copy.deepcopy(unwrapped(model)).float(), _trained_by(unwrapped(model), optimizer)
    for name, parameter in wide.named_parameters():
        parameter.requires_grad_(name in trained)
    wide.register_forward_pre_hook(_in_full, with_kwargs=True)  # before a mode casts what the model is given
    return wide


def _in_full(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast what a loop gives to a model of half weights to FP32."""
    return tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALVES else leaf, (args, kwargs)
    )


def _trained_by(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, nn.Parameter]:
    groups = [] if optimizer is None else optimizer.param_groups
    own = {id(parameter) for group in groups for parameter in group["params"]}
    named = model.named_parameters()
    return {name: each for name, each in named if each.requires_grad and (optimizer is None or id(each) in own)}


def _lost_updates(
    model: nn.Module, loss_fn: LossFunction, batch: Any, optimizer: torch.optim.Optimizer | None
) -> tuple[Finding | None, tuple[str, ...]]:
    """Return what rounding loses of the next update of half weights, or a note that it was not looked at."""
    if optimizer is None:
        return None, ("what rounding loses of the updates was not looked at: give optimizer=",)
    inner = unwrapped(model)
    device = next((parameter.device for parameter in inner.parameters()), torch.device("cpu"))
    with settings_restored(), other_random_numbers(device), torch.enable_grad():
        made = copy.deepcopy(inner).train()
        made.register_forward_pre_hook(_cast_to_model, with_kwargs=True)
        loss_fn(made, _rebuilt(batch, {name: tensor.detach().clone() for name, tensor in _tensors(batch)})).backward()
    gradients = {name: own.grad for name, own in made.named_parameters() if own.grad is not None}
    try:
        return lost_in_loop(_trained_by(inner, optimizer), gradients, optimizer), ()
    except Exception as error:  # optimizers of others may not take copies
        return None, (f"what rounding loses of the updates was not looked at: {type(error).__name__}: {error}",)


def diagnose(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    precision: str = "amp_dynamic",
    loss_scale: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> LoopReport:
    """Find the operator in which a training step becomes inf or NaN, or wrong, and try remedies on the step.

    Call it when a step has overflowed, before anything changes the weights: with the model, the batch and the scale of
    that step. Random numbers are other ones than those of the step. Nothing of the caller's is changed, as by `doctor`,
    which has the arguments and errors that are not described here.

    Args:
        model: As for `doctor`.
        loss_fn: As for `doctor`.
        batch: As for `doctor`.
        precision: As for `doctor`, or ``fp32``.
        loss_scale: Loss scale of the step (``scaler.get_scale()``); None for the first of a ``torch.amp.GradScaler``,
            2^16, or none in precisions without a scaler.
        optimizer: As for `doctor`.

    Returns:
        Report whose first finding is the first cause, with the remedy that helped on this batch. An overflow that the
        scaler ends by itself is a note.
    """
    with loop_config(model, loss_fn, batch, optimizer, _words(precision, loss_scale)) as config:
        examination = diagnose_config(config).examination
        findings = _causes(config, examination)
    failed = [remedy for remedy in examination.remedies if remedy.helped is False]
    at = f" at loss scale {scale_in_words(examination.loss_scale)}" if examination.loss_scale != 1 and findings else ""
    result = f"the step fails in {NAMES[examination.cause]}" if findings else _in_other_words(examination.verdict)
    result = "the step is skipped, as usual" if findings and findings[0].minor else result
    notes = (*examination.notes, *(f"tried without success: {remedy.text}: {remedy.outcome}" for remedy in failed))
    summary = f"{type(unwrapped(model)).__name__} in {precision}{at}: {result}"
    return LoopReport(summary, findings, tuple(map(_in_other_words, notes)))


def _words(precision: str, loss_scale: float | None) -> list[str]:
    dynamic = precision.endswith("_dynamic")
    words = [f"precision={precision}", *(["scaler=torch"] if dynamic or loss_scale is not None else [])]
    return words if loss_scale is None else [*words, f"scaler.init_scale={float(loss_scale)!r}"]


def _causes(config: Config, examination: Examination) -> tuple[Finding, ...]:
    """Return the first cause of a step's failure with the remedy that helped or is advised, and the other causes."""
    if examination.cause == "none":
        return ()
    untried = (candidate for candidate in examination.remedies if candidate.helped is None and not candidate.words)
    advised = [candidate for candidate in untried if not candidate.outcome.startswith("not advised")]
    remedy = next(iter((*(candidate for candidate in examination.remedies if candidate.helped), *advised)), None)
    hint, what = "", examination.verdict
    if remedy is not None:
        hint = f"{_in_torch(config, remedy.words) or remedy.text}: {remedy.outcome}"
    by_itself = bool(examination.cause == "backward" and remedy is not None and remedy.helped and not remedy.words)
    if by_itself:
        what = what.rpartition("; until then ")[2]
    first = (examination.cause, examination.module, examination.operator, what, hint)
    several: list[tuple[str, str | None, str, str, str]] = [first]
    several += [(further.cause, further.module, further.operator, further.sentence, "") for further in examination.also]
    return tuple(
        _phrased(Finding(kind, () if module is None else (module,), what, hint, (), operator, minor=by_itself))
        for kind, module, operator, what, hint in several
    )


def _phrased(finding: Finding) -> Finding:
    return replace(finding, what=_in_other_words(finding.what), hint=_in_other_words(finding.hint))


def _in_other_words(sentence: str) -> str:
    for phrase, other in _PHRASES.items():
        sentence = sentence.replace(phrase, other)
    return sentence


def _in_torch(config: Config, words: Iterable[str]) -> str:
    """Return what overrides of a run are in a loop of torch, such as ``precision=amp_bf16``; empty for unknown ones."""
    return " and ".join(filter(None, (_word_in_torch(config, word) for word in words)))


def _word_in_torch(config: Config, word: str) -> str:
    key, _, value = word.partition("=")
    autocast = f'torch.autocast("{torch.device(config.device).type}"'
    if key == "precision.keep_fp32":
        entries = [name for name in re.split(r"[\[\],]", value) if name and name not in config.precision.keep_fp32]
        names = " and ".join("the norm layers" if name == "norms" else name for name in entries)
        in_autocast = f"with {autocast}, enabled=False): module(x.float())"
        how = in_autocast if config.precision.autocast else "module.float()(x.float()).to(x.dtype)"
        return f"compute {names} in FP32 ({how})"
    if key in ("scaler.scale", "scaler.init_scale"):
        return f"set a loss scale of {value} (GradScaler(init_scale={value}))"
    return {
        "precision=fp32": "compute all in FP32",
        "precision=bf16": "use torch.bfloat16 in place of torch.float16, without a loss scaler",
        "precision=amp_bf16": f"use {autocast}, torch.bfloat16), without a loss scaler",
        "precision=amp_dynamic": f"keep the weights in FP32, with {autocast}, torch.float16) and torch.amp.GradScaler",
        "scaler=dynamic": "use torch.amp.GradScaler",
    }.get(word, "")
