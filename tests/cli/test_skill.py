"""An agent that knows nothing but SKILL.md finds a planted overflow, applies the remedy and judges the result."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from mptrain.cli.help import SKILL
from tests.faulty_networks import FAULTS, with_fault
from tests.small_runs import run_in_process

TEXT = SKILL.read_text()
LINES = [line[2:] for line in TEXT.splitlines() if line.startswith("$ ")]

SMALL = ("dataset.train_samples=64", "train.batch_size=16", "train.epochs=20", "checkpoint.every_epochs=null")


@pytest.fixture
def follow(tmp_path):
    """Run a line of the skill with words in place of its placeholders; return the exit code and the object."""

    def run(line, *words, places=("KEY=VALUE ...",)):
        assert line in LINES, f"SKILL.md has no line {line}"
        for place, given in zip(places, words, strict=True):
            line = line.replace(place, shlex.join(given) if isinstance(given, tuple) else given, 1)
        done = run_in_process(*shlex.split(line)[1:], cwd=tmp_path)
        return done.returncode, json.loads(done.stdout) if "--json" in line else done.stderr

    return run


def at(found, path):
    """The value at a path that the skill names."""
    assert f"`{path}`" in TEXT, f"SKILL.md does not name {path}"
    for key in re.findall(r"\w+", path):
        found = found[int(key) if key.isdigit() else key]
    return found


def test_the_front_matter_names_the_skill():
    front = TEXT.split("---\n")[1]
    assert re.fullmatch(r"name: mptrain\ndescription: .{100,1024}\n", front)


def test_help_shows_the_skill(tmp_path):
    assert run_in_process("help", "agents", cwd=tmp_path).stdout == TEXT


@pytest.mark.process
def test_a_planted_overflow_is_found_fixed_and_judged(follow, tmp_path):
    words = (*with_fault("large_linear"), *SMALL, "train.max_consecutive_overflows=5")

    code, found = follow("mptrain doctor KEY=VALUE ... --json", (*words, "precision=fp16_dynamic"))
    assert code == 4
    assert FAULTS["large_linear"].where in [name for one in at(found, ".model.findings[]") for name in one["where"]]

    broken = run_in_process(*words, "precision=fp16_dynamic", "run.name=broken", cwd=tmp_path)
    assert broken.returncode == 4
    _, found = follow("mptrain runs --json", places=())
    run = at(found, ".runs[]")[0]
    assert (run["path"], run["status"]) == ("outputs/broken", "failed")
    _, found = follow("mptrain report RUN --json", run["path"], places=("RUN",))
    assert "first.weight" in at(found, ".reports[0].run.learners.main.tensors")
    run_of_package = (run["path"], "extensions.allow=[tests.faulty_networks]")
    _, found = follow("mptrain diagnose RUN --json", run_of_package, places=("RUN",))
    assert (at(found, ".diagnosis.cause"), at(found, ".diagnosis.module")) == ("forward", FAULTS["large_linear"].where)

    code, found_again = follow("mptrain diagnose RUN --step N --json", run_of_package, "1", places=("RUN", "N"))
    assert (code, found_again["diagnosis"]["step"]) == (0, 1)

    resume = shlex.split(at(found, ".fix.command"))
    resume = resume[resume.index("mptrain") + 1 :]
    assert run_in_process(*resume, cwd=tmp_path).returncode == 0
    fix = tuple(at(found, ".fix.overrides"))

    for seed in range(2):
        for name, more in (("fp32", ("precision=fp32",)), ("fixed", ("precision=fp16_dynamic", *fix))):
            done = run_in_process(*words, *more, f"seed={seed}", f"run.name={name}-{seed}", cwd=tmp_path)
            assert done.returncode == 0, done.stderr
    runs = [f"{name}-{seed}" for name in ("fp32", "fixed") for seed in range(2)]
    code, found = follow("mptrain compare RUN RUN RUN RUN --json", *runs, places=("RUN",) * 4)
    assert (code, at(found, ".no_verdict")) == (0, "")
    reference, fixed = at(found, ".comparison.arms[]")
    assert reference["verdict"]["word"] == "reference"
    assert fixed["verdict"]["word"] in ("equivalent", "better", "undecided")
    assert fixed["verdict"]["why"]


@pytest.mark.long
def test_a_loss_scale_is_chosen(follow, tmp_path):
    line = "mptrain KEY=VALUE ... precision=amp_dynamic diagnostics=histograms diagnostics.every=10"
    code, said = follow(line, ("model=mlp", "dataset.image_size=8", "train.epochs=8", "run.name=watched"))
    assert code == 0, said
    code, found = follow("mptrain recommend RUN --json", "watched", places=("RUN",))
    assert code == 0
    assert re.fullmatch(r"scaler\.scale=\d+", at(found, ".learners.main.overrides")[-1])


@pytest.mark.process
def test_the_other_lines_are_commands(follow):
    code, found = follow(
        "mptrain compare KEY=VALUE ... precision=fp32,fp16_dynamic seed=0,1,2,3 --json",
        ("model=mlp", "train.max_steps=2"),
    )
    assert code == 0
    assert [arm["arm"]["name"] for arm in at(found, ".comparison.arms[]")] == ["fp32", "fp16_dynamic"]
    assert all(len(arm["arm"]["runs"]) == 4 for arm in found["comparison"]["arms"])
