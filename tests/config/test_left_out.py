"""Files at the top that leave groups out."""

import pytest
import yaml

from mptrain.cli.main import main
from mptrain.config.catalogue import configs_folder


@pytest.mark.parametrize(("group", "code"), [("logger", 0), ("diagnostics", 0), ("optimizer", 2)])
def test_a_file_at_the_top_may_leave_out_what_does_nothing_by_default(tmp_path, monkeypatch, capsys, group, code):
    monkeypatch.chdir(tmp_path)
    top = yaml.safe_load((configs_folder() / "train.yaml").read_text())
    top["defaults"] = [one for one in top["defaults"] if not (isinstance(one, dict) and group in one)]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.yaml").write_text(yaml.safe_dump(top))
    words = ("model=mlp", "dataset.image_size=8", "dataset.train_samples=32", "train.max_steps=1")
    assert main(["--config-dir", "mine", "--config-name", "own", *words]) == code
    assert (f"{group} has no _target_" in capsys.readouterr().err) == (code == 2)
