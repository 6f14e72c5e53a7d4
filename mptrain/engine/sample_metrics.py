"""Metrics of an evaluated split from each sample's sums and outputs, with 95 % confidence intervals.

The intervals are about the choice of samples: a test set is a sample of all the texts or pictures that it represents.
They do not cover the variation between seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mptrain.engine.fingerprints import digest_of_samples
from mptrain.system.errors import ConfigError, instance

if TYPE_CHECKING:
    from mptrain.parallel.communicator import Communicator
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.task import Task

#: Number of bootstrap resamples of sums, which are cheap.
RESAMPLES = 1000

#: Maximum and minimum number of resamples of answers, and the total number of answers to score in between: mean average
#: precision takes a millisecond per image.
MOST_SCORES, FEWEST_SCORES, SCORED = 200, 25, 100_000

#: Minimum number of samples for an interval: a bootstrap of few values gives far too narrow ones.
FEWEST = 20

#: Half-width of a 95 % interval in standard errors.
_Z = 1.959963984540054

_SEED = 1979  # seed of the bootstrap, so that the same evaluation always has the same interval


class BatchMetrics(NamedTuple):
    """Measurements of one evaluated batch, or of a rank's part of it.

    ``sums`` are quantities to sum over the split: each sample's value, or a scalar for the batch (`Task.measure`).
    ``counts`` are the loss terms of each sample, ``answers`` the model's outputs for other metrics, one per sample or
    none (`Task.answers`).
    """

    sums: Mapping[str, Tensor]
    counts: Sequence[int]
    answers: Sequence[Any]
    digests: Sequence[bytes]


class SampleMetrics:
    """Accumulator of a split's measurements during an evaluation; tensors stay on the device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._counts: list[int] = []
        self._answers: list[Any] = []
        self._digests: list[bytes] = []
        self._batches: list[BatchMetrics] = []

    def add(
        self, batch: Batch, sums: Mapping[str, Tensor], answers: Sequence[Any], digests: Sequence[bytes] = ()
    ) -> None:
        """Add the measurements of an evaluated batch, as in `BatchMetrics`; raise ConfigError for others."""
        counts = batch.counts or [1] * batch.samples
        for name, value in sums.items():
            if not isinstance(value, Tensor) or value.numel() not in (1, len(counts)):
                given = f"{value.numel()} values" if isinstance(value, Tensor) else instance(value)
                raise ConfigError(
                    f"measure() of the task returns {given} of {name} for {len(counts)} samples",
                    "return a tensor with a value for each sample, or a scalar for the batch",
                )
        if len(answers) not in (0, len(counts)):
            raise ConfigError(
                f"answers() of the task returns {len(answers)} for {len(counts)} samples",
                "return one for each, or none",
            )
        self._take(BatchMetrics(sums, counts, answers, digests))

    def skip(self) -> None:
        """Add an empty entry for a batch of which this rank has no samples, so that all ranks have equally many."""
        self._take(BatchMetrics({}, (), (), ()))

    def _take(self, batch: BatchMetrics) -> None:
        self._batches.append(batch)
        for name, value in batch.sums.items():
            self._sums.setdefault(name, []).append(value)
        self._counts += batch.counts
        self._answers += batch.answers
        self._digests += batch.digests

    def over(self, comm: Communicator) -> SampleMetrics:
        """Return the measurements of all ranks in the order of one. All ranks must call this; waits for the device."""
        if comm.world_size == 1:
            return self
        own = [
            batch._replace(sums={name: value.cpu() for name, value in batch.sums.items()}) for batch in self._batches
        ]
        whole = SampleMetrics()
        for parts in zip(*comm.all_gather_object(own), strict=True):
            for batch in parts:
                whole._take(batch)
        return whole

    @property
    def digest(self) -> str:
        """SHA-256 of all samples so far, in hexadecimal; equal digests mean that evaluations used the same data."""
        return digest_of_samples(self._digests)

    @property
    def samples(self) -> int:
        """Number of samples so far."""
        return len(self._counts)

    def metrics(self, task: Task) -> dict[str, float]:
        """Return the metrics of the split by name. Waits for the device."""
        totals = {name: values.sum().item() for name, values in self._on_host().items()}
        return self._judged(task, totals, sum(self._counts), self._answers)

    def intervals(self, task: Task, metrics: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """Return 95 % confidence intervals of metrics over the choice of samples, where they can be computed.

        Proportions of samples, such as accuracy, get Wilson's score interval, which also holds near 0 and 1. All other
        metrics get 1.96 bootstrap standard errors to either side (Efron 1979). The number of resamples is `RESAMPLES`
        for metrics from sums and `MOST_SCORES` for metrics from the model's outputs; it falls to `FEWEST_SCORES` for
        many outputs, which gives a standard error to 14 %. No interval extends beyond the values of the resamples, so
        that none leaves the range of the metric. Fewer than `FEWEST` samples have none.

        Resamples repeat samples, and this alone biases some scores: the Fréchet distance of 400 pictures by 128
        features had a bias of five times its standard error, and a bootstrap error three times too large. If the mean
        of the resamples differs from the metric by more than their standard deviation, the standard error comes from a
        grouped jackknife instead, which repeats no sample; it was 1.2 to 1.6 times too large in that example.
        """
        if self.samples < FEWEST:
            return {}
        shares = [name for name in task.shares if math.isfinite(metrics.get(name, math.nan))]
        intervals = {name: _wilson(metrics[name], self.samples) for name in shares}
        drawn = {
            name: values
            for name, values in self._resampled(task).items()
            if name not in intervals and math.isfinite(metrics.get(name, math.nan))
        }
        biased = [name for name, values in drawn.items() if abs(fmean(values) - metrics[name]) > stdev(values)]
        unbiased = self._jackknife(task) if biased and self._answers else {}
        for name, values in drawn.items():
            metric, error = metrics[name], stdev(values)
            least, most = min(*values, metric), max(*values, metric)
            if name in biased and name in unbiased:
                error, least, most = unbiased[name], -math.inf, math.inf
            if error > 0:
                intervals[name] = (max(metric - _Z * error, least), min(metric + _Z * error, most))
        return intervals

    def _resampled(self, task: Task) -> dict[str, list[float]]:
        """Return the metrics of bootstrap resamples, by name; only metrics that are finite in all of them."""
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
                    metrics = task.summarise(dict(zip(values, map(float, sums), strict=True)), round(terms))
                    _append(seen, metrics)
        if self._answers:
            for _ in range(self._scores):
                picked = draws.integers(len(self._answers), size=len(self._answers))
                _append(seen, task.score([self._answers[index] for index in picked]))
        return {name: drawn for name, drawn in seen.items() if len(drawn) > 1 and all(map(math.isfinite, drawn))}

    def _jackknife(self, task: Task) -> dict[str, float]:
        import numpy as np

        order = np.random.default_rng(_SEED).permutation(len(self._answers))
        groups = np.array_split(order, min(self._scores, len(order)))
        seen: dict[str, list[float]] = {}
        for group in groups:
            left_out = set(group.tolist())
            _append(seen, task.score([answer for index, answer in enumerate(self._answers) if index not in left_out]))
        known = {name: values for name, values in seen.items() if all(map(math.isfinite, values))}
        return {name: (len(values) - 1) / math.sqrt(len(values)) * stdev(values) for name, values in known.items()}

    @property
    def _scores(self) -> int:
        return max(FEWEST_SCORES, min(MOST_SCORES, SCORED // len(self._answers)))

    def _judged(self, task: Task, sums: dict[str, float], terms: int, answers: Sequence[Any]) -> dict[str, float]:
        metrics: dict[str, Any] = {**task.summarise(sums, terms), **(task.score(answers) if answers else {})}
        metrics = {name: _number(value) for name, value in metrics.items()}
        if odd := [name for name, value in metrics.items() if not isinstance(value, int | float)]:
            raise ConfigError(f"the task's metric {odd[0]} is {instance(metrics[odd[0]])}", "return numbers by name")
        return metrics

    def _on_host(self) -> dict[str, Tensor]:
        """Return sums on the host as float64, one value per sample, or per batch if the task measures only those."""
        return {
            name: torch.cat([part.reshape(-1) for part in parts]).cpu().double() for name, parts in self._sums.items()
        }


def _number(value: Any) -> Any:
    """Return a tensor or NumPy value of one element as Python's number; any other value as it is."""
    return (
        value.item()
        if getattr(value, "size", None) == 1 or (isinstance(value, Tensor) and value.numel() == 1)
        else value
    )


def _append(seen: dict[str, list[float]], metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        seen.setdefault(name, []).append(value)


def _wilson(share: float, samples: int) -> tuple[float, float]:
    """Return Wilson's score interval (1927) of a proportion; importing that of scipy would take 0.6 seconds."""
    proportion, z = round(share * samples) / samples, _Z
    middle = proportion + z * z / (2 * samples)
    reach = z * math.sqrt(proportion * (1 - proportion) / samples + (z / (2 * samples)) ** 2)
    whole = 1 + z * z / samples
    return max(0.0, (middle - reach) / whole) if proportion else 0.0, min(
        1.0, (middle + reach) / whole
    ) if proportion < 1 else 1.0
