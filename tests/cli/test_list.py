import pytest


def test_all_groups_are_listed_with_the_names_of_their_options_on_a_screen(terminal):
    assert terminal("list") == 0
    lines = terminal.out.splitlines()
    assert any(line.startswith("precision  dtypes of weights") for line in lines)
    assert {"amp_dynamic*", "fp16_static", "resnet50", "cnn*", "image_folder"} <= set(terminal.out.split())
    assert len(lines) < 60


def test_one_group_is_listed_with_keys_defaults_and_comments(terminal):
    assert terminal("list", "scaler") == 0
    assert "scaler=dynamic  (default)" in terminal.out
    line = next(line for line in terminal.out.splitlines() if "scaler.growth_interval=2000" in line)
    assert line.endswith("clean steps before the scale grows")
    assert "_target_" not in terminal.out
    terminal("list", "dataset")
    assert "  for task=translate\n" in terminal.out.split("dataset=number_words\n")[1].split("\n\n")[0]
    assert max(map(len, terminal.out.splitlines())) > 120  # a row stays one line where there is no terminal


def test_a_rate_that_the_model_may_choose_says_so(terminal):
    terminal("list", "optimizer")
    line = next(line for line in terminal.out.splitlines() if "optimizer.lr=" in line)
    assert "${" not in line
    assert "unless the model sets it" in line
    assert "optimizer.betas=[0.9,0.999] " in terminal.out


def test_size_and_need_stand_below_what_it_is(terminal, tmp_path):
    (tmp_path / "model").mkdir()
    top = "# @package _global_\n# My network.\n# Size: 1,234 parameters with 10 classes.\n# Needs: pip install mine.\nmodel:\n"
    (tmp_path / "model" / "mine.yaml").write_text(top + "  _target_: mine.Net  # Size: no\n")
    (tmp_path / "model" / "plain.yaml").write_text("# Another.\n# Needs: nothing.\n_target_: mine.Net\n")
    assert terminal("list", "model", "--config-dir", str(tmp_path)) == 0
    assert "model=mine\n  My network.\n  1,234 parameters with 10 classes\n  needs pip install mine\n" in terminal.out
    assert "model=plain\n  Another.\n\n" in terminal.out + "\n"
    assert terminal("list", "--config-dir", str(tmp_path)) == 0
    assert {"mine", "plain"} <= set(terminal.out.split())


@pytest.mark.parametrize("words", [(), ("dataset",)])
@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal_no_row_is_wider_than_it(terminal, monkeypatch, words, columns):
    assert terminal("list", *words) == 0
    whole = terminal.out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal("list", *words) == 0
    lines = [line for line in terminal.out.splitlines() if " " in line.strip()]  # a long KEY=VALUE stays whole
    assert max(map(len, lines)) <= columns
    assert terminal.out.split() == whole.split()  # nothing is lost
