"""The weights that one learner trains: their gradients, the copies that its optimizer moves, and the order of a step's calls.

Where ranks hold parts of the parameters (`mptrain.numerics.shards`), everything here is about this rank's parts; what goes out,
full-precision weights and optimizer state, are parts that know of what. Nothing here waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mptrain.device import capabilities, widest
from mptrain.errors import ConfigError
from mptrain.numerics.formats import FLOAT32
from mptrain.numerics.shards import is_sharded
from mptrain.numerics.verdict import HostJudge, Verdict, clip_coefficient, gradient_norms, judge
from mptrain.optimizer.gradients import Gradients
from mptrain.optimizer.master_weights import MasterWeights
from mptrain.optimizer.updater import Updater

if TYPE_CHECKING:
    from mptrain.numerics.measures import Measure
    from mptrain.optimizer.rules import Rule

    #: What becomes of norms, and of a measure of gradients, where there are several ranks.
    AcrossNorms = Callable[[Tensor], Tensor]
    AcrossMeasure = Callable[[Measure, list[Tensor]], Tensor]


class Weights:
    """Parameters with their gradients, working copies and optimizer state.

    Args:
        named: Name and parameter, as `nn.Module.named_parameters` gives them; frozen ones are left out.
        rule: What moves them.
        master_weights: Keep FP32 copies of half parameters.
        state_in_half: Half parameters are updated in place, with optimizer state of their own dtype.
        clip_norm: Largest global gradient norm, or None.
        initial: FP32 values that the parameters were cast from, by name; the master copies start there, so that
            nothing of the initial draw is lost.

    Attributes:
        names: The names of the P parameters trained, in the order of `Verdict.norms`.
        params: The P parameters, in that order.
        sharded: Whether this rank holds parts of the parameters only.
        rule: What moves them.
        clip_norm: Largest global gradient norm, or None.
        masters: Their working copies.
        updater: The rule with its state.
        gradients: Their gradients.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        rule: Rule,
        *,
        master_weights: bool,
        state_in_half: bool = False,
        clip_norm: float | None = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        if not trained:
            raise ConfigError("no parameter of the model is trainable", "unfreeze at least one module")
        self.names, self.params = tuple(trained), list(trained.values())
        self.sharded = is_sharded(self.params[0])  # all are, or none
        self.rule, self.clip_norm = rule, clip_norm
        self.masters = MasterWeights(
            self.names, self.params, keep=master_weights, state_in_half=state_in_half, initial=initial or {}
        )
        work = self.masters.work
        self.updater = Updater(rule, self.names, self.params, self.masters)
        self.gradients = Gradients(self.names, self.params, self.masters, read_half=self.updater.one_pass)
        device = work[0].device
        has = capabilities(device)
        self._host_judge = HostJudge(work, exact=clip_norm is not None) if has.host and has.fp64 else None
        self._one = torch.ones(1, device=device)
        self._no_gradient = torch.full((), -1.0, dtype=widest(device), device=device)

    @property
    def one_pass(self) -> bool:
        """True where norms and update are kernels over all tensors at once."""
        return self.updater.one_pass

    def judge(
        self,
        scale: Tensor,
        *,
        refuses: bool,
        measure: Measure | None = None,
        across: tuple[AcrossNorms, AcrossMeasure] | None = None,
        offenders_only: bool = False,
    ) -> Verdict:
        """Return whether the gradients are finite, their norms, and what a scaler asks to know of them.

        Args:
            scale: float32, shape (1,): the scale they carry.
            refuses: Whether an overflow refuses the update.
            measure: What the scaler asks for.
            across: What makes norms, and a measure, of this rank's gradients those of all ranks; None on one rank.
            offenders_only: Norms of single gradients are needed only where one is not finite. The host reads a CPU's memory
                for nothing, so there it looks at the norm of all of them first.
        """
        grads = self.gradients.tensors()
        present = [grad for grad in grads if grad is not None]
        complete = len(present) == len(grads)
        measured = None
        if measure is not None:
            found = [g.to(work.dtype) for g, work in zip(grads, self.masters.work, strict=True) if g is not None]
            measured = measure(found) if across is None else across[1](measure, found)
        if offenders_only and complete and across is None and self._host_judge is not None:
            verdict = self._host_judge(present, scale)
            if verdict is not None:
                return verdict._replace(measured=measured)
        if self.one_pass and present:
            norms = self.updater.norms(grads)
        else:
            norms = gradient_norms(present)
            if not complete:
                found_norms = iter(norms)
                norms = torch.stack([self._no_gradient if grad is None else next(found_norms) for grad in grads])
        if across is not None:
            norms = across[0](norms)
        return judge(norms, scale, refuses=refuses, complete=complete, measured=measured)

    def update(self, verdict: Verdict, lr: Tensor, scale: Tensor | None) -> None:
        """Unscale, clip, update, and round to half precision, in this order; a refused update changes nothing.

        Args:
            verdict: What `judge` said about these gradients.
            lr: float32, shape (1,).
            scale: float32, shape (1,): the scale that multiplied this step's loss, whatever the next one will be; None
                where losses are never scaled: on a CPU torch's Adam takes half the time without a division.
        """
        if self.clip_norm is not None:
            divisor = (1.0 if scale is None else scale) / clip_coefficient(verdict.grad_norm, self.clip_norm)
            scale = divisor.clamp(max=FLOAT32.max).to(torch.float32)  # dividing by inf would zero every gradient
        elif scale is None and self.one_pass:
            scale = self._one
        self.updater(self.gradients.tensors(), verdict, lr, scale)
