"""The table of bad input: what each mistake on the command line gets, in words and as an exit code."""

import random

import pytest
from loops import each

from mptrain.parallel.torchrun import TorchrunRank, torchrun_rank

ROWS = [
    (
        ["precision=amp_dynamc"],
        ["error: no option 'amp_dynamc' in precision", "hint: did you mean amp_dynamic?"],
    ),
    (
        ["precison=amp_dynamic"],
        ["error: unknown key 'precison'", "hint: did you mean precision=amp_dynamic?"],
    ),
    (["scaler.foo=1"], ["error: unknown key 'scaler.foo'", "hint: mptrain.scaler.DynamicScaler takes "]),
    (["+train2=x"], ["error: unknown key 'train2'", "hint: train is a section of keys: train.epochs, "]),
    (["trian", "model=resnet50"], ["error: 'trian' is not a command", "hint: did you mean train?"]),
    (["train.epochs=1.5"], ["error: train.epochs=1.5: must be a whole number, at least 1"]),
    (["scaler.growth_factor=0.5"], ["error: scaler.growth_factor=0.5: must be a number above 1"]),
    (["precision=amp_static", "scaler.scale=-1"], ["error: scaler.scale=-1: must be a number above 0"]),
    (["scaler.init_scale=nan"], ["error: scaler.init_scale=nan: must be a finite number above 0"]),
    (["scaler.scale=1,128"], ["error: scaler.scale=1,128: two values for one key: add -m to sweep"]),
    (
        ["--epochs=3"],
        [
            "error: unknown option '--epochs=3'",
            "hint: did you mean train.epochs=3? KEY=VALUE takes no leading dashes",
        ],
    ),
    (["--multirum"], ["error: unknown option '--multirum'", "hint: did you mean --multirun?"]),
    (["--config-dir"], ["error: --config-dir needs a value"]),
    (["--config-dir", "/nowhere"], ["error: --config-dir /nowhere: there is no such folder"]),
    (["--config-name", "nothing"], ["error: --config-name nothing: no such file"]),
    (["--config-dir", "/nowhere"], ["hint: give the folder that holds GROUP/OPTION.yaml"]),
    (["list", "model", "--config-dir", "/nowhere"], ["hint: give the folder that holds GROUP/OPTION.yaml"]),
    (["--precision=fp32"], ["hint: did you mean precision=fp32?"]),
    (["--precision", "fp32"], ["hint: did you mean precision=fp32?"]),
    (["--config-dirr=x"], ["hint: did you mean --config-dir?"]),
    (["model", "=", "cnn"], ["error: 'model = cnn': no spaces around '='", "hint: write model=cnn"]),
    (["seed=1", "model=", "cnn"], ["error: 'model= cnn': no spaces around '='", "hint: write model=cnn"]),
    (["seed=1", "model", "=cnn"], ["error: 'model =cnn': no spaces around '='", "hint: write model=cnn"]),
    (["-sc"], ["error: -sc takes install=SHELL and nothing else", "hint: write mptrain completion SHELL"]),
    (
        ["-sc", "install=tcsh"],
        ["error: there is no completion for 'tcsh'", "hint: supported shells are bash, zsh, fish"],
    ),
    (["seed=99999999999999999999"], ["must be a whole number from 0 to 2^63-1"]),
    (["model.widths=[]"], ["error: model.widths=[]: must be a list, each entry a whole number, at least 1"]),
    (["model=mlp", "model.hidden=64"], ["hint: write model.hidden=[64]"]),
    (
        ["train.batch_size=4", "train.accumulate=5"],
        ["error: train.accumulate=5 with train.batch_size=4: a micro-batch needs at least one sample"],
    ),
    (["precision.keep_fp32=norms"], ["hint: write precision.keep_fp32=[norms]"]),
    (["list", "precison"], ["error: there is no group 'precison'", "hint: did you mean precision?"]),
    (["help", "trian"], ["error: there is no help on 'trian'", "hint: did you mean mptrain help train?"]),
    (["help", "scaller"], ["error: there is no help on 'scaller'", "hint: did you mean mptrain help scaler?"]),
    (["help", "train", "foo"], ["error: there is no help on 'foo'", "hint: help topics are train, compare, "]),
    (["precision=fp16"], ["hint: did you mean fp16_dynamic, fp16_noscale, fp16_pure or fp16_static? mptrain help"]),
    (["train.epochs", "3"], ["error: 'train.epochs 3': no '=' between key and value", "hint: write train.epochs=3"]),
    (["seed=1", "train.epochs", "3", "model", "mlp"], ["hint: write train.epochs=3", "hint: write model=mlp"]),
    (["doctor", "model", "mlp"], ["hint: write model=mlp"]),
    (["model", "=", "cnn", "seed", "1"], ["hint: write model=cnn", "hint: write seed=1"]),
    (
        ["compare", "fp32", "amp_bf16"],
        [
            "error: there is no run fp32",
            "hint: to train and compare arms, write mptrain compare precision=fp32,amp_bf16 seed=0,1,2,3",
        ],
    ),
    (["train.epochs"], ["error: 'train.epochs' is not a command", "hint: write train.epochs=VALUE"]),
    (["precision"], ["hint: write precision=OPTION; mptrain help precision shows the options"]),
    (["fit"], ["error: 'fit' is not a command", "hint: did you mean mptrain train?"]),
    (["sweep", "seed=0,1"], ["hint: did you mean mptrain -m? mptrain help sweep explains sweeps"]),
    (["eval", "last", "--device", "cpu"], ["hint: did you mean device=cpu? KEY=VALUE takes no leading dashes"]),
    (
        ["resume", "x", "--epochs=5", "y"],
        ["hint: did you mean train.epochs=5?", "error: 'y' is not of the form KEY=VALUE"],
    ),
    (["model:cnn"], ["hint: write model=cnn"]),
    (["--list"], ["hint: did you mean mptrain list?"]),
    (["-v"], ["hint: did you mean --version?"]),
    (["compare", "--seeds", "3", "precision=fp32,bf16"], ["hint: did you mean seed=3?"]),
    (["compare", "--refrence", "fp32", "precision=fp32,bf16"], ["hint: did you mean --reference?"]),
    (["re"], ["hint: did you mean resume, report, recommend, replay or reproduce?"]),
    (
        ["distributed=null"],
        ["error: distributed=null: a run needs an option of distributed", "hint: write distributed=ddp"],
    ),
    (["model._target_=os.system"], ["error: _target_ 'os.system' is not in an allowed package"]),
    (
        ["model._target_=mptrain.workloads.classification.models.convnet.cnnn"],
        ["has no 'cnnn'", "hint: did you mean mptrain.workloads.classification.models.convnet.cnn?"],
    ),
    (["model._target_=mptrain.workloads.gan.models.os.system"], ["importing mptrain.workloads.gan.models.os failed"]),
    (
        ["model._target_=mptrain.cli.main.main", "+model.argv=[doctor]"],
        [
            "'mptrain.cli.main.main' is not in an allowed package",
            "hint: name a class or function of mptrain.workloads.*.models.*",
        ],
    ),
]


