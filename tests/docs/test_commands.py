"""Every command that README and docs show runs: in small, where it trains, and one after the other on a page.

Commands that cannot run here stand in the tables below with the reason; those that train are checked against the configuration all the same.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mptrain.config import compose as composing
from tests.docs.pages import PAGES, commands, write_logs
from tests.loops import each
from tests.small_runs import TINY, run_in_process

#: Words that make training small.
SMALL = ("train.max_steps=2", "threads=1")

#: Programs besides mptrain, and the tests that run them.
OTHER_PROGRAMS = {
    "pip": "every environment begins with it",
    "python": "test_examples.py, test_watched_frameworks.py, tests/golden, and every environment",
    "make": "test_checks.py, which finds its commands in .ci/run",
    "pytest": ".ci/run",
    "pre-commit": "not ours; .ci/run runs its hooks",
    "tensorboard": "not ours",
    "jupyter": "not ours; test_examples.py runs the cells of the notebook",
    "torchrun": "tests/parallel/test_torchrun.py and test_watched_frameworks.py",
}

#: Words of commands of mptrain that other tests run, because they take several processes, minutes, or a package of one's own.
ELSEWHERE = {
    "--launcher": "tests/integration/test_submitted_sweeps.py",
    "distributed.procs=4": "tests/parallel",
    "--config-dir": "tests/docs/test_pages.py and tests/integration/test_command_line.py",
    "extensions.allow=[mypackage.*]": "tests/docs/test_pages.py",
    "train.compile=true": "tests/integration/test_limits_and_compilation.py",
}

#: Words that ask for data or memory that a test does not have; the configuration is checked.
NOT_HERE = [
    "dataset=imagenet",
    "dataset=coco",
    "dataset=voc",
    "dataset=cifar10",
    "dataset=fashion_mnist",
    "dataset=asterisk",
    "dataset=asterisk_audio",
    "dataset=recordings",
    "dataset=speech",
    "dataset=gettext",
    "dataset=trans_de_en",
    "dataset.root=DIV2K",
    "model=dncnn",
    "model=big_lstm",
    "task.classifier=judge",
    "model.pretrained=true",
    "model.weights=weights.safetensors",
]

#: Exit codes other than 0 that are right.
EXIT_CODES = {
    "doctor": (0, 4),  # it finds what the page is about
    "recommend": (0, 6),  # two steps name no scale
    "diagnose": (0,),
}

#: Names of pages by which a command finds what an earlier one has left.
GIVEN = {"RUN": "last", "outputs/sweeps/DATE/TIME-xxxx": "SWEEP"}


def stated(words):
    """Return why a command is not run; empty where it is."""
    if words[0] != "mptrain":
        return OTHER_PROGRAMS[words[0]]
    reasons = [reason for word, reason in ELSEWHERE.items() if word in words]
    return reasons[0] if reasons else "data" if set(NOT_HERE) & set(words) else ""


RUN = {name: [words[1:] for words in commands(name) if not stated(words)] for name in PAGES}


def prepare(folder: Path, *, makes_nightly: bool) -> None:
    """Make what pages take for granted: files of the reader's, and runs, one of them only if the page does not make it."""
    draw = np.random.default_rng(0)
    splits = ("train/cat", "train/dog", "val/cat", "val/dog")
    parts = {"pictures": splits, "my_images": splits, "flowers": ("rose", "tulip"), "faces": ("",), "photos": ("",)}
    for place, folders in parts.items():
        for part in folders:
            (folder / place / part).mkdir(parents=True)
            for number in range(10):
                pixels = draw.integers(0, 256, (256, 256, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / place / part / f"{number}.jpg")
    (folder / "reviews.tsv").write_text("".join(f"{'good' if n % 2 else 'bad'}\tbook {n}\n" for n in range(100)))
    (folder / "corpus").mkdir()
    text = "It was the best of times, it was the worst of times.\n" * 400
    for path in ("book.txt", "corpus/one.txt", "corpus/two.txt"):
        (folder / path).write_text(text)
    pairs = "".join(f"{number} apples\t{number} Äpfel\n" for number in range(400))
    for path in ("corpus.tsv", "corpus/train.tsv", "corpus/valid.tsv", "corpus/test.tsv"):
        (folder / path).write_text(pairs)
    write_logs(folder / "logs")
    resnet = ("model=resnet18", "threads=1")  # whose weights a page begins with
    for name, words in (
        ("mine_fp32", (*TINY, "precision=fp32")),
        ("mine_amp", (*TINY, "precision=amp_bf16")),
        *((("nightly", resnet),) if not makes_nightly else ()),
    ):
        done = run_in_process(*words, "train.max_steps=2", f"run.name={name}", cwd=folder)
        assert done.returncode == 0, done.stderr


def small(words):
    """Return a command with the words that make it small."""
    words = [re.sub(r"^seed=.*,.*", "seed=0,1", word) for word in words]
    trains = words[0] in ("-m", "compare") or "=" in words[0] or not words
    if words[0] == "reproduce":
        return [*words, "--smoke"] if "--dry-run" not in words else words
    if words[0] == "compare" and ("--logs" in words or not any("=" in word for word in words)):
        return words
    if words[0] == "resume":
        return [word for word in words if not word.startswith("train.epochs=")]
    return [*words, *SMALL] if trains else words


@pytest.mark.workload
@pytest.mark.parametrize("name", [name for name, found in RUN.items() if found])
def test_the_commands_of_a_page_run(name, tmp_path):
    prepare(tmp_path, makes_nightly=any("run.name=nightly" in words for words in RUN[name]))
    sweep = ""
    for shown in RUN[name]:
        words = [GIVEN.get(word, word).replace("SWEEP", sweep) for word in shown]
        done = run_in_process(*small(words), cwd=tmp_path)
        right = EXIT_CODES.get(words[0], (0,)) if words else (0,)
        loud = any(word.startswith("train.max_consecutive_overflows") for word in words)
        assert done.returncode in (*right, 4 if loud else 0), f"mptrain {' '.join(words)}\n{done.stderr[-3000:]}"
        if found := re.search(r"^sweep=(\S+)", done.stdout, re.MULTILINE):
            sweep = found[1]


@each("words", [words[1:] for name in PAGES for words in commands(name) if words[0] == "mptrain" and stated(words)])
def test_what_cannot_run_here_is_still_a_valid_command(words):
    plain = [word for word in words if "=" in word and not word.startswith(("extensions.", "model=mine", "--"))]
    if "--config-dir" in words or "," in "".join(plain) or words[0] == "resume" or "=" in words[0]:
        return  # other tests have these
    composing.Composer().compose(plain)


def test_no_table_names_what_no_page_shows():
    shown = [words for name in PAGES for words in commands(name)]
    flat = {word for words in shown for word in words}
    assert set(OTHER_PROGRAMS) == {words[0] for words in shown} - {"mptrain"}
    assert not {*ELSEWHERE, *NOT_HERE} - flat
