"""Choice of runs: a covering array of pairs, greedy and deterministic."""

from __future__ import annotations

import random
from itertools import combinations, product

#: So many rows are tried for a pair before it counts as impossible.
TRIES = 12


def pairs_of(row):
    """Return the pairs of settings that a row has, each as ``((factor, value), (factor, value))``."""
    return list(combinations(row.items(), 2))


def all_pairs(factors):
    """Return every pair of values of two factors, in order."""
    names = combinations(factors, 2)
    return [((a, one), (b, other)) for a, b in names for one, other in product(factors[a], factors[b])]


def choose(factors, most, is_valid):
    """Choose rows that together have as many pairs as a greedy choice finds.

    Args:
        factors: Values by name of the factor. Rows have their names in this order.
        most: The largest number of rows.
        is_valid: Takes a row and returns whether it can be run.

    Returns:
        Rows; pairs that none of them has, valid or not; pairs that no valid row was found for.
    """
    missing = dict.fromkeys(all_pairs(factors))  # a set that keeps its order
    used = dict.fromkeys(((name, value) for name, values in factors.items() for value in values), 0)
    rows, impossible = [], []

    def urgency(pair):
        too_many = len(factors[pair[0][0]]) * len(factors[pair[1][0]]) > most  # pairs of these two, for so many rows
        return too_many, used[pair[0]] + used[pair[1]]

    while missing and len(rows) < most:
        seed = min(missing, key=urgency)
        row = next(filter(is_valid, _rows_with(seed, factors, missing, used, impossible)), None)
        if row is None:
            impossible.append(seed)
            del missing[seed]
            continue
        rows.append(row)
        for setting in row.items():
            used[setting] += 1
        for pair in pairs_of(row):
            missing.pop(pair, None)
    return rows, list(missing), impossible


def is_possible(pair, factors, is_valid):
    """Return whether there is a valid row with a pair, among so many as `choose` tries."""
    used = dict.fromkeys(((name, value) for name, values in factors.items() for value in values), 0)
    return any(map(is_valid, _rows_with(pair, factors, {}, used, [])))


def _rows_with(seed, factors, missing, used, impossible):
    """Yield rows with a pair: the one that adds most to what is covered, then drawn ones."""
    names, avoided = list(factors), set(impossible)

    def pairs(name, value, row):
        for other in row.items():
            earlier = names.index(name) < names.index(other[0])
            yield ((name, value), other) if earlier else (other, (name, value))

    row = dict(seed)
    for name in sorted(set(names) - row.keys(), key=lambda name: (-len(factors[name]), name)):

        def worth(value, name=name):
            added = list(pairs(name, value, row))
            return not avoided.intersection(added), sum(pair in missing for pair in added), -used[name, value]

        row[name] = max(factors[name], key=worth)
    yield {name: row[name] for name in names}
    chance = random.Random(repr(seed))
    for _ in range(TRIES - 1):
        yield {name: dict(seed).get(name, chance.choice(factors[name])) for name in names}
