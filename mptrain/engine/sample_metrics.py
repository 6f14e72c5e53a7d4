"""What an evaluation collects sample by sample: metrics of a split, and how far they would move on other samples.

An interval here is about the data: a test set is a sample of all the texts or pictures that it stands for. What moves
between seeds is the business of comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mptrain.engine.fingerprints import digest_of_samples

if TYPE_CHECKING:
    from mptrain.parallel.communicator import Communicator
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.task import Task

#: Resamples of sums, which are cheap.
RESAMPLES = 1000

#: Resamples of answers, at most and at least, and how many answers may be scored for them between these: mean average
#: precision takes a millisecond an image.
MOST_SCORES, FEWEST_SCORES, SCORED = 200, 25, 100_000

#: Samples below which nothing is said: a bootstrap of a few values is far too sure of itself.
FEWEST = 20

#: Standard errors to either side of 95 %.
_Z = 1.959963984540054

_SEED = 1979  # of the draws of the bootstrap: the same evaluation always has the same interval


class BatchMetrics(NamedTuple):
    """What was gathered of one batch, or of a rank's part of it.

    Attributes:
        sums: What the task measured, by name.
        counts: Terms of each sample.
        answers: What the model answered.
        digests: Of the samples as they were fetched.
    """

    sums: Mapping[str, Tensor]
    counts: Sequence[int]
    answers: Sequence[Any]
    digests: Sequence[bytes]


class SampleMetrics:
    """The sums and answers of a split, batch by batch. Sums stay on the device until they are asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._counts: list[int] = []
        self._answers: list[Any] = []
        self._digests: list[bytes] = []
        self._batches: list[BatchMetrics] = []

    def add(
        self, batch: Batch, sums: Mapping[str, Tensor], answers: Sequence[Any], digests: Sequence[bytes] = ()
    ) -> None:
        """Take what a task measured on a batch, what the model answered, and digests of its samples."""
        self._take(BatchMetrics(sums, batch.counts or [1] * batch.samples, answers, digests))

    def skip(self) -> None:
        """Take note of a batch of which this rank has no part."""
        self._take(BatchMetrics({}, (), (), ()))

    def _take(self, one: BatchMetrics) -> None:
        self._batches.append(one)
        for name, value in one.sums.items():
            self._sums.setdefault(name, []).append(value)
        self._counts += one.counts
        self._answers += one.answers
        self._digests += one.digests

    def over(self, comm: Communicator) -> SampleMetrics:
        """The whole, in the order in which one rank would have met it; every sample once. The device is waited for."""
        if comm.world_size == 1:
            return self
        own = [one._replace(sums={name: value.cpu() for name, value in one.sums.items()}) for one in self._batches]
        whole = SampleMetrics()
        for parts in zip(*comm.all_gather_object(own), strict=True):
            for one in parts:
                whole._take(one)
        return whole

    @property
    def digest(self) -> str:
        """Of all samples, in hexadecimal."""
        return digest_of_samples(self._digests)

    @property
    def samples(self) -> int:
        """How many there were."""
        return len(self._counts)

    def metrics(self, task: Task) -> dict[str, float]:
        """The metrics of the split; the device is waited for."""
        totals = {name: values.sum().item() for name, values in self._on_host().items()}
        return self._judged(task, totals, sum(self._counts), self._answers)

    def intervals(self, task: Task, metrics: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """95 % intervals of metrics, over the choice of the samples.

        Shares of samples have Wilson's score interval, which holds near 0 and 1 as well; all others reach 1.96 standard errors to either
        side, of bootstrap resamples of the samples (Efron 1979): `RESAMPLES` of sums, `MOST_SCORES` of answers, and of many answers
        fewer, down to `FEWEST_SCORES`, of which a standard error is known to 14 %. No end lies beyond what any resample had, so that
        none is outside the range of the metric.

        Resamples repeat samples, and some scores are moved by that alone: the Fréchet distance of 400 pictures by 128 features had
        five times its standard error of bias, and a bootstrap error three times too large. Where the mean of the resamples is off
        by more than their deviation, the error is that of a jackknife which leaves out group after group, and repeats none: 1.2 to
        1.6 times too large in that example.

        Args:
            task: Whose metrics.
            metrics: As they were measured.

        Returns:
            Those that anything can be said about; none for fewer than `FEWEST` samples.
        """
        if self.samples < FEWEST:
            return {}
        shares = [name for name in task.shares if math.isfinite(metrics.get(name, math.nan))]
        found = {name: _wilson(metrics[name], self.samples) for name in shares}
        drawn = {
            name: values
            for name, values in self._resampled(task).items()
            if name not in found and math.isfinite(metrics.get(name, math.nan))
        }
        biased = [name for name, values in drawn.items() if abs(fmean(values) - metrics[name]) > stdev(values)]
        unbiased = self._jackknife(task) if biased and self._answers else {}
        for name, values in drawn.items():
            metric, error = metrics[name], stdev(values)
            least, most = min(*values, metric), max(*values, metric)
            if name in biased and name in unbiased:
                error, least, most = unbiased[name], -math.inf, math.inf
            if error > 0:
                found[name] = (max(metric - _Z * error, least), min(metric + _Z * error, most))
        return found

    def _resampled(self, task: Task) -> dict[str, list[float]]:
        """The metrics of bootstrap resamples, by name, of those that are finite in all."""
        import numpy as np

        draws = np.random.default_rng(_SEED)
        values = self._on_host()
        seen: dict[str, list[float]] = {}
        if self._sums and all(len(column) == self.samples for column in values.values()):
            table = np.stack(
                [np.array(self._counts, dtype=np.float64), *(column.numpy() for column in values.values())], 1
            )
            for _ in range(RESAMPLES):
                terms, *sums = table[draws.integers(self.samples, size=self.samples)].sum(0)
                if terms:
                    found = task.summarise(dict(zip(values, map(float, sums), strict=True)), round(terms))
                    _append(seen, found)
        if self._answers:
            for _ in range(self._scores):
                picked = draws.integers(len(self._answers), size=len(self._answers))
                _append(seen, task.score([self._answers[index] for index in picked]))
        return {name: drawn for name, drawn in seen.items() if len(drawn) > 1 and all(map(math.isfinite, drawn))}

    def _jackknife(self, task: Task) -> dict[str, float]:
        """Standard errors of scores, from leaving out each of as many groups of samples, drawn by lot."""
        import numpy as np

        order = np.random.default_rng(_SEED).permutation(len(self._answers))
        groups = np.array_split(order, min(self._scores, len(order)))
        seen: dict[str, list[float]] = {}
        for group in groups:
            left_out = set(group.tolist())
            _append(seen, task.score([one for index, one in enumerate(self._answers) if index not in left_out]))
        known = {name: values for name, values in seen.items() if all(map(math.isfinite, values))}
        return {name: (len(values) - 1) / math.sqrt(len(values)) * stdev(values) for name, values in known.items()}

    @property
    def _scores(self) -> int:
        """How often answers are scored for an interval."""
        return max(FEWEST_SCORES, min(MOST_SCORES, SCORED // len(self._answers)))

    def _judged(self, task: Task, sums: dict[str, float], terms: int, answers: Sequence[Any]) -> dict[str, float]:
        metrics = task.summarise(sums, terms)
        return {**metrics, **task.score(answers)} if answers else metrics

    def _on_host(self) -> dict[str, Tensor]:
        """float64, one value for each sample, or for each batch where a task gave only those."""
        return {
            name: torch.cat([part.reshape(-1) for part in parts]).cpu().double() for name, parts in self._sums.items()
        }


def _append(seen: dict[str, list[float]], metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        seen.setdefault(name, []).append(value)


def _wilson(share: float, samples: int) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share of independent samples.

    `scipy.stats.binomtest` has it too, and importing that costs every run 0.6 seconds.
    """
    found, z = round(share * samples) / samples, _Z
    middle = found + z * z / (2 * samples)
    reach = z * math.sqrt(found * (1 - found) / samples + (z / (2 * samples)) ** 2)
    whole = 1 + z * z / samples
    return max(0.0, (middle - reach) / whole) if found else 0.0, min(
        1.0, (middle + reach) / whole
    ) if found < 1 else 1.0
