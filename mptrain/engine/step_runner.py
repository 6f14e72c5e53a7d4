"""The steps of all learners on a batch: operator by operator, or the whole of it as one CUDA graph.

A network whose kernels are shorter than the time it takes to launch them waits for the host all the time. A graph is
launched once for all of them. What is captured is `mptrain.engine.step` as it is: forward and backward passes, verdict,
update, scaler, schedule, record. That works because nothing in there depends on the host: a graph repeats addresses and
Python's decisions, and every value that may change is in device memory.

What a step makes anew and the next one begins with, the count of updates and the scaler's state, is copied into fixed tensors at
its end. A batch is copied into fixed tensors before it.
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

from mptrain.device import capabilities
from mptrain.engine.cuda_graphs import CudaGraphs, GraphsInvalidated, host_waits
from mptrain.engine.step import StepValues, train_step

if TYPE_CHECKING:
    from mptrain.engine.parts import Parts
    from mptrain.engine.ring import Ring
    from mptrain.optimizer.weights import GradientState
    from mptrain.probe.probe import Watch
    from mptrain.workloads.base.batch import Batch

    #: Takes what a step does, and gives back what does it again.
    Capture = Callable[[Callable[[], None]], Callable[[], None]]

#: Steps on a shape of batch before it is captured: libraries choose their kernels in the first ones.
WARM_UP = 3
#: Shapes that are captured; each keeps the memory of a whole step.
MOST = 4
#: Shapes after which no more are looked for; where none of them came often enough, none ever will.
LOOKED_AT = 64


def capture_on(device: torch.device) -> Capture | None:
    """How steps are captured on a device; None where they cannot be."""
    return CudaGraphs(device) if capabilities(device).graphs else None


class StepRunner:
    """Trains every learner on one batch after another.

    Args:
        parts: The run.
        rings: Takes the record of each learner, in their order.
        capture: How a step is captured; None launches it operator by operator.

    Attributes:
        notes: What the user should know about it, one sentence each; whoever tells it takes it out.
    """

    def __init__(self, parts: Parts, rings: Sequence[Ring], capture: Capture | None = None) -> None:
        self._parts = parts
        self._rings = tuple(rings)
        self._capture = capture
        self._fixed: list[dict[str, Tensor]] = []
        self._seen: Counter[Any] = Counter()
        self._graphs: dict[Any, _Graph] = {}
        self._refused: set[Any] = set()
        self._newest: _Graph | None = None
        self.notes: list[str] = []
        if capture is not None and (why := _outside_of_graphs(parts.model)):
            self._give_up(why)

    def run(self, batch: Batch, watches: Sequence[Watch | None], *, as_usual: bool = True) -> None:
        """One step of every learner.

        Args:
            batch: Prepared.
            watches: What looks at each learner's step, if anything does.
            as_usual: Nothing but the step is to happen; no fault was put in.
        """
        if self._capture is None:
            self._record(self._eagerly(batch, watches))
            return
        kind = _kind_of(batch) if as_usual and not any(watches) else None
        graph = None if kind is None else self._graph_for(kind, batch)
        if graph is None:
            last = kind not in self._refused and self._seen[kind] == WARM_UP  # the next one is captured
            looking: AbstractContextManager[list[str]] = (
                host_waits(self._parts.device) if last else contextlib.nullcontext([])
            )
            with looking as waits:
                values = self._eagerly(batch, watches)
            if waits:  # no capture survives that
                self._refuse(kind, f"the host waits for the device, in {waits[0]}")
            self._record([_copy_of(one) for one in values])  # what follows writes into the tensors of some of them
            self._newest = None
            self._hold()
            return
        self._record(graph.run(batch, again=graph is self._newest))
        self._newest = graph

    def _eagerly(self, batch: Batch, watches: Sequence[Watch | None]) -> list[StepValues]:
        model, plan = self._parts.model, self._parts.plan
        pairs = zip(self._parts.learners, watches, strict=True)
        return [train_step(learner, model, batch, plan, watch) for learner, watch in pairs]

    def _record(self, values: Sequence[StepValues]) -> None:
        for ring, one in zip(self._rings, values, strict=True):
            ring.record(one)

    def _hold(self) -> None:
        """Have what moved in an eager step in the fixed tensors that graphs read."""
        if not self._fixed:
            self._fixed = [
                {name: value.clone() for name, value in one.moving().items()} for one in self._parts.learners
            ]
        for learner, fixed in zip(self._parts.learners, self._fixed, strict=True):
            learner.move_into(fixed)

    def _graph_for(self, key: Any, batch: Batch) -> _Graph | None:
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
            self._graphs[key] = self._captured(batch)
        except (RuntimeError, torch.AcceleratorError) as error:
            if isinstance(error, GraphsInvalidated):
                self._graphs.clear()
            self._refuse(key, str(error).splitlines()[0] if str(error) else type(error).__name__)
        return self._graphs.get(key)

    def _refuse(self, key: Any, why: str) -> None:
        """Capture no more batches of a kind; none at all where no kind has been captured."""
        if self._graphs:
            self._refused.add(key)
            self.notes.append(f"train.engine=graph: batches of another shape are launched operator by operator: {why}")
        else:
            self._give_up(why)

    def _captured(self, batch: Batch) -> _Graph:
        """A graph of the step on batches like this one; where there is none, nothing has happened.

        Raises:
            RuntimeError: It cannot be captured; says why.
        """
        graph = _Graph(self._parts, batch)
        assert self._capture is not None
        with self._undone_on_error(), _refusing_random_numbers():
            graph.replay = self._capture(lambda: graph.body(self._fixed))
        graph.keep_gradients()
        return graph

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Where capturing fails, the learners go on with what they had."""
        before = [learner.moving() for learner in self._parts.learners]
        try:
            yield
        except BaseException:
            for learner, values in zip(self._parts.learners, before, strict=True):
                learner.go_on_with(values)
                learner.weights.gradients.zero_grad()
            raise

    def _give_up(self, why: str) -> None:
        self.notes.append(
            f"train.engine=graph: the step cannot be captured, and is launched operator by operator: {why}"
        )
        self._capture = None


