"""A command line run in this process, with training replaced by a note of what it was asked for."""

import argparse

import pytest

from mptrain.cli.main import main


class Terminal:
    """Runs command lines and keeps what came out."""

    def __init__(self, capsys):
        self._capsys = capsys
        self.trained = []
        self.resumed = []
        self.evaluated = []
        self.codes = []
        self.out = self.err = ""

    def __call__(self, *words):
        """The exit code of a command line; its output is in ``out`` and ``err``."""
        self._capsys.readouterr()
        code = main(list(words))
        self.out, self.err = self._capsys.readouterr()
        return code

    def train(self, config):
        self.trained.append(config)
        outcome = self.codes.pop(0) if self.codes else 0
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture(autouse=True)
def _no_width(monkeypatch):
    """Leave the width of lines to the tests: workers of pytest-xdist set one."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def terminal(capsys, monkeypatch, tmp_path):
    found = Terminal(capsys)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MPTRAIN_TRACEBACK", raising=False)
    monkeypatch.setattr("mptrain.cli.train.train", found.train)
    monkeypatch.setattr("mptrain.cli.train.resume", lambda run, words: found.resumed.append((run, words)) or 0)
    monkeypatch.setattr(
        "mptrain.cli.train.evaluate",
        lambda run, words, which, average, by_class: found.evaluated.append((run, words, which, average)) or 0,
    )
    return found


@pytest.fixture
def python_3_14(monkeypatch):
    """Have argparse check help texts when arguments are added, as Python 3.14 does (`ArgumentParser._check_help`)."""
    add = argparse._ActionsContainer.add_argument

    def add_and_check(self, *names, **options):
        action = add(self, *names, **options)
        if action.help and hasattr(self, "_get_formatter"):
            try:
                if "%" in action.help:
                    self._get_formatter()._expand_help(action)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError("badly formed help string") from error
        return action

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", add_and_check)
