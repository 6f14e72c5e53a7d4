"""Files of a folder of options that would take all memory, or for ever, to read: refused before Hydra reads them."""

from __future__ import annotations

import pytest

from mptrain.config.compose import compose
from mptrain.system.errors import ConfigError

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 10)}]\n" for n in range(9)
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "expand to more than"),
        ("a: &a [*a]\n", "expand to more than"),
        ("a: " + "[" * 20_000 + "]" * 20_000 + "\n", "nested too deeply"),
        ("".join(" " * n + f"k{n}:\n" for n in range(200)), "nested too deeply"),
        ("".join(" " * n + f"k{n}:\n" for n in range(3000)), "more than 40,000 characters"),
    ],
)
def test_a_file_without_end_is_refused(tmp_path, text, said):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/evil.yaml").write_text(
        "_target_: mptrain.workloads.classification.models.perceptron.mlp\n" + text
    )
    with pytest.raises(ConfigError, match=said) as raised:
        compose(["model=evil"], config_dirs=[tmp_path])
    assert "evil.yaml" in str(raised.value)


def test_short_aliases_are_followed(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text(
        "_target_: mptrain.workloads.classification.models.perceptron.mlp\nhidden: &h [16, 16]\n"
    )
    assert (
        compose(["model=mine"], config_dirs=[tmp_path]).model.path
        == "mptrain.workloads.classification.models.perceptron.mlp"
    )
