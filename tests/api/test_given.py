"""Models, data and tasks that a Python program gives: the same bits as from YAML, trained in place, opened again."""

from __future__ import annotations

import copy
import functools
import os
import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn

import mptrain
from mptrain.api.run import in_python
from mptrain.system.errors import ConfigError, DataError, NumericsError, Preempted, UsageError
from mptrain.workloads.classification.task import Classify
from tests.api.test_train import NAMED, Callback, state
from tests.small_runs import TINY, run_in_process

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, in_channels, width=4):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images):
        return self.head(self.drop(self.norm(self.conv(images)).relu().mean((2, 3))))
"""
WORDS = tuple(word for word in TINY if not word.startswith("model="))


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def net(tmp_path, monkeypatch):
    """The class of a module that lies in the folder, as a program imports it."""
    (tmp_path / "my_given_net.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_given_net", raising=False)
    import my_given_net  # type: ignore[import-not-found]

    yield my_given_net.Net
    del sys.modules["my_given_net"]


def losses(run):
    return [step.loss for step in run.steps()]


def test_a_class_trains_as_yaml_that_names_it(net, tmp_path):
    words = (*WORDS, "precision=fp16_dynamic", "threads=1")
    run = mptrain.train(*words, "run.name=given", "model.width=8", model=net, show=False)
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own/model/mine.yaml").write_text("_target_: my_given_net.Net\nwidth: 8\n")
    flags = ("--config-dir", "own", "model=mine", "extensions.allow=[my_given_net]")
    done = run_in_process(*flags, *words, "run.name=yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(mptrain.open_run("yaml"))
    again = run_in_process("eval", "given", "extensions.allow=[my_given_net]", cwd=tmp_path)  # its class has a file
    assert again.returncode == 0, again.stderr
    function = mptrain.train(*words, "run.name=function", model=functools.partial(net, width=8), show=False)
    assert losses(function) == losses(run)


def test_the_class_of_a_run_from_yaml_is_given_without_its_permission(net, tmp_path):
    target, allow = "model._target_=my_given_net.Net", "extensions.allow=[my_given_net]"
    done = run_in_process(*WORDS, target, "~model.widths", allow, "run.name=yaml", "threads=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    alone, given = mptrain.open_run("yaml"), mptrain.open_run("yaml", model=net)
    calls = (("evaluate", ()), ("model", ()), ("predict", ("a.png",)), ("resume", ()), ("export", ("net.pt",)))
    for name, arguments in calls:
        with pytest.raises(ConfigError, match="runs code from outside mptrain") as caught:
            getattr(alone, name)(*arguments)
        assert caught.value.hint == f'if you trust that code, call .{name}(..., "{allow}")'
    assert given.evaluate().metrics == alone.evaluate(allow).metrics
    assert given.export("net.pt").exists()
    assert torch.equal(given.model().head.weight, alone.model(allow).head.weight)
    longer = given.resume(epochs=4, show=False)
    assert len(list(longer.steps())) == 24
    assert "  allow:\n  - my_given_net\n" in longer.config  # what the command line still needs


def test_code_of_a_run_from_yaml_that_is_not_given_needs_its_permission(net, tmp_path):
    (tmp_path / "my_rule.py").write_text("import torch\nclass Rule(torch.optim.SGD):\n    pass\n")
    own = ("model._target_=my_given_net.Net", "~model.widths", "optimizer._target_=my_rule.Rule")
    allow = "extensions.allow=[my_given_net,my_rule]"
    done = run_in_process(*WORDS, *own, allow, "run.name=yaml", "threads=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = mptrain.open_run("yaml", model=net)
    sys.modules.pop("my_rule", None)
    for call in (run.evaluate, run.model, run.resume):
        with pytest.raises(ConfigError, match=r"my_rule\.Rule' is not in an allowed package") as caught:
            call()
        assert caught.value.hint.endswith(f'call .{call.__name__}(..., "extensions.allow=[my_rule.*]")')
    assert "my_rule" not in sys.modules
    assert run.evaluate("extensions.allow=[my_rule.*]").metrics
    del sys.modules["my_rule"]


@pytest.mark.parametrize("update", [True, False])
def test_a_module_has_the_trained_weights_afterwards_or_is_untouched(net, update):
    torch.manual_seed(3)
    model = net(10, 1).eval().to(torch.float64)
    model.norm.train()
    model.conv.bias.requires_grad_(False)
    before, first = state(), copy.deepcopy(model)
    run = mptrain.train(*WORDS, model=model, update_model=update, show=False)
    assert state() == before
    trained = run.model().double()
    for (name, own), theirs in zip(model.state_dict().items(), trained.state_dict().values(), strict=True):
        assert own.dtype == first.state_dict()[name].dtype
        assert torch.equal(own, theirs if update else first.state_dict()[name]), name
    assert torch.equal(model.conv.bias, first.conv.bias)
    assert not torch.equal(trained.head.weight, first.head.weight)
    flags = [(module.training, [p.requires_grad for p in module.parameters()]) for module in (model, first)]
    assert flags[0] == flags[1]
    assert [module.training for module in model.modules()] == [module.training for module in first.modules()]
    assert all(p.grad is None for p in model.parameters())


def test_a_module_after_an_error_is_as_at_the_last_checkpoint_and_the_same_call_goes_on(net):
    whole = mptrain.train(*WORDS, "run.name=whole", model=(model := net(10, 1)), update_model=False, show=False)
    first = copy.deepcopy(model)
    words = (*WORDS, "run.name=cut", "checkpoint.every_steps=4")
    stop = Callback(6, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Preempted) as raised:
        mptrain.train(*words, model=model, callbacks=[stop], show=False)
    step = mptrain.open_run("cut").state.attempts[-1].to_step
    assert raised.value.hint.endswith(f"the model is as after step {step}, its last checkpoint")
    assert not torch.equal(model.head.weight, first.head.weight)
    saved = mptrain.open_run("cut", model=net).model()
    assert torch.equal(model.head.weight, saved.head.weight)
    run = mptrain.train(*words, "run.resume=auto", model=model, show=False)
    assert losses(run) == losses(whole)
    assert torch.equal(model.head.weight, run.model().head.weight)
    model = copy.deepcopy(first)
    with pytest.raises(NumericsError) as failed:
        mptrain.train(*WORDS, "run.name=bad", "precision=fp32", "optimizer.lr=1e30", model=model, show=False)
    saved = mptrain.open_run("bad").paths.checkpoints
    assert failed.value.hint.endswith("its last checkpoint" if any(saved.glob("*.json")) else "the model is as it was")


def test_a_run_is_opened_again_with_what_only_the_program_has(tmp_path):
    class Local(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

        def forward(self, x):
            return self.layers(x)

    run = mptrain.train(*WORDS, "train.epochs=1", "run.name=local", model=Local, show=False)
    assert run.given["model"].call is Local
    opened = mptrain.open_run("local")
    for ask in (opened.model, opened.evaluate, lambda: opened.export("net.onnx"), lambda: opened.resume(epochs=2)):
        with pytest.raises(ConfigError, match="is in a Python program, which alone has it") as refused:
            ask()
        assert "mptrain.open_run(RUN, model=...)" in refused.value.problems[0].hint
    done = run_in_process("resume", "local", "train.epochs=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "is in a Python program" in done.stderr
    opened = mptrain.open_run("local", model=Local)
    assert opened.evaluate().metrics == run.evaluate().metrics
    assert opened.evaluate("precision.eval=fp32", by_class=True).by_class.split == "test"
    longer = opened.resume(epochs=2, show=False)
    assert longer.state.attempts[-1].to_step == 12
    assert longer.given["model"].call is Local


def batch(count, seed):
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, 8, 8, generator=draws)
    return inputs, (inputs.mean((1, 2, 3)) > 0).long()


def test_a_run_on_data_of_the_program_is_evaluated_and_trained_on(tmp_path):
    data = {"train": batch(96, 0), "val": batch(32, 1), "test": batch(32, 2)}
    words = ("model=cnn", "train.batch_size=16", "train.epochs=1", "threads=1")
    run = mptrain.train(*words, "run.name=own", data=data, show=False)
    assert run.evaluate().metrics == run.summary["test"]
    other = run.evaluate(batch(64, 5))
    assert [(record.split, record.samples) for record in other.records] == [("test", 64)]
    assert "test, 64 samples: loss" in repr(other)
    assert "96 of 96 test samples were trained on" in run.evaluate(batch(96, 0)).notes
    opened = mptrain.open_run("own")
    assert opened.evaluate(data).metrics == run.summary["test"]
    with pytest.raises(DataError, match="the data are in a Python program") as refused:
        opened.evaluate()
    assert "mptrain.open_run(RUN, data=...)" in refused.value.hint
    longer = opened.resume(epochs=2, data=data, show=False)
    at_once = mptrain.train(*words, "run.name=two", data=data, show=False).resume(epochs=2, show=False)
    assert losses(longer) == losses(at_once)


def test_a_task_may_be_given():
    class Doubled(Classify):
        def loss(self, model, batch):
            return 2 * super().loss(model, batch)

    words = (*TINY, "precision=fp32", "train.epochs=1")
    run, other = mptrain.train(*words, task=Doubled, show=False), mptrain.train(*words, show=False)
    assert losses(run)[0] == 2 * losses(other)[0]


@pytest.mark.parametrize(
    ("words", "more", "error", "said"),
    [
        (("model=cnn",), {"model": nn.Linear}, UsageError, "model=cnn has no effect beside model="),
        (("dataset=digits",), {"data": batch(4, 0)}, UsageError, "dataset=digits has no effect beside data="),
        ((), {"model": "cnn"}, UsageError, "model='cnn' is a text"),
        ((), {"model": 3}, UsageError, "model is an int"),
        ((), {"model": nn.Linear(2, 2).state_dict()}, UsageError, "model is a state dict"),
        (("model.width=2",), {"model": nn.Linear(2, 2)}, UsageError, "model.width=2 has no effect: model is a module"),
        ((), {"model": nn.Linear}, ConfigError, "model.in_features is required by torch.nn.modules.linear.Linear"),
        ((), {"model": lambda: 3}, ConfigError, "returned an int, not a torch.nn.Module"),
        ((), {"stop": 3}, UsageError, "stop is an int"),
        ((), {"epochs": 3, "lr": 0.1}, UsageError, "mptrain.train has no argument epochs, lr"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(words, more, error, said, tmp_path):
    before = state()
    with pytest.raises(error, match=said):
        mptrain.train(*words, **more, show=False)
    assert state() == before
    assert not (tmp_path / "outputs").exists()


def test_words_for_arguments_are_told():
    with pytest.raises(UsageError) as refused:
        mptrain.train(epochs=3, lr=0.1, batch_size=8)
    assert 'mptrain.train("train.epochs=3", "optimizer.lr=0.1", "train.batch_size=8")' in refused.value.hint


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ({"optimizer": torch.optim.Adam}, '("optimizer=adam")'),
        ({"optimizer": torch.optim.Adam([torch.zeros(1)]), "lr": 0.1}, '("optimizer=adam", "optimizer.lr=0.1")'),
        ({"optimizer": torch.optim.RMSprop}, '("optimizer=torch", "optimizer.name=RMSprop")'),
        ({"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR}, '("schedule=cosine")'),
        ({"precision": torch.bfloat16, "device": torch.device("cpu")}, '("precision=bf16", "device=cpu")'),
        ({"net": nn.Linear(2, 2), "val_data": (torch.zeros(2), torch.zeros(2))}, "(model=..., data=...)"),
        ({"loss_scale": 128, "resume": True}, '("scaler=static", "scaler.scale=128", "run.resume=auto")'),
        ({"callback": nn.Linear}, "(callbacks=...)"),
        (
            {"criterion": nn.MSELoss()},
            "give as task= a class derived from mptrain.workloads.classification.task.Classify",
        ),
    ],
)
def test_objects_for_keywords_that_are_words_are_answered_with_these(words, meant):
    with pytest.raises(UsageError) as refused:
        mptrain.train(**words)
    assert meant in refused.value.hint


def own_loss(outputs, targets):
    return (outputs - targets).square().mean()


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.MSELoss, nn.MSELoss(), own_loss])
def test_a_loss_is_no_task(loss):
    with pytest.raises(UsageError, match="a loss alone is no task") as refused:
        mptrain.train(*TINY, task=loss, show=False)
    assert "with def loss(self, model, batch)" in refused.value.hint


def test_a_text_with_several_words_is_taken_apart_and_a_value_with_blanks_is_one(net):
    with pytest.raises(ConfigError, match=r"'train.epochs=1 seed=2' is 2 words") as refused:
        mptrain.train("train.epochs=1 seed=2")
    assert refused.value.hint == "give each on its own: train.epochs=1, seed=2"
    run = mptrain.train(*WORDS, "train.max_steps=1", "run.name='a b=c'", model=net, show=False)
    assert run.paths.root.name == "a b=c"


def test_a_module_that_cannot_be_copied_is_named():
    model = nn.Linear(2, 2)
    model.cache = (torch.ones(2, requires_grad=True) * 2,)  # no leaf: torch copies none
    with pytest.raises(ConfigError, match="model is a Linear that cannot be copied"):
        mptrain.train(model=model, show=False)


class TestStop:
    """A function of the program ends training after a validation: on record, and the same when the run is resumed."""

    def test_it_gets_metrics_and_its_reason_is_on_record(self, capsys):
        seen = []

        def stop(metrics):
            seen.append(metrics)
            return f"enough after epoch {metrics['epoch']}" if metrics["epoch"] == 2 else None

        run = mptrain.train(*NAMED, stop=stop)
        assert [(each["epoch"], each["step"]) for each in seen] == [(1, 6), (2, 12)]
        assert set(seen[0]) >= {"loss", "top1"}
        assert run.summary["stopped_early"] == "enough after epoch 2"
        assert run.state.attempts[-1].to_step == 12
        assert [e["why"] for e in run.events() if e["event"] == "stopped_early"] == ["enough after epoch 2"]
        assert run.state.reason == "stopped early: enough after epoch 2"
        with pytest.raises(ConfigError, match="stopped early: enough after epoch 2; there is nothing left to do"):
            run.resume("train.clip_norm=1", show=False)
        assert run.resume(epochs=4, show=False).state.attempts[-1].to_step == 24  # asked for more, without a stop

    def test_a_run_that_was_cut_stops_at_the_same_step(self):
        def stop(metrics):
            return metrics["epoch"] == 2

        whole = mptrain.train(*NAMED, stop=stop, show=False)
        cut = Callback(9, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(Preempted):
            mptrain.train(*NAMED, "run.name=cut", stop=stop, callbacks=[cut], show=False)
        run = mptrain.open_run("cut").resume(stop=stop, show=False)
        assert losses(run) == losses(whole)
        assert run.summary["stopped_early"] == whole.summary["stopped_early"] == "stop= returned True"

    @pytest.mark.parametrize("answer", [False, None, "", np.bool_(False), torch.tensor(False)])
    def test_answers_that_go_on(self, answer):
        run = mptrain.train(*NAMED, "train.epochs=1", stop=lambda metrics: answer, show=False)
        assert run.summary["stopped_early"] is None

    def test_a_function_that_fails_and_missing_validation_data(self):
        with pytest.raises(ConfigError, match=r"stop= failed after epoch 1: KeyError: 'accuracy'") as refused:
            mptrain.train(*NAMED, stop=lambda metrics: metrics["accuracy"] > 1, show=False)
        assert "it gets a dict of metrics, loss, top1" in refused.value.problems[0].hint
        words = ("model=cnn", "train.epochs=1", "run.name=none")
        with pytest.raises(ConfigError, match="stop= needs validation data"):
            mptrain.train(*words, data=batch(32, 0), stop=lambda metrics: True, show=False)


class Scaled(nn.Module):
    def __init__(self, num_classes, scale=1.0):
        super().__init__()
        self.layers, self.scale = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes)), scale

    def forward(self, x):
        return self.scale * self.layers(x)


def test_an_object_and_a_partial_are_no_class_that_another_program_could_import():
    for name, model in (("partial", functools.partial(Scaled, scale=-2.0)), ("object", Scaled(10, -2.0))):
        run = mptrain.train(*WORDS, "train.epochs=1", f"run.name={name}", model=model, show=False)
        with pytest.raises(ConfigError, match=f"<{name} of .*Scaled> is in a Python program, which alone has it"):
            mptrain.open_run(name).evaluate("extensions.allow=[tests]")
        assert mptrain.open_run(name, model=model).evaluate().notes == run.evaluate().notes == ()
        changed = mptrain.open_run(name, model=Scaled)  # the same weights, and another scale
        told = "the code of the model, or its structure, is not that with which the run was started"
        assert told in changed.evaluate().notes
        with pytest.warns(UserWarning, match=told):
            changed.predict(str(DIGIT))
        assert told in changed.resume(epochs=2, show=False).warnings
    run = mptrain.open_run("partial", model=Scaled)
    with pytest.raises(UsageError, match=r"model\._target_=mypk\.Other has no effect beside model="):
        run.resume("model._target_=mypk.Other", epochs=4)


@pytest.fixture(autouse=True)
def _digit(tmp_path):
    global DIGIT
    from PIL import Image

    Image.new("L", (8, 8)).save(DIGIT := tmp_path / "digit.png")


def test_a_module_follows_its_run(net):
    model = net(10, 1)
    run = mptrain.train(*WORDS, "train.epochs=1", model=model, show=False)
    longer = run.resume(epochs=2, show=False)
    assert torch.equal(model.head.weight, longer.model().head.weight)
    kept = longer.resume(epochs=3, update_model=False, show=False)
    assert not torch.equal(model.head.weight, kept.model().head.weight)


def test_contexts_of_the_caller_change_no_number(net):
    words = (*WORDS, "precision=fp32", "train.epochs=1")
    plain = mptrain.train(*words, model=net, show=False)
    for context in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
    ):
        with context:
            inside = mptrain.train(*words, model=net, show=False)
            assert inside.evaluate().metrics == plain.summary["test"]
        assert losses(inside) == losses(plain)
    torch.set_default_dtype(torch.float64)
    try:
        assert losses(mptrain.train(*words, model=net, show=False)) == losses(plain)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_goes_wrong_is_shown_with_its_hint_and_has_the_run(net):
    with pytest.raises(ConfigError) as refused:
        mptrain.train("train.epoch=3")
    if sys.version_info >= (3, 11):
        assert refused.value.__notes__ == ["hint: did you mean train.epochs=3?"]
    with pytest.raises(UsageError, match=r"Run\.resume: got an unexpected keyword argument 'epoch'"):
        mptrain.train(*WORDS, "train.epochs=1", model=net, show=False).resume(epoch=3)
    with pytest.raises(NumericsError) as failed:
        mptrain.train(*WORDS, "precision=fp32", "optimizer.lr=1e30", "run.name=bad", model=net, show=False)
    assert failed.value.run.paths.root.name == "bad"
    assert failed.value.run.given["model"].call is net
    stop = Callback(6, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Preempted) as cut:
        mptrain.train(*WORDS, "run.name=cut", model=net, callbacks=[stop], show=False)
    assert cut.value.hint == "continue with: mptrain.open_run('outputs/cut', model=...).resume()"


def test_hints_name_calls_that_a_run_with_parts_of_the_program_takes(net):
    parts = {"model": net, "data": batch(96, 0)}
    run = mptrain.train("train.epochs=1", "train.batch_size=16", "run.name=own", "threads=1", **parts, show=False)
    with pytest.raises(ConfigError) as refused:
        mptrain.train("train.epochs=2", "train.batch_size=16", "run.name=own", "run.resume=auto", **parts, show=False)
    call = """mptrain.open_run('outputs/own', model=..., data=...).resume("KEY=VALUE")"""
    assert refused.value.problems[-1].hint.endswith(f"or change it on purpose: {call}")
    said = "mptrain diagnose outputs/own names the module"
    for given, shown in (
        (run, "mptrain.diagnose(model, loss_fn, batch) names the module"),
        (mptrain.open_run("own"), said),
    ):

        @in_python
        def failing(run):
            raise NumericsError("none of 3 updates was applied", said)

        with pytest.raises(NumericsError) as failed:
            failing(given)
        assert failed.value.hint == shown


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("continue with: mptrain resume outputs/a; it is saved", "continue with: {}.resume(); it is saved"),
        ("continue with: PYTHONPATH='my code' mptrain resume outputs/a extensions.allow=[b,c]",
         'continue with: {}.resume("extensions.allow=[b,c]")'),
        ("torchrun --nproc-per-node=2 -m mptrain resume outputs/a 'model.name=b c'", '{}.resume("model.name=b c")'),
        ("with: mptrain eval outputs/a precision=fp32", 'with: {}.evaluate("precision=fp32")'),
        ("write mptrain export outputs/a --raw", "write mptrain export outputs/a average=False"),
    ],
)  # fmt: skip
def test_commands_on_a_run_become_calls(line, call):
    @in_python
    def failing(model=None):
        raise UsageError("x", line)

    with pytest.raises(UsageError) as failed:
        failing(model=nn.Linear)
    assert failed.value.hint == call.format("mptrain.open_run('outputs/a', model=...)")


def test_a_confusion_matrix_of_a_run_that_does_not_classify_is_refused_in_words_of_the_call():
    inputs, _ = batch(96, 0)
    words = ("model=mlp", "task=regression", "train.max_steps=1", "threads=1")
    run = mptrain.train(*words, data={"train": (inputs, inputs.mean((1, 2, 3)))}, show=False)
    with pytest.raises(UsageError, match="a confusion matrix is for classification: this task gives") as refused:
        run.confusion((inputs, inputs.mean((1, 2, 3))))
    assert "by_class" not in f"{refused.value} {refused.value.hint}"


def test_a_run_that_diverges_without_validation_data_has_failed():
    inputs, targets = batch(96, 0)
    with pytest.raises(NumericsError, match="the run diverged: no update was applied any more until its end"):
        mptrain.train(
            "model=cnn", "precision=fp32", "optimizer.lr=1e18", "threads=1", data=(inputs, targets), show=False
        )
