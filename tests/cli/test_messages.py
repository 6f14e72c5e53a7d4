"""Every command line of the catalogue prints what stands there, and ends with the exit code that stands there."""

import pytest

from tests.cli import message_catalogue

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_a_command_line_prints_what_the_catalogue_says(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MPTRAIN_TRACEBACK", raising=False)
    monkeypatch.setenv("COLUMNS", message_catalogue.COLUMNS)
    monkeypatch.setattr("mptrain.cli.train.train", lambda config: pytest.fail("it trains"))
    message_catalogue.prepare(tmp_path)
    lines = list(message_catalogue.entries().items())[part::PARTS]
    changed = [
        f"$ mptrain {line}\n{answer}" for line, text in lines if (answer := message_catalogue.answer(line)) != text
    ]
    assert not changed, "python tests/cli/message_catalogue.py writes the catalogue anew:\n" + "\n\n".join(changed)
