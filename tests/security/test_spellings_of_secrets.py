"""A secret with any character is masked in every spelling in which a file, a page or the terminal may show it."""

from __future__ import annotations

import csv
import html
import io
import json
import shlex
import string
import textwrap
import time
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from markupsafe import escape
from omegaconf import OmegaConf
from PIL import Image

from mptrain.cli.main import main
from mptrain.cli.messages import printable, without_control_characters
from mptrain.report.html_and_markdown import markdown
from mptrain.system.masking import MaskedText, masked
from mptrain.system.words import plain
from tests.small_runs import TINY

#: A part of the secret before and one behind the character. No file has them by chance.
HEAD, TAIL = "hq7Zk", "Vw3Xp"
CHARACTERS = [*string.punctuation, *" \n\t\r\x0b\x0c\x07\x08\x1b\x7f", *"éß文\xa0\x85\u2028\u202e😀\udc80"]


def one_cell(text):
    file = io.StringIO()
    csv.writer(file).writerow([text, 1])
    return file.getvalue()


def quoted_by_hydra(text):
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


WRITERS = {
    "text": str,
    "repr": repr,
    "repr of repr": lambda text: repr(repr(text)),
    "JSON": json.dumps,
    "JSON in Unicode": lambda text: json.dumps(text, ensure_ascii=False),
    "JSON of repr": lambda text: json.dumps(repr(text)),
    "JSON of JSON": lambda text: json.dumps(json.dumps(text)),
    "YAML": lambda text: yaml.safe_dump({"key": text}),
    "YAML in Unicode": lambda text: OmegaConf.to_yaml(OmegaConf.create({"key": text})),
    "YAML in double quotes": lambda text: yaml.safe_dump(text, default_style='"'),
    "YAML in single quotes": lambda text: yaml.safe_dump(text, default_style="'", allow_unicode=True),
    "YAML as a block": lambda text: yaml.safe_dump(text, default_style="|", allow_unicode=True),
    "HTML": html.escape,
    "a page": lambda text: str(escape(text)),
    "a page of repr": lambda text: str(escape(repr(text))),
    "a page of JSON": lambda text: str(escape(json.dumps(text))),
    "one line of a page": lambda text: str(escape(plain(text))),
    "Markdown": markdown,
    "Markdown of JSON": lambda text: markdown(json.dumps(text)),
    "a shell": shlex.quote,
    "JSON of a shell": lambda text: json.dumps(shlex.quote(text)),
    "a shell of a shell": lambda text: shlex.quote(shlex.quote(text)),
    "Hydra": quoted_by_hydra,
    "JSON of Hydra": lambda text: json.dumps(quoted_by_hydra(text), ensure_ascii=False),
    "a URL": lambda text: quote(text, safe="", errors="surrogateescape"),
    "CSV": one_cell,
    "the terminal": printable,
    "lines of the terminal": without_control_characters,
    "wrapped": lambda text: "\n".join(
        textwrap.wrap(" ".join(text.split()), 7, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_secret_with_any_character_is_masked_in_every_spelling(monkeypatch, writer):
    for character in CHARACTERS:
        for secret in (f"{HEAD}{character}{TAIL}", f"{HEAD}{character * 2}{TAIL}", f"{HEAD}{character}'\"\\{TAIL}"):
            try:
                monkeypatch.delenv("TRACKER_API_KEY", raising=False)
                written = WRITERS[writer](f"a {secret} b")
            except (UnicodeEncodeError, yaml.YAMLError):  # a lone surrogate, or what YAML does not allow
                continue
            monkeypatch.setenv("TRACKER_API_KEY", secret)
            shown = masked(written)
            assert HEAD not in shown, (secret, written)
            assert TAIL not in shown, (secret, written)
            assert shown.count("${oc.env:TRACKER_API_KEY}") == 1


def test_other_text_stays_and_the_longest_secret_wins(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh'ijkl")
    assert masked("abcdefg abcdefgh abcdefgh''ijkl") == "abcdefg ${oc.env:A_TOKEN} ${oc.env:B_TOKEN}"
    assert masked("abcd efgh abcdefg\\h") == "abcd efgh abcdefg\\h"


def test_masking_of_hostile_text_takes_no_time(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "'\\\"'\\ \\\"'\\\"'x")
    monkeypatch.setenv("B_TOKEN", "  ".join(["key"] * 500))
    began = time.perf_counter()
    for text in (
        "\\" * 10_000,
        "'" * 10_000,
        "&amp;" * 5_000,
        "key " * 5_000,
        "key\\n" * 5_000,
        "%20" * 5_000,
        " " * 10_000,
    ):
        masked(text)
    assert time.perf_counter() - began < 5


def records(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.parametrize("odd", [string.punctuation, "\n\t 'é\\文\"😀", "$(x)`${y}`&amp;\\n"])
def test_no_file_page_or_line_of_a_run_shows_a_secret_with_odd_characters(monkeypatch, tmp_path, capsys, odd):
    monkeypatch.chdir(tmp_path)
    secret = f"{HEAD}{odd}{TAIL}"
    monkeypatch.setenv("TRACKER_API_KEY", secret)
    for number in range(16):
        path = Path(f"pictures/train/{'ab'[number % 2]}/{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 9, 0, 0)).save(path)
    words = ["model=mlp", "dataset=image_folder", "dataset.root=pictures", "dataset.image_size=8", "dataset.workers=0"]
    words += ["dataset.val_samples=4", "train.batch_size=4", "train.max_steps=2", "logger=tensorboard"]
    words.append("dataset.name=${oc.env:TRACKER_API_KEY}")
    monkeypatch.setattr("sys.argv", ["mptrain", *words])
    assert main([*words, "run.name=run"]) == 0
    assert main(["report", "outputs/run"]) == 0
    assert main(["resume", "outputs/run", "train.max_steps=3"]) == 0
    assert main(["eval", "outputs/run"]) == 0
    typed = quoted_by_hydra(secret)
    assert main([*TINY, f"optimizer.lr={typed}", "run.name=other"]) == 2
    assert main([*TINY, f"model.{secret}=1", "run.name=other"]) == 2
    assert main([*TINY, f"model.weights={typed}", "run.name=other"]) in (2, 6)
    assert main(["report", secret]) in (2, 6)
    monkeypatch.setenv("MPTRAIN_TRACEBACK", "1")
    assert main(["report", secret]) in (2, 6)
    shown = capsys.readouterr()
    for text in (HEAD, TAIL):
        assert [name for name, content in records("outputs").items() if text.encode() in content] == []
        assert text not in shown.out + shown.err
    assert "TRACKER_API_KEY" in Path("outputs/run/config.yaml").read_text()
    assert json.loads(Path("outputs/run/data.json").read_text())["name"] == "${oc.env:TRACKER_API_KEY}"
    assert "dataset    ${oc.env:TRACKER_API_KEY}, " in shown.out


def test_what_a_process_prints_is_masked(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKER_API_KEY", f"{HEAD}'\n\"{TAIL}")
    stream = MaskedText((tmp_path / "log").open("wb"), encoding="utf-8")
    print("logged in with", repr(f"{HEAD}'\n\"{TAIL}"), f"{HEAD}'\n\"{TAIL}", file=stream)
    stream.close()
    assert HEAD not in (tmp_path / "log").read_text()