@each(("words", "expected"), ROWS)
def test_bad_input_gets_its_answer_and_exit_code_2(terminal, words, expected):
    assert terminal(*words) == 2
    for text in expected:
        assert text in terminal.err
    assert terminal.err.startswith("error: ")
    assert "Traceback" not in terminal.err
    assert not terminal.trained


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
    monkeypatch.setattr("mptrain.cli.main.place_of", lambda run, overrides: run)  # there are no runs
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


def test_a_mistake_in_every_point_of_a_sweep_is_named_once(terminal):
    assert terminal("-m", "lr=0.1,0.01,0.001") == 2
    assert terminal.err == "error: unknown key 'lr'\nhint: did you mean optimizer.lr=0.1?\n"


def test_the_value_of_a_flag_is_no_key_without_a_value(terminal):
    assert terminal("compare", "--by", "optimizer", "outputs/a", "outputs/b") != 0
    assert "no '='" not in terminal.err


def test_a_run_as_the_first_word_hints_what_can_be_done_with_it(terminal, tmp_path):
    (tmp_path / "mine").mkdir()
    assert terminal("mine") == 2
    assert "mptrain resume mine" not in terminal.err
    (tmp_path / "mine" / "run.json").write_text("{}")
    assert terminal("mine") == 2
    assert terminal.err.endswith("hint: write mptrain resume mine, or mptrain report mine\n")
