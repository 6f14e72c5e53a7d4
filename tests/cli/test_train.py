"""What the commands that train print around a run."""

import io
from pathlib import Path

import pytest

from mptrain.cli.main import main
from mptrain.cli.messages import print_rows
from mptrain.cli.train import print_closing
from mptrain.config.compose import allow_argument, search_path

LEARNER = {
    "updates": 376,
    "skipped": 4,
    "skip_rate": 4 / 380,
    "overflows": {"calibrating": 3, "growth probe": 1, "unexpected": 0},
    "scale": {"first": 65536.0, "min": 8192.0, "max": 65536.0, "last": 16384.0},
}
SUMMARY = {
    "metric_name": "top1",
    "metric": 0.9673,
    "metric_split": "test",
    "best_val": 0.97,
    "steps": 380,
    "epochs": 10,
}
SUMMARY |= {"learners": {"main": LEARNER}, "term": "samples", "terms_per_second": 4215.0, "train_seconds": 61.0}
SUMMARY |= {"peak_memory": 512_000_000}


@pytest.fixture
def closing(capsys):
    def printed(*words, **changes):
        print_closing(Path("outputs/a b"), {**SUMMARY, **changes}, *words)
        return capsys.readouterr().out

    return printed


TINY = ("model=mlp", "dataset.image_size=8", "dataset.train_samples=32", "train.batch_size=8", "train.max_steps=2")


def test_the_start_names_model_data_precision_scaler_device_and_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "precision=amp_dynamic", "device=cpu", "run.name=x"]) == 0
    text = " ".join(capsys.readouterr().out.partition("\ndone\n")[0].split())
    for part in (
        " model mlp, ",
        " parameters dataset digits, 32 train, ",
        " precision amp_dynamic: parameters float32",
    ):
        assert part in text
    for part in (" scaler dynamic from ", " device cpu; ", " steps 2 run outputs/x"):
        assert part in text
    assert " note " not in text
    assert main(["resume", "x", "train.max_steps=4"]) == 0
    text = " ".join(capsys.readouterr().out.partition("\ndone\n")[0].split())
    assert " steps 4, resuming from 2 run outputs/x note " in text


def test_a_batch_larger_than_the_training_data_is_noted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = (*TINY, "precision=fp32", "device=cpu", "train.batch_size=4096", "train.max_steps=1")
    assert main([*words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "note train.batch_size=4096 is more than the 32 training samples: an epoch is one step with all" in text
    assert main([*words, "train.one_batch=true"]) == 0
    assert " note " not in capsys.readouterr().out


def test_the_end_names_metric_counts_scale_path_and_the_next_commands(closing):
    text = closing()
    for part in ("0.9673 on test", "0.9700 on val", "2^16 to 2^14, between 2^13 and 2^16"):
        assert part in text
    assert "380 attempted, 376 updates, 4 skipped (1.1 %); overflows: 3 calibrating, 1 growth probe" in text
    path = {"first": 65536.0, "min": 16384.0, "max": 65536.0, "last": 16384.0}
    fell = closing(learners={"main": {**LEARNER, "scale": path}})
    assert "2^16 to 2^14" in fell
    assert "between" not in fell
    assert "mptrain eval 'outputs/a b'" in text
    assert "mptrain resume 'outputs/a b' train.epochs=20" in text
    text = closing(test={"top1": 0.9673, "loss": 0.1, "top5": 1.0})
    (also,) = [line for line in text.splitlines() if line.split()[:1] == ["also"]]
    assert also.split() == ["also", "top5", "1.0000", "loss", "0.1000"]
    assert "also" not in closing(test={"top1": 0.9673})


def test_a_quiet_run_and_one_without_steps_say_so(closing):
    quiet = {"skipped": 0, "overflows": {}, "scale": dict.fromkeys(("first", "min", "max", "last"), 1024.0)}
    text = closing(learners={"main": {**LEARNER, **quiet}})
    assert "none skipped" in text
    assert "loss scale  2^10\n" in text
    learner = {"updates": 0, "skipped": 0, "skip_rate": 0.0, "overflows": {}, "scale": {}}
    text = closing(metric=None, best_val=None, steps=0, learners={"main": learner}, peak_memory=None)
    assert "on val" not in text
    assert "loss scale" not in text
    assert "0 attempted" in text


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        ({"steps": 40, "max_steps": 40, "epochs": 1, "planned_epochs": 10}, "train.max_steps=80"),
        ({"steps": 38, "max_steps": 40, "epochs": 1, "planned_epochs": 1}, "train.epochs=2"),
        ({"steps": 38, "max_steps": 38, "epochs": 1, "planned_epochs": 1}, "train.max_steps=76 train.epochs=2"),
        ({"steps": 38, "max_steps": None, "epochs": 3, "planned_epochs": 3}, "train.epochs=6"),
    ],
)
def test_going_on_doubles_the_limit_that_ended_the_run(closing, summary, words):
    [line] = [line for line in closing(**summary).splitlines() if line.startswith("  resume")]
    assert line.endswith(f"'outputs/a b' {words}")


class Tty(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("300", 110), ("20", 60)])
def test_facts_are_wrapped_to_the_width_of_the_terminal(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Tty()
    print_rows("title", [("name", "word " * 100)], stream)
    assert width - 5 <= max(map(len, stream.getvalue().splitlines())) <= width
    plain = io.StringIO()
    print_rows("title", [("name", "word " * 100), ("blank", " \n ")], plain)
    assert "blank" not in plain.getvalue()
    assert 105 < max(map(len, plain.getvalue().splitlines())) <= 120


@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_a_cpu_without_half_arithmetic_is_described_once(tmp_path, monkeypatch, capsys, kernels):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mptrain.precision.support.has_native_half", lambda dtype: False)
    monkeypatch.setattr("mptrain.precision.support.uses_upcast", lambda policy, device: kernels == "auto")
    words = ["model=mlp", "precision=amp_bf16", "train.max_steps=1", "run.name=run", "device=cpu"]
    assert main([*words, f"precision.cpu_kernels={kernels}"]) == 0
    found = capsys.readouterr()
    said = " ".join((found.out + found.err).split())
    assert said.count("this CPU has no bfloat16 arithmetic") == 1
    assert found.err.startswith("warning: precision=amp_bf16 on cpu: ")
    assert ("not faster than FP32" in found.err) == (kernels == "auto")
    assert ("10 to 80 times slower" in found.err) == (kernels == "native")


def test_commands_on_a_run_with_code_of_ones_own_find_it_again(closing, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "my code")
    trust, path = allow_argument(["mine.*"]), search_path(["mine.*"])
    lines = [
        line.split(None, 1)[1] for line in closing("mptrain resume", trust, path).splitlines() if "mptrain " in line
    ]
    assert lines[0] == "mptrain report 'outputs/a b'"  # reads no model
    assert [line.partition("mptrain")[0] for line in lines[1:]] == ["PYTHONPATH='my code' "] * 3
    assert all(line.endswith(" 'extensions.allow=[mine.*]'") for line in lines[1:])
    assert search_path([]) == ""
    words = " ".join(closing("torchrun --nproc-per-node=2 -m mptrain resume").split())
    assert "resume torchrun --nproc-per-node=2 -m mptrain resume 'outputs/a b' train.epochs=" in words


def test_an_evaluation_is_a_table_on_a_terminal_and_lines_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "precision=fp32", "run.name=x"]) == 0
    capsys.readouterr()
    assert main(["eval", "x"]) == 0
    assert "split=test samples=397 " in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["eval", "x"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("test top1" in line and "95 % CI" in line for line in lines)
    assert max(map(len, lines)) <= 90  # with colours
