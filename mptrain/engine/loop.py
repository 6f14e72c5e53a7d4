"""The training loop: epochs, evaluations, checkpoints, and an orderly end whatever happens.

It reads top to bottom. What one step does is in `mptrain.engine.step`; what is written where, in `mptrain.runlog`.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from mptrain.dataset.faults import in_words
from mptrain.device import capabilities
from mptrain.distributed.ranks import RankLost
from mptrain.engine.carried import Carried
from mptrain.engine.clock import Clock
from mptrain.engine.evaluate import evaluate
from mptrain.engine.exhibit import keep_exhibits
from mptrain.engine.failure import explain, is_sound, require_success
from mptrain.engine.interrupt import Interrupts
from mptrain.engine.job import LearnerTotals, Progress
from mptrain.engine.ledger import Account, Ledger
from mptrain.engine.memory import forget_peak, memory_now
from mptrain.engine.origin import data_order
from mptrain.engine.randomness import random_state
from mptrain.engine.rehearsal import rehearse, warnings_about
from mptrain.engine.ring import Ring
from mptrain.engine.snapshot import restore_snapshot, take_snapshot
from mptrain.engine.steps import Steps, capture_on
from mptrain.engine.summary import summarise
from mptrain.engine.tally import Tally
from mptrain.engine.turns import AgreedTurns, Turns
from mptrain.engine.watchdog import Watchdog
from mptrain.errors import EXIT_PREEMPTED, NumericsError, Preempted, StorageError
from mptrain.optimizer import multi_tensor
from mptrain.records import EpochRecord, EventRecord, ProgressRecord
from mptrain.runlog.sink import Fanout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mptrain.dataset.batch import Batch
    from mptrain.engine.job import Options, Parts
    from mptrain.engine.storage import NoStorage, Storage
    from mptrain.records import Record
    from mptrain.runlog.sink import Sink


class Loop:
    """Trains a run to its end, from wherever it stands.

    Args:
        parts: What the run is made of.
        options: What the user chose about it.
        storage: Where it keeps records and checkpoints.
        displays: Further sinks, which only show.
    """

    def __init__(
        self, parts: Parts, options: Options, storage: Storage | NoStorage, displays: Sequence[Sink] = ()
    ) -> None:
        self.parts = parts
        self.options = options
        self.storage = storage
        self.progress = Progress(learners={learner.name: LearnerTotals() for learner in parts.learners})
        self.interrupts = Interrupts()
        self._ranks = parts.ranks
        self._turns = (
            Turns(self.interrupts, self._time_is_over)
            if self._ranks.count == 1
            else AgreedTurns(self.interrupts, self._time_is_over, self._ranks)
        )
        self._within = False  # a step
        self._coming: list[Record] = []  # of the next step; on record when it is done, so that it can be done again
        self._carried = Carried(parts)
        self._tally = Tally(self.progress)
        self._sink = Fanout((storage.writer, self._tally, *displays))
        self._rings = tuple(
            Ring(options.log.ring, len(learner.weights.names), parts.device, self._ranks) for learner in parts.learners
        )
        capture = capture_on(parts.device) if options.train.engine == "graph" and self._ranks.count == 1 else None
        self._steps = Steps(parts, self._rings, capture)
        accounts = [
            Account(learner, ring, parts.plan.guard.count)
            for learner, ring in zip(parts.learners, self._rings, strict=True)
        ]
        self._ledger = Ledger(accounts, self._sink, options.log)
        self._saver = storage.saver(background=options.checkpoint.background)
        self._clock = Clock(self.progress, parts.device)
        self._watchdog = Watchdog(storage.paths.stalls_of(self._ranks.rank), options.log.stalled)
        self._stalls = 0
        self._rehearsed = False
        self._unusable: dict[str, set[str]] = {name: set() for name in parts.loaders}
        self._remarked: set[str] = set()  # kinds of unusual files that were named
        self._random: dict[str, Any] = {}  # before the last step, once it may be one that ends the run

    @property
    def planned(self) -> int:
        """How many steps will be attempted."""
        return self.options.train.planned(self.steps_per_epoch)

    @property
    def _finished(self) -> bool:
        return self.progress.step >= self.planned or self._turns.late

    def _time_is_over(self) -> bool:
        minutes = self.options.train.max_minutes
        return minutes is not None and self.progress.seconds >= 60 * minutes

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch."""
        return self.parts.loaders["train"].steps_per_epoch

    def restore(self, state: Mapping[str, Any], *, forgive: bool) -> list[str]:
        """Go back to where a checkpoint was taken.

        Args:
            state: The checkpoint's state.
            forgive: Count refused steps in a row anew; for a run that was stopped by them and is tried again.

        Returns:
            What could not be restored, as sentences.
        """
        self.progress, notes = restore_snapshot(self.parts, self._ledger, state)
        self._tally.progress = self._clock.progress = self.progress
        self._carried.begin()
        if forgive:
            for account in self._ledger.accounts:
                account.history.consecutive = 0
        return notes

    def run(self) -> dict[str, Any]:
        """Train, evaluate, save.

        Returns:
            The numbers of the summary.

        Raises:
            NumericsError: Every one of the last ``train.patience`` steps of a learner overflowed.
            Preempted: A signal asked for the end, and the run is saved; or another rank has gone.
            DataError: A sample cannot be used.
            StorageError: The disk refuses.
        """
        forget_peak(self.parts.device)
        try:
            with self.interrupts, self._watchdog, self._saver:
                try:
                    self._train_and_evaluate()
                    self._evaluate_test()
                except BaseException as error:
                    self._ranks.tell_why(error)
                    lost = self._ranks.is_lost(error)
                    if lost:
                        self._ranks.abandon()
                    else:
                        self._record_coming()
                    if not lost or self.parts.device.type == "cpu":  # a device may wait for the lost one for ever
                        self._ledger.flush()  # what was recorded on the device is on record whatever ended the run
                    if lost:
                        self._end_without(error)
                    raise
        except StorageError as error:  # the checkpoint that the records announce may not be there
            self._sink.take(EventRecord("storage", self.progress.step, {"message": str(error)}))
            raise
        return summarise(self.parts, self.options, self.progress, self._ledger.accounts)

    def require_success(self) -> None:
        """Refuse to call a run done that learned nothing because of its numerics.

        Raises:
            NumericsError: A learner never applied an update, or what was last evaluated is not finite.
        """
        for warning in require_success(
            self.progress, self._ledger.accounts, self.parts.task.metric, half=self.parts.policy.half
        ):
            self._warn(warning)

    def _train_and_evaluate(self) -> None:
        progress = self.progress
        if self.parts.loaders.keys() == {"train"}:
            self._warn(f"{self.parts.dataset.name} has neither validation nor test data: nothing will be evaluated")
        self._turns.ask()  # whether time is over already, in a run that goes on
        while not self._finished or progress.evaluated_at != progress.step:
            self._train_epoch()
            self._evaluate_epoch()
            every = self.options.checkpoint.every_epochs
            if self._finished or (every is not None and progress.epoch % every == 0):
                self._save()

    def _train_epoch(self) -> None:
        """Train on what is left of the current epoch."""
        progress, options = self.progress, self.options
        if progress.batch >= self.steps_per_epoch or self._finished:
            return
        self.parts.model.train()
        self._clock.begin()
        batches = self.parts.loaders["train"].batches(progress.epoch, start=progress.batch)
        while progress.batch < self.steps_per_epoch and not self._finished:
            started = time.perf_counter()
            turn = self._turns.next(batches)
            if turn is None:  # unusable samples were left out, and with them the last batches
                progress.batch = self.steps_per_epoch
                break
            waited = time.perf_counter() - started
            self._obey_signals()
            self._look_at(turn.batch)
            started = time.perf_counter()
            self.attempt(self.parts.prepare(turn.batch))
            progress.samples += turn.samples
            if self._clock.lap(turn.terms, waited, waited + time.perf_counter() - started):
                self._settle()  # the device is waited for once, so that steady time begins with nothing under way
            self._tell()
            self._saver.check()
            self._obey_signals()
            every = options.checkpoint.every_steps
            if every is not None and progress.step % every == 0 and not self._finished:
                self._settle()
                self._save()
        self._settle()
        self._clock.end()

    def _look_at(self, batch: Batch) -> None:
        """What is done with the first batch of an epoch, and of the run, before it is trained on; no time of training."""
        progress, loader = self.progress, self.parts.loaders["train"]
        begins = progress.batch == 0 and not (loader.one_batch and progress.epoch)
        if begins and self._ranks.first:  # which keeps the record
            first = batch if self._ranks.count == 1 else loader.whole_batch(progress.epoch)
            self._coming.append(EventRecord("data_order", progress.step, data_order(loader, progress.epoch, first)))
        if not self._rehearsed:
            self._rehearse(self.parts.prepare(batch))

    def attempt(self, batch: Batch) -> None:
        """One step of every learner on one prepared batch, its record, and the end of a run that only overflows.

        Raises:
            NumericsError: Every one of the last ``train.patience`` steps of a learner overflowed.
        """
        progress = self.progress
        step = progress.step + 1
        self._ranks.begin_step(self.parts.loaders["train"].seed, step)
        if self._ledger.close_to(self.options.train.patience):
            self._random = random_state(self.parts.device)
        self._coming += self.parts.fault.records(step)
        self._within = True
        watches = [self.parts.probe.watch(learner.name, step) for learner in self.parts.learners]
        with self.parts.fault.at(step, batch) as given:
            self._steps.take(given, watches, as_usual=not self.parts.fault.is_at(step))
        self._record_coming()
        for watch in watches:
            for seen in watch.records():
                self._sink.take(seen)
        self._within = False
        self._beat()
        progress.step, progress.batch = step, progress.batch + 1
        self._ledger.note(progress.step, progress.epoch)
        while self._steps.notes:
            self._warn(self._steps.notes.pop(0))
        account = self._ledger.hopeless(self.options.train.patience)
        if account is not None:
            self._give_up(account, batch, given)

    def _record_coming(self) -> None:
        while self._coming:
            self._sink.take(self._coming.pop(0))

    def _move_on(self) -> bool:
        """There was progress; whether the run is asked to end."""
        self._beat()
        return self._turns.ask()

    def _beat(self) -> None:
        """There was progress; put on record that there had been none for too long."""
        self._watchdog.beat()
        if self._watchdog.stalls > self._stalls:
            self._stalls = self._watchdog.stalls
            fields = {"seconds": self.options.log.stalled, "file": self.storage.paths.stalls_of(self._ranks.rank).name}
            self._sink.take(EventRecord("stalled", self.progress.step, fields))

    def _rehearse(self, batch: Batch) -> None:
        """Check the promises of the precision mode; put operators on record, and warn of what will not be trained."""
        found = rehearse(self.parts, batch)
        self._rehearsed = True
        self.parts.plan.products.leave_out_idle(self.parts.model, found.in_half)
        self._sink.take(EventRecord("operators", self.progress.step, found.operators))
        if any(found.untrained.values()):
            self._sink.take(EventRecord("untrained", self.progress.step, found.untrained))
        for sentence in (*warnings_about(found.untrained), *self.parts.fault.check(batch, self.planned)):
            self._warn(sentence)
        for why in self._obstacles():
            self._warn(
                f"Triton cannot be used here: norms and update are torch's, with more passes over memory ({why})"
            )
        if self.options.train.compile:
            self.parts.compile()
        if self._ranks.count > 1 and self.options.train.engine == "graph":
            self._warn("train.engine=graph: a step of several ranks is launched operator by operator")
        elif self.options.train.engine == "graph" and not capabilities(self.parts.device).graphs:
            self._warn("train.engine=graph: only CUDA devices have graphs; the step is launched operator by operator")

    def _obstacles(self) -> set[str]:
        """Why learners on a GPU whose rules have kernels of ours go without them."""
        device, rules = self.parts.device, [learner.weights.rule for learner in self.parts.learners]
        if device.type == "cpu":
            return set()
        return {multi_tensor.obstacle(device, rule) for rule in rules if multi_tensor.supports(rule)} - {""}

    def _warn(self, message: str) -> None:
        self._sink.take(EventRecord("warning", self.progress.step, {"message": message}))

    def _name_unusable(self) -> None:
        """Put on record, and warn of, the samples that were left out since the last call; and once of each kind of unusual files."""
        own = {
            split: (faults.found, {name: kind for name, kind in faults.remarks.items() if kind not in self._remarked})
            for split, faults in ((split, loader.split.faults) for split, loader in self.parts.loaders.items())
        }
        everyones = self._ranks.everyones(own)
        for split in own:
            found = {name: why for theirs in everyones for name, why in theirs[split][0].items()}
            remarks = {name: kind for theirs in everyones for name, kind in theirs[split][1].items()}
            if remarks := {name: kind for name, kind in remarks.items() if kind not in self._remarked}:
                self._remarked.update(remarks.values())
                self._warn(f"{split} has unusual files, {in_words(remarks)}")
            news = {name: found[name] for name in found if name not in self._unusable[split]}
            if news:
                self._unusable[split] |= news.keys()
                self._sink.take(EventRecord("unusable", self.progress.step, {"split": split, "samples": news}))
                name, reason = next(iter(news.items()))
                more = f" and {len(news) - 1} more" if len(news) > 1 else ""
                self._warn(f"left out of {split}: {name} ({reason}){more}")

    def _evaluate_epoch(self) -> None:
        """Validate, write the epoch's row and begin the next one."""
        progress = self.progress
        self._ledger.flush()
        self._name_unusable()
        metrics: dict[str, float] = {}
        completed = progress.epoch + (progress.batch >= self.steps_per_epoch)
        if "val" in self.parts.loaders:
            metrics = self._evaluate("val", completed)
        for account in self._ledger.accounts:
            totals = progress.learners[account.name]
            self._sink.take(
                EpochRecord(
                    learner=account.name,
                    epoch=progress.epoch + 1,
                    step=progress.step,
                    updates=account.updates,
                    skipped=totals.epoch_skipped,
                    train_loss=totals.epoch_loss / totals.epoch_losses if totals.epoch_losses else math.nan,
                    loss_scale=account.last.loss_scale if account.last else math.nan,
                    lr=account.last.lr if account.last else math.nan,
                    val=metrics,
                    seconds=round(progress.epoch_seconds, 3),
                    terms_per_second=round(progress.epoch_terms / max(progress.epoch_seconds, 1e-9), 1),
                )
            )
        progress.evaluated_at = progress.step
        if progress.batch >= self.steps_per_epoch:
            self._carried.whole()
            progress.epoch, progress.batch = completed, 0
            progress.epoch_seconds, progress.epoch_terms = 0.0, 0
            for totals in progress.learners.values():
                totals.epoch_loss, totals.epoch_losses, totals.epoch_skipped = 0.0, 0, 0

    def _evaluate(self, split: str, epoch: int) -> dict[str, float]:
        self._show("evaluating")
        loader = self.parts.loaders[split]
        outcome = evaluate(
            self.parts,
            loader,
            split,
            self.progress.step,
            epoch,
            stop=self._move_on,
            exhibit=split == "val",
            intervals=split == "test",
        )
        if outcome is None:
            self._obey_signals()
        assert outcome is not None
        self._name_unusable()  # the ranks' last exchange before the evaluation is on record and counts as done
        metrics = outcome.record.metrics
        self._sink.take(outcome.record)
        if files := keep_exhibits(
            self.storage.paths.samples, self.progress.step, outcome.exhibits
        ):  # none but on the first
            self._sink.take(EventRecord("samples", self.progress.step, {"files": files}))
        self.progress.last[split], self.progress.intervals[split] = metrics, outcome.record.intervals
        if split == "val" and self.parts.task.metric is not None:
            value, best = metrics[self.parts.task.metric], self.progress.best
            sign = 1.0 if self.parts.task.higher_is_better else -1.0
            if not math.isnan(value) and (best is None or sign * value > sign * best):
                self.progress.best = value
        return metrics

    def _evaluate_test(self) -> None:
        if "test" in self.parts.loaders:
            self._evaluate("test", self.progress.epoch)

    def _validation_metric(self) -> float | None:
        """The metric of exactly the present weights, if they were validated."""
        if self.progress.evaluated_at != self.progress.step:
            return None
        return self.progress.last.get("val", {}).get(self.parts.task.metric or "")

    def _save(self) -> None:
        self._show("saving")
        self._ledger.flush()
        self._clock.save()
        metric = self._validation_metric()  # also when a step is saved again: the best checkpoint is found by it
        self._sink.take(EventRecord("checkpoint", self.progress.step, {"metric": metric}))
        self._saver.save(
            take_snapshot(self.parts, self._ledger, self.progress, self._carried.whole()),
            step=self.progress.step,
            metric=metric,
            config_digest=self.storage.config_digest,
            ranks=self._ranks,
        )

    def _obey_signals(self) -> None:
        """End in order if a signal asked for it: save, then say how to go on."""
        name = self._turns.asked
        if name is None:
            return
        self._ledger.flush()
        self._sink.take(EventRecord("signal", self.progress.step, {"signal": name}))
        self._save()
        self._saver.wait()
        raise Preempted(
            f"{'Ctrl-C' if name == 'SIGINT' else name}, saved after step {self.progress.step} of {self.planned}",
            f"continue with: mptrain resume {self.storage.paths.root}",
            self.interrupts.exit_code,
        )

    def _end_without(self, error: BaseException) -> None:
        """End a run that has lost a rank: save what this one has, if that is all there is, and say how to go on.

        Every exchange between ranks comes before the step moves anything, so but for buffers nothing has moved yet.

        Raises:
            MptrainError: What the lost rank has left word of.
            Preempted: It has left none.
        """
        why = self._ranks.why()
        saved = self._ranks.first and self._complete_here()
        left = "the last checkpoint is what there is"
        if saved:
            if self._within:
                self.parts.plan.guard.restore(torch.ones(1, device=self.parts.device))
            self._save()
            self._saver.wait()
            left = f"saved after step {self.progress.step} of {self.planned}"
        else:
            with contextlib.suppress(RankLost):  # what was on its way from the device may not be there
                self._saver.wait()
        if why is not None:
            raise why from error
        raise Preempted(
            f"{self._ranks.who_ended()}; {left}",
            f"continue with: mptrain resume {self.storage.paths.root}",
            EXIT_PREEMPTED,
            saved=saved,
            asked=False,
        ) from error

    def _complete_here(self) -> bool:
        """Whether this rank alone has the whole state, and knows that the step it was in has moved nothing."""
        parts = self.parts
        sharded = any(learner.weights.sharded for learner in parts.learners)
        return parts.device.type == "cpu" and len(parts.learners) == 1 and not sharded and not parts.carried()

    def _give_up(self, account: Account, batch: Batch, given: Batch) -> None:
        """End a run that only overflows: keep what explains it, and the weights if they are sound."""
        failure = self.storage.paths.failure
        diagnosis = explain(self.parts, account, self.progress, batch, given, self._random, failure)
        sound = self._ranks.added([not is_sound(self.parts)]) == [0]
        self._sink.take(EventRecord("failure", self.progress.step, {"cause": diagnosis.cause}))
        if sound:
            self._save()
            self._saver.wait()
            kept = f"; weights and batch are saved in {self.storage.paths.root}"
        else:
            kept = f"; the batch is saved in {failure}"
        closer = f"{diagnosis.advice}; mptrain diagnose {self.storage.paths.root} tries it on that step"
        raise NumericsError(diagnosis.in_words() + kept, closer)

    def _settle(self) -> None:
        """Wait for the device, and count what it still had to do as time of training."""
        started = time.perf_counter()
        self._ledger.flush()
        self._clock.add(time.perf_counter() - started)
        self._tell()

    def _tell(self) -> None:
        if self._clock.elapsed >= self.options.log.seconds:
            self._ledger.look()
            self._show("training")

    def _show(self, doing: str) -> None:
        self.storage.writer.flush()  # so that a reader, or a kill, finds what is shown, however long it is done
        self._clock.read()
        progress, planned = self.progress, self.planned
        rate = progress.seconds / progress.step if progress.step else 0.0
        eta = rate * (planned - progress.step)
        if self.options.train.max_minutes is not None:
            eta = min(eta, max(0.0, 60 * self.options.train.max_minutes - progress.seconds))
        self._sink.take(
            ProgressRecord(
                step=progress.step,
                steps=planned,
                epoch=progress.epoch,
                epochs=self.options.train.epochs,
                terms_per_second=self._clock.rate,
                term=self.parts.task.term,
                data_wait=self._clock.wait_share,
                memory=memory_now(self.parts.device),
                eta=eta,
                doing=doing,
            )
        )
