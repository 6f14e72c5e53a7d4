"""Whole training steps on tensors of the device ``meta``, which have shapes and dtypes, but neither values nor memory.

Nobody can read a value there, so a step that gets to its end waited for none: what asks for one raises. And the host is another
device, as on a machine with a GPU: what a step computes there, or copies from there and waits, is found.

Runs are built on the CPU as always; then their parameters and buffers are exchanged for such tensors. Norms and updates
take the way of a GPU: tables of addresses, and kernels that are launched, though they do nothing here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from mptrain.config.compose import compose
from mptrain.engine.buffer_guard import BufferGuard
from mptrain.engine.parts import Parts
from mptrain.engine.ring import Ring, stack
from mptrain.engine.step_runner import StepRunner
from mptrain.precision import apply
from mptrain.precision.keep_fp32 import cast_floating
from mptrain.precision.upcast import EagerMode, products
from mptrain.run.build.parts import build, build_learners

META = torch.device("meta")
AUTOCAST = torch.autocast
aten = torch.ops.aten

#: Words that make a model small enough to be drawn, or give it data that need no file.
WORDS = {
    "big_lstm": (
        *("dataset=python_docs", "dataset.tokens=word", "dataset.sequence_length=4", "model.embedding_size=32"),
        *("model.hidden_size=64", "model.projection=32", "model.samples=64"),
    ),
    "alexnet": ("dataset.image_size=64",),
    "wavenet": ("dataset=made_up_sounds", "dataset.window=2000"),
    **dict.fromkeys(("big_lstm_small", "char_lstm", "word_lstm"), ("dataset.sequence_length=4",)),
}
#: Operators that read values on the host inside of their kernels, though they run on ``meta``.
WAITING = frozenset(
    {"_ctc_loss", "_cudnn_ctc_loss", "bincount", "nonzero", "repeat_interleave", "_unique2", "unique_dim"}
)
#: Views, and what makes tensors of numbers in Python.
_ON_THE_HOST = frozenset({"lift_fresh", "detach", "alias", "view", "_unsafe_view"})
#: torch's fused updates, which have no kernel for ``meta``. They return nothing.
_WITHOUT_META = frozenset({"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"})


class Watch(EagerMode):
    """Notes what an operator has to do with the host.

    Attributes:
        found: Operators that wait for the device, or work on tensors of the host.
        operators: How many ran.
        first: It is the first step, in which tables may be computed on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.operators = 0
        self.first = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name().removeprefix("aten::").split(".")[0], kwargs or {}
        self.operators += 1
        if name in _WITHOUT_META:
            return None
        result = func(*args, **kwargs)
        places = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        asynchronous = name in ("_to_copy", "copy_") and (kwargs.get("non_blocking") or True in args[2:])
        table = self.first and places == {"cpu"}
        if "cpu" in places and name not in _ON_THE_HOST and not asynchronous and not table:
            self.found.append(f"{name} on {' and '.join(sorted(places))}")
        elif name in WAITING and "meta" in places:
            self.found.append(f"{name} waits")
        return result


