"""The samples that the report of a run shows."""

from __future__ import annotations

import json
from types import SimpleNamespace

from mptrain.report.page import Picture, Sound, Table, Text
from mptrain.report.run_blocks import exhibits

PNG = b"\x89PNG\r\n\x1a\n"


def shown(tmp_path):
    return exhibits(SimpleNamespace(paths=SimpleNamespace(samples=tmp_path)))


def test_a_table_that_cannot_be_read_is_left_out(tmp_path):
    (tmp_path / "long-000001.tsv").write_text("text\n" + "x" * 200_000)
    (tmp_path / "said-000001.tsv").write_text("text\nhello\n")
    words, table = shown(tmp_path)
    assert (type(words), words.text) == (Text, "said after step 1:")
    assert (type(table), table.head) == (Table, ("text",))


def test_recordings_that_belong_together_stand_beside_each_other(tmp_path):
    for kind in ("drawn-1", "drawn-2", "drawn-10", "recorded-1", "recorded-2", "recorded-10", "alone"):
        (tmp_path / f"{kind}-000003.wav").write_bytes(b"RIFF")
    (tmp_path / "captions.json").write_text(json.dumps({"drawn-2": "The model goes on.", "recorded-2": 7}))
    found = shown(tmp_path)
    assert all(isinstance(block, Sound) for block in found)
    pairs = [f"{kind}-{number}" for number in (1, 2, 10) for kind in ("drawn", "recorded")]
    assert [block.file.rpartition("/")[2] for block in found] == [f"{kind}-000003.wav" for kind in ("alone", *pairs)]
    assert found[3].caption == "drawn-2 after step 3. The model goes on."
    assert found[4].caption == "recorded-2 after step 3"


def test_the_picture_of_the_latest_step_is_shown(tmp_path):
    for step in (999_999, 1_000_000, 60):
        (tmp_path / f"drawn-{step:06d}.png").write_bytes(PNG)
    for content in (b"[]", b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "captions.json").write_bytes(content)
        (picture,) = shown(tmp_path)
        assert isinstance(picture, Picture)
        assert picture.file.endswith("drawn-1000000.png")
        assert picture.caption == "drawn after step 1,000,000"
