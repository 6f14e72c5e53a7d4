from mptrain.cli import main as main_module
from mptrain.config.catalogue import SHARED, Catalogue, configs_folder
from mptrain.config.compose import compose
from tests.loops import each


def test_help_names_every_command_group_option_key_and_exit_code(terminal):
    assert terminal("--help") == 0
    catalogue = Catalogue([configs_folder()])
    for group, options in catalogue.groups.items():
        assert f"\n  {group} " in terminal.out
        for name in options:
            assert name in terminal.out
    for entry in catalogue.root_entries():
        assert f"{entry.key}={entry.value}" in terminal.out
    for name in ("resume", "eval", "list", "doctor", "-m KEY=A,B"):
        assert f"mptrain {name}" in terminal.out
    for code in (0, 1, 2, 3, 4, 6, 7, 75, 130):
        assert f"\n  {code} " in terminal.out


def test_help_fits_the_terminal_and_has_no_control_characters(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    terminal("--help")
    assert all(letter.isprintable() or letter == "\n" for letter in terminal.out)
    assert max(map(len, terminal.out.splitlines())) <= 90


@each("name", sorted(main_module.COMMANDS))
def test_every_command_explains_itself(terminal, name):
    assert terminal(name, "--help") == 0
    assert terminal.out.startswith("usage: mptrain")
    by_flag = terminal.out
    assert terminal("help", name) == 0
    assert terminal.out == by_flag


def test_what_a_continued_run_may_change_is_said(terminal):
    terminal("resume", "--help")
    text = " ".join(terminal.out.split())
    assert "Any key may change" in text
    assert "except model, dataset, task and train.batch_size" in text


@each("group", sorted(Catalogue([configs_folder()]).groups))
def test_help_about_a_group_has_a_line_for_each_option(terminal, group):
    assert terminal("help", group) == 0
    by_command = terminal.out
    catalogue = Catalogue([configs_folder()])
    text = " ".join(terminal.out.split())
    for name, option in catalogue.groups[group].items():
        assert f"{group}={name} {option.summary}" in text
    if default := catalogue.defaults[group]:
        assert f"{catalogue.groups[group][default].summary} (default)" in text
    for words in ((group, "--help"), ("--help", group)):
        assert terminal(*words) == 0
        assert terminal.out == by_command


def test_help_about_options_keys_sections_and_sweeps(terminal):
    assert terminal("help", "train.epochs") == 0
    assert terminal.out == "train.epochs=10  passes over the training data\n"
    assert terminal("help", "checkpoint") == 0
    assert "  checkpoint.keep=2 " in terminal.out
    assert terminal("help", "scaler.scale") == 0
    assert terminal.out == "  scaler=static  scaler.scale=1024.0\n"
    assert terminal("help", "train") == 0
    assert "usage: mptrain [train]" in terminal.out
    assert "  train.batch_size=32 " in terminal.out
    assert terminal("help", "train.early_stopping.metric") == 0
    assert "train.early_stopping=null" in terminal.out
    assert terminal("help", "train.ema_decay.x") == 2


@each("entry", [entry for entries in SHARED.values() for entry in entries])
def test_a_key_of_every_option_of_a_group_is_explained(terminal, entry):
    line, group = f"{entry.key}={entry.value}", entry.key.partition(".")[0]
    assert terminal("help", entry.key) == 0
    assert terminal.out.split() == f"{line} {entry.comment}".split()
    for words in (("help", group), ("list", group)):
        assert terminal(*words) == 0
        assert terminal.out.count(line) == 1
    assert compose([line])
