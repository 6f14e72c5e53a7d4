"""Bad input beyond messages.txt: malformed words, the environment of torchrun, and what depends on folders."""

import random

import pytest

from mptrain.parallel.torchrun import TorchrunRank, torchrun_rank
from tests.loops import each

THERE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def ranks(monkeypatch):
    """Set what torchrun sets for its ranks, and nothing else of it."""

    def environment(**variables):
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return environment


@pytest.mark.parametrize("words", [("-m", "model=mlp", "seed=0,1"), ("report", "outputs/run"), ("list", "model")])
def test_what_is_no_run_is_refused_under_torchrun(terminal, ranks, words):
    ranks(**THERE)
    assert terminal(*words) == 2
    assert terminal.err.startswith("error: torchrun starts the ranks of a single run, but ")


def test_a_run_begins_under_torchrun(terminal, ranks):
    ranks(**THERE)
    assert terminal("train", "model=mlp") == terminal("model=mlp") == 0, terminal.err
    assert len(terminal.trained) == 2


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK=first"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE=-2"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is out of range for WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR or MASTER_PORT is not"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_ADDR or MASTER_PORT is not"),
    ],
)
def test_what_the_environment_says_of_ranks_must_make_sense(terminal, ranks, variables, named):
    ranks(**variables)
    assert terminal("list", "model") == 3
    assert terminal.err.startswith("error: environment: ")
    assert named in terminal.err.partition("\nhint: ")[0]
    assert "\nhint: " in terminal.err


@pytest.mark.parametrize(
    "variables",
    [{}, {"WORLD_SIZE": "4"}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "", "WORLD_SIZE": "2"}],
)
def test_one_rank_is_no_several(ranks, variables):
    ranks(**variables)
    assert torchrun_rank() is None


def test_a_rank_is_told_where_it_stands(ranks):
    several = {**THERE, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    ranks(**several, LOCAL_RANK="1")
    assert torchrun_rank() == TorchrunRank(5, 8, 1, 4, speaks=False)
    ranks(**several)
    assert torchrun_rank() == TorchrunRank(5, 8, 5, 4, speaks=True)


WORDS = [
    "precision=amp_dynamic", "scaler=static", "scaler.scale=128", "train.epochs=3", "optimizer.betas=[0.9,0.99]",
    "model=plain16", "run.name=foo", "+model.x=1", "~debug", "seed=0,1", "-m", "--cfg", "job", "--config-dir", "resume",
    "list", "eval", "seed=range(1,3)", "precision=glob(fp*)", "train={epochs: 2}", "device=cuda:0", "hydra.verbose=true",
]  # fmt: skip
PIECES = [*"=.,+~-@:/\\'\"(){}[]$#%&*!?<>| \t\n\0é漢𝄞\ud800", "${", "${oc.env:X}", "???", "null", "nan", "1e999", "-1"]


def malformed(random_source):
    """A command line of valid words with letters lost, doubled, swapped and strange ones put in."""
    words = []
    for _ in range(random_source.randint(1, 4)):
        word = random_source.choice(WORDS)
        for _ in range(random_source.randint(0, 3)):
            place = random_source.randint(0, len(word))
            kind = random_source.randint(0, 3)
            if kind == 0:
                word = word[:place] + word[place + 1 :]
            elif kind == 1:
                word = word[:place] + random_source.choice(PIECES) + word[place:]
            elif kind == 2:
                word = word[:place] + word[place : place + 1] * random_source.randint(2, 30) + word[place:]
            else:
                word = word[place:] + word[:place]
        words.append(word)
    return words


@pytest.mark.long
@each("seed", range(100))
def test_a_random_malformed_command_line_never_shows_a_traceback(terminal, monkeypatch, seed):
    monkeypatch.setattr("mptrain.study.commands.sweep.finish", lambda *_: 0)
    monkeypatch.setattr("mptrain.cli.commands.run_folder", lambda run, overrides: run)  # there are no runs
    words = malformed(random.Random(seed))
    code = terminal(*words)
    assert code in (0, 2), (words, terminal.err)
    assert "Traceback" not in terminal.err
    assert "this is a bug" not in terminal.err
    assert code == 0 or terminal.err.startswith("error: "), (words, terminal.err)


@pytest.mark.parametrize(
    "word", ["train.epochs=" + "[" * 3000, "x" * 100_000 + "=1", "a." * 3000 + "b=1", "seed=" + "9" * 9000]
)
def test_an_enormous_word_is_refused_in_words(terminal, word):
    assert terminal(word) == 2
    assert "this is a bug" not in terminal.err
    assert len(terminal.err) < 2000
