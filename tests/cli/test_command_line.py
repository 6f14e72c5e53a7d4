import pytest
from loops import each

from mptrain.cli.command_line import read_flags
from mptrain.errors import ConfigError, UsageError


def test_flags_and_overrides_are_told_apart_in_any_order():
    flags = read_flags(["a=1", "-m", "--config-dir", "x", "b=2", "-cd=y", "--config-name=z"])
    assert flags.overrides == ("a=1", "b=2")
    assert flags.multirun
    assert flags.config_dirs == ("x", "y")
    assert flags.config_name == "z"
    assert not flags.show


def test_flags_that_ask_hydra_to_show_something_are_noticed():
    assert read_flags(["--cfg", "job"]).show
    assert read_flags(["-c=all"]).show
    info = read_flags(["--info", "defaults", "a=1"])
    assert info.show
    assert info.overrides == ("a=1",)
    assert read_flags(["--info", "a=1"]).overrides == ("a=1",)


@each(
    ("words", "message", "hint"),
    [
        (["--multi-run"], "unknown option '--multi-run'", "did you mean --multirun?"),
        (
            ["--train.epochs=3"],
            "unknown option '--train.epochs=3'",
            "did you mean train.epochs=3? KEY=VALUE takes no leading dashes",
        ),
        (
            ["--warmup-epochs", "2"],
            "unknown option '--warmup-epochs'",
            "did you mean schedule.warmup=UPDATES, which counts updates, not epochs? KEY=VALUE takes no leading dashes",
        ),
        (["-x"], "unknown option '-x'", "configuration is KEY=VALUE; mptrain --help shows the options"),
        (
            ["--config-path", "x"],
            "unknown option '--config-path'",
            "--config-dir adds a folder of groups and options",
        ),
        (["--config-dir"], "--config-dir needs a value", "write --config-dir VALUE"),
        (["--config-name", "-m"], "--config-name needs a value", "write --config-name VALUE"),
        (["--cfg", "jobs"], "--cfg jobs: invalid value", "choose from job, hydra, all"),
    ],
)
def test_an_unknown_or_incomplete_flag_is_refused(words, message, hint):
    with pytest.raises((UsageError, ConfigError)) as caught:
        read_flags(words)
    assert (str(caught.value), caught.value.hint) == (message, hint)


def test_all_unknown_flags_are_named_with_what_is_wrong_besides():
    with pytest.raises(ConfigError) as caught:
        read_flags(["--epochs", "3", "--learning-rate=0.1", "--precision", "fp16", "--fp17", "precison=fp32", "--amp"])
    assert [
        (problem.what, problem.hint.removesuffix(" KEY=VALUE takes no leading dashes"))
        for problem in caught.value.problems
    ] == [
        ("unknown option '--epochs'", "did you mean train.epochs=3?"),
        ("unknown option '--learning-rate=0.1'", "did you mean optimizer.lr=0.1?"),
        ("unknown option '--precision'", "did you mean precision=fp16?"),
        ("unknown option '--fp17'", "configuration is KEY=VALUE; mptrain --help shows the options"),
        ("unknown option '--amp'", "did you mean precision=amp_dynamic?"),
        (
            "no option 'fp16' in precision",
            "did you mean fp16_dynamic, fp16_noscale, fp16_pure or fp16_static? mptrain help precision describes them",
        ),
        ("unknown key 'precison'", "did you mean precision=fp32?"),
    ]


@pytest.mark.parametrize("words", [["-m", "--jobs", "3"], ["--jobs=3", "-m"]])
def test_the_number_of_jobs_belongs_to_sweeps(words):
    assert read_flags(words).jobs == 3
    assert read_flags(["-m"]).jobs is None
    assert read_flags(["-m", "--launcher", "slurm.yaml"]).launcher == "slurm.yaml"
    with pytest.raises(UsageError, match="--launcher applies only to sweeps"):
        read_flags(["--launcher=local"])
    with pytest.raises(UsageError, match="--jobs applies only to sweeps"):
        read_flags([word for word in words if word != "-m"])


@each("number", ["0", "-1", "two", "1.5", "²", "99999"])
def test_a_number_of_jobs_that_is_none_is_refused(number):
    with pytest.raises(UsageError, match=r"^--jobs .*must be a whole number, at least 1"):
        read_flags(["-m", f"--jobs={number}"])