class _Graph:
    """One captured step of all learners on batches of one shape."""

    def __init__(self, parts: Parts, batch: Batch) -> None:
        self._parts = parts
        self._batch = batch.clone()
        self._packed: list[tuple[Tensor, Tensor]] = []
        self._gathered: list[GradientState] = []
        self.replay: Callable[[], None]

    def body(self, fixed: Sequence[dict[str, Tensor]]) -> None:
        """What is captured."""
        parts, self._packed = self._parts, []
        for learner, moving in zip(parts.learners, fixed, strict=True):
            self._packed.append(_packed(train_step(learner, parts.model, self._batch, parts.plan)))
            learner.move_into(moving)

    def keep_gradients(self) -> None:
        """Remember where the graph leaves the gradients, for whoever looks at them after a step."""
        self._gathered = [learner.weights.gradients.state() for learner in self._parts.learners]

    def run(self, batch: Batch, *, again: bool) -> list[StepValues]:
        """Do the step on a batch; return copies of its values, since the next run writes into the same tensors."""
        self._batch.copy_(batch)
        self.replay()
        if not again:
            for learner, gathered in zip(self._parts.learners, self._gathered, strict=True):
                learner.weights.gradients.restore(gathered)
        return [_unpacked(singles.clone(), norms.clone()) for singles, norms in self._packed]


def _packed(values: StepValues) -> tuple[Tensor, Tensor]:
    """Return the values of a step in two tensors, so that copies of them are two kernels."""
    singles = torch.cat([values.loss.view(1), values.scale, values.lr, values.next_scale])
    return singles, torch.cat([values.grad_norm, values.norms])


def _unpacked(singles: Tensor, norms: Tensor) -> StepValues:
    """Return the values that `_packed` has put into tensors, as views of them."""
    return StepValues(singles[0], singles[1:2], norms[:1], norms[1:], singles[2:3], singles[3:4])


def _copy_of(values: StepValues) -> StepValues:
    return _unpacked(*_packed(values))


def _kind_of(batch: Batch) -> tuple[Any, ...]:
    """What a captured step has taken for granted of its batch."""
    tensors = {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in batch.tensors().items()}
    return tuple(tensors.items()), batch.targets is batch.inputs, batch.counts


def _outside_of_graphs(model: nn.Module) -> str:
    """Why no step of a model may be captured although it could be; empty where nothing is known."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.num_layers > 1 and module.dropout > 0:
            return f"the random numbers for the dropout of {name or 'the network'} are cuDNN's, which makes new ones now and then"
    return ""


@contextlib.contextmanager
def _refusing_random_numbers() -> Iterator[None]:
    """A region in which nobody draws random numbers on the host, or no trace is left of it.

    Raises:
        RuntimeError: Somebody has.
    """
    numpy = sys.modules.get("numpy")  # whoever has not imported it draws nothing from it
    python, own, theirs = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state(legacy=False)
    try:
        yield
        same = random.getstate() == python and torch.equal(torch.get_rng_state(), own)
        if not same or (numpy and pickle.dumps(numpy.random.get_state(legacy=False)) != pickle.dumps(theirs)):
            raise RuntimeError("it draws random numbers on the host, which a graph would repeat")
    finally:
        random.setstate(python)
        torch.set_rng_state(own)
        if numpy:
            numpy.random.set_state(theirs)
