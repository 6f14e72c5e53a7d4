"""Parts of a run that is built from its configuration: its model, data, learners and plan.

`Parts.prepare` brings each batch to the device by a `Transfer`, while the device still computes the step before.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.engine.fingerprints import digest_of_labels
from mptrain.numerics.tensors import saturated
from mptrain.parallel.communicator import SINGLE_PROCESS, Communicator
from mptrain.precision.apply import input_dtype
from mptrain.system.device import capabilities, current_stream, event_now, new_stream, on_stream
from mptrain.workloads.base.task import Task

if TYPE_CHECKING:
    from mptrain.engine.fault_injection import Injection
    from mptrain.engine.fingerprints import StartFingerprints
    from mptrain.engine.histograms import Probe
    from mptrain.engine.step import Learner, Plan
    from mptrain.precision.policy import Policy
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.dataset import Dataset
    from mptrain.workloads.base.loader import Loader


@dataclass(frozen=True)
class Parts:
    """Parts of a run that is built from its configuration and ready to train.

    Attributes:
        kept: Modules that stay in FP32, by name.
        learners: Learners, one per loss of the task; a GAN has two. Each has weights, an optimizer and a loss scaler.
        plan: Settings that hold for every step, such as the number of micro-batches.
        loaders: Loaders of the batches by split: ``train``, and ``val`` and ``test`` if the data set has them.
        origin: Memory use before the model was built, and digest of the initial weights.
        notes: Remarks for the user about how the run was built, one sentence each.
        warnings: Deviations from what the user asked for, one sentence each.
        blank: Whole model on the meta device if its weights are sharded, else None.
        frozen: FP32 values, in host memory, of the half-precision parameters that no learner trains, by name. They are
            saved and exported in place of the rounded ones. Empty if weights are sharded.
        infinite: Names of the buffers that held inf when the model was built, such as attention masks.
    """

    model: nn.Module
    kept: dict[str, nn.Module]
    task: Task
    dataset: Dataset
    policy: Policy
    device: torch.device
    learners: tuple[Learner, ...]
    plan: Plan
    memory_format: torch.memory_format
    loaders: dict[str, Loader]
    origin: StartFingerprints
    probe: Probe
    fault: Injection
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    comm: Communicator = SINGLE_PROCESS
    blank: nn.Module | None = None
    frozen: dict[str, Tensor] = field(default_factory=dict)
    infinite: frozenset[str] = frozenset()

    def prepare(self, batch: Batch) -> Batch:
        """Copy a batch from the host to the device and prepare it for training, in the input dtype of the model."""
        return self._transfer(lambda: self._prepared(batch).cast(input_dtype(self.policy)))

    def prepare_float32(self, batch: Batch) -> Batch:
        """Copy a batch from the host to the device and prepare it in FP32."""
        return self._transfer(lambda: self._prepared(batch))

    def _prepared(self, batch: Batch) -> Batch:
        prepared = self.dataset.prepare(batch, self.device, self.memory_format)
        if batch.whole is None and not batch.is_dummy:
            return prepared
        return replace(prepared, whole=batch.whole, is_dummy=batch.is_dummy)  # data sets need not know these fields

    @functools.cached_property
    def _transfer(self) -> Transfer:
        return Transfer(self.device)

    def must_be_finite(self) -> dict[str, Tensor]:
        """Return the full-precision parameters and floating-point buffers by name, without those in ``infinite``."""
        state = {**self._trained(), **dict(self.model.named_buffers())}
        return {name: value for name, value in state.items() if value.is_floating_point() and name not in self.infinite}

    def full_precision(self) -> dict[str, Tensor]:
        """Return FP32 master weights, and FP32 values of frozen parameters that no module has changed, by name."""
        current = dict(self.model.named_parameters()) if self.frozen else {}
        frozen = {
            name: value
            for name, value in self.frozen.items()
            if torch.equal(current[name].detach().cpu(), saturated(value, current[name].dtype).cpu())
        }
        return {**frozen, **self._trained()}

    def _trained(self) -> dict[str, Tensor]:
        return {
            name: value for learner in self.learners for name, value in learner.weights.masters.full_precision().items()
        }

    def averages(self) -> dict[str, Tensor]:
        """Return the exponential moving averages of the trained parameters by name; empty if the run keeps none."""
        averages = [learner.average.values() for learner in self.learners if learner.average]
        return {name: value for values in averages for name, value in values.items()}

    def compile(self) -> None:
        """Compile the modules that the run trains with torch.compile.

        Each batch shape gets its own kernels. Dynamic-shape kernels would be used only after a second shape was seen,
        so a resumed run would not be bitwise equal to an uninterrupted one. For the same reason the compiler must not
        give up on a shape: all modules share one recompile limit, eight by default, and a GAN needs more.
        """
        import torch._dynamo

        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.accumulated_recompile_limit = 1024
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        modules = dict(self.model.named_modules())
        for name in {name for learner in self.learners for name in learner.objective.modules}:
            if name in modules:
                modules[name].compile(dynamic=False)

    def data_card(self) -> dict[str, Any]:
        """Return the data set's name, kind of inputs and facts, and the fields of its own card, such as ``labels``."""
        own = self.dataset.card() if hasattr(self.dataset, "card") else {}
        # Callables are for the task, not for a file; names of classes and speakers are in the card's labels.
        names = ("class_names", "speaker_names")
        facts = {n: fact for n, fact in self.dataset.facts().items() if not callable(fact) and n not in names}
        predicts = getattr(type(self.task), "predict", Task.predict) is not Task.predict
        kind = getattr(self.dataset, "inputs", "") if predicts else ""
        return {"name": self.dataset.name, **({"inputs": kind} if kind else {}), **facts, **own}

    @functools.cached_property
    def labels_digest(self) -> str:
        """Hexadecimal digest of the data set's labels, or of an empty list; a resumed run must have the same."""
        return digest_of_labels(self.data_card().get("labels", []))

    def carried(self) -> dict[str, Tensor]:
        """Return the non-persistent buffers of the model by name, which belong to the run and not to its weights."""
        lasting = self.model.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in lasting}


#: Number of batches that the host may be ahead of the device. Enough to bridge a slow batch; each takes memory.
AHEAD = 4


class Transfer:
    """Transfer of training batches to the device on a separate stream, so that neither host nor training waits for it.

    The host prepares the next batch while the device is still busy with the current step. On a separate stream, the
    copy does not queue behind that step. A device without streams copies in order with the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device) if capabilities(device).streams else None
        self._device = device
        self._before: deque[torch.Event] = deque()

    def __call__(self, make: Callable[[], Batch]) -> Batch:
        """Make a batch on the transfer stream, safe to use on the current one; waits if too many batches are ahead."""
        if self._stream is None:
            return make()
        current = current_stream(self._device)
        self._wait_for_space()
        with on_stream(self._device, self._stream):
            batch = make()
        current.wait_stream(self._stream)
        for tensor in batch.tensors().values():
            if tensor.device.type == self._device.type:
                tensor.record_stream(current)  # memory stays reserved until that stream has used it
        return batch

    def _wait_for_space(self) -> None:
        self._before.append(event_now(self._device, sleeping=True))
        if len(self._before) > AHEAD:
            self._before.popleft().synchronize()
