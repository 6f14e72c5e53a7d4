"""Numbers that are kept of a run: every one that its directory holds, but for those of the clock and of the machine."""

from __future__ import annotations

import csv
import hashlib
import json

from tests.faults.references import EVENTS, TIMES, state_of

#: Numbers of ``summary.json`` that depend on the clock or on the machine, or on which batch came first after a resume.
_OF_THE_MACHINE = frozenset(
    {"terms_per_second", "steady_terms_per_second", "train_seconds", "data_wait", "energy_joules", "memory_before",
     "peak_memory", "steady_steps", "support", "device", "activations"}
)  # fmt: skip

#: What is said below pictures.
_CAPTIONS = "captions.json"

#: Fields of events that hold sentences for people, whose wording is no number.
_PROSE = frozenset({"message"})


def kept_of(run):
    """Return what is kept of a finished run, as JSON values."""
    events = [_without(json.loads(line), _PROSE) for line in _lines(run / "events.jsonl")]
    with (run / "epochs.csv").open(newline="") as file:
        epochs = [_without(row, TIMES) for row in csv.DictReader(file)]
    data = json.loads((run / "data.json").read_text())
    return {
        "steps": [json.loads(line) for line in _lines(run / "steps.jsonl")],
        "epochs": epochs,
        "events": in_order(events),
        "summary": _without(json.loads((run / "summary.json").read_text()), _OF_THE_MACHINE),
        "data": {key: _digest(json.dumps(value).encode()) for key, value in data.items()},
        "histograms": _histograms(run / "histograms.jsonl"),
        "samples": {
            path.name: _digest(path.read_bytes())
            for path in sorted((run / "samples").glob("*"))
            if path.name != _CAPTIONS
        },
        "state": _with_one_digest_of_random_states(state_of(run)),
    }


def _with_one_digest_of_random_states(state):
    """Put one digest in the place of the hundreds of numbers that generators of random numbers have."""
    states = [f"{place} {value}" for place, value in state.items() if place.startswith(".random")]
    kept = {place: value for place, value in state.items() if not place.startswith(".random")}
    return {**kept, ".random": _digest("\n".join(states).encode())}


def _histograms(path):
    """Return a digest of all values of each line, in their order: numbers, dtypes, kinds of what is not finite. Names may change."""

    def values(one):
        if isinstance(one, (dict, list)):
            for item in one.values() if isinstance(one, dict) else one:
                yield from values(item)
        else:
            yield one

    kept = []
    for line in map(json.loads, _lines(path)) if path.exists() else ():
        named = {"learner": line.pop("learner"), "step": line["step"]}
        kept.append({**named, "digest": _digest(json.dumps([*values(line)]).encode())})
    return kept


def _digest(content):
    return hashlib.sha256(content).hexdigest()


def in_order(events):
    """Sort events: when an overflow is read off the device, between two others, is the clock's business."""
    return sorted(events, key=lambda event: (event["step"], json.dumps(event, sort_keys=True)))


def outcome_of(record):
    """Return those parts of a record that a run which was interrupted and resumed has in common with one that was not."""
    events = [event for event in record["events"] if event["event"] in EVENTS]
    return {
        **{part: record[part] for part in ("steps", "epochs", "histograms", "summary", "data", "samples", "state")},
        "events": events,
    }


def text_of(record):
    """Return the text of a record's file."""
    return json.dumps(record, sort_keys=True, indent=1) + "\n"


def _lines(path):
    return path.read_text().splitlines()


def _without(value, names):
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    return [_without(item, names) for item in value] if isinstance(value, list) else value
