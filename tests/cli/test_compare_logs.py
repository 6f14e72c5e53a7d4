"""``mptrain compare --logs``: verdicts, certificate and refusals, as a user meets them."""

from __future__ import annotations

import json

import pytest

from tests.small_runs import run_in_process


@pytest.fixture
def two_arms(tmp_path):
    for name, values in {"bf16": (3.300, 3.302, 3.299), "fp8": (3.3011, 3.3002, 3.2991)}.items():
        for seed, value in enumerate(values):
            rows = [{"step": at, "loss": value + 1 / at} for at in (10, 100, 1000)]
            (tmp_path / f"{name}-{seed}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "bf16=bf16-*.jsonl", "fp8=fp8-*.jsonl"


def test_it_prints_verdicts_and_writes_a_certificate(two_arms, tmp_path):
    done = run_in_process("compare", "--logs", *two_arms, "--metric", "loss", "--margin", "0.01", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "- fp8 is equivalent: the difference in loss is" in done.stdout
    folder = next(tmp_path.glob("outputs/comparisons/*/*"))
    assert {one.name for one in folder.iterdir()} == {
        "certificate.html", "certificate.md", "certificate.json", "figures",
    }  # fmt: skip
    page = (folder / "certificate.md").read_text()
    assert "each arm is equal to the reference up to ±0.01" in page
    assert "with these runs a difference of 0.0046 cannot be told from none" in page
    assert "bf16, fp8: up to 63 % of runs may fail, or end worse than the worst of 3 runs" in page
    assert json.loads((folder / "certificate.json").read_text())["arms"][1]["verdict"] == "equivalent"
    answer = run_in_process(
        "compare", "--logs", *two_arms, "--metric", "loss", "--margin", "0.01", "--json", cwd=tmp_path
    )
    found = json.loads(answer.stdout)
    assert [arm["verdict"] for arm in found["logs"]["arms"]] == ["reference", "equivalent"]


def test_a_target_needs_no_reference(two_arms, tmp_path):
    done = run_in_process("compare", "--logs", *two_arms, "--metric", "loss", "--target", "3.4", cwd=tmp_path)
    assert done.stdout.count("beats target: the difference of loss from 3.4 is") == 2
    done = run_in_process("compare", "--logs", *two_arms, "--metric", "loss", "--target", "-1e-3", cwd=tmp_path)
    assert done.stdout.count("misses target: the difference of loss from -0.001 is") == 2


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ((), "compare --logs needs --metric", "--metric loss"),
        (("--metric", "loss"), "compare --logs needs --margin", "choose, before you see the results"),
        (("--metric", "lss", "--margin", "1"), "has no lss", "did you mean loss?"),
        (("--metric", "loss", "--margin", "1", "--reference", "x"), "no arm is called 'x'", "the arms are bf16, fp8"),
        (("--metric", "loss", "--margin", "1", "--target", "3"), "--target asks about one arm at a time", "leave out"),
        (("--metric", "loss", "--margin", "1", "--pair"), "does not say which runs belong together", "{seed}"),
        (("--metric", "loss", "--target", "inf"), "--target inf: must be a number", "--target X"),
    ],
)
def test_what_it_cannot_answer_is_refused_and_leaves_nothing(two_arms, words, said, hint, tmp_path):
    done = run_in_process("compare", "--logs", *two_arms, *words, cwd=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
    assert hint in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_without_arms_or_with_words_that_are_none_it_says_how_to_write_them(tmp_path):
    for words, said in (((), "compare --logs needs arms"), (("runs/a",), "runs/a has no arm")):
        done = run_in_process("compare", "--logs", *words, "--metric", "loss", "--margin", "1", cwd=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr


def test_logs_without_the_option_are_told_of_it(tmp_path):
    done = run_in_process("compare", "a=logs/a-*.csv", "b=logs/b-*.csv", "--metric", "loss", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: a=logs/a-*.csv is no setting")
    assert "add --logs" in done.stderr


def test_options_of_logs_are_refused_without_them(tmp_path):
    done = run_in_process("compare", "a", "b", "--target", "3", cwd=tmp_path)
    assert "--target" in done.stderr
    assert done.returncode == 2
