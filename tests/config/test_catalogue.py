import pytest
import yaml

from mptrain.config.catalogue import Catalogue, configs_folder, read_entries, split_comment


@pytest.fixture(scope="module")
def catalogue():
    return Catalogue([configs_folder()])


def test_groups_are_in_order_and_options_say_what_they_are(catalogue):
    assert list(catalogue.groups)[:3] == ["task", "dataset", "optimizer"]
    assert catalogue.defaults["precision"] == "amp_dynamic"
    assert catalogue.defaults["debug"] is None
    for options in catalogue.groups.values():
        for option in options.values():
            assert len(option.summary) > 10, option.path


def test_keys_read_as_text_are_those_that_a_yaml_parser_finds(catalogue):
    def leaves(node, prefix=""):
        for key, value in node.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    for options in catalogue.groups.values():
        for option in options.values():
            tree = yaml.safe_load(option.path.read_text())
            tree.pop("defaults", None)
            prefix = "" if option.is_global else f"{option.group}."
            expected = set(leaves(tree, prefix))
            # A mapping in braces on one line is one entry of the text.
            found = {entry.key for entry in option.entries}
            assert all(any(key == name or key.startswith(name + ".") for name in found) for key in expected)
            assert all(any(key == name or key.startswith(name + ".") for key in expected) for name in found)


def test_a_hash_inside_quotes_starts_no_comment():
    assert split_comment('name: "a # b"  # c') == ('name: "a # b"', "c")
    assert split_comment("name: a#b") == ("name: a#b", "")


def test_nested_keys_get_dotted_paths_and_the_defaults_list_is_left_out():
    lines = ["defaults:", "  - _self_", "a:", "  b: 1  # one", "  c:", "    d: [1, 2]", "e: 2"]
    assert [(entry.key, entry.value) for entry in read_entries(lines)] == [
        ("a.b", "1"),
        ("a.c.d", "[1, 2]"),
        ("e", "2"),
    ]


def test_a_second_folder_adds_options_and_groups(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# Mine.\n_target_: mine.Net\n")
    (tmp_path / "season").mkdir()
    (tmp_path / "season" / "summer.yaml").write_text("# Warm.\nx: 1\n")
    catalogue = Catalogue([configs_folder(), tmp_path])
    assert catalogue.groups["model"]["mine"].summary == "Mine."
    assert list(catalogue.groups)[-1] == "season"


def test_keys_are_traced_to_the_options_that_have_them(catalogue):
    assert [option.name for option in catalogue.options_with("scaler.scale")] == ["static"]
    assert catalogue.options_with("scaler.nothing") == []


def test_an_unreadable_file_is_an_option_without_keys(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "bytes.yaml").write_bytes(b"\xff\xfe: \x00")
    option = Catalogue([tmp_path]).groups["model"]["bytes"]
    assert option.entries == ()
    assert option.summary == ""
