"""Capture of training steps as CUDA graphs, one for each shape of batches that comes often.

If the kernels of a model are shorter than the time to launch them, the device always waits for the host. A graph
launches all of them at once. The capture covers `mptrain.engine.step` unchanged: forward and backward passes, verdict,
update, scaler, schedule and record. This works because no step depends on the host: a replay repeats addresses and
Python's decisions, and every value that may change is in device memory.

State that a step replaces and the next one reads (the update count and the scaler's state) is copied to fixed tensors
at the end of the step. A batch is copied to fixed tensors before it.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.engine.cuda_graphs import CudaGraphs, GraphsInvalidated, host_waits
from mptrain.engine.step_values import StepValues, stack
from mptrain.system.device import capabilities

if TYPE_CHECKING:
    from mptrain.engine.parts import Parts
    from mptrain.engine.step import Learner
    from mptrain.optimizer.weights import GradientState
    from mptrain.workloads.base.batch import Batch

    #: Takes the body of a step and returns a function that replays it.
    Capture = Callable[[Callable[[], None]], Callable[[], None]]

    #: Runs the step of every learner on a batch, operator by operator, and returns the values of each.
    Step = Callable[[Batch], list[StepValues]]

#: Steps on a batch shape before it is captured: libraries choose their kernels in the first ones.
WARM_UP = 3
#: Maximum number of captured shapes; each keeps the memory of a whole step.
MOST = 4
#: Maximum number of shapes to track. If none of them is captured by then, capturing is given up.
LOOKED_AT = 64


def capture_on(device: torch.device) -> Capture | None:
    """Return a function that captures the body of a step as a CUDA graph, or None if the device has no graphs."""
    return CudaGraphs(device) if capabilities(device).graphs else None


class StepGraphs:
    """Training steps that are captured as CUDA graphs where possible.

    Each batch shape is captured after a few eager steps, if the step allows it. ``notes`` gets warnings for the user.
    """

    def __init__(self, parts: Parts, capture: Capture, notes: list[str]) -> None:
        self._device, self._learners, self._notes = parts.device, parts.learners, notes
        self._capture: Capture | None = capture
        self._fixed: list[dict[str, Tensor]] = []
        self._seen: Counter[Any] = Counter()
        self._graphs: dict[Any, _Graph] = {}
        self._refused: set[Any] = set()
        self._newest: _Graph | None = None
        if why := _outside_of_graphs(parts.model):
            self._give_up(why)

    def run(self, batch: Batch, step: Step, *, as_usual: bool) -> list[StepValues]:
        """Run the step of every learner on a batch, by its graph if there is one, and return their values.

        ``as_usual`` says that the step does what is in a graph, so that it may be captured or replayed.
        """
        if self._capture is None:
            return step(batch)
        kind = _kind_of(batch) if as_usual else None
        graph = None if kind is None else self._graph_for(kind, batch, step)
        values = self._eagerly(kind, batch, step) if graph is None else graph.run(batch, again=graph is self._newest)
        self._newest = graph
        return values

    def _eagerly(self, kind: Any, batch: Batch, step: Step) -> list[StepValues]:
        # The next step is captured.
        last = kind not in self._refused and self._seen[kind] == WARM_UP and len(self._graphs) < MOST
        looking: AbstractContextManager[list[str]] = host_waits(self._device) if last else contextlib.nullcontext([])
        with looking as waits:
            values = step(batch)
        if waits:  # a capture would fail
            self._refuse(kind, f"the host waits for the device, in {waits[0]}")
        values = [StepValues.of(stack([one])) for one in values]  # _hold writes into some of these tensors
        self._hold()
        return values

    def _hold(self) -> None:
        """Copy the state that an eager step changed to the fixed tensors that graphs read."""
        if not self._fixed:
            self._fixed = [{name: value.clone() for name, value in one.moving().items()} for one in self._learners]
        for learner, fixed in zip(self._learners, self._fixed, strict=True):
            learner.move_into(fixed)

    def _graph_for(self, key: Any, batch: Batch, step: Step) -> _Graph | None:
        if key in self._graphs:
            return self._graphs[key]
        if key in self._refused or len(self._graphs) == MOST:
            return None
        if key not in self._seen and len(self._seen) == LOOKED_AT:
            if not self._graphs:
                self._give_up(f"batches come in more than {LOOKED_AT} shapes, none of them often")
            return None
        self._seen[key] += 1
        if self._seen[key] <= WARM_UP:
            return None
        try:
            self._graphs[key] = self._captured(batch, step)
        except (RuntimeError, torch.AcceleratorError) as error:
            if isinstance(error, GraphsInvalidated):
                self._graphs.clear()
            self._refuse(key, str(error).splitlines()[0] if str(error) else type(error).__name__)
        return self._graphs.get(key)

    def _refuse(self, key: Any, why: str) -> None:
        """Stop capturing batches of a kind, or all batches if no kind has been captured yet."""
        if self._graphs:
            self._refused.add(key)
            self._notes.append(f"train.engine=graph: batches of another shape run without a CUDA graph: {why}")
        else:
            self._give_up(why)

    def _captured(self, batch: Batch, step: Step) -> _Graph:
        """Capture the step on batches like this one, or raise RuntimeError with the state of the learners unchanged."""
        graph = _Graph(self._learners, batch)
        assert self._capture is not None
        with self._undone_on_error(), _refusing_random_numbers():
            graph.replay = self._capture(lambda: graph.body(step, self._fixed))
        graph.keep_gradients()
        return graph

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        before = [learner.moving() for learner in self._learners]
        try:
            yield
        except BaseException:
            for learner, values in zip(self._learners, before, strict=True):
                learner.use_moving(values)
                learner.weights.gradients.zero_grad()
            raise

    def _give_up(self, why: str) -> None:
        self._notes.append(f"train.engine=graph: the step cannot be captured and runs without a CUDA graph: {why}")
        self._capture = None


class _Graph:
    """One captured step of all learners on batches of one shape."""

    def __init__(self, learners: Sequence[Learner], batch: Batch) -> None:
        self._learners, self._batch = learners, batch.clone()
        self._values: list[Tensor] = []
        self._gathered: list[GradientState] = []
        self.replay: Callable[[], None]

    def body(self, step: Step, fixed: Sequence[dict[str, Tensor]]) -> None:
        self._values = [stack([one]) for one in step(self._batch)]  # move_into writes into some of these tensors
        for learner, moving in zip(self._learners, fixed, strict=True):
            learner.move_into(moving)

    def keep_gradients(self) -> None:
        """Remember the tensors in which the graph leaves the gradients, so that they can be read after a step."""
        self._gathered = [learner.weights.gradients.state() for learner in self._learners]

    def run(self, batch: Batch, *, again: bool) -> list[StepValues]:
        """Replay the step on a batch; return copies of its values, because the next replay overwrites them."""
        self._batch.copy_(batch)
        self.replay()
        if not again:
            for learner, gathered in zip(self._learners, self._gathered, strict=True):
                learner.weights.gradients.restore(gathered)
        return [StepValues.of(values.clone()) for values in self._values]


def _kind_of(batch: Batch) -> tuple[Any, ...]:
    tensors = {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in batch.tensors().items()}
    return tuple(tensors.items()), batch.targets is batch.inputs, batch.counts


def _outside_of_graphs(model: nn.Module) -> str:
    """Return why a model must not be captured although a capture would succeed; empty if no reason is known."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.num_layers > 1 and module.dropout > 0:
            return f"cuDNN draws the random numbers for the dropout of {name or 'the model'} outside the graph"
    return ""


@contextlib.contextmanager
def _refusing_random_numbers() -> Iterator[None]:
    """Raise RuntimeError after random draws on the host; restore the random states on exit."""
    numpy = sys.modules.get("numpy")  # if it is not imported, nothing draws from it
    python, own, theirs = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state(legacy=False)
    try:
        yield
        same = random.getstate() == python and torch.equal(torch.get_rng_state(), own)
        if not same or (numpy and pickle.dumps(numpy.random.get_state(legacy=False)) != pickle.dumps(theirs)):
            raise RuntimeError("it draws random numbers on the host, which a graph would repeat unchanged")
    finally:
        random.setstate(python)
        torch.set_rng_state(own)
        if numpy:
            numpy.random.set_state(theirs)