class Made(TorchFunctionMode):
    """Notes tensors that are made of numbers in Python on a device: torch copies them there and waits.

    Args:
        watch: Takes the notes.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        makes = func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
        if makes and result.device == META and not isinstance(args[-1], torch.Tensor):
            self._watch.found.append(f"{func.__name__} copies numbers and waits")
        return result


class Autocast(TorchFunctionMode):
    """torch's autocast, which does not know ``meta``: products in half precision, what sums many numbers up in FP32.

    Args:
        device: As torch.autocast takes it.
        dtype: Of products.
        enabled: False leaves the region.
    """

    HALF = frozenset(
        [
            "linear",
            "conv1d",
            "conv2d",
            "conv3d",
            "conv_transpose1d",
            "conv_transpose2d",
            "matmul",
            "__matmul__",
            "mm",
            "bmm",
            "addmm",
            "baddbmm",
            "lstm",
            "gru",
            "rnn_tanh",
            "rnn_relu",
            "lstm_cell",
            "gru_cell",
            "scaled_dot_product_attention",
            "multi_head_attention_forward",
        ]
    )
    WIDE = frozenset(
        [
            "softmax",
            "log_softmax",
            "cross_entropy",
            "nll_loss",
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "layer_norm",
            "group_norm",
            "local_response_norm",
            "exp",
            "log",
            "log1p",
            "pow",
            "sum",
            "cumsum",
            "prod",
            "norm",
            "logsumexp",
            "ctc_loss",
            "softplus",
            "binary_cross_entropy_with_logits",
            "cosine_similarity",
        ]
    )
    MIXED = frozenset({"cat", "stack", "where", "index_put", "addcmul"})
    _entered: list[Autocast] = []

    def __init__(self, device: str, dtype: torch.dtype = torch.float16, enabled: bool = True) -> None:
        super().__init__()
        assert device == "meta"
        self._dtype, self._enabled = dtype, enabled
        self._theirs = AUTOCAST("cpu", dtype=dtype, enabled=enabled)  # so that whoever asks torch is told

    def __enter__(self) -> Any:
        self._entered.append(self)
        self._theirs.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._theirs.__exit__(*error)
        self._entered.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, dtype = getattr(func, "__name__", ""), None
        if self is self._entered[-1] and self._enabled:
            if name in self.HALF:
                dtype = self._dtype
            elif name in self.WIDE:
                dtype = torch.float32
            elif name in self.MIXED:
                floats = {x.dtype for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.is_floating_point()}
                dtype = torch.float32 if len(floats) > 1 else None
        if dtype is not None:
            args, kwargs = tree_map(lambda x: cast_floating(x, dtype), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=2)  # all of them would take some 8 GiB
def drawn(model: str, *words: str) -> tuple[Any, Parts, Any]:
    """A configuration, what was built of it on the CPU in FP32, and a batch."""
    small = ("train.batch_size=2", "device=cpu", "precision=fp32", *WORDS.get(model, ()))
    config = compose([f"model={model}", *small, *words])
    parts, _ = build(config, weights=False)
    return config, parts, parts.loaders["train"].whole_batch(0)


@functools.cache
def chosen(word: str) -> Any:
    """A configuration that only its mode and its scaler are taken of."""
    return compose(["model=mlp", word])


def without_values(model: nn.Module) -> nn.Module:
    """A copy with parameters and buffers on ``meta``; what is shared stays shared."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        blank = torch.empty_like(tensor, device=META)
        memo[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
    return copy.deepcopy(model, memo)


def parts_of(model: str, precision: str, *words: str, scaler: str | None = None) -> tuple[Parts, Any]:
    """A run on ``meta``, and a batch on the host; `device` must be in force.

    Args:
        model: An option of the group.
        precision: An option of the group.
        words: More, for the model.
        scaler: An option of the group; None is that of the mode.
    """
    config, parts, batch = drawn(model, *words)
    mode = chosen(f"precision={precision}")
    config = replace(
        config, precision=mode.precision, scaler=chosen(f"scaler={scaler}").scaler if scaler else mode.scaler
    )
    network = without_values(parts.model).train()
    kept = apply.cast_model(network, config.precision)
    plan = replace(
        parts.plan,
        products=products(config.precision, META),
        autocast=apply.autocast(config.precision, META),
        guard=BufferGuard(network),
    )
    steps = parts.loaders["train"].steps_per_epoch
    learners = build_learners(config, parts.task.objectives(), network, {}, steps)
    changed = {"policy": config.precision, "device": META, "learners": learners, "plan": plan}
    return replace(parts, model=network, kept=kept, **changed), batch


@dataclass
class Seen:
    """Dealings of steps with the host.

    Attributes:
        found: Each thing, in words; one that ended the step is the last.
        operators: How many ran.
    """

    found: list[str] = field(default_factory=list)
    operators: int = 0


def look_at(parts: Parts, batch: Any, steps: int = 2) -> Seen:
    """Prepare a batch and take steps on it; everything that moves has to be on the device behind them."""
    watch = Watch()
    rings = [Ring(steps, len(learner.weights.names), META) for learner in parts.learners]
    taken = StepRunner(parts, rings)
    try:
        with watch, Made(watch):
            for step in range(steps):
                watch.first = step == 0
                taken.run(parts.prepare(batch), [None] * len(rings))
            blocks = [stack(ring._kept) for ring in rings]
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return Seen([*watch.found, first_line(error)], watch.operators)
    moving = [value for learner in parts.learners for value in learner.moving().values()]
    state = [value for learner in parts.learners for value in learner.weights.masters.working().values()]
    everything = [*blocks, *moving, *state, *parts.model.parameters(), *parts.model.buffers()]
    left = [f"{tuple(tensor.shape)} is left on the host" for tensor in everything if tensor.device != META]
    return Seen(watch.found + left, watch.operators)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


@pytest.fixture
def device(monkeypatch):
    """``meta`` as a device that has autocast."""
    monkeypatch.setattr(torch, "autocast", Autocast)
    with contextlib.suppress(AttributeError):
        monkeypatch.setattr(torch.amp, "autocast", Autocast)
