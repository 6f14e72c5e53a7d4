"""Runner of training steps: all learners' steps on a batch, operator by operator or as CUDA graphs, one for each shape.

torch restores its own state only after a successful capture. After a failed one, the capture stream stays current and
the device's generator still expects a capture and refuses to draw. Before torch 2.12 allocations still go to the
capture's pool (pytorch#180395); before 2.14 the pool is never released (pytorch#190348).

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
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from mptrain.engine.ring import StepValues, stack
from mptrain.engine.step import train_step
from mptrain.system.device import capabilities

if TYPE_CHECKING:
    from mptrain.engine.histograms import StepWatch
    from mptrain.engine.parts import Parts
    from mptrain.engine.ring import Ring
    from mptrain.engine.step import Learner
    from mptrain.optimizer.weights import GradientState
    from mptrain.workloads.base.batch import Batch

    Capture = Callable[[Callable[[], None]], Callable[[], None]]
    Step = Callable[[Batch], list[StepValues]]


#: From this version on torch may release the pool of a failed capture itself; releasing it twice breaks its count.
_RELEASES_POOLS = TorchVersion("2.13")


class GraphsInvalidated(RuntimeError):
    """Error raised when a failed capture of a CUDA graph has made the graphs captured before it unusable."""


class CudaGraphs:
    """Capture of functions as CUDA graphs: calling an instance captures a function's kernels without running them.

    All graphs share one memory pool. That is safe because only one graph runs at a time and each graph writes
    everything that it reads from the pool. References to tensors that are read after a replay are kept, so no other
    graph gets their memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._captured = False

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run a function once on the host, capturing its kernels; return a function that replays them.

        Raises:
            RuntimeError: The capture failed; this is the first error, not a follow-up of it.
            GraphsInvalidated: The capture failed and earlier graphs can no longer be replayed.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        drawn, begun = torch.cuda.get_rng_state(self._device), False
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, capture_error_mode="relaxed"
            ):  # relaxed: other threads may pin memory meanwhile
                begun = True
                body()
        except BaseException as error:
            torch.cuda.set_stream(stream)
            if begun:
                self._release(graph)
            taken = self._free_generator()
            torch.cuda.set_rng_state(drawn, self._device)
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            if taken and self._captured:
                raise GraphsInvalidated(str(first)) from error
            raise first from None
        self._captured = True
        return graph.replay

    def _release(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.pool()  # raises unless the capture itself ended, as it does if the error came from elsewhere
            ended = True
        except RuntimeError:
            ended = False
        graph.reset()
        if ended:
            return
        with contextlib.suppress(RuntimeError):  # torch has ended it already
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
        if TorchVersion(torch.__version__) < _RELEASES_POOLS:
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_releasePool(self._index, self._pool)

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index

    def _free_generator(self) -> bool:
        """Replace the state of the device's generator if it still expects a capture; return whether it was replaced."""
        try:
            torch.rand((), device=self._device)
        except RuntimeError:
            generator = torch.cuda.default_generators[self._index]
            generator.graphsafe_set_state(generator.clone_state())
            return True
        return False


#: Start of torch's warning about a synchronisation, and of its one-time warning that it does not detect all of them.
_WAIT, _PROTOTYPE = "called a synchronizing CUDA operation", "Synchronization debug mode"


@contextlib.contextmanager
def host_waits(device: torch.device) -> Iterator[list[str]]:
    """Yield a list that is filled on exit with the places (``FILE:LINE``) where the host waited for a CUDA device."""
    waits: list[str] = []
    if device.type != "cuda":
        yield waits
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if _WAIT in str(warning.message):
            waits.append(f"{Path(warning.filename).name}:{warning.lineno}")
        elif _PROTOTYPE not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


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
        # _hold writes into some of these tensors
        values = [StepValues.of(stack([learner_values])) for learner_values in values]
        self._hold()
        return values

    def _hold(self) -> None:
        """Copy the state that an eager step changed to the fixed tensors that graphs read."""
        if not self._fixed:
            self._fixed = [
                {name: value.clone() for name, value in learner.moving().items()} for learner in self._learners
            ]
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
        # move_into writes into some of these tensors
        self._values = [stack([learner_values]) for learner_values in step(self._batch)]
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


class StepRunner:
    """Runner of training steps: runs every learner's step on one batch after another, and records its values.

    With ``capture``, steps become CUDA graphs (`StepGraphs`). ``notes`` are warnings for the user; the caller removes
    them once shown.
    """

    def __init__(self, parts: Parts, rings: Sequence[Ring], capture: Capture | None = None) -> None:
        self._parts, self._rings = parts, tuple(rings)
        self.notes: list[str] = []
        self._graphs = None if capture is None else StepGraphs(parts, capture, self.notes)

    def run(self, batch: Batch, watches: Sequence[StepWatch | None], *, as_usual: bool = True) -> None:
        """Run one training step of every learner on this rank's prepared part of a batch, and record its values.

        ``as_usual`` says that the step has no injected fault, so that it may be captured or replayed.
        """

        def step(batch: Batch) -> list[StepValues]:
            model, plan = self._parts.model, self._parts.plan
            pairs = zip(self._parts.learners, watches, strict=True)
            return [train_step(learner, model, batch, plan, watch) for learner, watch in pairs]

        usual = as_usual and not any(watches)
        values = step(batch) if self._graphs is None else self._graphs.run(batch, step, as_usual=usual)
        for ring, learner_values in zip(self._rings, values, strict=True):
            ring.record(learner_values)
