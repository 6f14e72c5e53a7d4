from pathlib import Path

import pytest

from mptrain.config import location
from mptrain.system.errors import EnvironmentRefused


def test_a_checkout_uses_its_top_folder():
    assert (location.configs() / "precision" / "fp32.yaml").is_file()
    assert location.configs().parent == Path(location.__file__).parents[2]


def test_the_copy_inside_a_wheel_comes_first(tmp_path, monkeypatch):
    for folder in (tmp_path / "mptrain" / "_data" / "configs", tmp_path / "configs"):
        folder.mkdir(parents=True)
        (folder / "train.yaml").write_text("seed: 0\n")
    monkeypatch.setattr(location, "_PACKAGE", tmp_path / "mptrain")
    assert location.configs() == tmp_path / "mptrain" / "_data" / "configs"
    (tmp_path / "mptrain" / "_data" / "recipes").mkdir()
    assert location.recipes() == tmp_path / "mptrain" / "_data" / "recipes"


def test_a_missing_folder_is_an_error_that_says_where_was_looked(tmp_path, monkeypatch):
    monkeypatch.setattr(location, "_PACKAGE", tmp_path / "mptrain")
    with pytest.raises(EnvironmentRefused, match=r"searched .*_data"):
        location.configs()
