"""One optimizer of a watched training loop: it puts its backward passes, updates and histograms together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.engine.histograms import FrozenWeights
from mptrain.engine.ring import StepValues
from mptrain.integrations.passes import Follower, Passes, PassLog, first_not_finite, warn
from mptrain.integrations.updates import Rates, UpdateFacts, UpdateHistograms, UpdateLog
from mptrain.numerics.lost_updates import RoundedUpdates, lost_at_start, lost_decays, states_of
from mptrain.numerics.overflow_check import Verdict
from mptrain.runlog.lost_updates import in_words
from mptrain.system.torch_private import is_within_step, skips_on_device


class Owner(Protocol):
    """Watch that a learner tells of its passes and updates, and asks for the loss scale."""

    def before_pass(self) -> None:
        """Take notice that a backward pass has ended, before its gradients are looked at."""

    def updated(self, learner: WatchedLearner) -> None:
        """Take notice that a learner's optimizer has stepped."""

    def loss_scale(self) -> Tensor | None:
        """Return the present loss scale, float32 (1,), not changed in place later; None without a scaler."""

    def scale_by_hand(self) -> float | Tensor | None:
        """Return the present loss scale of a loop that scales by hand; None of others."""

    def is_unscaled(self, learner: WatchedLearner) -> bool:
        """Return whether the gradients of a learner have been divided by the loss scale."""

    def give_up(self, error: Exception) -> None:
        """End the watch, because observing failed; training goes on."""


class Applied(NamedTuple):
    """Look at the gradients that an optimizer was given, after whatever the loop has done to them.

    Attributes:
        verdict: Its norm and its finiteness.
        unscaled: They have been divided by the loss scale.
        same: They are the gradients of the passes, changed in place or not, and no others that the loop has set.
        changes: Number of times that they were changed in place between pass and update.
    """

    verdict: Verdict
    unscaled: bool
    same: bool
    changes: int


