"""Export of a run's network as a program: an ONNX file, or a file of `torch.export`; checked against torch.

The network is exported with the arguments with which evaluation calls it, on the first batch of the run's own data. The
file takes any number of samples, and other lengths or picture sizes where the network allows it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from mptrain.engine.evaluate import gather_model, in_evaluation_mode, with_weights
from mptrain.engine.parts import Parts
from mptrain.numerics.tensors import saturated
from mptrain.system.errors import ConfigError, MptrainError, NumericsError
from mptrain.system.machine import load_extra
from mptrain.system.torch_private import tree_leaves, tree_map
from mptrain.system.words import elided, number
from mptrain.workloads.base.batch import Batch

#: Samples in the example that is exported, and in the batches that check the file besides it.
_EXAMPLE, _CHECKED = 4, (1, 3)

#: Arguments that make a network carry state between batches, or return losses; files have neither.
_LEFT_OUT = ("lane", "fresh", "targets")

#: Largest difference between the answers of a file and of torch, as a share of the largest answer. In FP32, sums in
#: another order change about 1e-6 of it, and a wrong operator far more.
TOLERANCE = 1e-4

#: Addition to it in FP16, where each layer rounds: a multiple of the difference between torch's FP16 and FP32 answers.
TOLERANCE_FP16 = 4.0

_HINT = "--format state_dict exports its weights alone; --traceback shows where it fails"

Program: TypeAlias = Literal["onnx", "torch_export"]
_Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_Run: TypeAlias = Callable[[_Call], list[Tensor]]


@dataclass(frozen=True)
class ExportedNetwork:
    """Content of a file with a network, and the result of its check.

    Attributes:
        arguments: Arguments with which Python calls the network: ``levels, speaker=speaker``.
        inputs: Dtype and shape of each input by name, such as ``float32 [batch, 1, 8, 8]``; ``any`` may vary too.
        outputs: Dtype and shape of each output.
        checked_with: Program that ran the file for the check.
        difference: Largest difference between the answers of the file and of torch.
        tolerance: Largest difference that was allowed.
    """

    content: bytes
    arguments: str
    inputs: dict[str, str]
    outputs: tuple[str, ...]
    checked_with: str
    difference: float
    tolerance: float


def export_network(
    parts: Parts, weights: Mapping[str, Tensor], dtype: torch.dtype, form: Program, facts: Mapping[str, Any]
) -> ExportedNetwork:
    """Export a run's network, and check the answers of the file against torch's on batches of several sizes.

    Args:
        parts: The run, built in FP32 on the CPU, with the weights of its checkpoint.
        weights: Parameters that replace those of the checkpoint, such as averages, by name.
        dtype: Dtype of parameters, buffers and floating-point inputs; FP16 saturates at 65504.
        form: ``onnx``, which needs onnx and onnxscript, or ``torch_export``, which `torch.export.load` reads.
        facts: JSON values that an ONNX file keeps as metadata, by name.

    Raises:
        ConfigError: The network cannot be exported, or its file cannot be run.
        NumericsError: The answers of the file are not those of torch, or not finite.
        EnvironmentRefused: A library is missing.
    """
    for library in ("onnx", "onnxscript") if form == "onnx" else ():
        load_extra(library, "onnx", "an .onnx file")
    whole = with_weights(gather_model(parts), weights).eval()
    name = f"{type(whole).__name__} of task {type(parts.task).__name__}"
    with torch.no_grad(), _silence():
        with _refusing(f"{name} cannot be exported"):
            calls = _calls(parts, whole)
            network = _in_dtype(whole, dtype)  # now that hooks have left tensors without a graph, which can be copied
            args, kwargs = example = _cast(calls[0], dtype)
            for first, other in zip(
                _tensors(network(*args, **kwargs)), _tensors(network(*args, **kwargs)), strict=True
            ):
                if _distance(first, other) > TOLERANCE * float(first.abs().max()):
                    raise ValueError("its answers to the same input differ: it draws random numbers, or keeps a state")
            program = _program(
                network, example, fixed=bool({"image_size", "input_shape"} & parts.dataset.facts().keys())
            )
        with _refusing(f"{name} cannot be written as {form}"):
            content = _content(program, form, facts)
        with _refusing(f"{name} was exported, and its file cannot be run"):
            tool, run = _opened(content, form)
            difference, tolerance = _compare(whole, network, calls, dtype, run)
    inputs = _described(program, program.graph_signature.user_inputs)
    named = [*inputs][: len(_tensors(args))] + [f"{name}={name}" for name in kwargs]
    outputs = tuple(_described(program, program.graph_signature.user_outputs).values())
    return ExportedNetwork(content, ", ".join(named), inputs, outputs, tool, difference, tolerance)


def _calls(parts: Parts, model: nn.Module) -> list[_Call]:
    """Return the arguments with which evaluation calls a network: the example, and batches of other sizes."""
    loader = next(parts.loaders[name] for name in ("val", "test", "train") if name in parts.loaders)
    first, second = 0, min(1, loader.steps_per_epoch - 1)
    example, other = (_call(parts, model, loader.whole_batch(0, which)) for which in (first, second))
    return [_resized(example, _EXAMPLE), *(_resized(other, size) for size in _CHECKED)]


def _call(parts: Parts, model: nn.Module, batch: Batch) -> _Call:
    """Return the arguments with which evaluation calls a network for a batch, cut to a few samples.

    Of several calls it is the one with the fewest tensors: the others also get targets, and return losses.
    """
    seen: list[_Call] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, {name: value for name, value in kwargs.items() if name not in _LEFT_OUT}))

    prepared = parts.prepare(batch)
    some = prepared.split(-(-prepared.samples // _EXAMPLE))[0]
    with in_evaluation_mode(parts, model), model.register_forward_pre_hook(see, with_kwargs=True):
        parts.task.measure(model, some)
        parts.task.answers(model, some)
    if not seen:
        raise ConfigError(f"task {type(parts.task).__name__} calls the parts of its network, never the whole", _HINT)
    return min(seen, key=lambda call: len(_tensors(call)))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _each(call: _Call, change: Callable[[Tensor], Tensor]) -> _Call:
    return cast("_Call", tree_map(lambda value: change(value) if isinstance(value, Tensor) else value, call))


def _resized(call: _Call, samples: int) -> _Call:
    """Return a call with another number of samples, repeated if there are fewer; its tensors are all of samples."""
    return _each(call, lambda tensor: tensor[torch.arange(samples) % len(tensor)])


def _cast(call: _Call, dtype: torch.dtype) -> _Call:
    return _each(call, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of an FP32 model in a dtype, in which FP16 saturates."""
    model = copy.deepcopy(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = saturated(tensor.data, dtype)
    return model


def _program(network: nn.Module, call: _Call, *, fixed: bool) -> torch.export.ExportedProgram:
    """Return the program of a network with any number of samples, and unless ``fixed`` any other size it allows."""
    batch, other = torch.export.Dim("batch"), torch.export.Dim.STATIC if fixed else torch.export.Dim.AUTO
    args, kwargs = tree_map(
        lambda value: {at: other if at else batch for at in range(value.ndim)} if isinstance(value, Tensor) else None,
        call,
    )
    bound = inspect.signature(network.forward).bind(*args, **kwargs).arguments
    return torch.export.export(network, *call, dynamic_shapes=bound)


def _content(program: torch.export.ExportedProgram, form: Program, facts: Mapping[str, Any]) -> bytes:
    """Return the content of the file of a program; an .onnx file cannot have more than 2 GiB."""
    if form == "torch_export":
        torch.export.save(program, file := io.BytesIO())
        return file.getvalue()
    names = ["output"] if len(program.graph_signature.user_outputs) == 1 else None
    shapes = tuple({0: "batch"} for _ in program.graph_signature.user_inputs)
    made: Any = torch.onnx.export(program, dynamo=True, verbose=False, output_names=names, dynamic_shapes=shapes)
    made.model.metadata_props.update({name: json.dumps(value) for name, value in facts.items()})
    return cast("bytes", made.model_proto.SerializeToString())


def _opened(content: bytes, form: Program) -> tuple[str, _Run]:
    """Open the content of an exported file; return the name of the program that runs it, and a function that does."""
    if form == "torch_export":
        module = torch.export.load(io.BytesIO(content)).module()
        return "torch", lambda call: _tensors(module(*call[0], **call[1]))
    if importlib.util.find_spec("onnxruntime"):
        tool, runtime = "onnxruntime", load_extra("onnxruntime", "onnx", "the check of an .onnx file")
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # it raises what it also logs
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        names = [argument.name for argument in session.get_inputs()]
    else:
        tool, library = "onnx.reference", load_extra("onnx.reference", "onnx", "the check of an .onnx file")
        session = library.ReferenceEvaluator(content)
        names = session.input_names

    def run(call: _Call) -> list[Tensor]:
        arrays = [tensor.contiguous().numpy() for tensor in _tensors(call)]
        return [torch.as_tensor(answer) for answer in session.run(None, dict(zip(names, arrays, strict=True)))]

    return tool, run


def _compare(
    whole: nn.Module, network: nn.Module, calls: list[_Call], dtype: torch.dtype, run: _Run
) -> tuple[float, float]:
    """Return the largest difference between a file's answers and torch's, and the largest that is allowed.

    Raises NumericsError if it is larger, or torch's answers are not finite.
    """
    difference = largest = rounding = 0.0
    for call in calls:
        args, kwargs = rounded = _cast(call, dtype)
        exact, own, there = whole(*call[0], **call[1]), network(*args, **kwargs), run(rounded)
        for wide, near, far in zip(_tensors(exact), _tensors(own), there, strict=True):
            if (near.shape, near.dtype) != (far.shape, far.dtype):
                raise ValueError(f"it returns {far.dtype} {list(far.shape)}, not {near.dtype} {list(near.shape)}")
            if not near.isfinite().all():
                message = f"the network's own answers are not finite in {_name(dtype)}"
                raise NumericsError(message, "export it without --fp16, or another checkpoint (--best)")
            difference = max(difference, _distance(far, near))
            largest, rounding = max(largest, float(near.abs().max())), max(rounding, _distance(near, wide))
    tolerance = TOLERANCE * largest + TOLERANCE_FP16 * rounding
    if difference > tolerance:
        message = (
            f"answers of the exported file differ from torch's by {number(difference)}; {number(tolerance)} is allowed"
        )
        raise NumericsError(message, f"report it with the name of the model; {_HINT}")
    return difference, tolerance


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _distance(first: Tensor, other: Tensor) -> float:
    return float((first.double() - other.double()).abs().max().nan_to_num(torch.inf))


def _described(program: torch.export.ExportedProgram, names: Sequence[Any]) -> dict[str, str]:
    """Return dtype and shape of a program's inputs or outputs by name; a size that may vary is ``batch`` or ``any``."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    described = {}
    for name in names:
        if isinstance(tensor := values.get(name), Tensor):
            sizes = [text if text.isdigit() else "any" for text in map(str, tensor.shape)]
            sizes[:1] = ["batch"] if sizes[:1] == ["any"] else sizes[:1]
            described[name] = f"{_name(tensor.dtype)} [{', '.join(sizes)}]"
    return described


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Convert exceptions of exporters and of exported files to a ConfigError of one line."""
    try:
        yield
    except MptrainError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise ConfigError(f"{what}: {elided(reason, 200)}", _HINT) from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what exporters print, log and warn of off the terminal; it is about their own code."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
