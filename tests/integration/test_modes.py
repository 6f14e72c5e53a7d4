"""Every precision mode on real networks: finite, and in the dtypes it promises, read from the running modules."""

from __future__ import annotations

import math

import pytest
from precision_promises import F16, F32, PROMISED
from small_runs import Kept, loop_of
from torch import nn

from mptrain.system.records import StepRecord

pytestmark = pytest.mark.workload

SMALL = {
    "cnn": ("train.batch_size=16",),
    "resnet18": ("train.batch_size=4",),
    "plain16": ("train.batch_size=8",),
}


class SeenByHooks:
    """What each product module was given and gave, and what its gradients were."""

    def __init__(self, model):
        self.outputs, self.gradients = set(), set()
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.register_forward_hook(self.look)

    def look(self, module, args, output):
        self.outputs.add(output.dtype)
        if output.requires_grad:
            output.register_hook(lambda grad: self.gradients.add(grad.dtype))


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("precision", PROMISED)
def test_twenty_steps_are_finite_and_have_the_promised_dtypes(tmp_path, precision, model):
    kept = Kept()
    parameters, compute, norms = PROMISED[precision]
    loop = loop_of(
        tmp_path, f"model={model}", f"precision={precision}", "train.max_steps=20", "dataset.train_samples=320",
        "checkpoint.every_epochs=null", *SMALL[model], kept=kept,
    )  # fmt: skip
    del loop.parts.loaders["val"], loop.parts.loaders["test"]
    seen = SeenByHooks(loop.parts.model)
    per_parameter = {}
    for name, parameter in loop.parts.model.named_parameters():
        parameter.register_hook(lambda grad, name=name: per_parameter.__setitem__(name, grad.dtype))
    loop.run()
    assert seen.outputs == {compute}
    assert seen.gradients == {compute}
    for name, module in loop.parts.model.named_modules():
        expected = norms if isinstance(module, nn.BatchNorm2d) else parameters
        for own, parameter in module.named_parameters(recurse=False):
            assert parameter.dtype == expected, f"{name}.{own}"
            assert per_parameter[f"{name}.{own}".lstrip(".")] == expected
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_var.dtype == norms
            assert module.running_var.isfinite().all()
    masters = loop.parts.full_precision()
    assert {value.dtype for value in masters.values()} == ({F32} if not precision.endswith("pure") else {parameters})
    assert all(value.isfinite().all() for value in masters.values())
    steps = kept.of(StepRecord)
    assert [step.step for step in steps] == list(range(1, 21))
    assert all(math.isfinite(step.loss) for step in steps)
    assert sum(not step.skipped for step in steps) >= 10


def test_keep_fp32_by_name_computes_there_in_float32(tmp_path):
    loop = loop_of(
        tmp_path, "model=resnet18", "precision=fp16_dynamic", "precision.keep_fp32=[norms,layer4]", "train.max_steps=2",
        "train.batch_size=4", "dataset.train_samples=8",
    )  # fmt: skip
    dtypes = {}
    for name, module in loop.parts.model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, args, out, name=name: dtypes.__setitem__(name, out.dtype))
    loop.run()
    assert {dtype for name, dtype in dtypes.items() if name.startswith("layer4")} == {F32}
    assert {dtype for name, dtype in dtypes.items() if not name.startswith("layer4")} == {F16}


def test_evaluation_in_fp32_uses_the_masters_and_leaves_the_model_alone(tmp_path):
    loop = loop_of(
        tmp_path, "model=cnn", "precision=fp16_dynamic", "precision.eval=fp32", "train.max_steps=3",
        "dataset.train_samples=96",
    )  # fmt: skip
    dtypes = set()
    loop.parts.model.register_forward_hook(lambda m, args, out: dtypes.add((m.training, out.dtype)))
    before = {name: parameter.dtype for name, parameter in loop.parts.model.named_parameters()}
    loop.run()
    assert dtypes == {(True, F16), (False, F32)}
    assert {name: parameter.dtype for name, parameter in loop.parts.model.named_parameters()} == before
    assert loop.parts.model.training
