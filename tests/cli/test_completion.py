"""What TAB offers, in every shell, quickly."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from mptrain.cli.commands import COMMANDS
from mptrain.cli.completion import SHELLS, answers, escaped, query, script, split
from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.compose import RECHOSEN
from mptrain.config.schema import SECTIONS
from mptrain.runlog import RunState, create_run
from tests.loops import each
from tests.small_runs import environment

#: What bash has where nobody changed it.
BREAKS = " \t\n\"'@><=;|&(:"


def offered(line):
    """The words offered at the end of a line without quotes."""
    *before, current = line.split(" ")
    return [candidate.text for candidate in answers(before, current, COMMANDS)]


SAVED = """
train:
  epochs: 3
scaler:
  _target_: mptrain.scaler.DynamicScaler
  init_scale: 8.0
  on_overflow: skip
model:
  _target_: mine.Net
  depth: 7
chosen:
  model: mine
  scaler: dynamic
"""


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
    groups = Catalogue([configs_folder()]).groups
    assert set(COMMANDS) <= set(found)
    assert {f"{group}=" for group in groups} <= set(found)
    assert {"train.", "run.", "seed="} <= set(found)
    assert "train.epochs=" not in found  # one level at a time


def test_commands_are_offered_as_the_first_word_only():
    assert "doctor" in offered("do")
    assert offered("seed=1 do") == []
    assert offered("--config-name train do") == ["doctor"]
    assert {"two_cliffs", "model/", "precision/"} <= set(offered("copy "))
    assert set(offered("help ")) == {*COMMANDS, *Catalogue([configs_folder()]).groups, "sweep", "json", "agents"}


@pytest.mark.parametrize("group", ["precision", "logger", "model"])
def test_all_options_of_a_group_are_offered(group):
    options = [path.stem for path in sorted((configs_folder() / group).glob("*.yaml"))]
    assert offered(f"{group}=") == [f"{group}={option}" for option in options]
    assert offered(f"train {group}=") == offered(f"{group}=")


def test_groups_offer_null_and_lists_only_where_they_may():
    assert "debug=null" in offered("debug=")
    assert "model=null" not in offered("model=")
    assert "precision=fp32,fp32" not in offered("-m precision=fp32,fp")


def test_keys_are_those_of_the_options_that_the_line_has_chosen():
    assert "scaler.init_scale=" in offered("scaler.")
    assert offered("scaler=static scaler.") == ["scaler.scale=", "scaler.on_overflow="]
    assert offered("precision=fp16_static scaler.") == ["scaler.scale=", "scaler.on_overflow="]  # which chooses it
    assert "scaler.init_scale=" in offered("precision=fp16_static scaler=dynamic scaler.")
    assert offered("++train.epo") == ["++train.epochs="]
    assert offered("~debu") == ["~debug"]
    assert not [word for word in offered("model=resnet50 model.") if "_target_" in word or "defaults" in word]
    both = offered("-m scaler=static,dynamic scaler.")
    assert {"scaler.scale=", "scaler.init_scale="} <= set(both)


def test_the_comment_on_a_key_lists_every_value_of_its_annotation():
    """So that completion and help know them without an import of what checks them."""
    for section, options in SECTIONS.items():
        for name, annotation in get_type_hints(options).items():
            kinds = [part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal]
            values = {str(value) for part in kinds for value in get_args(part) if value is not None}
            key = f"{section}.{name}="
            if len(values) > 1:
                assert {word.removeprefix(key) for word in offered(key)} - {"null"} == values, key


def test_runs_are_offered_newest_first_and_last():
    old, new = made_run("old"), made_run("deep/new")
    os.utime(old.root, (1, 1))
    for command in ("resume", "eval", "export"):
        assert offered(f"{command} ")[:2] == [str(new.root), str(old.root)]
        assert "last" in offered(f"{command} ")
    assert offered("resume outputs/o") == ["outputs/old"]
    assert offered("list outputs/o") == []
    Path("outputs/sweep").mkdir()
    Path("outputs/sweep/sweep.json").touch()
    assert offered("resume outputs/s") == ["outputs/sweep/", "outputs/sweep"]
    assert "outputs/sweep" not in offered("eval outputs/s")


def test_runs_and_files_elsewhere_are_found_folder_by_folder(tmp_path):
    made_run("a", root=tmp_path / "elsewhere")
    assert "elsewhere/" in offered("resume ")
    assert offered("resume elsewhere/") == ["elsewhere/a"]
    assert offered(f"resume {tmp_path}/else") == [f"{tmp_path}/elsewhere/"]
    Path("weights.pt").touch()
    assert offered("dataset=image_folder dataset.root=wei") == ["dataset.root=weights.pt"]
    assert offered("anything=./wei") == ["anything=./weights.pt"]
    assert offered("anything=wei") == []


def test_behind_a_run_stand_its_own_keys_and_what_may_be_chosen_again():
    made_run("a", SAVED)
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
    assert {"outputs/a", "last", "model=", "precision="} <= set(offered("diagnose "))
    assert "precision=fp16_static" in offered("diagnose model=mlp precision=fp16")
    assert offered("diagnose --step ") == []


def test_behind_replay_and_a_run_stand_words_about_the_scaler_alone():
    made_run("a", SAVED)
    assert set(offered("replay outputs/a ")) == {"scaler=", "scaler."}
    assert "scaler=logmax" in offered("replay outputs/a scaler=")
    assert "scaler.overflow_counts_as=" in offered("replay outputs/a scaler=logmax scaler.")
    assert offered("replay outputs/a train.") == []


def test_a_folder_of_ones_own_adds_its_groups_and_options(tmp_path):
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "mine.yaml").write_text("# My own.\n_target_: mine.Net\nwidth: 3\n")
    assert offered("--config-dir o") == ["own/"]
    assert offered("--config-dir=own model=mi") == ["model=mine"]
    assert offered("--config-dir own model=mine model.w") == ["model.weights=", "model.width="]
    assert "mine" not in offered("model=")


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
    assert escaped("my run:1=(a)") == r"my\ run:1=\(a\)"


def test_candidates_for_bash_leave_out_what_readline_keeps(terminal):
    assert terminal("completion", "query", "bash", "mptrain precision=fp16_st", BREAKS) == 0
    assert terminal.out == "fp16_static\n"
    assert terminal("completion", "query", "bash", "mptrain precision=fp16_st", " ") == 0
    assert terminal.out == "precision=fp16_static\n"
    assert terminal("completion", "query", "bash", "mptrain --tracebac --help --traceb", BREAKS) == 0
    assert terminal.out == "--traceback\n"  # words of the other line, not of ours


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
    words = [sys.executable, "-m", "mptrain", "completion", "query", "bash", "mptrain scaler.on_overflow=", "="]

    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, env=environment(), capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert any(seconds() < 0.3 for _ in range(3))  # 0.1 to 0.2 on a busy machine; Hydra alone takes 0.3, torch 1.5


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "\x1b[2J", "\u202egnp", "caf\udce9", "\u2028"])
@pytest.mark.parametrize("shell", SHELLS)
def test_a_name_that_would_be_several_answers_or_control_the_terminal_is_not_offered(shell, name, capsys):
    for each_name in (name, "plain"):
        made_run("run").paths.root.rename(f"outputs/{each_name}")
        Path(f"outputs/{each_name}/run.json").write_text("{}")
    line = (
        ("mptrain report outputs/", BREAKS)
        if shell == "bash"
        else ("report", *(["--"] * (shell == "fish")), "outputs/")
    )
    assert query([shell, *line], COMMANDS) == 0
    assert {answer.split("\t")[0].rstrip("/") for answer in capsys.readouterr().out.splitlines()} == {"outputs/plain"}


def test_a_folder_called_like_a_home_is_not_offered_as_one():
    Path("~root").mkdir()
    Path("x").mkdir()
    assert [one for one in offered("report ") if "/" in one] == ["x/"]


def test_a_description_is_one_line_without_control_characters(capsys):
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/evil.yaml").write_text(
        "# x\x1b[2Jy\u202ez\n_target_: mptrain.workloads.classification.models.perceptron.mlp\n"
    )
    assert query(["zsh", "--config-dir", "mine", "model=ev"], COMMANDS) == 0
    ((text, about),) = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert (text, about.isprintable()) == ("model=evil", True)
