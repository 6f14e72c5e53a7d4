"""The `Sink` protocol for consumers of a run's records, and a sink that combines several.

Records (`mptrain.system.records`) describe steps, epochs, evaluations and other events as frozen dataclasses. A sink
displays or stores them. It must not change training and never receives a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mptrain.system.records import Record


class Sink(Protocol):
    """Protocol of consumers of a training run's records, such as the writer of its files or a progress display."""

    def take(self, record: Record) -> None:
        """Accept one record, in the order of the events, and ignore it if the sink does not use records of its type."""

    def close(self) -> None:
        """Store or display all pending records and release resources; accept no records afterwards.

        A second call does nothing.
        """


class NoRecords:
    """Sink that discards all records of a run, with the methods of `RecordWriter` that ranks other than 0 call."""

    def take(self, record: Record) -> None:
        """Discard the record."""

    def flush(self) -> dict[str, int]:
        """Return an empty dict, because no file has any records."""
        return {}

    def close(self) -> None:
        """Do nothing: there are no pending records."""


class Fanout:
    """Sink that passes every record of a run to several sinks."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = tuple(sinks)

    def take(self, record: Record) -> None:
        """Pass the record to every sink, in order."""
        for sink in self.sinks:
            sink.take(record)

    def close(self) -> None:
        """Close every sink, even if one of them fails, and then raise the first failure."""
        failures: list[Exception] = []
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
