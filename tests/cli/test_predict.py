"""`mptrain predict` as a user runs it: files, folders, standard input, a closed pipe, many files, pictures with answers."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys

import pytest
import torch
from PIL import Image

from mptrain.cli import using
from mptrain.system.errors import StorageError
from mptrain.system.words import elided
from mptrain.workloads.images.datasets.digits import digits_path, read_digits
from tests.small_runs import TINY, command, environment, run_in_process


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    done = run_in_process(*TINY, "train.epochs=20", "run.name=a", "threads=1", cwd=folder)
    assert done.returncode == 0, done.stderr
    done = run_in_process(
        "model=ssd_small", "dataset.train_samples=64", "dataset.val_samples=8", "dataset.test_samples=8", "train.epochs=1",
        "task.shown_score=0", "run.name=boxes", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    images, targets = read_digits(digits_path())
    for number in range(12):
        place = folder / "digits" / ("even" if targets[number] % 2 == 0 else "odd")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number, 0].numpy()).save(place / f"{number}.png")
    return folder


@pytest.mark.long
def test_a_folder_is_searched_and_each_file_has_a_line(trained):
    done = run_in_process("predict", "a", "digits", cwd=trained)
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines)) == (0, 12)
    assert lines[0].split()[0] == "digits/even/0.png"
    right = sum(int(line.split()[0].split("/")[-1][:-4]) % 10 == int(line.split()[1]) for line in lines)
    assert right >= 8  # the first digits of the data set are 0 to 9 and 0, 1


def test_an_unusable_file_is_named_and_the_exit_code_says_so(trained, tmp_path):
    (tmp_path / "bad.png").write_text("x")
    good = str(trained / "digits/even/0.png")
    done = run_in_process("predict", "a", str(tmp_path / "bad.png"), good, cwd=trained)
    assert (done.returncode, len(done.stdout.splitlines())) == (6, 1)
    assert f"warning: {tmp_path / 'bad.png'}: it is no picture of a known format" in done.stderr
    done = run_in_process("predict", "a", str(tmp_path / "bad.png"), good, "--jsonl", "--best", cwd=trained)
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == {"input": str(tmp_path / "bad.png"), "error": "it is no picture of a known format"}
    assert second["class"] == second["top"][0][0]
    assert sum(share for _, share in second["top"]) == pytest.approx(1, abs=0.2)


@pytest.mark.timeout(120)
def test_what_is_no_file_is_named_and_the_others_are_answered(trained, tmp_path):
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in/a.png")
    (tmp_path / "in/b.png").symlink_to("/dev/zero")
    (tmp_path / "in/c.png").mkdir()
    (tmp_path / "in/d.png").write_bytes((trained / "digits/even/0.png").read_bytes())
    done = run_in_process("predict", "a", str(tmp_path / "in"), cwd=trained)
    assert (done.returncode, len(done.stdout.splitlines())) == (6, 1)
    assert "in/a.png: it is a named pipe, not a file" in done.stderr
    assert "in/b.png: it is a device, not a file" in done.stderr
    assert "2 inputs of 3 cannot be used" in done.stderr


@pytest.mark.parametrize("name", ["~nobody-here/x.png", "x" * 5000, "x" * 300 + ".png", "loop.png", "loop.png/x.png"])
def test_a_name_that_no_file_can_have_is_an_unusable_input(name, trained, monkeypatch):
    if not (trained / "loop.png").is_symlink():
        (trained / "loop.png").symlink_to("loop.png")
    done = run_in_process("predict", "a", "digits/even/0.png", name, cwd=trained)
    assert (done.returncode, len(done.stdout.splitlines())) == (6, 1)
    assert f"warning: {elided(name, 200)}: " in done.stderr
    done = run_in_process("predict", "a", name, cwd=trained)
    assert (done.returncode, done.stdout) == (6, "")
    assert "error: there is no " in done.stderr


def test_standard_input_may_be_closed(trained, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    done = run_in_process("predict", "a", "-", cwd=trained)
    sys.stdin.close()
    assert (done.returncode, "standard input names no file" in done.stderr) == (6, True)


def test_answers_below_the_inputs_go_on_after_a_failure_and_are_no_inputs(trained, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for number in range(3):
        Image.new("L", (8, 8)).save(tmp_path / "in" / f"{number}.png")
    words = ("predict", "a", str(tmp_path / "in"), "--output", str(tmp_path / "in/out"))
    left = [2]

    def fails(path, *given, **options):
        if not left[0]:
            raise StorageError("the disk is full", "")
        left[0] -= 1
        return write_atomically(path, *given, **options)

    write_atomically = using.write_atomically
    monkeypatch.setattr(using, "write_atomically", fails)
    assert run_in_process(*words, cwd=trained).returncode == 6
    left[0] = 10
    assert run_in_process(*words, cwd=trained).returncode == 0
    assert sorted(path.name for path in (tmp_path / "in/out").iterdir()) == ["0.png", "1.png", "2.png"]


def test_a_file_that_is_missing_among_others_is_an_unusable_input(trained):
    done = run_in_process("predict", "a", "digits/even/0.png", "none.png", cwd=trained)
    assert (done.returncode, len(done.stdout.splitlines())) == (6, 1)
    assert "warning: none.png: there is no such file" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a",), "predict needs inputs"),
        (("a", "nothing.png", "none"), "there is no nothing.png; there is no none"),
        (("a", "digits/even/none.png"), "there is no digits/even/none.png"),
        (("a", "digits", "dataset.root=x"), "has no effect on predictions"),
        (("a", "digits", "--output", "digits"), "--output digits is not empty"),
        (("b", "digits"), "no run directory b"),
        (("a", "outputs/a/checkpoints"), "ends in .bmp"),
        (("a", "digits", "outputs/a/checkpoints"), "ends in .bmp"),
    ],
)
def test_what_cannot_be_predicted_is_said_before_any_answer(words, said, trained):
    done = run_in_process("predict", *words, cwd=trained)
    assert done.returncode != 0
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_answers_are_drawn_into_copies_of_the_pictures(trained, tmp_path):
    done = run_in_process("predict", "a", "digits", "--output", str(tmp_path / "out"), cwd=trained)
    assert done.returncode == 0, done.stderr
    assert len([*(tmp_path / "out").rglob("*.png")]) == 12
    with Image.open(tmp_path / "out/even/0.png") as picture:
        assert picture.size == (256, 256)
        assert (200, 48, 0) in {picture.getpixel((x, y)) for x in range(40) for y in range(12)}
    done = run_in_process("predict", "boxes", "digits/odd", "--output", str(tmp_path / "boxes"), cwd=trained)
    assert done.returncode == 0, done.stderr
    assert len([*(tmp_path / "boxes").iterdir()]) == len([*(trained / "digits/odd").iterdir()])


def test_a_folder_of_answers_goes_on_where_the_same_command_was_killed(trained, tmp_path, monkeypatch):
    out, words = tmp_path / "out", ("predict", "a", "digits", "--output", str(tmp_path / "out"))
    write, left = using.write_atomically, 4

    def killed(path, *given, **options):
        nonlocal left
        left -= 1
        if not left:
            path.with_name(f"{path.name}.0123abcd.tmp").touch()
            raise KeyboardInterrupt
        write(path, *given, **options)

    monkeypatch.setattr(using, "write_atomically", killed)
    assert run_in_process(*words, cwd=trained).returncode != 0
    monkeypatch.undo()
    assert len([*out.rglob("*.png")]) == 2
    refused = run_in_process("predict", "a", "digits/even", *words[3:], cwd=trained)
    assert (refused.returncode, "is not empty" in refused.stderr) == (2, True)
    assert run_in_process(*words, cwd=trained).returncode == 0
    assert len([path for path in out.rglob("*") if path.is_file()]) == len([*out.rglob("*.png")]) == 12
    assert "is not empty" in run_in_process(*words, cwd=trained).stderr
    (tmp_path / "seen").mkdir()
    inside = run_in_process(*words[:4], "outputs/a/pictures", cwd=trained)
    assert "outputs/a/pictures lies in the run" in inside.stderr


def test_hidden_files_of_a_folder_are_not_answered_and_told(trained, tmp_path):
    (tmp_path / "in" / "__MACOSX").mkdir(parents=True)
    for name in ("a.png", "._a.png", "__MACOSX/._a.png"):
        (tmp_path / "in" / name).write_bytes((trained / "digits/even/0.png").read_bytes())
    done = run_in_process("predict", "a", str(tmp_path / "in"), cwd=trained)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    assert "left out: 2 hidden files or folders" in done.stderr


@pytest.mark.process
def test_paths_come_from_standard_input_and_a_closed_pipe_ends_it(trained):
    names = "\n".join(str(path.relative_to(trained)) for path in sorted((trained / "digits").rglob("*.png")))
    started = command("predict", "a", "-")
    done = subprocess.run(
        started, input=names, cwd=trained, env=environment(), capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, len(done.stdout.splitlines()), done.stderr) == (0, 12, "")
    running = subprocess.Popen(
        started,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=trained,
        env=environment(),
        text=True,
    )
    running.stdout.close()  # before the first answer
    running.stdout = None
    assert (running.communicate(names, timeout=120)[1], running.returncode) == ("", 0)


def test_a_path_from_standard_input_may_have_any_bytes(trained, tmp_path, monkeypatch):
    odd = os.fsencode(tmp_path) + b"/caf\xe9.png"
    Image.new("L", (8, 8)).save(tmp_path / "plain.png")
    os.link(tmp_path / "plain.png", odd)
    lines = io.TextIOWrapper(io.BytesIO(odd + b"\r\n\n" + os.fsencode(tmp_path / "plain.png")))
    monkeypatch.setattr("sys.stdin", lines)
    done = run_in_process("predict", "a", "-", "--jsonl", cwd=trained)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr


def test_a_path_that_is_given_twice_is_answered_twice(trained):
    done = run_in_process("predict", "a", "digits/even/0.png", "digits/odd/1.png", "digits/even/0.png", cwd=trained)
    first, _, third = done.stdout.splitlines()
    assert first == third
    done = run_in_process("predict", "a", "digits/even", "digits/even/0.png", "--output", "twice", cwd=trained)
    assert (done.returncode, done.stdout) == (2, "")
    assert "two inputs have the same name" in done.stderr


@pytest.mark.slow
def test_ten_thousand_files_need_no_more_memory_than_a_hundred_and_have_a_progress_bar(trained, tmp_path):
    images = torch.randint(0, 256, (64, 8, 8), dtype=torch.uint8)
    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    for number in range(100):
        Image.fromarray(images[number % 64].numpy()).save(tmp_path / "few" / f"{number}.png")
    for number in range(10_000):
        os.link(tmp_path / "few" / f"{number % 100}.png", tmp_path / "many" / f"{number}.png")
    peaks = {}
    for name, count in (("few", 100), ("many", 10_000)):
        script = (
            "import resource, sys; from mptrain.cli.main import main; code = main(sys.argv[1:]);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=open('peak', 'w')); sys.exit(code)"
        )
        shown, terminal = pty.openpty()
        with (tmp_path / "answers").open("w") as out:
            words = [command()[0], "-c", script, "predict", "a", str(tmp_path / name), "--jsonl"]
            running = subprocess.Popen(words, cwd=trained, env=environment(), stdout=out, stderr=terminal)
        os.close(terminal)
        bar = b""
        while piece := _read(shown):
            bar += piece
        assert running.wait(timeout=200) == 0
        assert b"predicting" in bar
        assert len((tmp_path / "answers").read_text().splitlines()) == count
        peaks[name] = int((trained / "peak").read_text())
    assert peaks["many"] - peaks["few"] < 60_000  # kilobytes


def _read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # the program has ended
        return b""
