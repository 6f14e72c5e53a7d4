"""Checking that needs no torch must not wait for it."""

import subprocess
import sys

CODE = """
import sys
from mptrain.config.compose import compose
from mptrain.system.errors import ConfigError
try:
    compose({words!r})
except ConfigError as error:
    print(len(error.problems), "torch" in sys.modules)
"""


def test_mistyped_groups_and_keys_are_answered_without_torch():
    words = ["precision=amp_dynamc", "train.epohcs=3", "run.resume=perhaps", "train.epochs=0"]
    found = subprocess.run([sys.executable, "-c", CODE.format(words=words)], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(len(words)), "False"]
