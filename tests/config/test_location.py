from pathlib import Path

import pytest

from mptrain.config import catalogue
from mptrain.config.catalogue import configs_folder, recipes_folder
from mptrain.system.errors import EnvironmentRefused


def test_a_checkout_uses_its_top_folder():
    assert (configs_folder() / "precision" / "fp32.yaml").is_file()
    assert configs_folder().parent == Path(catalogue.__file__).parents[2]


def test_the_copy_inside_a_wheel_comes_first(tmp_path, monkeypatch):
    for folder in (tmp_path / "mptrain" / "_data" / "configs", tmp_path / "configs"):
        folder.mkdir(parents=True)
        (folder / "train.yaml").write_text("seed: 0\n")
    monkeypatch.setattr(catalogue, "_PACKAGE", tmp_path / "mptrain")
    assert configs_folder() == tmp_path / "mptrain" / "_data" / "configs"
    (tmp_path / "mptrain" / "_data" / "recipes").mkdir()
    assert recipes_folder() == tmp_path / "mptrain" / "_data" / "recipes"


def test_a_missing_folder_is_an_error_that_says_where_was_looked(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "_PACKAGE", tmp_path / "mptrain")
    with pytest.raises(EnvironmentRefused, match=r"searched .*_data"):
        configs_folder()
