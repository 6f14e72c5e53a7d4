"""Greedy and beam search against a language small enough to try every sentence of it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mptrain.workloads.text.subwords import BEGIN, END, PAD, UNKNOWN
from mptrain.workloads.translation.task import beam_search, greedy
from tests.loops import each

A, B = 4, 5
VOCABULARY = 6


class Spelled:
    """Says the next token by a table of what has been said so far; the source's first token chooses the table."""

    def __init__(self, *tables):
        self.tables = tables
        self.steps = 0

    def encode(self, source, source_lengths):
        return {"table": source[:, 0], "said": torch.zeros(len(source), 0, dtype=torch.int64)}

    def step(self, tokens, state):
        self.steps += 1
        said = torch.cat([state["said"], tokens[:, None]], 1)
        rows = [
            self.tables[int(table)](tuple(row[1:])) for table, row in zip(state["table"], said.tolist(), strict=True)
        ]
        assert all(row[0] == BEGIN for row in said.tolist())
        return torch.tensor(rows), {"table": state["table"], "said": said}


def logits(**probabilities):
    """Logits ``[V]``; what is not named is next to impossible."""
    names = {"a": A, "b": B, "end": END, "unknown": UNKNOWN, "pad": PAD, "begin": BEGIN}
    row = [-30.0] * VOCABULARY
    for name, probability in probabilities.items():
        row[names[name]] = math.log(probability)
    return row


def misleading(said):
    """*a* is likelier than *b*, but nothing likely follows it."""
    if said == ():
        return logits(a=0.6, b=0.4)
    if said[0] == A:
        return logits(a=0.3, b=0.3, end=0.4)
    return logits(end=0.9, a=0.1)


def drawn(seed):
    """A random table: the same for the same sentence."""

    def table(said):
        generator = torch.Generator().manual_seed(hash((seed, *said)) % (1 << 31))
        return torch.randn(VOCABULARY, generator=generator).mul(2).tolist()

    return table


def source_of(*tables):
    return torch.tensor(tables)[:, None], torch.ones(len(tables), dtype=torch.int64)


def searched(model, tables, limits, beam=None, penalty=0.0):
    given = (model, *source_of(*tables), torch.tensor(limits))
    return (greedy(*given) if beam is None else beam_search(*given, beam, penalty)).tolist()


def trimmed(row):
    return row[: row.index(END) + 1] if END in row else row


def best_by_trying(table, limit, penalty):
    """The best finished sentence of at most ``limit`` tokens, of all."""
    best, best_score = None, -math.inf
    for length in range(limit):
        for words in itertools.product((A, B), repeat=length):
            total = 0.0
            for place, token in enumerate((*words, END)):
                row = torch.tensor(table(words[:place]))
                row[[PAD, UNKNOWN, BEGIN]] = -math.inf
                total += row.log_softmax(0)[token].item()
            score = total / ((5 + length + 1) / 6) ** penalty
            if score > best_score:
                best, best_score = [*words, END], score
    return best


def test_a_beam_finds_what_greed_misses():
    model = Spelled(misleading)
    assert searched(model, [0], [5]) == [[A, END]]
    assert trimmed(searched(model, [0], [5], beam=2)[0]) == [B, END]


@each("penalty", [0.0, 0.6, 1.5])
@each("seed", range(5))
def test_a_beam_as_wide_as_the_language_finds_the_best_sentence(seed, penalty):
    table = drawn(seed)
    said = searched(Spelled(table), [0], [4], beam=16, penalty=penalty)[0]
    assert trimmed(said) == best_by_trying(table, 4, penalty)


def test_sentences_of_a_batch_do_not_disturb_each_other():
    tables = [drawn(seed) for seed in range(6)] + [misleading]
    limits = [4, 7, 2, 5, 1, 6, 5]
    for beam in (None, 2, 3):
        together = searched(Spelled(*tables), range(7), limits, beam)
        for number, limit in enumerate(limits):
            alone = searched(Spelled(*tables), [number], [limit], beam)[0]
            assert trimmed(together[number])[:limit] == trimmed(alone)[:limit]
            assert set(together[number][limit:]) <= {PAD}


def test_a_higher_penalty_prefers_longer_sentences():
    def table(said):
        return logits(a=0.5, end=0.5) if len(said) < 4 else logits(end=1.0)

    lengths = [len(trimmed(searched(Spelled(table), [0], [9], beam=4, penalty=penalty)[0])) for penalty in (0.0, 8.0)]
    assert lengths == [1, 5]


@pytest.mark.parametrize(("beam", "expected"), [(None, [A, A, A]), (3, [END, PAD, PAD])])
def test_what_is_no_part_of_a_sentence_is_never_said(beam, expected):
    model = Spelled(lambda said: logits(pad=0.5, begin=0.3, unknown=0.15, a=0.04, end=0.01))
    assert searched(model, [0], [3], beam) == [expected]


@pytest.mark.parametrize("beam", [None, 3])
def test_a_sentence_without_an_end_stops_at_its_limit(beam):
    model = Spelled(lambda said: [-math.inf if token == END else float(token == A) for token in range(VOCABULARY)])
    assert searched(model, [0, 0], [2, 4], beam) == [[A, A, PAD, PAD], [A, A, A, A]]
    assert len(searched(Spelled(lambda said: [math.nan] * VOCABULARY), [0, 0], [3, 2], beam)) == 2


@pytest.mark.parametrize("beam", [None, 2])
def test_it_stops_as_soon_as_every_sentence_has_ended(beam):
    model = Spelled(lambda said: logits(end=0.98, a=0.01, b=0.01) if said else logits(a=0.98, b=0.01, end=0.01))
    searched(model, [0, 0, 0], [50, 50, 50], beam, penalty=0.6)
    assert model.steps <= 4


@pytest.mark.parametrize("beam", [None, 3])
def test_logits_in_half_precision_are_summed_up_in_fp32(beam):
    """After 40 tokens FP16 sums of log-probabilities near -120 are steps of 1/16 apart; the two differ by less."""

    class Half(Spelled):
        def step(self, tokens, state):
            found, state = super().step(tokens, state)
            return found.half(), state

    def table(said):
        if not said:
            return logits(a=0.5, b=0.5 + 1e-3)
        return logits(end=1.0) if len(said) > 40 else logits(a=0.05, b=0.05 + 2e-4 * (said[0] == B))

    assert trimmed(searched(Half(table), [0], [60], beam)[0])[0] == B
