"""Bad input beyond messages.txt: malformed words, the environment of torchrun, and what depends on folders."""

import random

import pytest
from loops import each

from mptrain.parallel.torchrun import TorchrunRank, torchrun_rank

THERE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("words", [("-m", "model=mlp", "seed=0,1"), ("report", "outputs/run"), ("list", "model")])
def test_what_is_no_run_is_refused_under_torchrun(terminal, monkeypatch, words):
    for name, value in THERE.items():
        monkeypatch.setenv(name, value)
    assert terminal(*words) == 2
    assert terminal.err.startswith("error: torchrun starts the ranks of a single run, but ")


@pytest.mark.parametrize("words", [("train", "model=mlp"), ("model=mlp",)])
def test_a_run_begins_under_torchrun(terminal, monkeypatch, words):
    for name, value in THERE.items():
        monkeypatch.setenv(name, value)
    assert terminal(*words) == 0, terminal.err
    assert terminal.trained


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "first", "WORLD_SIZE": "2"}, "environment: RANK=first is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "environment: WORLD_SIZE=-2 is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "environment: RANK=2 is out of range for WORLD_SIZE=2"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "65536"},
            "environment: MASTER_PORT=65536 is not a number up to 65535",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "environment: RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"},
            "environment: RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not",
        ),
    ],
)
def test_what_the_environment_says_of_ranks_must_make_sense(terminal, monkeypatch, variables, said):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert terminal("list", "model") == 3
    assert terminal.err.startswith(f"error: {said}\nhint: ")


@pytest.mark.parametrize(
    "variables",
    [{}, {"WORLD_SIZE": "4"}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "", "WORLD_SIZE": "2"}],
)
def test_one_rank_is_no_several(monkeypatch, variables):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert torchrun_rank() is None


def test_a_rank_is_told_where_it_stands(monkeypatch):
    for name, value in {**THERE, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert torchrun_rank() == TorchrunRank(5, 8, 1, 4, speaks=False)
    monkeypatch.delenv("LOCAL_RANK")
    assert torchrun_rank() == TorchrunRank(5, 8, 5, 4, speaks=True)


def test_all_problems_come_out_at_once(terminal):
    assert terminal("precison=x", "train.epochs=1.5", "scaler.growth_factor=0.5") == 2
    assert terminal.err.count("error: ") == 3


WORDS = [
    "precision=amp_dynamic",
    "scaler=static",
    "scaler.scale=128",
    "train.epochs=3",
    "optimizer.betas=[0.9,0.99]",
    "model=plain16",
    "run.name=foo",
    "+model.x=1",
    "~debug",
    "seed=0,1",
    "-m",
    "--cfg",
    "job",
    "--config-dir",
    "resume",
    "list",
    "eval",
    "seed=range(1,3)",
    "precision=glob(fp*)",
    "train={epochs: 2}",
    "device=cuda:0",
    "hydra.verbose=true",
]
PIECES = [
    *"=.,+~-@:/\\'\"(){}[]$#%&*!?<>| \t\n\0é漢𝄞",
    "${",
    "}",
    "${oc.env:X}",
    "???",
    "null",
    "nan",
    "1e999",
    "-1",
    "\ud800",
]


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


@each("seed", range(200))
def test_a_random_malformed_command_line_never_shows_a_traceback(terminal, monkeypatch, seed):
    monkeypatch.setattr("mptrain.cli.sweep.finish", lambda *_: 0)
    monkeypatch.setattr("mptrain.cli.places.place_of", lambda run, overrides: run)  # there are no runs
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


def test_the_value_of_a_flag_is_no_key_without_a_value(terminal):
    assert terminal("compare", "--by", "optimizer", "outputs/a", "outputs/b") != 0
    assert "no '='" not in terminal.err
