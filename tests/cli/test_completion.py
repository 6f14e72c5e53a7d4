"""What TAB offers, in every shell, quickly."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from loops import each
from small_runs import environment

from mptrain.cli.commands import COMMANDS
from mptrain.cli.completion import SHELLS, answers, escaped, script, split
from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.config.compose import RECHOSEN
from mptrain.config.schema import SECTIONS
from mptrain.runlog import RunState, create_run

#: What bash has where nobody changed it.
BREAKS = " \t\n\"'@><=;|&(:"


def offered(line):
    """The words offered at the end of a line without quotes."""
    *before, current = line.split(" ")
    return [candidate.text for candidate in answers(before, current, COMMANDS)]


def made_run(name, config="", root=Path("outputs")):
    run = create_run(root, "label", name)
    run.write_state(RunState(id=name, argv=(), command="").begin())
    run.write_config(config, [])
    return run


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_an_empty_line_offers_commands_groups_and_sections():
    found = offered("")
    groups = Catalogue([location.configs()]).groups
    assert set(COMMANDS) <= set(found)
    assert {f"{group}=" for group in groups} <= set(found)
    assert {"train.", "run.", "seed="} <= set(found)
    assert "train.epochs=" not in found  # one level at a time


def test_commands_are_offered_as_the_first_word_only():
    assert "doctor" in offered("do")
    assert offered("seed=1 do") == []
    assert offered("--config-name train do") == ["doctor"]


def test_what_can_be_copied_is_offered_a_level_at_a_time(tmp_path):
    (tmp_path / "conf").mkdir()
    assert {"two_cliffs", "model/", "precision/"} <= set(offered("copy "))
    assert offered("copy model/resnet") == ["model/resnet18", "model/resnet50"]
    assert offered("copy model/resnet18 c") == ["conf/"]


@pytest.mark.parametrize("group", ["precision", "logger", "model"])
def test_all_options_of_a_group_are_offered(group):
    options = [path.stem for path in sorted((location.configs() / group).glob("*.yaml"))]
    assert offered(f"{group}=") == [f"{group}={option}" for option in options]
    assert offered(f"train {group}=") == offered(f"{group}=")


def test_a_list_of_options_goes_on_without_those_it_has():
    assert offered("-m precision=fp32,fp16_s") == ["precision=fp32,fp16_static"]
    assert "precision=fp32,fp32" not in offered("-m precision=fp32,fp")


def test_a_group_that_may_be_empty_offers_that_too():
    assert "debug=null" in offered("debug=")
    assert "model=null" not in offered("model=")


def test_keys_are_those_of_the_options_that_the_line_has_chosen():
    assert "scaler.init_scale=" in offered("scaler.")
    assert offered("scaler=static scaler.") == ["scaler.scale=", "scaler.on_overflow="]
    assert offered("precision=fp16_static scaler.") == ["scaler.scale=", "scaler.on_overflow="]  # which chooses it
    assert "scaler.init_scale=" in offered("precision=fp16_static scaler=dynamic scaler.")
    both = offered("-m scaler=static,dynamic scaler.")
    assert {"scaler.scale=", "scaler.init_scale="} <= set(both)


def test_no_target_and_no_default_of_a_model_is_offered():
    assert not [word for word in offered("model=resnet50 model.") if "_target_" in word or "defaults" in word]


def test_keys_with_a_sign_before_them_are_completed():
    assert offered("++train.epo") == ["++train.epochs="]
    assert offered("~debu") == ["~debug"]


@each(
    ("line", "values"),
    [
        ("run.resume=", ["auto", "never", "must"]),
        ("train.channels_last=", ["true", "false"]),
        ("scaler.on_overflow=", ["skip", "apply"]),
        ("logger=wandb logger.mode=", ["online", "offline", "null"]),
        ("device=c", ["cpu", "cuda"]),
        ("train.epochs=", []),
    ],
)
def test_values_are_offered_where_they_are_a_short_list(line, values):
    key = line.split(" ")[-1].partition("=")[0]
    assert offered(line) == [f"{key}={value}" for value in values]


def test_the_comment_on_a_key_lists_every_value_that_its_annotation_allows():
    """So that completion and help know them without an import of what checks them."""
    missing = {}
    for section, options in SECTIONS.items():
        for name, annotation in get_type_hints(options).items():
            values = [value for part in (annotation, *get_args(annotation)) for value in literals(part)]
            key = f"{section}.{name}"
            if len(values) > 1 and set(offered_values(key)) - {"null"} != set(values):
                missing[key] = values
    assert not missing


def literals(annotation):
    return (
        [str(value) for value in get_args(annotation) if value is not None] if get_origin(annotation) is Literal else []
    )


def offered_values(key):
    return [word.removeprefix(f"{key}=") for word in offered(f"{key}=")]


def test_every_listed_value_is_one_that_the_configuration_accepts(terminal):
    catalogue = Catalogue([location.configs()])
    tried = 0
    for line in ("run.resume=", "precision.cpu_kernels=", "scaler.on_overflow=", "train.channels_last="):
        for word in offered(line):
            name = ["run.name=x"] if line == "run.resume=" else []
            assert terminal(word, *name) == 0, word
            tried += 1
    assert tried >= 9
    assert catalogue.groups


def test_runs_are_offered_newest_first_and_last():
    old, new = made_run("old"), made_run("deep/new")
    os.utime(old.root, (1, 1))
    for command in ("resume", "eval", "export"):
        assert offered(f"{command} ")[:2] == [str(new.root), str(old.root)]
        assert "last" in offered(f"{command} ")
    assert offered("resume outputs/o") == ["outputs/old"]
    assert offered("list outputs/o") == []


def test_runs_elsewhere_are_found_folder_by_folder(tmp_path):
    made_run("a", root=tmp_path / "elsewhere")
    assert "elsewhere/" in offered("resume ")
    assert offered("resume elsewhere/") == ["elsewhere/a"]
    assert offered(f"resume {tmp_path}/else") == [f"{tmp_path}/elsewhere/"]


def test_behind_a_run_stand_its_own_keys_and_what_may_be_chosen_again():
    saved = "train:\n  epochs: 3\nscaler:\n  _target_: mptrain.scaler.DynamicScaler\n  init_scale: 8.0\n"
    saved += "  on_overflow: skip\nmodel:\n  _target_: mine.Net\n  depth: 7\nchosen:\n  model: mine\n"
    made_run("a", saved)
    for run in ("outputs/a", "last"):
        found = offered(f"resume {run} ")
        assert {word for word in found if word.endswith("=")} == {f"{group}=" for group in RECHOSEN}
        assert {"train.", "scaler.", "model."} <= set(found)
        assert "chosen." not in found
        assert offered(f"eval {run} model.") == ["model.depth="]
        assert offered(f"resume {run} scaler.o") == ["scaler.on_overflow="]
        assert offered(f"resume {run} scaler.on_overflow=") == ["scaler.on_overflow=skip", "scaler.on_overflow=apply"]
        assert offered(f"resume {run} scaler=static scaler.") == ["scaler.scale=", "scaler.on_overflow="]
    assert offered("resume outputs/nothing train.") == []


def test_behind_replay_and_a_run_stand_words_about_the_scaler_alone():
    saved = "train:\n  epochs: 3\nscaler:\n  _target_: mptrain.scaler.DynamicScaler\n  init_scale: 8.0\n"
    made_run("a", saved + "chosen:\n  scaler: dynamic\n")
    assert set(offered("replay outputs/a ")) == {"scaler=", "scaler."}
    assert "scaler=logmax" in offered("replay outputs/a scaler=")
    assert "scaler.overflow_counts_as=" in offered("replay outputs/a scaler=logmax scaler.")
    assert offered("replay outputs/a train.") == []


def test_flags_are_those_that_the_help_of_the_command_names():
    assert {"--multirun", "--config-dir", "--cfg", "--help"} <= set(offered("--"))
    assert "--best" in offered("eval last --")
    assert "--best" not in offered("resume last --")
    assert "--multirun" not in offered("eval last --")


def test_a_command_that_takes_a_run_or_a_configuration_offers_both_and_then_goes_on_with_what_was_chosen(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    made_run("mine", "train:\n  epochs: 3\n")
    assert {"outputs/mine", "last", "model=", "precision="} <= set(offered("diagnose "))
    assert "precision=fp16_static" in offered("diagnose model=mlp precision=fp16")
    assert offered("diagnose outputs/mine train.ep") == ["train.epochs="]
    assert {"--step", "--learner", "--all"} <= set(offered("diagnose -"))
    assert offered("diagnose --learner ") == []
    assert offered("diagnose --step ") == []


def test_words_of_other_commands_and_flags():
    assert offered("list sch") == ["schedule"]
    assert offered("list schedule ") == []
    assert offered("completion ") == ["bash", "zsh", "fish"]
    assert set(offered("help ")) == {*COMMANDS, *Catalogue([location.configs()]).groups, "sweep"}
    assert "model=" in offered("doctor ")
    assert offered("doctor model=resnet") == ["model=resnet18", "model=resnet50"]
    assert offered("--cfg ") == ["job", "hydra", "all"]
    assert offered("--cfg=j") == ["--cfg=job"]
    assert "train" in offered("--config-name ")


def test_a_folder_of_ones_own_adds_its_groups_and_options(tmp_path):
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "mine.yaml").write_text("# My own.\n_target_: mine.Net\nwidth: 3\n")
    assert offered("--config-dir o") == ["own/"]
    assert offered("--config-dir=own model=mi") == ["model=mine"]
    assert offered("--config-dir own model=mine model.w") == ["model.weights=", "model.width="]
    assert "mine" not in offered("model=")


def test_paths_are_offered_where_a_key_is_one():
    Path("weights.pt").touch()
    assert offered("dataset=image_folder dataset.root=wei") == ["dataset.root=weights.pt"]
    assert offered("anything=./wei") == ["anything=./weights.pt"]
    assert offered("anything=wei") == []


def test_a_damaged_world_offers_nothing_and_says_nothing(terminal):
    made_run("a", "\x00: [")
    (Path("outputs/a") / "run.json").write_text("{")
    assert terminal("completion", "query", "fish", "resume", "last", "--", "train.") == 0
    assert terminal.out + terminal.err == ""


@each(
    ("text", "words", "current", "rest", "quote"),
    [
        ("mptrain ", ["mptrain"], "", "", ""),
        ("mptrain pre", ["mptrain"], "pre", "pre", ""),
        ("mptrain a=b,c", ["mptrain"], "a=b,c", "b,c", ""),
        ("mptrain device=cuda:0", ["mptrain"], "device=cuda:0", "0", ""),
        ("mptrain 'a=b c", ["mptrain"], "a=b c", "a=b c", "'"),
        ('mptrain a="b=c', ["mptrain"], "a=b=c", "b=c", '"'),
        ("mptrain 'a b'=c d\\ e", ["mptrain", "a b=c"], "d e", "d e", ""),
        ('x "" y', ["x", ""], "y", "y", ""),
        ('x "a\\"b', ["x"], 'a"b', 'a"b', '"'),
    ],
)
def test_a_bash_line_is_split_as_readline_sees_it(text, words, current, rest, quote):
    line = split(text, BREAKS)
    assert (line.words, line.current, line.current[line.kept :], line.quote) == (words, current, rest, quote)


def test_what_a_shell_would_read_is_escaped_outside_quotes_only():
    assert escaped("my run:1=(a)", "") == r"my\ run:1=\(a\)"
    assert escaped("my run", "'") == "my run"


def test_candidates_for_bash_leave_out_what_readline_keeps(terminal):
    assert terminal("completion", "query", "bash", "mptrain precision=fp16_st", BREAKS) == 0
    assert terminal.out == "fp16_static\n"
    assert terminal("completion", "query", "bash", "mptrain precision=fp16_st", " ") == 0
    assert terminal.out == "precision=fp16_static\n"
    assert terminal("completion", "query", "bash", "mptrain --tracebac --help --traceb", BREAKS) == 0
    assert terminal.out == "--traceback\n"  # words of the other line, not of ours


def test_zsh_and_fish_are_told_what_words_mean(terminal):
    assert terminal("completion", "query", "zsh", "precision=fp16_st") == 0
    assert re.fullmatch(r"precision=fp16_static\t\S.*\n", terminal.out)
    assert terminal("completion", "query", "fish", "train", "--", "train.epo") == 0
    assert terminal.out == "train.epochs=\t10  passes over the training data\n"
    assert terminal("completion", "query", "fish", "--", "'precision=fp16_st") == 0
    assert terminal.out.startswith("precision=fp16_static\t")
    assert terminal("completion", "query", "fish", "list", "--") == 0
    assert terminal.out.startswith("task\t")


def test_scripts_are_printed_by_name(terminal):
    for shell in SHELLS:
        assert terminal("completion", shell) == 0
        assert terminal.out == script(shell)


def test_a_query_imports_neither_torch_nor_hydra_and_is_quick(tmp_path):
    made_run("a")
    code = """
import sys
from mptrain.cli.main import main
for line in ("mptrain pre", "mptrain precision=fp16_static scaler.on_overflow=", "mptrain resume ", "mptrain resume last s"):
    main(["completion", "query", "bash", line, "="])
print([name for name in ("torch", "hydra", "omegaconf", "pydantic", "yaml", "rich", "numpy") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [sys.executable, "-m", "mptrain", "completion", "query", "bash", "mptrain scaler.on_overflow=", "="]
        subprocess.run(words, env=environment(), capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(seconds) < 0.3  # 0.1 to 0.2 while other tests use the cores; Hydra alone takes 0.3, torch 1.5


def test_sweeps_are_offered_to_resume_and_to_nothing_else():
    Path("outputs/mine").mkdir(parents=True)
    Path("outputs/mine/sweep.json").touch()
    assert offered("resume outputs/m") == ["outputs/mine/", "outputs/mine"]
    assert "outputs/mine" not in offered("eval outputs/m")
    assert offered("-m --jobs ") == []
