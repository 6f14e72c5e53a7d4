"""The words of ``mptrain export``."""

import pytest


@pytest.mark.parametrize("name", ["w.onnx", "w.h5", "w.pt.gz"])
def test_a_file_whose_ending_means_another_format_is_refused(terminal, name):
    assert terminal("export", "last", "--output", name) == 2
    assert f"--output {name}: export writes no files that end in" in terminal.err
    assert ".safetensors" in terminal.err