class WatchedLearner(Follower):
    """Optimizer of a watched loop: the passes that reach its parameters, its pending update, its histograms.

    Args:
        optimizers: The optimizer that updates, and before it those that wrap it; it may be given parameters later.
        names: Name of each parameter by its id, in module order.
        models: Models by the prefix of their names, for histograms.
        every: Steps between two histograms; 0 for none.
        updates: Log of its updates.
        watch: What is told of passes and updates.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[int, str],
        updates: UpdateLog,
        watch: Owner,
        *,
        models: Mapping[str, nn.Module],
        every: int,
    ) -> None:
        self.optimizers, self.optimizer, self.updates = optimizers, optimizers[-1], updates
        self.name = updates.name
        self._watch, self._models, self._every = watch, models, every
        self._histograms: UpdateHistograms | None = None
        self._frozen, self._decays_known = FrozenWeights(), False
        self._loses: dict[str, bool] = {}  # after the first update, which has made the optimizer's state
        self._stepped: Passes | None = None  # of an update that the scaler has made, and is not updated yet
        self._applied: Applied | None = None  # of the pending update
        self._rates: Rates = ()
        self.passes = PassLog(self.optimizer, names, models, self)
        self.parameters_changed()
        self._handles = [
            self.optimizer.register_step_pre_hook(self.guarded(self._before_step)),
            self.optimizer.register_step_post_hook(self.guarded(self._after_step)),
        ]
        self._sample(updates.steps + 1)
        self.guarded(self._say_at_start)()

    def _loses_updates(self, rounded: RoundedUpdates, name: str, parameter: Tensor) -> bool:
        """Return whether nothing keeps what rounding takes from a weight; looked up once, because it reads state."""
        loses = self._loses.get(name)
        if loses is None:
            loses = rounded.are_lost(parameter)
            if self.optimizer.state.get(parameter):  # a copy is made in the first update that is not skipped
                self._loses[name] = loses
        return loses

    def _say_at_start(self) -> None:
        """Say what share of half-precision weights without a master copy cannot move, if it is seen before a step."""
        known = lost_at_start(self.optimizer)
        if known is not None:
            self.updates.take_event("no_master_weights", known)
            warn(f"mptrain.watch: {in_words('no_master_weights', known)}")

    def detach(self) -> None:
        """Remove all hooks."""
        if self._histograms is not None:
            self._histograms.close()
            self._histograms = None
        self.passes.detach()
        for handle in self._handles:
            handle.remove()

    def has_stepped(self) -> None:
        """Take notice that the scaler has stepped the optimizer and is not updated yet: later passes are of others."""
        if self._stepped is None:
            self._stepped = self.passes.take()

    def complete(
        self, scale: Tensor | None = None, next_scale: Tensor | None = None, found_infs: Sequence[Tensor] = ()
    ) -> None:
        """Take notice of an update that was made or skipped; it is recorded with the next one, or when it is pushed.

        Args:
            scale: Loss scale of the update, float32 of shape (1,); None for no loss scaling.
            next_scale: Loss scale of the next update, likewise.
            found_infs: Scalars that are above 0 if the update was skipped.
        """
        log = self.passes
        if found_infs and self._applied is None and self._stepped is None:
            self._look_at_step(unscaled=True)  # skipped: the optimizer was not called with these gradients
        passes, self._stepped = self._stepped or log.take(), None
        applied, self._applied = self._applied, None
        if passes is None and applied is None:
            return
        loss = log.unseen_losses() if passes is None else passes.loss
        by_hand = self.scale_by_hand() if passes is None else passes.scale
        scale = scale if by_hand is None else by_hand
        loss_scale = log.unit_scale if scale is None else scale.to(log.unit_scale.device)
        after = loss_scale if next_scale is None else next_scale.to(log.unit_scale.device)
        skip = (
            sum((each.to(loss_scale.device).reshape(1) for each in found_infs), torch.zeros_like(loss_scale))
            .gt(0)
            .float()
        )
        before, given = self._norms(passes, applied, loss_scale)
        values = self._values(before, loss_scale, after, skip, loss, passes)
        if given is not None:
            values = values._replace(applied_norm=given.grad_norm.to(loss_scale.dtype))
        rates = self._rates or (log.rates() if passes is None else passes.rates)
        facts = UpdateFacts(
            rates,
            loss is not None and loss is not log.unknown,
            applied is not None,
            set_by_loop=(passes is None or (applied is not None and not applied.same)) and not log.not_looked_at,
            changes=applied.changes if applied is not None and applied.same else 0,
        )
        self._rates = ()
        self.updates.not_looked_at |= dict.fromkeys(filter(None, [log.not_looked_at]))  # also if nobody closes it
        self.updates.add(values, facts, self._histograms_of(loss_scale, skip))
        self._sample(self.updates.steps + 2)

    @staticmethod
    def _norms(passes: Passes | None, applied: Applied | None, scale: Tensor) -> tuple[Verdict, Verdict | None]:
        """Return the verdicts on the gradients of the passes and on those applied, with their norms unscaled.

        Only of one of them there is a look, or of both. Without passes the first is that on the gradients applied.
        """
        given = None if applied is None else applied.verdict
        if applied is not None and not applied.unscaled:
            given = applied.verdict._replace(grad_norm=applied.verdict.grad_norm / scale)
        before = given if passes is None else passes.verdict._replace(grad_norm=passes.verdict.grad_norm / scale)
        assert before is not None
        if given is not None and len(given.norms) != len(before.norms):  # the optimizer was given parameters
            before = before._replace(norms=given.norms)
        if applied is not None and given is not None and passes is not None:
            # The norm as applied counts if the gradients of the passes are gone.
            before = first_not_finite(before, given, before if applied.same else given)
        return before, given

    def _histograms_of(self, scale: Tensor, skip: Tensor) -> UpdateHistograms | None:
        """Return the histograms of the update that has ended; None if it was not looked at."""
        histograms, self._histograms = self._histograms, None
        if histograms is None:
            return None
        log, rounded = self.passes, RoundedUpdates(self.optimizer)
        parameters = dict(zip(log.names, log.params, strict=True))
        histograms.update_ended(
            log.tensors(),
            scale,
            skip,
            moves=lambda name: rounded.rate_of(parameters[name]) != 0,  # it may be a warm-up's first step
            loses=lambda name: self._loses_updates(rounded, name, parameters[name]),
            exact=lambda name, before, same: rounded.exact(parameters[name], before, same),
        )
        for decay in () if self._decays_known else lost_decays(states_of(self.optimizer)):
            self.updates.take_event("state_rounding", decay)
        self._decays_known = bool(self.optimizer.state)
        return histograms

    def abandon(self, scale: Tensor, next_scale: Tensor | None) -> None:
        """Take notice that no update follows the passes so far, and of the loss scale as in `complete`."""
        if (passes := self._stepped or self.passes.take()) is not None:
            self._stepped = None
            self._record_abandoned(passes, scale, next_scale)

    @override
    def before_pass(self) -> None:
        self._watch.before_pass()

    @override
    def looked(self, verdict: Verdict) -> None:
        if self._histograms is not None:
            self._histograms.backward_ended(self.passes.tensors(), verdict)

    @override
    def abandoned(self, passes: Passes) -> None:
        scale = self._watch.loss_scale()
        self._record_abandoned(passes, scale, scale)

    def _record_abandoned(self, passes: Passes, scale: Tensor | None, next_scale: Tensor | None) -> None:
        log, scale = self.passes, scale if passes.scale is None else passes.scale
        loss_scale = log.unit_scale if scale is None else scale.to(log.unit_scale.device)
        after = loss_scale if passes.scale is not None or next_scale is None else next_scale.to(loss_scale.device)
        verdict = passes.verdict._replace(grad_norm=passes.verdict.grad_norm / loss_scale)
        values = self._values(verdict, loss_scale, after, torch.zeros_like(loss_scale), passes.loss, passes)
        known = passes.loss is not None and passes.loss is not log.unknown
        self.updates.push()
        self.updates.add(values, UpdateFacts(passes.rates, known, abandoned=True))

    @override
    def parameters_changed(self) -> None:
        log = self.passes
        self.updates.begin(log.names, log.ranks, log.unit_scale.device, sharded=log.sharded)

    @override
    def scale_by_hand(self) -> Tensor | None:
        scale = self._watch.scale_by_hand()
        return None if scale is None else self.passes.scalar(scale).view(1)

    @override
    def guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        return functools.partial(guarded_call, hook, self._watch)

    def _values(
        self,
        verdict: Verdict,
        scale: Tensor,
        next_scale: Tensor,
        skip: Tensor,
        loss: Tensor | None,
        passes: Passes | None,
    ) -> StepValues:
        log, norms = self.passes, verdict.norms
        if len(norms) != len(log.names):  # the optimizer was given parameters between the passes and the update
            norms = norms.new_full((len(log.names),), -1.0)
        if log.ranks > 1:
            local = None if passes is None or passes.local is None else passes.local
            norms = torch.cat([norms, torch.zeros_like(norms) if local is None else local.to(norms)])
        loss = log.unknown if loss is None or loss is log.unknown else loss / scale.squeeze(0)
        return StepValues(
            loss=loss,
            loss_scale=scale,
            lr=log.zero,  # rates of the groups are known on the host
            next_scale=next_scale,
            grad_norm=verdict.grad_norm,
            skip=skip,
            applied_norm=log.zero,
            norms=norms,
        )

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not is_within_step(optimizer, 2):
            # A closure runs backward passes inside of the step, and the gradients are looked at when it has ended.
            self._applied = None
            if self.passes.inside and self.passes.stepping:  # an exception of its closure has ended the last step
                self.passes.abandon()
            self.passes.stepping = any(closure is not None for closure in (*args[1:], kwargs.get("closure")))
            if not self.passes.stepping:
                self._look_at_step(unscaled=self._watch.is_unscaled(self))

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not is_within_step(optimizer, 2):
            self.passes.stepping = False
            if self._applied is None:
                self._look_at_step(unscaled=self._watch.is_unscaled(self), after=True)
            elif self.passes.changes() > self._applied.changes and not skips_on_device(optimizer):
                # By a hook that came after ours, or by the optimizer itself; its kernel on a device only unscales them.
                verdict, now = self._applied.verdict, self.passes.look()
                if now is not None:
                    self._applied = self._applied._replace(verdict=first_not_finite(verdict, now, verdict))
            self._rates = self.passes.rates()
            self._watch.updated(self)

    def _look_at_step(self, *, unscaled: bool, after: bool = False) -> None:
        """Look at the gradients before the optimizer takes them, or ``after`` a step whose closure made them."""
        self.passes.refresh()
        verdict = self.passes.look_at_step()
        same, changes = self.passes.is_same() or (after and self.passes.inside), self.passes.changes()
        self._applied = None if verdict is None else Applied(verdict, unscaled, same, changes)

    def _sample(self, step: int) -> None:
        if self._every and (step == 1 or step % self._every == 0):
            self._histograms = UpdateHistograms(self.name, step, self._models, {*self.passes.ids}, self._frozen)


def guarded_call(hook: Callable[..., None], watch: Owner, *args: Any) -> None:
    """Call a hook in somebody's training, which goes on if the hook fails; then nothing is watched any more."""
    try:
        hook(*args)
    except Exception as error:
        watch.give_up(error)
